"""What the operator that normalises and quantizes takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.operation import Written


class Arguments(NamedTuple):
    """Rows [m, h], and the outputs. ``block_scale`` has the 128x4 layout, ``block_scale_unswizzled`` the linear one.

    With a ``gate`` a row is several heads, and ``weight`` that of each.
    """

    input: torch.Tensor
    residual: Written | None
    weight: torch.Tensor
    gate: torch.Tensor | None
    global_scale: torch.Tensor | None
    y_fp4: Written
    block_scale: Written | None
    block_scale_unswizzled: Written | None
    y_out: Written | None
    eps: float
    block_size: int
    scale_format: str
    enable_pdl: bool | None
    names: str
