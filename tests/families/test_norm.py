"""RMSNorm with FP4 quantization: the reference, separate steps, outputs and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, mxfp4_quantize, nvfp4_dequantize, nvfp4_quantize
from jitfp4.families.norm import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from jitfp4.reference import norm as reference
from jitfp4.reference.formats import unpack_e2m1, unswizzle
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.norm import DTYPES, FORMATS, LAYOUTS, LINEAR, SWIZZLED, assert_same_floats, check, rows_of_all_kinds

# ---- the reference itself --------------------------------------------------------------------------------------------


def test_sum_of_squares_follows_the_documented_order() -> None:
    h = 16 * 70
    x = torch.randn(h, generator=torch.Generator().manual_seed(0)).half()
    lanes = [[0.0] * 4 for _ in range(32)]
    for unit, values in enumerate(x.view(-1, 16).tolist()):
        chains = [torch.tensor(0.0), torch.tensor(0.0)]
        for i, value in enumerate(values):
            chains[i % 2] = (chains[i % 2].double() + value * value).float()
        lanes[unit % 32][unit // 32] = float(chains[0] + chains[1])

    def tree(values: list[float]) -> float:
        while len(values) > 1:
            values = [float(torch.tensor(a) + torch.tensor(b)) for a, b in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    assert reference.sum_of_squares(x).item() == tree([tree(turns) for turns in lanes])


def test_another_order_of_summation_would_be_seen() -> None:
    x = rows_of_all_kinds(64, 4096, torch.float16)
    straight = x.float().square().cumsum(-1)[:, -1]
    assert (straight != reference.sum_of_squares(x)).any()


def test_a_row_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0] * 32], dtype=torch.bfloat16)  # mean of squares 12.5
    weight = torch.full((64,), 2.0, dtype=torch.bfloat16)
    q, sf = rmsnorm_fp4quant(x, weight, eps=3.5)  # rstd = 1/4: y = 1.5, 2
    assert sf.view(torch.uint8).tolist() == [[0x2B] * 4]  # 2 / 6 in E4M3: 0.34375
    assert q.view(torch.uint8).tolist() == [[0x76] * 32]  # 1.5 / 0.34375 = 4.36 to 4; 2 / 0.34375 = 5.8 to 6


# ---- against separate steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_is_composed(dtype: torch.dtype) -> None:
    x, residual = rows_of_all_kinds(40, 320, dtype), rows_of_all_kinds(40, 320, dtype).flip(0)
    weight, g = torch.randn(320).to(dtype), torch.tensor([5.0])
    kept, y = residual.clone(), torch.empty_like(x)
    q, sf, linear = add_rmsnorm_fp4quant(  # type: ignore[misc]
        x, residual, weight, global_scale=g, output_both_sf_layouts=True, y_out=y
    )
    assert_same_floats("residual", residual, x + kept)
    want_q, want_sf = nvfp4_quantize(y, g)
    assert_same_bytes("codes", q.view(torch.uint8), want_q)
    assert_same_bytes("swizzled", sf.view(torch.uint8), want_sf.flatten())
    assert_same_bytes("linear", linear.view(torch.uint8), nvfp4_quantize(y, g, LINEAR)[1])
    alone_q, alone_sf = rmsnorm_fp4quant(residual, weight, block_size=32, is_sf_swizzled_layout=True)
    want_q, want_sf = mxfp4_quantize(y)
    assert_same_bytes("mxfp4 codes", alone_q.view(torch.uint8), want_q)
    assert_same_bytes("mxfp4 scales", alone_sf, want_sf.flatten())


@pytest.mark.parametrize("dtype", DTYPES)
def test_close_to_a_composition_with_torch_rms_norm(dtype: torch.dtype) -> None:
    """torch sums in another order: an ulp of rstd moves some elements of y by an ulp, and some of those by a code."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((256, 1536), (1536,)))
    y = torch.nn.functional.rms_norm(x.float(), (1536,), weight.float(), 1e-6).to(dtype)
    g = torch.tensor([2688.0]) / y.float().abs().amax()
    q, sf = rmsnorm_fp4quant(x, weight, global_scale=g)
    want_q, want_sf = nvfp4_quantize(y, g, LINEAR)
    assert (q.view(torch.uint8) == want_q).float().mean() >= 0.999
    assert (sf.view(torch.uint8) == want_sf).float().mean() >= 0.999
    magnitudes = (unpack_e2m1(codes.view(torch.uint8)).int() & 7 for codes in (q, want_q))
    assert torch.sub(*magnitudes).abs().amax() <= 1
    error = (nvfp4_dequantize(q.view(torch.uint8), sf, 1 / g, LINEAR) - y.float()).abs()
    relative = error / y.float().abs().clamp(min=1e-6)
    assert ((error <= 0.5) | (relative <= 0.3)).float().mean() >= 0.99  # FlashInfer's tiers
    assert ((error <= 2.0) | (relative <= 0.5)).all()


