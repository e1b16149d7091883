"""RMSNorm in Triton, with or without an addition before it, written in the usual way: the peer of bench_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(x, residual, weight, y, h, eps, ADD: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803 - Triton's custom
    columns = tl.arange(0, SIZE)
    at = tl.program_id(0).to(tl.int64) * h + columns
    keep = columns < h
    value = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        value = (value + tl.load(residual + at, mask=keep, other=0.0).to(tl.float32)).to(tl.float16)
        tl.store(residual + at, value, mask=keep)
        value = value.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value) / h + eps)
    tl.store(y + at, value * rstd * tl.load(weight + columns, mask=keep, other=0.0).to(tl.float32), mask=keep)


def rmsnorm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of [m, h] fp16. If there is a ``residual``, ``x`` is first added to it in place."""
    m, h = x.shape
    y, size = torch.empty_like(x), triton.next_power_of_2(h)
    add, warps = residual is not None, min(max(size // 512, 4), 32)
    _kernel[(m,)](x, residual if add else x, weight, y, h, eps, ADD=add, SIZE=size, num_warps=warps)
    return y
