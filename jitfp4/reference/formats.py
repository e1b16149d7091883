"""E2M1, E4M3 and UE8M0 conversions and scale layouts in torch, bit-exact."""

from __future__ import annotations

import math

import torch

from jitfp4.formats import E2M1_VALUES, E4M3_MAX
from jitfp4.layouts import SfLayout, padded_shape, tile_of

FLT_MAX = torch.finfo(torch.float32).max


def divide(numerator: torch.Tensor | float, denominator: torch.Tensor) -> torch.Tensor:
    """Correctly rounded division. torch evaluates ``scalar / tensor`` as reciprocal times scalar, one ulp off."""
    if not isinstance(numerator, torch.Tensor):
        numerator = torch.full_like(denominator, numerator)
    return numerator / denominator


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 to E2M1 codes (uint8, 0 to 15): nearest, ties to the even code, saturating at 6, NaN to code 7.

    The thresholds are the midpoints of the format; ties at 0.25, 1.25, 2.5 and 5 go down, at 0.75, 1.75 and 3.5 up.
    The sign is kept, also on zero results.
    """
    a = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for midpoint, tie_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (a >= midpoint) if tie_up else (a > midpoint)
    code |= torch.signbit(x).to(torch.uint8) << 3
    return torch.where(torch.isnan(x), 7, code)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes (uint8, 0 to 15) to float32."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=codes.device)
    return values[codes.long()]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """[..., n] codes to [..., n/2] bytes; element 2j in the low nibble of byte j."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """[..., n/2] bytes to [..., n] codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 to E4M3 bytes: nearest even, saturating at 448, NaN to 0x7F."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(x.isnan(), 0x7F)  # of any sign


def decode_e4m3(byte: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes to float32."""
    return byte.view(torch.float8_e4m3fn).to(torch.float32)


def encode_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """Non-negative float32 to UE8M0 bytes, rounded up to a power of two; 0 to byte 0, at most byte 254.

    A subnormal takes byte 0 up to 2^-127 and byte 1 above. Inf and NaN give 254: byte 255 is never produced.
    """
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
    return (exponent + up).clamp(0, 254).to(torch.uint8)


def decode_ue8m0(byte: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes to float32: 2^(byte - 127); byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    power = torch.exp2(byte.to(torch.float64) - 127.0).to(torch.float32)
    return torch.where(byte == 255, torch.nan, power)


def block_amax(blocks: torch.Tensor) -> torch.Tensor:
    """Largest magnitude along the last dimension. NaN is ignored unless a whole block is NaN."""
    magnitude = blocks.abs()
    nan = torch.isnan(magnitude)
    return torch.where(nan.all(-1), torch.nan, magnitude.masked_fill(nan, 0.0).amax(-1))


def swizzle(scales: torch.Tensor, layout: SfLayout) -> torch.Tensor:
    """[..., rows, cols] scale bytes to ``layout``, padding zero: [..., padded rows, padded cols]."""
    *batch, rows, cols = scales.shape
    padded_rows, padded_cols = padded_shape(layout, rows, cols)
    padded = scales.new_zeros(*batch, padded_rows, padded_cols)
    padded[..., :rows, :cols] = scales
    outer, inner, tile_cols = tile_of(layout)
    tiles = padded.view(
        math.prod(batch), padded_rows // (outer * inner), outer, inner, padded_cols // tile_cols, tile_cols
    )
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(padded.shape)


def unswizzle(scales: torch.Tensor, layout: SfLayout, rows: int, cols: int) -> torch.Tensor:
    """The inverse of swizzle(): [..., padded rows, padded cols] in ``layout`` to the logical [..., rows, cols]."""
    *batch, padded_rows, padded_cols = scales.shape
    outer, inner, tile_cols = tile_of(layout)
    tiles = scales.reshape(
        math.prod(batch), padded_rows // (outer * inner), padded_cols // tile_cols, inner, outer, tile_cols
    )
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(*batch, padded_rows, padded_cols)[..., :rows, :cols]
