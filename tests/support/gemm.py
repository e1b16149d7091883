"""Weights with every scale, and products held against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from jitfp4 import Fp4Weight, SfLayout, mm_bf16_fp4, mm_fp4, prepare_fp4_weight
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.reference.experts import activation, activation_bound
from jitfp4.reference.formats import swizzle
from jitfp4.reference.gemm import error_bound, matmul
from jitfp4.reference.quantize import dequantize
from tests.support.compare import poisoned

LINEAR = SfLayout.layout_linear
_SWIGLU = (1.0, 0.0, math.inf)  # alpha, beta, limit


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


def assert_weights_come_back(
    n: int,
    k: int,
    block_format: BlockFormat,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    *,
    rows: int | None = None,
) -> None:
    """Rows with a single one give the weight, exactly: no rounding hides a wrong bit. ``rows`` at a time, or all."""
    weight = make_weight(n, k, block_format, device)
    parts = torch.eye(k, dtype=dtype, device=device).split(rows or k)
    out = torch.cat([mm_bf16_fp4(part, weight) for part in parts])
    assert torch.equal(out.double(), weight.dequantize().double().T)


def assert_close(
    out: torch.Tensor, a: torch.Tensor, weight: Fp4Weight, alpha: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    values = weight.dequantize()
    error = (out.double() - matmul(a, values, alpha, bias)).abs()
    bound = error_bound(a, values, alpha, bias, out.dtype)
    assert bool((error <= bound).all()), f"{(error / bound).max().item():.2f} times what is allowed"


def assert_gated(out: torch.Tensor, a: torch.Tensor, weight: Fp4Weight, alpha: torch.Tensor | None) -> None:
    """silu(gate) * up of a product with a weight of gates and ups is within the bound."""
    values = weight.dequantize()
    gate, up = matmul(a, values, alpha, None).chunk(2, -1)
    of_gate, of_up = error_bound(a, values, alpha, None, torch.float32).chunk(2, -1)
    error = (out.double() - activation(gate, up, *_SWIGLU)).abs()
    bound = activation_bound(gate, up, (of_gate, of_up), *_SWIGLU, out.dtype)
    assert bool((error <= bound).all()), f"{(error / bound).max().item():.2f} times what is allowed"


class Fp4Matrix(NamedTuple):
    """Codes [rows, k / 2], their block scales in a swizzled layout, whose padding is NaN, and what they stand for."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


def swizzled(linear: torch.Tensor, layout: SfLayout) -> torch.Tensor:
    """``linear`` [rows, cols] in ``layout``; every byte of padding is 0xFF, which is NaN in both formats."""
    padded = torch.full(layout.shape(*linear.shape), 0xFF, dtype=torch.uint8)
    padded[: linear.shape[0], : linear.shape[1]] = linear.cpu()
    return swizzle(padded, layout).to(linear.device)


def make_matrix(
    rows: int, k: int, block_format: BlockFormat, layout: SfLayout = SfLayout.layout_128x4, seed: int = 0
) -> Fp4Matrix:
    codes, linear = make_codes(rows, k, block_format, seed)
    return Fp4Matrix(codes, swizzled(linear, layout), dequantize(codes, linear, block_format, None, LINEAR))


class Fp4Batch(NamedTuple):
    """Codes [rows, k / 2, l] and scales [32, 4, rm, 4, rk, l], as FlashInfer orders them, and the values of each."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: list[torch.Tensor]


def make_batch(entries: int, rows: int, k: int, block_format: BlockFormat, seed: int = 0) -> Fp4Batch:
    """The padding of scales is NaN."""
    made = [make_matrix(rows, k, block_format, seed=seed + entry) for entry in range(entries)]
    padded = torch.stack([one.scales for one in made])
    tiles = padded.view(entries, padded.shape[1] // 128, padded.shape[2] // 4, 32, 4, 4)
    codes = torch.stack([one.codes for one in made])
    return Fp4Batch(codes.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0), [one.values for one in made])


def masked_keywords(block_format: BlockFormat, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """What grouped_gemm_nt_masked() takes as words and numbers."""
    sf_dtype = "float8_e4m3fn" if block_format is NVFP4 else "float8_e8m0fnu"
    c_dtype = str(dtype).removeprefix("torch.")
    return {"ab_dtype": "float4_e2m1fn", "sf_dtype": sf_dtype, "sf_vec_size": block_format.block, "c_dtype": c_dtype}


def assert_fp4_product(
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat = NVFP4,
    a_layout: SfLayout = SfLayout.layout_128x4,
    out_dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> torch.Tensor:
    """A product of two FP4 matrices in a poisoned output is within the bound; returns it."""
    a, b = make_matrix(m, k, block_format, a_layout, 1), make_matrix(n, k, block_format, seed=2)
    alpha = torch.tensor([2.0**-9 * 1.37])
    out = poisoned((m, n), out_dtype, device)
    given = [t.to(device) for t in (a.codes, b.codes, a.scales, b.scales, alpha)]
    got = mm_fp4(
        *(given[0], given[1].T, given[2], given[3].T, given[4]),
        out_dtype=out_dtype,
        out=out,
        block_size=block_format.block,
        use_8x4_sf_layout=a_layout is SfLayout.layout_8x4,
        use_nvfp4=block_format is NVFP4,
    )
    assert got is out
    assert_fp4_close(out, a.values, b.values, alpha)
    return out


def assert_fp4_close(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None) -> None:
    error = (out.cpu().double() - matmul(a, b, alpha, None)).abs()
    bound = error_bound(a, b, alpha, None, out.dtype)
    assert bool((error <= bound).all()), f"{(error / bound).max().item():.2f} times what is allowed"


def check_graph_replay(chain: Callable[[], torch.Tensor]) -> None:
    """Calls that each need the one before give in a graph, replayed again and again, what they give one by one."""
    want = chain()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = chain()
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
