"""What the operators take. ``four_over_six`` is the code of a recipe; 0 for none."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.operation import Written


class Arguments(NamedTuple):
    """Rows [m, k], or [m, 2k] for silu_and_mul, and their codes and scales. ``scale``: one float32, one for each row,
    or None.
    """

    a: torch.Tensor
    scale: torch.Tensor | None
    out: Written
    out_sf: Written
    format: str
    layout: int
    silu: bool
    four_over_six: int
    enable_pdl: bool | None
    names: str


class BatchArguments(NamedTuple):
    """Matrices [batch, m, k], and their NVFP4 codes and 128x4 scales. ``scale``: one float32, one for each matrix, or
    with ``by_row`` one for each row.
    """

    a: torch.Tensor
    mask: torch.Tensor | None
    scale: torch.Tensor
    by_row: bool
    out: Written
    out_sf: Written
    silu: bool
    four_over_six: int
    enable_pdl: bool | None


class TokenArguments(NamedTuple):
    """Rows [m, k], their NVFP4 codes and scales, and a decode scale for each row."""

    a: torch.Tensor
    inverse_base: torch.Tensor
    out: Written
    out_sf: Written
    decode: Written
    layout: int
    four_over_six: int
    enable_pdl: bool | None


class DequantizeArguments(NamedTuple):
    """Codes and block scales, and the floats [m, k] of ``out``."""

    a_fp4: torch.Tensor
    a_sf: torch.Tensor
    scale: torch.Tensor | None
    out: Written
    format: str
    layout: int
    enable_pdl: bool | None
    names: str
