"""mm_fp4: products against float64 on CPU, simulator and GPU, FlashInfer's cases, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, SfLayout, mm_fp4, mxfp4_quantize, nvfp4_quantize, nvrtc, sim
from jitfp4.arch import ARCHS, Arch
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.fp4_tables import problems
from jitfp4.families.gemm.kernels.portable import KERNEL as PORTABLE
from jitfp4.families.gemm.kernels.portable import PortableTactic, rejects, specialise
from jitfp4.families.gemm.problem import Fp4Problem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.reference.formats import decode_e2m1, unpack_e2m1
from tests.support.gemm import (
    Fp4Matrix,
    assert_fp4_close,
    assert_fp4_product,
    check_graph_replay,
    make_matrix,
    swizzled,
)
from tests.support.sample import some
from tests.support.sass import disassemble

BF16, F16 = torch.bfloat16, torch.float16
SWIZZLED, TILED_8X4 = SfLayout.layout_128x4, SfLayout.layout_8x4
SIM = [pytest.mark.sim, pytest.mark.compile]


@pytest.fixture(
    params=[
        "cpu",
        *(pytest.param(arch, marks=SIM) for arch in ("sm_80", "sm_90a", "sm_120a")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Races are errors, also with a grid before that still runs; each architecture has products of its own."""
    if request.param.startswith("sm_"):
        chain = sim.Chain(after_unknown=True) if Arch.of(request.param).has_pdl else None
        with sim.device(request.param, races=True, chain=chain):
            yield "cpu"
    else:
        yield request.param


def problem(m: int, n: int, k: int) -> Fp4Problem:
    return Fp4Problem(NVFP4, SWIZZLED, DType.BF16, m, n, k)


def multiply(a: Fp4Matrix, b: Fp4Matrix, device: str, block_format: BlockFormat = NVFP4) -> torch.Tensor:
    """The plain product, its tensors moved to the device."""
    given = a.codes.to(device), b.codes.to(device).T, a.scales.to(device), b.scales.to(device).T
    return mm_fp4(*given, block_size=block_format.block, use_nvfp4=block_format is NVFP4).cpu()


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_format", "layout", "dtype"), [(NVFP4, SWIZZLED, BF16), (NVFP4, TILED_8X4, F16), (MXFP4, TILED_8X4, BF16)]
)
def test_formats_layouts_and_dtypes(
    device: str, block_format: BlockFormat, layout: SfLayout, dtype: torch.dtype
) -> None:
    """A ragged last tile of every dimension; padding of scales holds NaN."""
    assert_fp4_product(13, 72, 416, block_format, layout, dtype, device)


def test_one_row(device: str) -> None:
    assert_fp4_product(1, 8, 32, MXFP4, out_dtype=F16, device=device)


def test_strides(device: str) -> None:
    """Rows of codes and of the output lie apart; what lies between is left alone."""
    a, b = make_matrix(21, 160, NVFP4), make_matrix(40, 160, NVFP4, seed=1)
    codes = torch.full((61, 112), 0x77, dtype=torch.uint8)
    codes[:21, 16:96], codes[21:, 16:96] = a.codes, b.codes
    codes = codes.to(device)
    wide = torch.full((21, 56), 7.0, dtype=BF16, device=device)
    scales = a.scales.to(device), b.scales.to(device).flatten()
    out = mm_fp4(codes[:21, 16:96], codes[21:, 16:96].T, *scales, out=wide[:, 8:48])
    assert out.data_ptr() == wide[:, 8:].data_ptr()
    assert_fp4_close(out, a.values, b.values, None)
    assert (wide[:, :8] == 7).all()
    assert (wide[:, 48:] == 7).all()


