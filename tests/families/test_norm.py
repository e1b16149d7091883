"""RMSNorm with FP4 quantization: arguments, selection, and every byte on CPU, simulator and GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, ArgumentTypeError, SfLayout, mxfp4_quantize, nvfp4_dequantize, nvfp4_quantize
from jitfp4.arch import ARCHS, Arch
from jitfp4.engine import build
from jitfp4.families.norm import add_rmsnorm_fp4quant, kernel, rmsnorm_fp4quant
from jitfp4.families.norm.kernel import RMSNORM, SHAPES, Scale, Spec, geometry, select, specs
from jitfp4.formats import DType
from jitfp4.reference import norm as reference
from jitfp4.reference.formats import unpack_e2m1, unswizzle
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.inputs import hard_blocks
from tests.support.sass import disassemble

DTYPES = [torch.bfloat16, torch.float16]
FORMATS = [(16, "e4m3"), (32, "e4m3"), (32, "ue8m0")]
LAYOUTS = ["linear", "128x4", "both"]
LINEAR, SWIZZLED = SfLayout.layout_linear, SfLayout.layout_128x4


def rows_of_all_kinds(m: int, h: int, dtype: torch.dtype) -> torch.Tensor:
    """[m, h] normal values of unlike magnitude; rows 1 to 5 hold hard blocks, zeros, maxima, an Inf, a NaN."""
    generator = torch.Generator().manual_seed(h + m)
    scale = torch.exp2(torch.randint(-8, 9, (m, 1), generator=generator).float())
    x = (torch.randn(m, h, generator=generator) * scale).to(dtype)
    hard = hard_blocks(dtype).flatten()
    kinds: list[Callable[[torch.Tensor], object]] = [
        lambda row: row[: hard.numel()].copy_(hard[: row.numel()]),
        lambda row: row.zero_(),
        lambda row: row.fill_(torch.finfo(dtype).max),
        lambda row: row[h // 2].fill_(torch.inf),
        lambda row: row[h // 3].fill_(torch.nan),
    ]
    for row, kind in zip(x[1:], kinds, strict=False):
        kind(row)
    return x


def assert_same_floats(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bytes, but for the bits of a NaN, which CPU and GPU choose differently."""
    assert torch.equal(got.isnan().cpu(), want.isnan()), f"{name}: NaN elsewhere"
    assert_same_bytes(name, got.cpu().nan_to_num(0, torch.inf, -torch.inf), want.nan_to_num(0, torch.inf, -torch.inf))


