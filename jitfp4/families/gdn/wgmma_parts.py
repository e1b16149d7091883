"""What the kernels of gdn/prefill_wgmma's template share: their specifications and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.prefill_arguments import CHUNK, INVERTING_BYTES, LOWER_BYTES, OF_TOKENS_BYTES
from jitfp4.families.gdn.prefill_parameters import PARAMETERS as OF_PREFILL
from jitfp4.families.gdn.problem import HEAD_DIMS, VALUE_DIMS
from jitfp4.formats import DType
from jitfp4.layouts import round_up
from jitfp4.spec import F32, I64, KernelSpec, Ptr

_STAGES = 3
_SQUARE_BYTES = CHUNK * CHUNK * 2

PARAMETERS = (
    *OF_PREFILL,
    Ptr("part_states", "uint8", "[places of parts, heads, V + K, K] float32, of parts"),
    I64("part_chunks", "of a part"),
    I64("sequences"),
    Ptr("g", "const float", "[tokens, heads], decays; null: 1"),
    Ptr("beta", "const float", "[tokens, heads]; null: 1"),
    F32("scale", "of q"),
    I64("l2norm", "0: q and k as they are", member="bool"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSpec(KernelSpec):
    """A CTA has ``rows`` rows of a state, 64 in each warpgroup; one more copies what they take.

    ``alone``: each part of a sequence starts from no state, and has no outputs.
    """

    dtype: DType
    head_dim: int
    value_dim: int
    rows: int

    alone: ClassVar[bool]

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ArgumentError("head_dim", self.head_dim, f"one of {HEAD_DIMS}")
        if self.value_dim not in VALUE_DIMS[self.head_dim]:
            raise ArgumentError("value_dim", self.value_dim, f"one of {VALUE_DIMS[self.head_dim]}")
        if self.value_dim % self.rows or (self.alone and self.head_dim % self.rows):
            raise ArgumentError("rows", self.rows, f"a divisor of {self.value_dim} and {self.head_dim}, V and K")

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 128 * (self.rows // 64 + self._apart + self._makes + 1)

    @property
    def _apart(self) -> bool:
        """Whether another warpgroup computes the outputs."""
        return not self.alone and self.rows == 64

    @property
    def _makes(self) -> bool:
        """Whether another warpgroup makes the products of chunks."""
        return False

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: stages of what is copied, and their barriers."""
        squares = 2 * (self.head_dim // CHUNK + 1) * _SQUARE_BYTES
        values, factors = CHUNK * (self.rows + 8) * 2, 3 * CHUNK * 4 + 16
        left = 2 * 64 * (self.head_dim + CHUNK) * 2 + 32 if self._apart else 24
        making = INVERTING_BYTES - LOWER_BYTES + 2 * OF_TOKENS_BYTES + 24 if self._makes else 8
        stages = _STAGES * (round_up(squares + values + factors, 1024) + 24)
        return round_up(stages + left + making + 56, 1024)  # and the item of the CTA


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaSpec(RowsSpec):
    """``divided``: the sequences are in parts; ``fused``: one more warpgroup makes the products of chunks."""

    divided: bool
    fused: bool

    alone = False

    @property
    def _makes(self) -> bool:
        return self.fused


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsSpec(RowsSpec):
    """Parts, and their maps."""

    divided = True
    alone = True
    fused = False