def test_every_e4m3_scale(device: str) -> None:
    """All 256 bytes, whose sign does not count: 32 rows with the scales 8 i to 8 i + 7 against rows of ones."""
    linear = torch.arange(256, dtype=torch.uint8).view(32, 8)
    codes = torch.arange(32 * 64).mul(37).to(torch.uint8).view(32, 64)
    magnitude = (linear & 0x7F).view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    b = make_matrix(8, 128, NVFP4)
    a = Fp4Matrix(codes, swizzled(linear, SWIZZLED), decode_e2m1(unpack_e2m1(codes)) * magnitude)
    out = multiply(a, b, device)
    hurt = linear.bitwise_and(0x7F).eq(0x7F).any(1)
    assert torch.equal(out.isnan().all(1), hurt)
    assert torch.equal(out.isnan().any(1), hurt)
    assert_fp4_close(out[~hurt], a.values[~hurt], b.values, None)


def test_extreme_powers_of_two(device: str) -> None:
    """Scales of 2^-127 meet 2^125 and 2^126; NaN stays in its row; zeros are zeros whatever their scale is. Rows are
    there four times, as some kernels are for many.
    """
    codes = torch.full((8, 32), 0x22, dtype=torch.uint8)  # ones
    codes[6] = 0
    linear = torch.tensor([[0, 0], [1, 2], [127, 127], [252, 252], [253, 253], [127, 255], [254, 0], [126, 128]])
    a = Fp4Matrix(codes.repeat(4, 1), swizzled(linear.to(torch.uint8).repeat(4, 1), SWIZZLED), torch.ones(32, 64))
    of_b = torch.tensor([[252, 252]] * 8)
    of_b[4:] = 4
    b = Fp4Matrix(torch.full_like(codes, 0x22), swizzled(of_b.to(torch.uint8), SWIZZLED), torch.ones(8, 64))
    out = multiply(a, b, device, MXFP4).double()
    assert torch.equal(out.nan_to_num(), out[:8].repeat(4, 1).nan_to_num())
    out = out[:8]
    powers = torch.exp2(linear.double() - 127).masked_fill(linear == 255, torch.nan)
    powers[6] = 0
    want = powers.sum(1, keepdim=True) * 32 * torch.exp2(of_b[:, 0].double() - 127)
    finite = want.nan_to_num().abs() < 2.0**127
    normal = want.abs().nan_to_num() >= 2.0**-120
    assert torch.equal(out[normal & finite], want[normal & finite])
    assert out[5].isnan().all()
    assert not out[6].any()
    assert not out[:5].isnan().any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_native_dtypes_and_flat_scales_mean_the_same_bytes(dtype: torch.dtype) -> None:
    a, b = make_matrix(5, 64, NVFP4), make_matrix(16, 64, NVFP4, seed=1)
    native = torch.float4_e2m1fn_x2
    want = multiply(a, b, "cpu")
    got = mm_fp4(a.codes.view(native), b.codes.view(native).T, a.scales.view(dtype), b.scales.view(dtype).flatten())
    assert torch.equal(got, want)
    powers = make_matrix(5, 64, MXFP4), make_matrix(16, 64, MXFP4, seed=1)
    e8m0 = [x.scales.view(torch.float8_e8m0fnu) for x in powers]
    got = mm_fp4(powers[0].codes, powers[1].codes.T, e8m0[0], e8m0[1].T, block_size=32, use_nvfp4=False)
    assert torch.equal(got, multiply(*powers, "cpu", MXFP4))


def test_no_rows() -> None:
    full, none, scales = make_matrix(16, 64, NVFP4), torch.empty(0, 32, dtype=torch.uint8), torch.empty(0).byte()
    assert mm_fp4(none, full.codes.T, scales, full.scales.T).shape == (0, 16)
    assert mm_fp4(full.codes, none.T, full.scales, scales).shape == (16, 0)


