"""RMSNorm in float32, in one fixed order of summation, and its FP4 quantization.

A row is summed as a binary tree over units of 16 elements. The order depends on nothing but the row itself, so that a
kernel may spread a row over any number of threads and still give the same bits.
"""

from __future__ import annotations

import torch

from jitfp4.formats import INV_6_BITS
from jitfp4.reference.formats import (
    FLT_MAX,
    block_amax,
    decode_e4m3,
    decode_ue8m0,
    divide,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack_e2m1,
)

_UNIT = 16
_LANES = 32


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``round((x * rstd) * weight)`` for [..., h] fp16 or bf16, in x's dtype.

    In float32, every operation correctly rounded: ``rstd = 1 / sqrt(sum_of_squares(x) / h + eps)``.
    """
    mean = divide(sum_of_squares(x), torch.full(x.shape[:-1], float(x.shape[-1]), device=x.device))
    variance = mean + torch.tensor(eps, dtype=torch.float32, device=x.device)
    rstd = divide(1.0, variance.double().sqrt().float())  # torch's float32 sqrt is an ulp off on some CPUs
    return (x.float() * rstd.unsqueeze(-1) * weight.float()).to(x.dtype)


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
    y: torch.Tensor, block: int, scale_format: str, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., h] to packed E2M1 [..., h/2] and the block scales [..., h/block], uint8."""
    blocks = y.float().unflatten(-1, (-1, block))
    inv_6 = torch.tensor(INV_6_BITS, dtype=torch.int32, device=y.device).view(torch.float32)
    amax = block_amax(blocks)
    if scale_format == "ue8m0":
        scales = encode_ue8m0(amax * inv_6)
        encode = divide(1.0, decode_ue8m0(scales))
    else:
        g = torch.ones_like(inv_6) if global_scale is None else global_scale.float().reshape(())
        scales = encode_e4m3(amax * (g * inv_6))
        encode = divide(1.0, decode_e4m3(scales) * divide(1.0, g)).nan_to_num(nan=FLT_MAX).clamp(max=FLT_MAX)
        encode = torch.where(amax == 0, 0.0, encode)
    codes = encode_e2m1(blocks * encode.unsqueeze(-1)).flatten(-2)
    return pack_e2m1(codes), scales
