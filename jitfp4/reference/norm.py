"""RMSNorm in float32, in one fixed order of summation, and its FP4 quantization.

A row is summed as a binary tree over units of 16 elements. The order depends on nothing but the row itself, so that a
kernel may spread a row over any number of threads and still give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.formats import E4M3_MAX
from jitfp4.reference.formats import divide, encode_e4m3
from jitfp4.reference.quantize import quantize_blocks, silu

_UNIT = 16
_LANES = 32
_LEAST_SCALE = 2.0**-126  # of a row: that of less may have no reciprocal


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float = 0.0,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """``round((x * rstd) * (weight + weight_bias))`` for [..., h] fp16 or bf16, in x's dtype.

    In float32, every operation correctly rounded: ``rstd = 1 / sqrt(sum_of_squares(x) / h + eps)``. With a gate, the
    product is multiplied by ``silu(gate)`` before it is rounded.
    """
    mean = divide(sum_of_squares(x), torch.full(x.shape[:-1], float(x.shape[-1]), dtype=torch.float32, device=x.device))
    variance = mean + torch.tensor(eps, dtype=torch.float32, device=x.device)
    rstd = divide(1.0, variance.double().sqrt().float())  # torch's float32 sqrt is an ulp off on some CPUs
    y = x.float() * rstd.unsqueeze(-1) * (weight.float() + weight_bias)
    return (y if gate is None else y * silu(gate.float())).to(x.dtype)


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``round(x + residual)``, the sum in float32, in x's dtype: what the residual becomes and what is normalised."""
    return (x.float() + residual.float()).to(x.dtype)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """float32 sum of the squares of [..., h], h a multiple of 16, in the order that the kernels follow.

    In each unit of 16, the even and the odd elements are two chains of fused multiply-adds, added at the end. Unit j
    has lane ``j % 32`` and turn ``j // 32``. Each lane adds its turns as a binary tree, neighbours first (0 + 1, 2 + 3,
    ..., then those sums), and the lanes are added in the same way. Places without a unit count as zero.
    """
    units = x.double().unflatten(-1, (-1, _UNIT // 2, 2))
    chains = torch.zeros((*units.shape[:-2], 2), dtype=torch.float32, device=x.device)
    for i in range(_UNIT // 2):
        chains = (chains.double() + units[..., i, :].square()).float()  # one rounding: a fused multiply-add
    sums = _pad(chains[..., 0] + chains[..., 1], _LANES)
    turns = sums.unflatten(-1, (-1, _LANES)).transpose(-1, -2)
    return _tree(_tree(turns))


def _tree(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension: neighbours first."""
    while x.shape[-1] > 1:
        x = _pad(x, 2)
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _pad(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zeros behind the last dimension, up to a multiple."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % multiple))


def quantize(
    y: torch.Tensor, block: int, scale: str, global_encode_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., h] to packed E2M1 [..., h/2] and linear block scales [..., h/block], uint8; see quantize_blocks()."""
    return quantize_blocks(
        y, _Form(block, scale), None if global_encode_scale is None else global_encode_scale.reshape(())
    )


def quantize_rows(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[m, h] to E4M3 bytes, and the float32 decode scale of each row: its largest magnitude divided by 448.

    In float32, every operation correctly rounded: ``e4m3(y * (1 / scale))``. NaN is quantized to NaN and does not count
    for a scale. Scales of less than 2^-126 are zero, and so are their rows.
    """
    wide = y.float()
    scale = divide(wide.abs().nan_to_num(0.0, torch.inf).amax(-1), torch.full_like(wide[..., 0], E4M3_MAX))
    is_it = scale >= _LEAST_SCALE
    by = torch.where(is_it, divide(1.0, scale), 0.0)
    return encode_e4m3(wide * by.unsqueeze(-1)), torch.where(is_it, scale, 0.0)


class _Form(NamedTuple):
    """What quantize_blocks() asks of a format: blocks of 32 with E4M3 scales have no name of their own."""

    block: int
    scale: str
