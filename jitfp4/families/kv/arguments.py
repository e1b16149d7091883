"""What the operators that write and read a cache take."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.families.kv.problem import Addressing
from jitfp4.operation import Written

NEITHER = -1
"""The value of ``interleaved`` where the scales of both sides are linear."""


class Quantize(NamedTuple):
    """``k`` and ``v`` are tokens [tokens, heads, d], or whole pages [pages, tokens, heads, d].

    The caches are [pages, tokens, heads, ...]. K and V have the same shapes and strides. ``slots`` are slots, or
    positions if there is ``indptr``. ``interleaved`` is the side (0 for K, 1 for V) whose scales are interleaved by 4
    tokens, or NEITHER.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor | None
    slots: torch.Tensor | None
    batch_indices: torch.Tensor | None
    indices: torch.Tensor | None
    indptr: torch.Tensor | None
    k_codes: Written
    k_sf: Written
    v_codes: Written | None
    v_sf: Written | None
    interleaved: int
    enable_pdl: bool | None
    names: str

    @property
    def addressing(self) -> Addressing:
        if self.slots is None:
            return Addressing.WHOLE
        return Addressing.SLOTS if self.indptr is None else Addressing.POSITIONS

    @property
    def tokens(self) -> int:
        return self.k_codes.shape[0] * self.k_codes.shape[1] if self.slots is None else self.slots.numel()


class Dequantize(NamedTuple):
    """Caches [pages, tokens, heads, ...] to outputs [sequences, tokens, heads, d].

    Without ``block_tables`` there is one page, which is one sequence.
    """

    k_codes: torch.Tensor
    k_sf: torch.Tensor
    v_codes: torch.Tensor | None
    v_sf: torch.Tensor | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor | None
    block_tables: torch.Tensor | None
    seq_lens: torch.Tensor | None
    k_out: Written
    v_out: Written | None
    interleaved: int
    enable_pdl: bool | None
    names: str
