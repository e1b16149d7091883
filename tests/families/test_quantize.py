"""NVFP4 quantization: arguments, selection, generated source, and every byte on CPU, simulator and GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, ArgumentTypeError, SfLayout, nvfp4_dequantize, nvfp4_quantize
from jitfp4.formats import E2M1_VALUES, NVFP4
from jitfp4.reference import quantize as reference
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.inputs import all_half_patterns, hard_blocks, random_matrix
from tests.support.sample import SIM_ARCHS

DTYPES = [torch.bfloat16, torch.float16]
LAYOUTS = list(SfLayout)
SHAPES = [(1, 16), (1, 64), (3, 48), (7, 256), (33, 80), (128, 64), (129, 1040), (200, 528), (16, 4096)]


def encode_scale(a: torch.Tensor) -> torch.Tensor:
    amax = a.float().nan_to_num(0, 0, 0).abs().amax().clamp(min=1e-6)
    return (torch.full_like(amax, 2688.0) / amax).reshape(1)


def check_quantize(a: torch.Tensor, scale: torch.Tensor, layout: SfLayout, device: torch.device | str) -> None:
    """The kernel on ``device`` writes exactly the reference's bytes into poisoned outputs."""
    m, k = a.shape
    out = poisoned((m, k // 2), torch.uint8, device)
    out_sf = poisoned(layout.shape(m, k // 16), torch.uint8, device)
    q, sf = nvfp4_quantize(a.to(device), scale.to(device), layout, out=out, out_sf=out_sf)
    assert q is out and sf is out_sf
    want_q, want_sf = reference.nvfp4_quantize(a, scale, layout)
    assert_same_bytes("codes", q, want_q)
    assert_same_bytes("scales", sf, want_sf)


# ---- the reference itself --------------------------------------------------------------------------------------------


def test_a_block_by_hand() -> None:
    a = torch.tensor([[0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0] * 2], dtype=torch.bfloat16)
    q, sf = nvfp4_quantize(a, 1.0, SfLayout.layout_linear)
    assert sf.tolist() == [[0x38]]  # amax / 6 = 1.0
    assert q.tolist() == [[0x10, 0x3A, 0xD4, 0x76] * 2]


def test_zero_block_keeps_the_sign_of_zero() -> None:
    a = torch.zeros(1, 16, dtype=torch.float16)
    a[0, 3] = -0.0
    q, sf = nvfp4_quantize(a, 1.0, SfLayout.layout_linear)
    assert sf.item() == 0
    assert q.tolist() == [[0, 0x80, 0, 0, 0, 0, 0, 0]]


def test_nan_and_inf() -> None:
    a = torch.tensor(
        [[float("nan"), -float("nan"), float("inf"), -float("inf"), 1.0] + [0.0] * 11], dtype=torch.bfloat16
    )
    q, sf = nvfp4_quantize(a, 1.0, SfLayout.layout_linear)
    assert sf.item() == 0x7E
    assert q[0, :2].tolist() == [0x77, 0xF7]


def test_underflowed_scale_saturates_codes_and_dequantizes_to_zero() -> None:
    a = torch.tensor([[1e-6, -1e-6] + [0.0] * 14], dtype=torch.bfloat16)
    q, sf = nvfp4_quantize(a, 1.0, SfLayout.layout_linear)
    assert sf.item() == 0
    assert q[0].tolist() == [0xF7, 0, 0, 0, 0, 0, 0, 0]
    assert not nvfp4_dequantize(q, sf, 1.0, SfLayout.layout_linear).any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_error_is_half_a_step(dtype: torch.dtype, layout: SfLayout) -> None:
    a = random_matrix(100, 320, dtype)
    scale = encode_scale(a)
    q, sf = nvfp4_quantize(a, scale, layout)
    back = nvfp4_dequantize(q, sf, 1 / scale, layout)
    blocks, error = a.float().unflatten(1, (-1, 16)), (back - a.float()).unflatten(1, (-1, 16)).abs()
    block_scale = blocks.abs().amax(-1, keepdim=True) / 6
    subnormal_scale = 2**-9 / scale  # spacing of the smallest E4M3 scales
    assert (error <= 1.0 * block_scale * 1.08 + 6 * subnormal_scale).all()  # step 2 at the top, 1/16 scale rounding


def test_representable_values_survive_exactly() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    a = values[torch.randint(0, 16, (64, 128), generator=generator)]
    a[:, ::16] = 6.0
    q, sf = nvfp4_quantize(a.bfloat16(), 1.0)
    assert torch.equal(nvfp4_dequantize(q, sf, 1.0), a)


# ---- arguments -------------------------------------------------------------------------------------------------------

GOOD = torch.zeros(4, 64, dtype=torch.bfloat16)
BAD_CALLS: dict[str, tuple[type[ArgumentError], str, Callable[[], object]]] = {
    "not a tensor": (ArgumentTypeError, "a", lambda: nvfp4_quantize([1.0], 1.0)),
    "float32": (ArgumentTypeError, "a", lambda: nvfp4_quantize(GOOD.float(), 1.0)),
    "rank 1": (ArgumentError, "a", lambda: nvfp4_quantize(GOOD[0], 1.0)),
    "k % 16": (ArgumentError, "a", lambda: nvfp4_quantize(torch.zeros(4, 24, dtype=torch.float16), 1.0)),
    "k = 0": (ArgumentError, "a", lambda: nvfp4_quantize(GOOD[:, :0], 1.0)),
    "column stride": (ArgumentError, "a", lambda: nvfp4_quantize(torch.zeros(64, 16, dtype=torch.float16).T, 1.0)),
    "row stride": (ArgumentError, "a", lambda: nvfp4_quantize(torch.zeros(4, 68, dtype=torch.float16)[:, :64], 1.0)),
    "overlapping rows": (ArgumentError, "a", lambda: nvfp4_quantize(GOOD.as_strided((4, 64), (16, 1)), 1.0)),
    "unaligned start": (
        ArgumentError,
        "a",
        lambda: nvfp4_quantize(torch.zeros(4 * 72 + 1, dtype=torch.float16)[1:].view(4, 72)[:, :64], 1.0),
    ),
    "scale dtype": (ArgumentTypeError, "a_global_sf", lambda: nvfp4_quantize(GOOD, torch.ones(1, dtype=torch.int32))),
    "scale size": (ArgumentError, "a_global_sf", lambda: nvfp4_quantize(GOOD, torch.ones(2))),
    "scale device": (ArgumentTypeError, "a_global_sf", lambda: nvfp4_quantize(GOOD, torch.ones(1, device="meta"))),
    "layout": (ArgumentError, "sfLayout", lambda: nvfp4_quantize(GOOD, 1.0, 3)),
    "block size": (ArgumentError, "sf_vec_size", lambda: nvfp4_quantize(GOOD, 1.0, sf_vec_size=32)),
    "backend": (ArgumentError, "backend", lambda: nvfp4_quantize(GOOD, 1.0, backend="cutlass")),
    "shuffle": (ArgumentError, "do_shuffle", lambda: nvfp4_quantize(GOOD, 1.0, do_shuffle=True)),
    "out shape": (ArgumentError, "out", lambda: nvfp4_quantize(GOOD, 1.0, out=torch.empty(4, 64, dtype=torch.uint8))),
    "out dtype": (ArgumentTypeError, "out", lambda: nvfp4_quantize(GOOD, 1.0, out=torch.empty(4, 32))),
    "out strides": (
        ArgumentError,
        "out",
        lambda: nvfp4_quantize(GOOD, 1.0, out=torch.empty(4, 64, dtype=torch.uint8)[:, ::2]),
    ),
    "out_sf shape": (
        ArgumentError,
        "out_sf",
        lambda: nvfp4_quantize(GOOD, 1.0, out_sf=torch.empty(4, 4, dtype=torch.uint8)),
    ),
    "out_sf device": (
        ArgumentTypeError,
        "out_sf",
        lambda: nvfp4_quantize(GOOD, 1.0, out_sf=torch.empty(128, 4, dtype=torch.uint8, device="meta")),
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
    out = poisoned((4, 32), torch.uint8, "cpu")
    with pytest.raises(ArgumentError):
        nvfp4_quantize(GOOD, 1.0, out=out, out_sf=torch.empty(4, 4, dtype=torch.uint8))
    assert torch.equal(out, poisoned((4, 32), torch.uint8, "cpu"))


def test_strided_rows_and_leading_dimensions() -> None:
    wide = random_matrix(12, 128, torch.bfloat16)
    rows = wide[:, 32:96]
    q, sf = nvfp4_quantize(rows, 8.0)
    want_q, want_sf = nvfp4_quantize(rows.contiguous(), 8.0)
    assert_same_bytes("codes", q, want_q)
    assert_same_bytes("scales", sf, want_sf)
    q3, sf3 = nvfp4_quantize(rows.contiguous().view(3, 4, 64), 8.0)
    assert q3.shape == (3, 4, 32)
    assert_same_bytes("codes", q3.view(12, 32), want_q)
    assert_same_bytes("scales", sf3, want_sf)


def test_no_rows_give_empty_outputs() -> None:
    q, sf = nvfp4_quantize(GOOD[:0], 1.0)
    assert q.shape == (0, 32) and sf.shape == (0, 4)


def test_shuffle_permutes_rows_and_their_scales() -> None:
    a = random_matrix(256, 64, torch.bfloat16)
    q, sf = nvfp4_quantize(a, 4.0, do_shuffle=True)
    order = torch.cat([32 * block + torch.tensor([4 * (i % 8) + i // 8 for i in range(32)]) for block in range(8)])
    want_q, want_sf = nvfp4_quantize(a[order].contiguous(), 4.0)
    assert_same_bytes("codes", q, want_q)
    assert_same_bytes("scales", sf, want_sf)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scale_dtypes_and_float_agree(scale_dtype: torch.dtype) -> None:
    a = random_matrix(5, 64, torch.float16)
    want = nvfp4_quantize(a, 12.0)
    for scale in (torch.tensor(12.0, dtype=scale_dtype), torch.tensor([12.0], dtype=scale_dtype)):
        for got, expected in zip(nvfp4_quantize(a, scale), want, strict=True):
            assert_same_bytes("output", got, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_traces_the_whole_function() -> None:
    def model(a: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, sf = nvfp4_quantize(a * 2, scale, SfLayout.layout_8x4)
        return q ^ 1, sf

    a, scale = random_matrix(20, 64, torch.bfloat16), torch.tensor([7.0])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(a, scale), model(a, scale), strict=True):
        assert_same_bytes("output", got, want)


def test_meta_tensors_give_shapes() -> None:
    q, sf = nvfp4_quantize(GOOD.to("meta"), torch.ones(1, device="meta"))
    assert q.is_meta and q.shape == (4, 32) and sf.shape == (128, 4)


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e-38, 1e38, torch.inf, -torch.inf, torch.nan])
def test_no_global_scale_tells_kernels_and_reference_apart(scale: float, device: str) -> None:
    check_quantize(hard_blocks(torch.float16), torch.tensor([scale]), SfLayout.layout_128x4, device)


# ---- simulator -------------------------------------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.tag)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simulated_kernel(arch: str, layout: SfLayout, dtype: torch.dtype) -> None:
    hard = hard_blocks(dtype).view(-1, 80)
    with jitfp4.sim.device(arch):
        check_quantize(hard, torch.tensor([3.0]), layout, "cpu")
        for m, k in ((1, 16), (9, 80), (131, 144)):
            a = random_matrix(m, k, dtype)
            check_quantize(a, encode_scale(a), layout, "cpu")


# ---- GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.tag)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestOnGpu:
    def test_shapes(self, layout: SfLayout, dtype: torch.dtype) -> None:
        for m, k in SHAPES:
            a = random_matrix(m, k, dtype)
            check_quantize(a, encode_scale(a), layout, "cuda")

    def test_hard_blocks(self, layout: SfLayout, dtype: torch.dtype) -> None:
        a = hard_blocks(dtype)
        for scale in (1.0, 3.0, 1e-30, 1e30, 448.0):
            check_quantize(a, torch.tensor([scale]), layout, "cuda")

    def test_every_bit_pattern(self, layout: SfLayout, dtype: torch.dtype) -> None:
        a = all_half_patterns(dtype)
        for scale in (1.0, 0.37, 2688.0, 1e-20):
            check_quantize(a, torch.tensor([scale]), layout, "cuda")

    def test_graph_replay_and_streams(self, layout: SfLayout, dtype: torch.dtype) -> None:
        first, second = (random_matrix(70, 256, dtype, seed).cuda() for seed in (1, 2))
        a, scale = first.clone(), torch.tensor([5.0], device="cuda")
        nvfp4_quantize(a, scale, layout)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q, sf = nvfp4_quantize(a, scale, layout)
        a.copy_(second)
        graph.replay()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            want_q, want_sf = nvfp4_quantize(second, scale, layout)
        side.synchronize()
        assert_same_bytes("codes", q, want_q)
        assert_same_bytes("scales", sf, want_sf)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [None, True, False])
def test_dependent_kernels_see_each_other_s_results_on_gpu(pdl: bool | None) -> None:
    """Each kernel of a chain reads what the one before has just written; with PDL it is resident before that ends."""
    a = random_matrix(2048, 2048, torch.bfloat16).cuda()
    scale, inverse = torch.tensor([4.0], device="cuda"), torch.tensor([0.25], device="cuda")
    want = a
    for _ in range(20):
        q, sf = reference.nvfp4_quantize(want, scale, SfLayout.layout_128x4)
        want = reference.dequantize(q, sf, NVFP4, inverse, SfLayout.layout_128x4).bfloat16()
        if torch.equal(want, a):
            break
    got = a.clone()
    out = torch.empty_like(q)
    out_sf = torch.empty_like(sf)
    for _ in range(20):
        nvfp4_quantize(got, scale, enable_pdl=pdl, out=out, out_sf=out_sf)
        nvfp4_dequantize(out, out_sf, inverse, out_dtype=torch.bfloat16, enable_pdl=pdl, out=got)
    assert_same_bytes("after 20 round trips", got, want)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements_on_gpu() -> None:
    m, k = (1 << 18) + 200, 8208
    assert m * k > 1 << 31
    a = torch.empty(m, k, dtype=torch.bfloat16, device="cuda").normal_()
    scale = torch.tensor([300.0], device="cuda")
    q, sf = nvfp4_quantize(a, scale)
    for start in (0, (1 << 17) - 128, 1 << 18):  # whole tiles of scales: a slice is quantized as the whole is
        stop = min(start + 256, m)
        want_q, want_sf = reference.nvfp4_quantize(a[start:stop], scale, SfLayout.layout_128x4)
        assert_same_bytes("codes", q[start:stop], want_q)
        assert_same_bytes("scales", sf[start : start + want_sf.shape[0]], want_sf)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_the_second_gpu_runs_its_own_kernel() -> None:
    a, scale = random_matrix(130, 256, torch.bfloat16), torch.tensor([5.0])
    want = reference.nvfp4_quantize(a, scale, SfLayout.layout_128x4)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        for got, expected in zip(nvfp4_quantize(a.to(device), scale.to(device)), want, strict=True):
            assert got.device == torch.device(device)
            assert_same_bytes(device, got, expected)
    assert torch.cuda.current_device() == 0