def test_alpha_meets_the_sum_in_float32() -> None:
    """A sum that fp16 cannot hold is scaled before it is rounded."""
    ones = torch.full((8, 64), 0x77, dtype=torch.uint8)  # sixes
    scales = swizzled(torch.full((8, 8), 0x70, dtype=torch.uint8), SWIZZLED)  # 128
    out = mm_fp4(ones, ones.T, scales, scales.T, torch.tensor([2.0**-14]), F16)
    assert (out == 36 * 128).all()


# ---- FlashInfer's cases ----------------------------------------------------------------------------------------------

CASES = (  # m, n, k, dtype, backend, 8x4 scales of a, format
    (7, 128, 256, BF16, "trtllm", False, NVFP4),
    (512, 512, 512, BF16, "trtllm", True, NVFP4),
    (13, 256, 128, BF16, "cudnn", False, NVFP4),
    (256, 512, 256, F16, "cudnn", False, MXFP4),
    (31, 256, 256, F16, "cutlass", False, NVFP4),
    (48, 512, 128, F16, "cute-dsl", False, NVFP4),
    (3, 256, 512, BF16, "cute-dsl", False, MXFP4),
    (17, 128, 128, BF16, "b12x", False, NVFP4),
    (48, 256, 512, BF16, "auto", False, NVFP4),
)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantized_product_is_near_the_product(case: tuple[int, int, int, torch.dtype, str, bool, BlockFormat],
                                               where: str) -> None:  # fmt: skip
    m, n, k, dtype, backend, tiled, block_format = case
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator).to(BF16).to(where) for rows in (m, n))
    layout = TILED_8X4 if tiled else SWIZZLED
    alpha = None
    if block_format is NVFP4:
        encode_a, encode_b = (448 * 6 / x.abs().amax().float() for x in (a, b))
        of_a = nvfp4_quantize(a, encode_a, layout)
        of_b = nvfp4_quantize(b, encode_b, do_shuffle=backend == "trtllm")
        alpha = 1 / (encode_a * encode_b)
    else:
        of_a, of_b = mxfp4_quantize(a), mxfp4_quantize(b)
    out = mm_fp4(of_a[0], of_b[0].T, of_a[1], of_b[1].T, alpha, dtype, None, block_format.block, tiled, backend,
                 block_format is NVFP4)  # fmt: skip
    want = torch.mm(a, b.T).float().flatten()
    assert torch.nn.functional.cosine_similarity(out.float().flatten(), want, dim=0) > 0.97


def test_backends_by_compute_capability() -> None:
    for backend in ("auto", "cudnn", "trtllm", "cutlass", "cute-dsl", "b12x"):
        assert mm_fp4.is_backend_supported(backend, 100)
        assert mm_fp4.is_backend_supported(backend)
    assert mm_fp4.is_backend_supported("cutlass", 90)
    assert not mm_fp4.is_backend_supported("auto", 75)
    assert not mm_fp4.is_backend_supported("cublas", 100)


# ---- cuts ------------------------------------------------------------------------------------------------------------

