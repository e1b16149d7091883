"""The same call said otherwise gives the same bytes: dtypes, shapes and strides that FlashInfer's functions take."""

from __future__ import annotations

import pytest
import torch

import jitfp4
from jitfp4.reference.formats import E4M3_MAX, unswizzle
from jitfp4.reference.quantize import widen_e4m3
from tests.support.compare import assert_same_bytes

CODES = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
E4M3 = torch.float8_e4m3fn
ONE = torch.ones(1)


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert_same_bytes(name, got.contiguous().view(torch.uint8).flatten(), want.contiguous().view(torch.uint8).flatten())


def test_what_one_function_returns_another_takes() -> None:
    x, weight = halves(8, 64), torch.ones(64).bfloat16()
    codes, scales = jitfp4.rmsnorm_fp4quant(x, weight, is_sf_swizzled_layout=True)
    back = jitfp4.nvfp4_dequantize(codes, scales, 1.0)
    assert (back - x.float() / x.float().square().mean(1, keepdim=True).sqrt()).abs().max() < 0.6
    same("general", jitfp4.e2m1_and_ufp8sf_scale_to_float(codes, scales, ONE), back)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_native_dtypes(form: str) -> None:
    x, native = halves(8, 64), E4M3 if form == "nvfp4" else E8M0
    if form == "nvfp4":
        quantize, dequantize = (
            (lambda **o: jitfp4.nvfp4_quantize(x, ONE, **o)),
            lambda q, s: jitfp4.nvfp4_dequantize(q, s, ONE),
        )
    else:
        quantize, dequantize = (lambda **o: jitfp4.mxfp4_quantize(x, **o)), jitfp4.mxfp4_dequantize
    q, sf = quantize()
    out, out_sf = torch.zeros_like(q).view(CODES), torch.zeros_like(sf).view(native)
    assert all(a is b for a, b in zip(quantize(out=out, out_sf=out_sf), (out, out_sf), strict=True))
    same("codes", out, q)
    same("scales", out_sf, sf)
    assert torch.equal(dequantize(out, out_sf), dequantize(q, sf))
    linear = unswizzle(sf, jitfp4.SfLayout.layout_128x4, 8, sf.shape[1])
    swizzled = jitfp4.nvfp4_block_scale_interleave(linear.contiguous().view(native))
    assert swizzled.dtype == native
    same("interleaved", swizzled, sf)
    wide = linear.repeat(16, 1)
    assert jitfp4.shuffle_matrix_sf_a(wide.view(native), 128).dtype == native
    same("shuffled", jitfp4.shuffle_matrix_sf_a(wide.view(native), 128), jitfp4.shuffle_matrix_sf_a(wide, 128))


def test_ue8m0_scales_have_no_global_scale_to_look_at() -> None:
    q, sf = jitfp4.mxfp4_quantize(halves(8, 64))
    want = jitfp4.mxfp4_dequantize(q, sf)
    assert torch.equal(jitfp4.e2m1_and_ufp8sf_scale_to_float(q, sf, torch.full((1,), 3.0), 32, 0), want)
    linear = unswizzle(sf, jitfp4.SfLayout.layout_128x4, 8, 2).contiguous()
    assert torch.equal(jitfp4.mxfp4_dequantize_host(q, linear, 32), want)


def test_e4m3_input() -> None:
    x = halves(2, 8, 64).to(E4M3)
    for got, want in zip(jitfp4.mxfp4_quantize(x), jitfp4.mxfp4_quantize(x.bfloat16()), strict=True):
        same("mxfp4", got, want)
    options = {"sf_vec_size": 32, "sf_use_ue8m0": True}
    for got, want in zip(jitfp4.fp4_quantize(x, ONE, **options), jitfp4.mxfp4_quantize(x.half()), strict=True):
        same("general", got, want)
    for scale in (torch.tensor([3.0]), torch.rand(8) + 0.5):
        wide = widen_e4m3(x, scale.view(-1, 1))
        got, want = jitfp4.nvfp4_batched_quantize(x, scale), jitfp4.nvfp4_batched_quantize(wide, scale)
        same("batched", got[0], want[0])
        same("batched scales", got[1], want[1])
    one = jitfp4.nvfp4_quantize(x[1], torch.tensor([3.0]))
    same("as a matrix", jitfp4.nvfp4_batched_quantize(x, torch.tensor([3.0]))[0][1], one[0])


