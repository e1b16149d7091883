"""NVFP4 quantization in Triton with linear scales, written in the usual way: the peer of bench_quantize.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCKS = 64  # blocks of 16 elements for each program


@triton.jit
def _code(v):
    a = tl.abs(v)
    steps = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    steps += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return steps | (v < 0.0).to(tl.int32) << 3


@triton.jit
def _kernel(x, g, q, sf, blocks, BLOCKS: tl.constexpr):  # noqa: N803 - Triton's custom
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    keep = (block < blocks)[:, None]
    pair = tl.arange(0, 8)[None, :]
    at = block[:, None] * 16 + 2 * pair
    scale = tl.load(g)
    low = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    high = tl.load(x + at + 1, mask=keep, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
    byte = tl.minimum(amax * (scale / 6.0), 448.0).to(tl.float8e4nv)
    decoded = byte.to(tl.float32)
    encode = tl.where(decoded == 0.0, 0.0, scale / decoded)[:, None]
    codes = _code(low * encode) | _code(high * encode) << 4
    tl.store(q + block[:, None] * 8 + pair, codes.to(tl.uint8), mask=keep)
    tl.store(sf + block, byte.to(tl.uint8, bitcast=True), mask=block < blocks)


def quantize(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[m, k] bf16 to codes [m, k/2] and E4M3 scales [m, k/16]."""
    m, k = x.shape
    q = torch.empty(m, k // 2, dtype=torch.uint8, device="cuda")
    sf = torch.empty(m, k // 16, dtype=torch.uint8, device="cuda")
    _kernel[(triton.cdiv(m * k // 16, _BLOCKS),)](x, g, q, sf, m * k // 16, BLOCKS=_BLOCKS)
    return q, sf