def test_global_scale_is_an_encode_scale() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight = torch.ones(512, dtype=torch.bfloat16)
    y = reference.rmsnorm(x, weight, 1e-6).float()
    g = torch.tensor([2688.0]) / y.abs().amax()
    for scale, decode in ((g, 1 / g), (None, torch.ones(1))):
        q, sf = rmsnorm_fp4quant(x, weight, global_scale=scale, is_sf_swizzled_layout=True)
        back = nvfp4_dequantize(q.view(torch.uint8), sf.view(SWIZZLED.shape(64, 32)), decode)
        assert (back - y).norm() / y.norm() < 0.12  # four bits on normal data


def test_the_result_of_a_row_does_not_depend_on_the_others() -> None:
    x, weight = rows_of_all_kinds(50, 2064, torch.float16), torch.randn(2064).half()
    q, sf = rmsnorm_fp4quant(x, weight)
    for row in (0, 1, 49):
        alone_q, alone_sf = rmsnorm_fp4quant(x[row : row + 1].clone(), weight)
        assert_same_bytes("codes", q[row : row + 1].view(torch.uint8), alone_q.view(torch.uint8))
        assert_same_bytes("scales", sf[row : row + 1].view(torch.uint8), alone_sf.view(torch.uint8))


# ---- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("block", "scale_format"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_given_outputs_are_filled(dtype: torch.dtype, block: int, scale_format: str, layout: str) -> None:
    x = rows_of_all_kinds(9, 96, dtype)
    check(x, x.flip(0), layout, block, scale_format, "cpu")
    if layout != "both":
        check(x, None, layout, block, scale_format, "cpu", scale=None, eps=0.0)