def test_column_major_of_three_dimensions() -> None:
    x = halves(2, 64, 32).transpose(1, 2)
    q, sf = jitfp4.fp4_quantize(x.transpose(1, 2), ONE)
    want_q, want_sf = jitfp4.fp4_quantize(halves(2, 64, 32), ONE)
    same("row-major", q, want_q)
    assert (q.shape, sf.shape) == (want_q.shape, want_sf.shape)
    q, sf = jitfp4.fp4_quantize(x, ONE)
    assert q.shape == (2, 16, 64)
    same("codes", q.transpose(1, 2), want_q)
    same("scales", sf.t(), want_sf)


@pytest.mark.parametrize("swizzled", [False, True])
def test_norm_leaves_the_buffer_alone_that_engines_pass_always(swizzled: bool) -> None:
    x, weight = halves(4, 64), torch.ones(64).bfloat16()
    spare = torch.full((4, 4), 99, dtype=torch.uint8)
    options = {"is_sf_swizzled_layout": swizzled}
    got = jitfp4.add_rmsnorm_fp4quant(x, x + 0, weight, block_scale_unswizzled=spare.view(E4M3), **options)
    want = jitfp4.add_rmsnorm_fp4quant(x, x + 0, weight, **options)
    for a, b in zip(got, want, strict=True):
        same("result", a, b)
    assert (spare == 99).all()


def test_norm_takes_scales_in_two_dimensions_and_strided_rows() -> None:
    wide, weight = halves(4, 192), torch.ones(64).bfloat16()
    x, residual = wide[:, :64], wide[:, 64:128]
    want_residual = residual.clone()
    block_scale = torch.zeros(128, 4, dtype=torch.uint8).view(E4M3)
    want = jitfp4.add_rmsnorm_fp4quant(x.clone(), want_residual, weight, is_sf_swizzled_layout=True)
    got = jitfp4.add_rmsnorm_fp4quant(x, residual, weight, None, block_scale, is_sf_swizzled_layout=True)
    assert got[1] is block_scale
    same("codes", got[0], want[0])
    same("scales", got[1], want[1])
    assert torch.equal(residual, want_residual)
    assert torch.equal(wide[:, 128:], halves(4, 192)[:, 128:])


def test_norm_takes_native_ue8m0() -> None:
    x, weight = halves(4, 64), torch.ones(64).bfloat16()
    scales = torch.zeros(4, 2, dtype=torch.uint8)
    got = jitfp4.rmsnorm_fp4quant(x, weight, block_scale=scales.view(E8M0), block_size=32)
    same("scales", scales, jitfp4.rmsnorm_fp4quant(x, weight, block_size=32)[1])
    same("codes", got[0], jitfp4.rmsnorm_fp4quant(x, weight, block_size=32)[0])


def test_global_scales() -> None:
    x = halves(4, 64)
    assert torch.equal(jitfp4.make_nvfp4_global_scale(x, False), 6 * E4M3_MAX / x.float().abs().amax().view(1))
    assert jitfp4.make_nvfp4_global_scale(x, True).item() == pytest.approx(1 / 2688)
    assert jitfp4.make_nvfp4_global_scale(x, False, 3.0).item() == 3.0
    assert jitfp4.make_nvfp4_global_scale(x * 0, False).item() == torch.finfo(torch.float32).max


def test_silu_and_mul_is_what_the_fused_one_quantizes() -> None:
    x = halves(4, 64)
    out = torch.empty(4, 32).bfloat16()
    assert jitfp4.silu_and_mul(x, out) is out
    for got, want in zip(jitfp4.nvfp4_quantize(out, ONE), jitfp4.silu_and_mul_nvfp4_quantize(x, ONE), strict=True):
        same("quantized", got, want)
