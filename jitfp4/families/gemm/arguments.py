"""What the operations take, and views of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.layouts import SfLayout
from jitfp4.operation import Written


class Arguments(NamedTuple):
    """a [m, k], a prepared weight of n rows, and out [m, n]. ``row_scale`` is None for NVFP4.

    ``gated``: rows of the weight are gates and ups, and out is [m, n / 2].
    """

    a: torch.Tensor
    data: torch.Tensor
    row_scale: torch.Tensor | None
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    out: Written
    gated: bool
    enable_pdl: bool | None
    names: str


class Fp8Arguments(NamedTuple):
    """a [m, k], E4M3 as bytes, a prepared weight of n rows, and out [m, n].

    ``a_scale`` has a scale for each row of a or one for all, ``row_scale`` one for each row of the weight. ``gated``:
    rows of the weight are gates and ups, and out is [m, n / 2].
    """

    a: torch.Tensor
    a_scale: torch.Tensor
    data: torch.Tensor
    row_scale: torch.Tensor
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    out: Written
    gated: bool
    enable_pdl: bool | None
    names: str


def weight_rows(arguments: Arguments | Fp8Arguments) -> int:
    """The rows of the weight."""
    return arguments.out.shape[1] * (2 if arguments.gated else 1)


class Fp4Arguments(NamedTuple):
    """a [m, k / 2], b [n, k / 2] and out [m, n], which becomes a times the transpose of b.

    Codes and scales are uint8. Rows of a, b and out begin at multiples of 16 bytes, and their elements are adjacent.
    Scales are contiguous: those of b in 128x4, those of a in 8x4 if ``use_8x4_sf_layout``, else in 128x4.
    """

    a: torch.Tensor
    b: torch.Tensor
    a_descale: torch.Tensor
    b_descale: torch.Tensor
    alpha: torch.Tensor | None
    out: Written
    block_size: int
    use_8x4_sf_layout: bool
    enable_pdl: bool | None


class MaskedArguments(NamedTuple):
    """The operands of l products, one behind another: a [l * m, k / 2], b [l * n, k / 2] and out [l * m, n].

    As those of mm_fp4, all scales in 128x4, each matrix padded by itself. ``alpha`` and ``masked_m``, int32, have l
    elements; the first masked_m rows of each m rows of out become products, others stay as they are.
    """

    a: torch.Tensor
    b: torch.Tensor
    a_descale: torch.Tensor
    b_descale: torch.Tensor
    alpha: torch.Tensor | None
    masked_m: torch.Tensor
    out: Written
    block_size: int
    enable_pdl: bool | None
    names: str


class ExpandArguments(NamedTuple):
    """a [m, k / 2] and its scales, as those of mm_fp4; x [m, round_up(k, 128)], which becomes a.

    x holds a's values, of NVFP4 times 2^-7, in the order of columns of reference.gemm.expand().
    """

    a: torch.Tensor
    a_descale: torch.Tensor
    x: Written
    block_size: int
    use_8x4_sf_layout: bool
    enable_pdl: bool | None


def atoms(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Scales in 128x4 as 8-byte words, where the 64 words of an atom are adjacent: [rows / 128, 64 * cols / 4]."""
    padded_rows, padded_cols = SfLayout.layout_128x4.shape(rows, cols)
    return scales.view(-1).view(torch.int64).view(padded_rows // 128, padded_cols * 128 // 8)
