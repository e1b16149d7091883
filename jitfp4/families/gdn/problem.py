"""What selection sees of a call of the gated delta rule."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch

from jitfp4.dtypes import FLOATS
from jitfp4.formats import DType

STATE_DTYPES = {dtype: FLOATS[dtype] for dtype in (torch.float32, torch.bfloat16)}
HEAD_DIMS = (128, 64)
VALUE_DIMS = {128: (128, 256), 64: (64,)}  # by head_dim; those that differ from head_dim only for float32 states
MAX_TOKENS = (1, 4, 16)
MAX_CHUNK = (4, 8, 16)
CHUNK_ROWS = 16  # rows of a state that a warp of the chunkwise kernel takes
AHEAD_GRAIN = 4  # heads that one CTA prefetches into L2


class StateLayout(StrEnum):
    """The order of a head's state in memory: [V, K] or [K, V]."""

    VK = "vk"
    KV = "kv"


class Problem(NamedTuple):
    """The properties of a call that selection depends on.

    A head's state has ``value_dim`` rows (V) of ``head_dim`` columns (K). ``store_steps``: the state after every token
    is stored; ``step_slots``: in slots that the caller chose, which may be equal. ``general``: V differs from K, a or b
    is float32, or there are gaps between the heads of a slot.
    """

    dtype: DType
    state_dtype: DType
    state_layout: StateLayout
    head_dim: int
    value_dim: int
    tokens: int
    batch: int
    value_heads: int
    store_steps: bool
    step_slots: bool = False
    general: bool = False

    @property
    def heads(self) -> int:
        """Value heads in the whole batch."""
        return self.batch * self.value_heads
