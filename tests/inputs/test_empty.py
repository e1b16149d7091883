"""Nothing to do is no error: empty tensors, whatever their strides; and results go where torch lets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jitfp4
from jitfp4.formats import NVFP4
from tests.support.gemm import masked_keywords

E4M3 = torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Without elements, and with every stride but the last 0, as expand() leaves them."""
    ones = torch.zeros((*[1] * (len(shape) - 1), shape[-1]), dtype=dtype)
    return ones.expand(shape)


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _append() -> None:
    cache, sf = (
        (codes(4, 16, 2, 32), codes(4, 16, 2, 32)),
        (codes(4, 16, 2, 4).view(E4M3), codes(4, 16, 2, 4).view(E4M3)),
    )
    slots = torch.zeros(0, dtype=torch.int32)
    jitfp4.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        empty(0, 2, 64), empty(0, 2, 64), slots, cache, sf, 1.0, 1.0
    )


def _masked(entries: int, m: int) -> torch.Tensor:
    given = [(codes(entries, rows, 32).permute(1, 2, 0), codes(entries, -(-rows // 128) * 128, 4)) for rows in (m, 8)]
    out, masked_m = empty(entries, m, 8).permute(1, 2, 0), torch.zeros(entries, dtype=torch.int32)
    return jitfp4.grouped_gemm_nt_masked(*given, out, masked_m, **masked_keywords(NVFP4))


RECIPE = jitfp4.NVFP44Over6Config()
CALLS: dict[str, Callable[[], object]] = {
    "no rows": lambda: jitfp4.nvfp4_quantize(empty(0, 64), 1.0),
    "no rows in three dimensions": lambda: jitfp4.nvfp4_quantize(empty(3, 0, 64), 1.0),
    "4over6": lambda: jitfp4.nvfp4_quantize(empty(3, 0, 64), 1.0, nvfp4_4over6=RECIPE),
    "MXFP4": lambda: jitfp4.mxfp4_quantize(empty(0, 64)),
    "shuffled": lambda: jitfp4.nvfp4_quantize(empty(0, 64), 1.0, do_shuffle=True),
    "per token": lambda: jitfp4.nvfp4_quantize(empty(0, 64), 1.0, per_token_activation=True),
    "a batch": lambda: jitfp4.nvfp4_batched_quantize(empty(3, 0, 64), 1.0),
    "no experts": lambda: jitfp4.scaled_fp4_grouped_quantize(
        empty(0, 4, 64), torch.zeros(0, dtype=torch.int32), torch.zeros(0)
    ),
    "products of no matrices": lambda: _masked(0, 4),
    "products without rows": lambda: _masked(2, 0),
    "SwiGLU": lambda: jitfp4.silu_and_mul_nvfp4_quantize(empty(0, 64), 1.0),
    "norm": lambda: jitfp4.rmsnorm_fp4quant(empty(0, 64), torch.zeros(64).bfloat16()),
    "scales without rows": lambda: jitfp4.block_scale_interleave(codes(0, 4)),
    "scales without columns": lambda: jitfp4.block_scale_interleave(codes(4, 0)),
    "scales of experts without rows": lambda: jitfp4.block_scale_interleave(codes(2, 0, 4)),
    "scales of no experts": lambda: jitfp4.block_scale_interleave(codes(0, 4, 4)),
    "a shuffle of no rows": lambda: jitfp4.shuffle_matrix_a(codes(0, 4), 128),
    "a shuffle of no columns": lambda: jitfp4.shuffle_matrix_a(codes(128, 0), 128),
    "a shuffle of scales, no rows": lambda: jitfp4.shuffle_matrix_sf_a(codes(0, 4), 128),
    "a shuffle of scales, no columns": lambda: jitfp4.shuffle_matrix_sf_a(codes(128, 0), 128),
    "rows of a cache": lambda: jitfp4.nvfp4_kv_quantize(empty(0, 64), 1.0),
    "pages without tokens": lambda: jitfp4.nvfp4_quantize_paged_kv_cache(empty(3, 4, 0, 64), empty(3, 4, 0, 64)),
    "no pages": lambda: jitfp4.nvfp4_quantize_paged_kv_cache(empty(0, 2, 4, 64), empty(0, 2, 4, 64)),
    "nothing to append": _append,
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_no_error(name: str) -> None:
    result = CALLS[name]()
    for tensor in result if isinstance(result, tuple) else (result,):
        assert not isinstance(tensor, torch.Tensor) or not tensor.float().any()


@pytest.mark.parametrize("kind", ["leaf", "inference"])
def test_a_result_may_be_a_leaf_or_of_inference_mode(kind: str) -> None:
    """A kernel writes them, and so does the reference: no function of the package has a gradient."""
    with torch.inference_mode(kind == "inference"):
        out, bytes_out = torch.zeros(4, 64, dtype=torch.bfloat16), codes(512)
    out.requires_grad_(kind == "leaf")
    x, scales = torch.randn(4, 64).bfloat16(), torch.arange(16, dtype=torch.uint8).view(4, 4)
    q, sf = jitfp4.nvfp4_quantize(x, 1.0)
    assert jitfp4.nvfp4_dequantize(q, sf, 1.0, out_dtype=torch.bfloat16, out=out) is out
    assert torch.equal(out.detach(), jitfp4.nvfp4_dequantize(q, sf, 1.0, out_dtype=torch.bfloat16))
    gated = torch.randn(4, 128).bfloat16()
    assert torch.equal(jitfp4.silu_and_mul(gated, out=out).detach(), jitfp4.silu_and_mul(gated))
    jitfp4.add_rmsnorm_fp4quant(x, out, torch.ones(64).bfloat16())
    assert torch.equal(out.detach(), jitfp4.silu_and_mul(gated) + x)
    assert jitfp4.block_scale_interleave(scales, out=bytes_out) is bytes_out and bytes_out.any()