@pytest.mark.parametrize(("block", "scale_format"), FORMATS)
def test_allocated_outputs(block: int, scale_format: str) -> None:
    x, weight = rows_of_all_kinds(12, 64, torch.float16), torch.randn(64).half()
    kinds: dict[str, Any] = {"block_size": block, "scale_format": scale_format}
    q, sf = rmsnorm_fp4quant(x.view(3, 4, 64), weight, **kinds)
    assert q.shape == (3, 4, 32) and sf.shape == (3, 4, 64 // block)
    assert q.dtype == getattr(torch, "float4_e2m1fn_x2", torch.uint8)
    assert sf.dtype == (torch.uint8 if scale_format == "ue8m0" else torch.float8_e4m3fn)
    flat_q, flat_sf = rmsnorm_fp4quant(x, weight, is_sf_swizzled_layout=True, **kinds)
    assert flat_sf.shape == (512,)
    assert_same_bytes("codes", q.view(torch.uint8).view(12, 32), flat_q.view(torch.uint8))
    unswizzled = unswizzle(flat_sf.view(torch.uint8).view(128, 4), SWIZZLED, 12, 64 // block)
    assert_same_bytes("scales", sf.view(torch.uint8).view(12, -1), unswizzled)


def test_default_scale_format_follows_the_block_size() -> None:
    x, weight = rows_of_all_kinds(2, 64, torch.float16), torch.ones(64).half()
    assert rmsnorm_fp4quant(x, weight)[1].dtype == torch.float8_e4m3fn
    assert rmsnorm_fp4quant(x, weight, block_size=32)[1].dtype == torch.uint8


def test_no_rows_give_empty_outputs() -> None:
    x, weight = torch.empty(0, 64, dtype=torch.float16), torch.ones(64).half()
    q, sf = rmsnorm_fp4quant(x, weight, is_sf_swizzled_layout=True)
    assert q.shape == (0, 32) and sf.shape == (0,)


def test_meta_tensors_give_shapes() -> None:
    x, weight = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((7, 4096), (4096,)))
    outputs = add_rmsnorm_fp4quant(x, x.clone(), weight, output_both_sf_layouts=True)
    assert [tuple(out.shape) for out in outputs] == [(7, 2048), (32768,), (7, 256)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_traces_the_whole_function() -> None:
    def model(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = poisoned((20, 32), torch.uint8, "cpu")
        _, sf = add_rmsnorm_fp4quant(x * 2, residual, weight, out, global_scale=torch.ones(1))[:2]
        return out ^ 1, sf.view(torch.uint8), residual + 1

    x, weight = rows_of_all_kinds(20, 64, torch.bfloat16)[6:].repeat(2, 1)[:20], torch.randn(64).bfloat16()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, x.clone(), weight), model(x, x.clone(), weight), strict=True):
        assert_same_bytes("output", got, want)


# ---- arguments -------------------------------------------------------------------------------------------------------

GOOD = torch.zeros(4, 64, dtype=torch.float16)
WEIGHT = torch.ones(64, dtype=torch.float16)
ROOMY = torch.zeros(4 * 64 * 2 + 8, dtype=torch.float16)


def add_quant(residual: Any = None, **kwargs: Any) -> object:
    return add_rmsnorm_fp4quant(GOOD, GOOD.clone() if residual is None else residual, WEIGHT, **kwargs)


BAD_CALLS: dict[str, tuple[type[ArgumentError], str, Callable[[], object]]] = {
    "not a tensor": (ArgumentTypeError, "input", lambda: rmsnorm_fp4quant([1.0], WEIGHT)),
    "float32": (ArgumentTypeError, "input", lambda: rmsnorm_fp4quant(GOOD.float(), WEIGHT)),
    "rank 1": (ArgumentError, "input", lambda: rmsnorm_fp4quant(GOOD[0], WEIGHT)),
    "rank 4": (ArgumentError, "input", lambda: rmsnorm_fp4quant(GOOD.view(1, 1, 4, 64), WEIGHT)),
    "h < 64": (ArgumentError, "input", lambda: rmsnorm_fp4quant(GOOD.view(8, 32), WEIGHT[:32])),
    "h > 65536": (ArgumentError, "input", lambda: rmsnorm_fp4quant(torch.zeros(1, 65552).half(), WEIGHT)),
    "h % 16": (ArgumentError, "input", lambda: rmsnorm_fp4quant(torch.zeros(2, 72).half(), WEIGHT)),
    "h % 32": (ArgumentError, "input", lambda: rmsnorm_fp4quant(torch.zeros(2, 80).half(), WEIGHT, block_size=32)),
    "strided": (ArgumentError, "input", lambda: rmsnorm_fp4quant(torch.zeros(4, 128).half()[:, ::2], WEIGHT)),
    "unaligned": (ArgumentError, "input", lambda: rmsnorm_fp4quant(ROOMY[1:257].view(4, 64), WEIGHT)),
    "weight dtype": (ArgumentTypeError, "weight", lambda: rmsnorm_fp4quant(GOOD, WEIGHT.float())),
    "weight shape": (ArgumentError, "weight", lambda: rmsnorm_fp4quant(GOOD, WEIGHT[:48])),
    "weight strides": (ArgumentError, "weight", lambda: rmsnorm_fp4quant(GOOD, torch.ones(128).half()[::2])),
    "weight device": (ArgumentTypeError, "weight", lambda: rmsnorm_fp4quant(GOOD, WEIGHT.to("meta"))),
    "block size": (ArgumentError, "block_size", lambda: rmsnorm_fp4quant(GOOD, WEIGHT, block_size=64)),
    "scale format": (ArgumentError, "scale_format", lambda: rmsnorm_fp4quant(GOOD, WEIGHT, scale_format="e5m2")),
    "16 ue8m0": (ArgumentError, "scale_format", lambda: rmsnorm_fp4quant(GOOD, WEIGHT, scale_format="ue8m0")),
    "eps": (ArgumentError, "eps", lambda: rmsnorm_fp4quant(GOOD, WEIGHT, eps=-1.0)),
    "eps NaN": (ArgumentError, "eps", lambda: rmsnorm_fp4quant(GOOD, WEIGHT, eps=float("nan"))),
    "scale, mxfp4": (
        ArgumentError,
        "global_scale",
        lambda: rmsnorm_fp4quant(GOOD, WEIGHT, block_size=32, global_scale=torch.ones(1)),
    ),
    "scale size": (ArgumentError, "global_scale", lambda: rmsnorm_fp4quant(GOOD, WEIGHT, global_scale=torch.ones(2))),
    "scale device": (
        ArgumentTypeError,
        "global_scale",
        lambda: rmsnorm_fp4quant(GOOD, WEIGHT, global_scale=torch.ones(1, device="meta")),
    ),
    "y_fp4 shape": (
        ArgumentError,
        "y_fp4",
        lambda: rmsnorm_fp4quant(GOOD, WEIGHT, torch.empty(4, 64, dtype=torch.uint8)),
    ),
    "y_fp4 dtype": (ArgumentTypeError, "y_fp4", lambda: rmsnorm_fp4quant(GOOD, WEIGHT, torch.empty(4, 32))),
    "block_scale shape": (
        ArgumentError,
        "block_scale",
        lambda: rmsnorm_fp4quant(GOOD, WEIGHT, block_scale=torch.empty(512, dtype=torch.uint8)),
    ),
    "block_scale dtype": (
        ArgumentTypeError,
        "block_scale",
        lambda: rmsnorm_fp4quant(GOOD, WEIGHT, block_size=32, block_scale=torch.empty(4, 2, dtype=torch.float8_e4m3fn)),
    ),
    "residual shape": (ArgumentError, "residual", lambda: add_quant(GOOD[:2].clone())),
    "residual dtype": (ArgumentTypeError, "residual", lambda: add_quant(GOOD.bfloat16())),
    "residual strides": (ArgumentError, "residual", lambda: add_quant(torch.zeros(4, 128).half()[:, ::2])),
    "residual is input": (ArgumentError, "residual", lambda: add_quant(GOOD)),
    "residual unaligned": (ArgumentError, "residual", lambda: add_quant(ROOMY[1:257].view(4, 64))),
    "y_out dtype": (ArgumentTypeError, "y_out", lambda: add_quant(y_out=GOOD.float())),
    "y_out is input": (ArgumentError, "y_out", lambda: add_quant(y_out=GOOD)),
    "y_out meets residual": (
        ArgumentError,
        "y_out",
        lambda: add_quant(ROOMY[:256].view(4, 64), y_out=ROOMY[128:384].view(4, 64)),
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_named(case: str) -> None:
    error, name, call = BAD_CALLS[case]
    with pytest.raises(error) as caught:
        call()
    assert caught.value.name == name
    assert "allowed" in str(caught.value)


def test_nothing_is_written_when_an_argument_is_bad() -> None:
    out, residual = poisoned((4, 32), torch.uint8, "cpu"), torch.ones_like(GOOD)
    with pytest.raises(ArgumentError):
        add_rmsnorm_fp4quant(GOOD + 1, residual, WEIGHT, out, y_out=residual)
    assert torch.equal(out, poisoned((4, 32), torch.uint8, "cpu"))
    assert torch.equal(residual, torch.ones_like(GOOD))