SIMULATED = (
    PortableTactic(16, 64, 16, 32, 2, 2),
    PortableTactic(16, 32, 16, 32, 1, 3, split=3),
    PortableTactic(32, 64, 32, 64, 1, 3, split=2),
    PortableTactic(128, 64, 64, 32, 1, 2),
)
SCALED_MMA = (
    PortableTactic(16, 64, 16, 32, 2, 3, split=2, scaled_mma=True),
    PortableTactic(64, 32, 32, 32, 1, 2, scaled_mma=True),
)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize(
    ("tactic", "arch"), [*((t, "sm_90a") for t in SIMULATED), *((t, "sm_120a") for t in SCALED_MMA)], ids=str
)
def test_every_cut_without_a_race(tactic: PortableTactic, arch: str) -> None:
    """Tiles at other places of a tile of scales than its first, more steps than stages, a last tile with rows to
    spare."""
    layout = TILED_8X4 if tactic.tile_m == 32 else SWIZZLED
    k = 672 if tactic.groups * tactic.split > 1 else 416
    with sim.device(arch, races=True), MM_FP4.forced(tactic):
        assert_fp4_product(tactic.tile_m + 21, 40, k, NVFP4 if tactic.groups == 2 else MXFP4, layout)


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=SIM) for arch in ("sm_80", "sm_100a")])
def test_other_architectures(arch: str) -> None:
    """sm_80 has no clusters and no conversion of E4M3; the sm_100 family runs the same kernel."""
    tactic = PortableTactic(*CUT, split=1 if arch == "sm_80" else 2)
    with sim.device(arch, races=True), MM_FP4.forced(tactic):
        assert_fp4_product(21, 40, 416, a_layout=TILED_8X4, out_dtype=F16)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_every_problem_has_a_tactic_that_can_run_it(arch: Arch) -> None:
    for one in (*problems(arch), problem(1, 8, 32), problem(17, 8, 32), problem(1000, 57344, 28672)):
        tactic = MM_FP4.select(one, arch)
        assert tactic in MM_FP4.candidates(one, arch)
        assert not isinstance(tactic, PortableTactic) or tactic.scaled_mma == arch.has_scaled_mma


def test_why_a_tactic_is_rejected() -> None:
    sm_80, sm_90a, sm_120a = Arch.of("sm_80"), Arch.of("sm_90a"), Arch.of("sm_120a")
    plain = PortableTactic(64, 64, 32, 32, 1, 4)
    assert rejects(problem(64, 64, 1024), plain, sm_90a) is None
    assert "block scales" in str(rejects(problem(16, 64, 64), PortableTactic(*CUT, scaled_mma=True), sm_90a))
    assert "shared memory" in str(rejects(problem(128, 128, 999 * 32), PortableTactic(128, 128, 64, 32, 1, 6), sm_120a))
    assert "clusters" in str(rejects(problem(16, 64, 1024), PortableTactic(*CUT, split=2), sm_80))
    assert "columns each" in str(rejects(problem(16, 64, 128), PortableTactic(*CUT, split=2), sm_90a))
    assert "empty" in str(rejects(problem(32, 64, 128), plain, sm_90a))
    assert "empty" in str(rejects(problem(64, 32, 128), plain, sm_90a))
    assert "tiles of b" in str(rejects(problem(16, 65536 * 64, 128), PortableTactic(*CUT), sm_90a))
    with pytest.raises(ArgumentError, match=r"tactic.*block scales"):
        PORTABLE.plan(problem(16, 64, 64), PortableTactic(*CUT, scaled_mma=True), sm_90a)
    for wrong, name in (((16, 64, 32, 32, 2, 2), "warp_m"), ((128, 128, 64, 64, 1, 4), "warp_n"),
                        ((128, 128, 16, 32, 2, 2), "groups"), ((16, 64, 16, 32, 2, 7), "stages")):  # fmt: skip
        with pytest.raises(ArgumentError, match=name):
            specialise(problem(16, 64, 64), PortableTactic(*wrong))


CUT = (16, 64, 16, 32, 2, 2)


