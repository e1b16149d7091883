"""NVFP4 and MXFP4 quantization and dequantization.

NVFP4 is the exact mode of FlashInfer and of Transformer Engine's reference: IEEE division, no approximate reciprocal.
MXFP4 follows the OCP Microscaling recipe with the scale rounded up, so that no element saturates.
"""

from __future__ import annotations

from typing import Protocol

import torch

from jitfp4.formats import INV_6_BITS, MXFP4, NVFP4, BlockFormat, NVFP44Over6Config, NVFP44Over6ErrMode
from jitfp4.layouts import SfLayout, padded_shape
from jitfp4.reference.formats import (
    FLT_MAX,
    block_amax,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    divide,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack_e2m1,
    swizzle,
    unpack_e2m1,
    unswizzle,
)


class Blocks(Protocol):
    """Elements that share a scale, and the scale's type: ``e4m3`` or ``ue8m0``. Every BlockFormat is one."""

    @property
    def block(self) -> int: ...

    @property
    def scale(self) -> str: ...


def quantize_blocks(
    x: torch.Tensor, form: Blocks, global_encode_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., k] floats to packed E2M1 [..., k/2] and linear block scales [..., k/form.block], all uint8.

    ``global_encode_scale`` g broadcasts against the block scales; None is 1. In float32, for each block::

        E4M3 scales:   s = amax * (g * float32(1/6));   b = e4m3(s)
                       o = min(1 / (dec8(b) * (1 / g)), FLT_MAX), 0 when amax == 0
        UE8M0 scales:  b = amax * float32(1/6) rounded up to a power of two;   o = 2^(127 - b)
        codes = e2m1(x * o)
    """
    blocks = x.float().unflatten(-1, (-1, form.block))
    sixth = torch.tensor(INV_6_BITS, dtype=torch.int32, device=x.device).view(torch.float32)
    amax = block_amax(blocks)
    if form.scale == "ue8m0":
        scales = encode_ue8m0(amax * sixth)
        encode = torch.exp2(127.0 - scales.double()).float()
    else:
        g = torch.ones_like(sixth) if global_encode_scale is None else global_encode_scale.float()
        scales = encode_e4m3(amax * (g * sixth))
        encode = divide(1.0, decode_e4m3(scales) * divide(1.0, g)).nan_to_num(nan=FLT_MAX).clamp(max=FLT_MAX)
        encode = torch.where(amax == 0, 0.0, encode)
    return pack_e2m1(encode_e2m1(blocks * encode.unsqueeze(-1)).flatten(-2)), scales


def quantize_4over6(
    x: torch.Tensor,
    recipe: NVFP44Over6Config,
    global_encode_scale: torch.Tensor,
    row_amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_blocks() to NVFP4 with the better of two scales for each block; ``row_amax`` broadcasts like g.

    In float32, for each block of x, of its amax and of g, every operation correctly rounded::

        s6 = (amax / 6) * g;   s4 = s6 * 1.5;   b = e4m3(s);   o = min(1 / (dec8(b) * (1 / g)), FLT_MAX)
        code = e2m1(x * o);   y = (e2m1(code) * dec8(b)) * (1 / g)

    With row_amax above 0, ``y = ((e2m1(code) * dec8(b)) * row_amax) / (6 * e4m3_max)``. The error is the sum, from the
    first element to the last, of ``|y - x|`` or of its square; with fast math, of
    ``|e2m1(code) * dec8(b) - x * g|``. s4 is taken where its error is less. A block of zeros has scale and codes 0.
    """
    blocks, g = x.float().unflatten(-1, (-1, NVFP4.block)), global_encode_scale.float()
    amax, inverse = block_amax(blocks), divide(1.0, g)
    s6 = divide(amax, torch.full_like(amax, 6.0)) * g

    def candidate(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scales = encode_e4m3(s)
        encode = divide(1.0, decode_e4m3(scales) * inverse).nan_to_num(nan=FLT_MAX).clamp(max=FLT_MAX)
        codes = encode_e2m1(blocks * encode.unsqueeze(-1))
        values = decode_e2m1(codes) * decode_e4m3(scales).unsqueeze(-1)
        if recipe.err_use_fast_math:
            return codes, scales, _sum_in_order(values - blocks * g.unsqueeze(-1), recipe)
        decoded = values * inverse.unsqueeze(-1)
        if row_amax is not None:
            by_row = divide(values * row_amax.unsqueeze(-1), torch.full_like(values, 6.0 * recipe.e4m3_max))
            decoded = torch.where(row_amax.unsqueeze(-1) > 0, by_row, decoded)
        return codes, scales, _sum_in_order(decoded - blocks, recipe)

    (codes6, scales6, error6), (codes4, scales4, error4) = candidate(s6), candidate(s6 * 1.5)
    better, zero = error4 < error6, amax == 0
    codes = torch.where(better.unsqueeze(-1), codes4, codes6).masked_fill(zero.unsqueeze(-1), 0)
    return pack_e2m1(codes.flatten(-2)), torch.where(better, scales4, scales6).masked_fill(zero, 0)


def _sum_in_order(differences: torch.Tensor, recipe: NVFP44Over6Config) -> torch.Tensor:
    square = recipe.err_mode == NVFP44Over6ErrMode.MSE
    terms = (differences * differences if square else differences.abs()).unbind(-1)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def widen_e4m3(a: torch.Tensor, global_encode_scale: torch.Tensor) -> torch.Tensor:
    """E4M3 input of the NVFP4 quantizer: ``fp16(x * ((1 / g) * 6))``, FlashInfer's convention.

    What comes back from the codes is therefore ``6 x / g``.
    """
    return (a.float() * (divide(1.0, global_encode_scale.float()) * 6.0)).to(torch.float16)


def row_scales(a: torch.Tensor, inverse_base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode and decode scale of each row of [m, k], float32 [m]; every operation correctly rounded.

    ``encode = min((1 / inverse_base) / amax, FLT_MAX)``, 1 where that is 0; ``decode = 1 / encode``, 0 for a row of
    zeros. amax ignores NaN unless the whole row is NaN; then encode is FLT_MAX.
    """
    amax = block_amax(a.float())
    base = divide(1.0, inverse_base.float().reshape(()))
    encode = divide(base.expand_as(amax), amax).nan_to_num(nan=FLT_MAX).clamp(max=FLT_MAX)
    encode = torch.where(encode == 0, 1.0, encode)
    return encode, torch.where(amax == 0, 0.0, divide(1.0, encode))


def nvfp4_quantize(
    a: torch.Tensor, global_encode_scale: torch.Tensor, layout: SfLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., m, k] to codes [..., m, k/2] and E4M3 scales in ``layout``; E4M3 input as widen_e4m3() says."""
    g = global_encode_scale.reshape(())
    codes, scales = quantize_blocks(widen_e4m3(a, g) if a.dtype == torch.float8_e4m3fn else a, NVFP4, g)
    return codes, swizzle(scales, layout)


def mxfp4_quantize(a: torch.Tensor, layout: SfLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., m, k] to codes [..., m, k/2] and UE8M0 scales in ``layout``."""
    codes, scales = quantize_blocks(a, MXFP4)
    return codes, swizzle(scales, layout)


def silu(v: torch.Tensor) -> torch.Tensor:
    """``v / (1 + exp(-v))`` of float32; exp is the only operation that is not correctly rounded everywhere.

    Below -80, where the 1 does not count, it is ``v * exp(v)``, whose exp does not overflow.
    """
    root = torch.exp(v / 2)  # twice, so that it is no subnormal
    return torch.where(v < -80, v * root * root, v / (1.0 + torch.exp(-v)))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """[..., 2k] to [..., k] in the same dtype: ``round(silu(x[..., :k]) * x[..., k:])``, both in float32."""
    gate, up = x.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def dequantize(
    q: torch.Tensor, sf: torch.Tensor, form: BlockFormat, global_decode_scale: torch.Tensor | None, layout: SfLayout
) -> torch.Tensor:
    """[..., m, k/2] codes and their scales in ``layout`` to float32 [..., m, k].

    ``x = e2m1(code) * (decode(b) * global_decode_scale)``, both products rounded to float32; None is 1.
    """
    codes = unpack_e2m1(q)
    rows, cols = codes.shape[-2], codes.shape[-1] // form.block
    padded = sf.reshape(*codes.shape[:-2], *padded_shape(layout, rows, cols))
    linear = unswizzle(padded, layout, rows, cols)
    scales = decode_ue8m0(linear) if form.scale == "ue8m0" else decode_e4m3(linear)
    if global_decode_scale is not None:
        scales = scales * global_decode_scale.float().reshape(())
    return decode_e2m1(codes) * scales.repeat_interleave(form.block, dim=-1)
