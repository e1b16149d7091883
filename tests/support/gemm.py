"""Weights with every scale, and products held against float64."""

from __future__ import annotations

import torch

from jitfp4 import Fp4Weight, SfLayout, mm_bf16_fp4, prepare_fp4_weight
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.reference.gemm import error_bound, matmul
from tests.support.compare import poisoned

LINEAR = SfLayout.layout_linear


def make_codes(n: int, k: int, block_format: BlockFormat, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes [n, k / 2] and linear scales [n, k / block] over many binades, none of them NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    low, high = (0, 127) if block_format is NVFP4 else (108, 124)
    scales = torch.randint(low, high, (n, k // block_format.block), generator=generator).to(torch.uint8)
    return codes, scales


def make_weight(n: int, k: int, block_format: BlockFormat, device: str = "cpu") -> Fp4Weight:
    codes, scales = make_codes(n, k, block_format)
    return prepare_fp4_weight(codes.to(device), scales.to(device), block_format.block, LINEAR)


def assert_product(
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat = NVFP4,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    device: str = "cpu",
    *,
    plain: bool = False,
) -> torch.Tensor:
    """A product in a poisoned output, with alpha and bias unless ``plain``, is within the bound; returns it."""
    out_dtype = out_dtype or dtype
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randn(m, k, generator=generator).to(dtype).to(device)
    weight = make_weight(n, k, block_format, device)
    alpha = None if plain else torch.tensor([2.0**-9 * 1.37], device=device)
    bias = None if plain else torch.randn(n, generator=generator).to(out_dtype).to(device)
    out = poisoned((m, n), out_dtype, device)
    assert mm_bf16_fp4(a, weight, alpha, bias, out=out) is out
    assert_close(out, a, weight, alpha, bias)
    return out


def assert_close(
    out: torch.Tensor, a: torch.Tensor, weight: Fp4Weight, alpha: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    values = weight.dequantize()
    error = (out.double() - matmul(a, values, alpha, bias)).abs()
    bound = error_bound(a, values, alpha, bias, out.dtype)
    assert bool((error <= bound).all()), f"{(error / bound).max().item():.2f} times what is allowed"
