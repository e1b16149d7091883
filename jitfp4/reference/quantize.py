"""NVFP4 quantization and dequantization.

This is the exact mode of FlashInfer and of Transformer Engine's reference: IEEE division, no approximate reciprocal.
"""

from __future__ import annotations

import torch

from jitfp4.formats import INV_6_BITS, NVFP4
from jitfp4.layouts import SfLayout
from jitfp4.reference.formats import (
    FLT_MAX,
    block_amax,
    decode_e2m1,
    decode_e4m3,
    divide,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    swizzle,
    unpack_e2m1,
    unswizzle,
)


def nvfp4_quantize(
    a: torch.Tensor, global_encode_scale: torch.Tensor, layout: SfLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., m, k] to packed E2M1 [..., m, k/2] and E4M3 block scales in ``layout`` (all uint8).

    For each block of 16, with ``g`` the global encode scale::

        s = amax * (g * float32(1/6))
        b = e4m3(s)
        o = min(1 / (dec8(b) * (1 / g)), FLT_MAX), 0 when amax == 0
        codes = e2m1(x * o)
    """
    blocks = a.float().unflatten(-1, (-1, NVFP4.block))
    g = global_encode_scale.float().reshape(())
    inv_6 = torch.tensor(INV_6_BITS, dtype=torch.int32, device=a.device).view(torch.float32)
    amax = block_amax(blocks)
    scales = encode_e4m3(amax * (g * inv_6))
    encode = divide(1.0, decode_e4m3(scales) * divide(1.0, g)).nan_to_num(nan=FLT_MAX).clamp(max=FLT_MAX)
    encode = torch.where(amax == 0, 0.0, encode)
    codes = encode_e2m1(blocks * encode.unsqueeze(-1)).flatten(-2)
    return pack_e2m1(codes), swizzle(scales, layout)


def nvfp4_dequantize(
    q: torch.Tensor, sf: torch.Tensor, global_decode_scale: torch.Tensor, layout: SfLayout
) -> torch.Tensor:
    """[..., m, k/2] codes and their scales in ``layout`` to float32 [..., m, k].

    ``x = e2m1(code) * (dec8(b) * global_decode_scale)``, both products rounded to float32.
    """
    codes = unpack_e2m1(q)
    rows, cols = codes.shape[-2], codes.shape[-1] // NVFP4.block
    padded = sf.reshape(*codes.shape[:-2], *layout.shape(rows, cols))
    scales = decode_e4m3(unswizzle(padded, layout, rows, cols)) * global_decode_scale.float().reshape(())
    return decode_e2m1(codes) * scales.repeat_interleave(NVFP4.block, dim=-1)