@pytest.mark.compile
@pytest.mark.parametrize("block_format", BlockFormat)
def test_sm_120a_multiplies_codes_as_they_are(block_format: BlockFormat) -> None:
    """Its products are those of four-bit operands with scales, and no other."""
    arch = ARCHS["sm_120a"]
    spec = specialise(problem(16, 64, 64)._replace(format=block_format), PortableTactic(*CUT, scaled_mma=True))
    code = disassemble(nvrtc.compile_cubin(PORTABLE.render(spec, arch), arch, symbol=PORTABLE.symbol))
    opcodes = [line.split()[0] for line in code if "MMA" in line.split()[0]]
    assert len(opcodes) == 2 * 4  # two steps of 64 columns, four blocks of eight rows of b
    assert all(opcode.startswith("OMMA.SF.16864.F32.E2M1.E2M1") for opcode in opcodes), opcodes


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named() -> None:
    """What the table of tests/inputs does not have: values that fit each other badly."""
    a, b = make_matrix(4, 64, NVFP4), make_matrix(16, 64, NVFP4)
    good = {"a": a.codes, "b": b.codes.T, "a_descale": a.scales, "b_descale": b.scales.T}
    for error, name, arguments in (
        (ArgumentError, "^a: got k = 48.*K % 32 == 0", {"a": a.codes[:, :24]}),
        (ArgumentError, "^b: got n = 10.*N % 8 == 0", {"b": b.codes[:10].T}),
        (ArgumentError, "^b: got strides", {"b": b.codes.T.contiguous()}),
        (ArgumentError, "^b: got shape", {"b": b.codes}),
        (ArgumentError, "^b: got a row stride", {"b": torch.zeros(16, 33, dtype=torch.uint8)[:, :32].T}),
        (ArgumentError, "^b: got n = 16.*128, shuffled", {"backend": "trtllm"}),
        (ArgumentError, "^a_descale: got shape", {"use_8x4_sf_layout": True}),
        (ArgumentError, "^b_descale: got shape", {"b_descale": b.scales}),
        (ArgumentError, "^b_descale: got strides", {"b_descale": b.scales.T.contiguous()}),
        (ArgumentTypeError, "^a_descale: got torch.float8_e8m0fnu", {"a_descale": a.scales.view(torch.float8_e8m0fnu)}),
        (ArgumentError, "^block_size: got 32; allowed: 16", {"block_size": 32}),
        (ArgumentError, "^block_size: got 16; allowed: 32", {"use_nvfp4": False}),
        (ArgumentError, "^out_dtype", {"out_dtype": torch.float32}),
        (ArgumentError, "^out: got a row stride", {"out": torch.zeros(4, 20, dtype=BF16)[:, :16]}),
        (ArgumentError, "^out: got memory of a", {"out": a.codes.flatten().view(BF16).view(4, 16), "a": a.codes}),
        (ArgumentTypeError, "^out: got torch.bfloat16", {"out": torch.zeros(4, 16, dtype=BF16), "out_dtype": F16}),
        (ArgumentError, "16-byte", {"a": torch.zeros(129, dtype=torch.uint8)[1:].view(4, 32)}),
        (ArgumentError, "^backend: got 'cublas'", {"backend": "cublas"}),
        (ArgumentError, "^backend", {"backend": "cublas", "skip_check": True}),
    ):
        with pytest.raises(error, match=name):
            mm_fp4(**{**good, **arguments})
    mm_fp4(**good, skip_check=True)


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 45, 200])
@pytest.mark.parametrize("block_format", BlockFormat)
def test_tactics_agree_and_repeat_themselves(m: int, block_format: BlockFormat, whole: bool) -> None:
    n, k = 1096, 1184
    arch = Arch.of_capability(*torch.cuda.get_device_capability())
    for tactic in some(12, MM_FP4.candidates(problem(m, n, k)._replace(format=block_format), arch), whole=whole):
        with MM_FP4.forced(tactic):
            first = assert_fp4_product(m, n, k, block_format, device="cuda")
            assert torch.equal(first, assert_fp4_product(m, n, k, block_format, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [40, 100, 600])
def test_in_a_graph_and_behind_each_other(m: int) -> None:
    """Each product reads what a quantizer behind the product before it wrote, by dependent launch."""
    b = [t.to("cuda") for t in make_matrix(1024, 1024, NVFP4)[:2]]
    one, alpha = torch.ones(1, device="cuda"), torch.tensor([2.0**-20], device="cuda")
    x = torch.randn(m, 1024, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        y = x
        for _ in range(20):
            codes, scales = nvfp4_quantize(y, one)
            y = mm_fp4(codes, b[0].T, scales, b[1].T, alpha)
        return y

    check_graph_replay(chain)