def check(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    layout: str,
    block: int,
    scale_format: str,
    device: torch.device | str,
    *,
    scale: float | None = 3.0,
    eps: float = 1e-6,
) -> None:
    """The kernel on ``device`` writes exactly the reference's bytes into poisoned outputs."""
    m, h = x.shape
    weight = torch.randn(h, generator=torch.Generator().manual_seed(h)).to(x.dtype)
    g = None if scale is None or scale_format == "ue8m0" else torch.tensor([scale])
    linear = poisoned((m, h // block), torch.uint8, device)
    swizzled = poisoned((SWIZZLED.numel(m, h // block),), torch.uint8, device)
    codes = poisoned((m, h // 2), torch.uint8, device)
    common: dict[str, Any] = {
        "global_scale": None if g is None else g.to(device),
        "eps": eps,
        "block_size": block,
        "scale_format": scale_format,
        "is_sf_swizzled_layout": layout == "128x4",
    }
    first = linear if layout == "linear" else swizzled
    hidden = x if residual is None else reference.add(x, residual)
    want_y = reference.rmsnorm(hidden, weight, eps)
    if residual is None:
        assert rmsnorm_fp4quant(x.to(device), weight.to(device), codes, first, **common)[0] is codes
    else:
        updated, y = residual.to(device, copy=True), poisoned((m, h), x.dtype, device)
        both = {"output_both_sf_layouts": True, "block_scale_unswizzled": linear} if layout == "both" else {}
        add_rmsnorm_fp4quant(x.to(device), updated, weight.to(device), codes, first, **common, **both, y_out=y)
        assert_same_floats("residual", updated, hidden)
        assert_same_floats("y_out", y, want_y)
    want_codes, want_scales = reference.quantize(want_y, block, scale_format, g)
    assert_same_bytes("codes", codes, want_codes)
    if layout != "128x4":
        assert_same_bytes("linear scales", linear, want_scales)
    if layout != "linear":
        padded = swizzled.cpu().view(SWIZZLED.shape(m, h // block))
        assert_same_bytes("swizzled scales", unswizzle(padded, SWIZZLED, m, h // block), want_scales)
        assert int(padded.int().sum()) == int(want_scales.int().sum()), "padding is not zero"


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
    "strided": (ArgumentError, "input", lambda: rmsnorm_fp4quant(torch.zeros(4, 128).half()[:, :64], WEIGHT)),
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
    "unswizzled alone": (
        ArgumentError,
        "block_scale_unswizzled",
        lambda: add_quant(block_scale_unswizzled=torch.empty(4, 4, dtype=torch.uint8)),
    ),
    "residual shape": (ArgumentError, "residual", lambda: add_quant(GOOD[:2].clone())),
    "residual dtype": (ArgumentTypeError, "residual", lambda: add_quant(GOOD.bfloat16())),
    "residual strides": (ArgumentError, "residual", lambda: add_quant(torch.zeros(4, 128).half()[:, :64])),
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


# ---- selection -------------------------------------------------------------------------------------------------------

PROBLEM: dict[str, Any] = {"in_dtype": DType.F16, "block": 16, "scale": Scale.E4M3}


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_every_hidden_size_has_a_kernel_that_warm_up_builds(arch: Arch) -> None:
    prebuilt = set(specs(arch))
    met = set()
    for add, h, m in product((False, True), range(64, 65537, 16), (1, 1000, 1 << 17)):
        spec = select(**PROBLEM, add=add, m=m, h=h, arch=arch)
        met.add(spec)
        launch, row_threads = geometry(spec, m=m, h=h, padded=False, arch=arch)
        assert launch.block[0] <= spec.max_threads and launch.shared_bytes <= arch.shared_bytes
        assert launch.cluster[0] == 1 or (arch.has_tma and launch.cluster[0] <= 8)
        threads = row_threads if spec.warps > 1 else min(row_threads, 32)
        assert threads * launch.cluster[0] * spec.units * 16 >= h
    assert met == {s for s in prebuilt if (s.in_dtype, s.block, s.scale) == tuple(PROBLEM.values())}


def test_a_row_that_does_not_fit_on_chip_is_streamed() -> None:
    assert select(**PROBLEM, add=True, m=1, h=65536, arch=Arch.of("sm_80")).stream
    assert select(**PROBLEM, add=True, m=1, h=65536, arch=Arch.of("sm_90a")).clustered
    assert not any(spec.stream for spec in specs(Arch.of("sm_90a")))


def test_specs_name_no_size_of_a_problem() -> None:
    names = {field.name for field in dataclasses.fields(Spec)}
    assert names == {"in_dtype", "block", "scale", "add", "units", "warps", "clustered", "stream"}


# ---- generated code --------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_no_local_memory_and_wide_accesses(arch: str, add: bool) -> None:
    target = Arch.of(arch)
    for spec in specs(target):
        if spec.add is add and (spec.in_dtype, spec.block) == (DType.BF16, 16):
            code = disassemble(build(RMSNORM, spec, target).cubin)
            assert not [line for line in code if line.startswith(("LDL", "STL"))], spec
            loads = [line for line in code if line.startswith("LDG" if spec.stream else "LDGSTS")]
            assert loads and all(".128" in line for line in loads if "LDGSTS" in line), spec


# ---- simulator -------------------------------------------------------------------------------------------------------

SIM_SHAPES = [(7, 64), (3, 80), (2, 1040), (131, 128), (2, 4160)]


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("block", "scale_format"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simulated_kernel(arch: str, dtype: torch.dtype, block: int, scale_format: str) -> None:
    with jitfp4.sim.device(arch):
        for layout, (m, h) in zip([*LAYOUTS, *LAYOUTS], SIM_SHAPES, strict=False):
            if h % block == 0:
                x = rows_of_all_kinds(m, h, dtype)
                check(x, x.flip(0), layout, block, scale_format, "cpu")
                check(x, None, "linear" if layout == "both" else layout, block, scale_format, "cpu", scale=None)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Gives every problem one kind of kernel."""

    def force(units: int, warps: int, clustered: bool, stream: bool = False) -> None:
        def select(**problem: Any) -> Spec:
            form = {name: problem[name] for name in ("in_dtype", "block", "scale", "add")}
            return Spec(**form, units=units, warps=warps, clustered=clustered, stream=stream)

        monkeypatch.setattr(kernel, "select", select)
        kernel.plan.cache_clear()

    yield force
    kernel.plan.cache_clear()


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize(
    ("units", "warps", "clustered", "stream", "h"),
    [
        (2, 1, False, False, 1024),  # rows that fill their threads, which are not asked for then
        (3, 1, False, False, 1536),
        (3, 1, False, False, 1104),
        (1, 8, False, False, 1040),
        (2, 8, False, False, 3088),
        (4, 4, False, False, 6160),
        (2, 16, True, False, 20496),
        (8, 16, False, True, 9232),
    ],
)
def test_every_kind_of_kernel_simulated(
    forced: Callable[..., None], units: int, warps: int, clustered: bool, stream: bool, h: int
) -> None:
    forced(units, warps, clustered, stream)
    x = rows_of_all_kinds(3, h, torch.float16)
    with jitfp4.sim.device("sm_90a", races=True):
        check(x, x.flip(0), "both", 16, "e4m3", "cpu")
        check(x, None, "128x4", 16, "e4m3", "cpu")


# ---- GPU -------------------------------------------------------------------------------------------------------------

GPU_SHAPES = [(1, 64), (130, 96), (300, 256), (129, 512), (33, 1024), (7, 1536), (70, 2080), (9, 4096), (5, 7168)]
LONG_SHAPES = [(3, 12288), (2, 20480), (2, 32768), (2, 65504), (1, 65536)]


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("block", "scale_format"), FORMATS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_shapes(self, dtype: torch.dtype, block: int, scale_format: str, layout: str) -> None:
        for m, h in GPU_SHAPES + LONG_SHAPES:
            x = rows_of_all_kinds(m, h, dtype)
            check(x, x.flip(0), layout, block, scale_format, "cuda")
            if layout != "both":
                check(x, None, layout, block, scale_format, "cuda", scale=None, eps=0.0)

    @pytest.mark.parametrize(("units", "warps", "clustered"), SHAPES)
    def test_every_kind_of_kernel(self, forced: Callable[..., None], units: int, warps: int, clustered: bool) -> None:
        forced(units, warps, clustered)
        for m, h in GPU_SHAPES + LONG_SHAPES:
            if h <= 512 * units * warps * (8 if clustered else 1):
                x = rows_of_all_kinds(m, h, torch.float16)
                check(x, x.flip(0), "both", 16 if h % 32 else 32, "e4m3", "cuda")
                check(x, None, "128x4", 16, "e4m3", "cuda")

    def test_streaming(self, forced: Callable[..., None]) -> None:
        forced(8, 16, False, True)
        for m, h in GPU_SHAPES + LONG_SHAPES:
            x = rows_of_all_kinds(m, h, torch.bfloat16)
            check(x, x.flip(0), "both", 16, "e4m3", "cuda")
            check(x, None, "linear", 16, "e4m3", "cuda")

    @pytest.mark.parametrize("h", [4096, 32768])
    def test_many_rows_against_the_reference_on_the_gpu(self, h: int) -> None:
        x, residual = (torch.randn(4096, h, device="cuda").half() for _ in range(2))
        weight, y = torch.randn(h, device="cuda").half(), torch.empty_like(x)
        hidden = reference.add(x, residual)
        q, sf = add_rmsnorm_fp4quant(x, residual, weight, global_scale=7.0, y_out=y)[:2]
        assert torch.equal(residual, hidden)
        assert torch.equal(y, reference.rmsnorm(hidden, weight, 1e-6))
        want_q, want_sf = nvfp4_quantize(y, 7.0, LINEAR)
        assert torch.equal(q.view(torch.uint8), want_q)
        assert torch.equal(sf.view(torch.uint8), want_sf)

    def test_calls_that_each_need_the_one_before(self) -> None:
        x, weight = torch.randn(300, 4096, device="cuda").half(), torch.randn(4096, device="cuda").half()
        results = []
        for enable_pdl in (True, False):
            residual = torch.zeros_like(x)
            for _ in range(20):
                q, sf = add_rmsnorm_fp4quant(x, residual, weight, enable_pdl=enable_pdl)[:2]
            results.append((residual, q.view(torch.uint8), sf.view(torch.uint8)))
        for name, got, want in zip(("residual", "codes", "scales"), *results, strict=True):
            assert_same_bytes(name, got.view(torch.uint8), want.view(torch.uint8))

    def test_graph_replay_and_streams(self) -> None:
        first, second = (torch.randn(70, 1536, device="cuda").half() for _ in range(2))
        x, weight = first.clone(), torch.randn(1536, device="cuda").half()
        rmsnorm_fp4quant(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q, sf = rmsnorm_fp4quant(x, weight)
        x.copy_(second)
        graph.replay()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            want_q, want_sf = rmsnorm_fp4quant(second, weight, enable_pdl=False)
        side.synchronize()
        assert_same_bytes("codes", q.view(torch.uint8), want_q.view(torch.uint8))
        assert_same_bytes("scales", sf.view(torch.uint8), want_sf.view(torch.uint8))
