"""mm_fp8_fp4: the kernels of sm_90a and their cuts, and which is selected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    Fp4Weight,
    UnsupportedArchError,
    fp8_row_scale,
    mm_fp8_fp4,
    prepare_fp4_weight,
    sim,
)
from jitfp4.arch import Arch
from jitfp4.families.gemm.fp8_operation import MM_FP8_FP4
from jitfp4.families.gemm.kernels import expanded_fp8
from jitfp4.families.gemm.kernels.expanded_fp8 import ExpandedTactic
from jitfp4.families.gemm.kernels.wide_fp8 import KERNEL, TACTICS, Fp8Tactic, geometry, rejects
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.reference.gemm import matmul
from jitfp4.weight import rounded_to_e4m3 as rounded
from tests.support.compare import poisoned
from tests.support.gemm import LINEAR, check_graph_replay, make_weight
from tests.support.gpu import needs_sm_90a
from tests.support.sample import some

E4M3, BF16, F16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]
SM_90A = Arch.of("sm_90a")
CUT = 33 * 2.0**-13  # of the largest of 32 products and a sum: what adding them loses


@contextmanager
def running(tactic: Fp8Tactic | ExpandedTactic | None, *, races: bool = False, device: str = "cpu") -> Iterator[None]:
    """Calls run the kernel: simulated, or on the GPU."""
    place = nullcontext() if device == "cuda" else sim.device("sm_90a", races=races)
    with place, nullcontext() if tactic is None else MM_FP8_FP4.forced(tactic):
        yield


def problem(m: int, n: int, k: int) -> Fp8Problem:
    return Fp8Problem(DType.BF16, NVFP4, m, n, k)


# ---- results ---------------------------------------------------------------------------------------------------------


def whole_numbers(
    m: int, n: int, k: int, block_format: BlockFormat, order: str | None = None
) -> tuple[torch.Tensor, Fp4Weight]:
    """Activations of -1, 0 and 1 and a weight of codes, whose sums fit in the bits that the tensor cores keep."""
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randint(-1, 2, (m, k), generator=generator).float()
    codes = torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
    one = 0x38 if block_format is NVFP4 else 127
    scales = torch.full((n, k // block_format.block), one, dtype=torch.uint8)
    return a, prepare_fp4_weight(codes, scales, block_format.block, LINEAR, order)


def on(device: str, weight: Fp4Weight) -> Fp4Weight:
    own = None if weight.row_scale is None else weight.row_scale.to(device)
    return replace(weight, data=weight.data.to(device), row_scale=own)


def assert_exact(m: int, n: int, k: int, block_format: BlockFormat, device: str = "cpu") -> None:
    """With scales that are powers of two no bit is lost before the result is rounded."""
    a, weight = whole_numbers(m, n, k, block_format)
    a_scale = 2.0 ** (torch.arange(m) % 3 - 1)
    out = poisoned((m, n), F16, device)
    given = on(device, weight)
    result = mm_fp8_fp4(a.to(E4M3).to(device), a_scale.to(device), given, fp8_row_scale(given), out=out, out_dtype=F16)
    assert result is out
    assert torch.equal(out.cpu(), (a_scale.unsqueeze(1) * (a @ weight.dequantize().T)).half())


def assert_close(
    m: int, n: int, k: int, block_format: BlockFormat, out_dtype: torch.dtype = BF16, device: str = "cpu"
) -> torch.Tensor:
    """Random operands with alpha, bias and a scale for all of ``a``, held against float64."""
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randn(m, k, generator=generator).to(E4M3)
    weight, bias = make_weight(n, k, block_format), torch.randn(n, generator=generator).to(out_dtype)
    a_scale, alpha = torch.tensor([0.37]), torch.tensor([2.0**-9 * 1.37])
    row_scale = fp8_row_scale(weight)
    moved = [t.to(device) for t in (row_scale, alpha, bias)]
    out = mm_fp8_fp4(a.to(device), a_scale.to(device), on(device, weight), *moved, out_dtype=out_dtype)
    values, x = rounded(weight, row_scale), a.double() * a_scale
    error = (out.cpu().double() - matmul(x, values, alpha, bias)).abs()
    bound = matmul(x.abs(), values.abs(), alpha, None) * (4 * CUT)
    bound = bound + matmul(x.abs(), values.abs(), alpha, bias.abs()) * torch.finfo(out_dtype).eps
    assert bool((error <= bound).all()), f"{(error / bound).max().item():.2f} times what is allowed"
    return out


def assert_weights_come_back(n: int, k: int, block_format: BlockFormat, device: str = "cpu") -> None:
    """Rows with a single one give the weight as it is multiplied: not one bit is wrong, also next to zero."""
    weight = make_weight(n, k, block_format, device)
    row_scale = fp8_row_scale(weight)
    one = torch.ones(1, device=device)
    out = mm_fp8_fp4(torch.eye(k, device=device).to(E4M3), one, weight, row_scale)
    assert torch.equal(out.double(), rounded(weight, row_scale).double().T)


CASES = (  # with rows, rows of the weight and columns that are no whole tiles
    (Fp8Tactic(64), 40, 72, 416, NVFP4),
    (Fp8Tactic(64, 3), 40, 200, 416, MXFP4),
    (Fp8Tactic(128), 130, 136, 96, NVFP4),
    (Fp8Tactic(128, 4), 130, 264, 544, NVFP4),
    (Fp8Tactic(128, divided=True), 130, 264, 416, NVFP4),
    (Fp8Tactic(128, cluster=2), 130, 520, 416, MXFP4),
    (Fp8Tactic(256, 2), 300, 136, 416, NVFP4),
    (Fp8Tactic(256, divided=True), 200, 136, 416, NVFP4),
    (Fp8Tactic(256, cluster=2, band=8), 200, 136, 160, MXFP4),
    (Fp8Tactic(256, cluster=2, divided=True, band=8), 300, 264, 544, NVFP4),
    (ExpandedTactic(256, 1), 300, 136, 416, NVFP4),
    (ExpandedTactic(144, 2), 530, 264, 544, MXFP4),
    (ExpandedTactic(176, 2), 530, 264, 544, NVFP4),
)
Tactic = Fp8Tactic | ExpandedTactic


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("tactic", "m", "n", "k", "block_format"), CASES, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_cuts(tactic: Tactic, m: int, n: int, k: int, block_format: BlockFormat, arch: str) -> None:
    with running(tactic):
        assert_exact(m, n, k, block_format)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("block_format", BlockFormat)
def test_each_bit_of_a_weight(block_format: BlockFormat) -> None:
    with running(Fp8Tactic(128)):
        assert_weights_come_back(72, 160, block_format)
    with running(ExpandedTactic(256, 1)):
        assert_weights_come_back(72, 288, block_format)


def assert_gated(tactic: Tactic | None, m: int, block_format: BlockFormat, device: str = "cpu") -> None:
    """silu(gate) * up of exact gates and ups, which are rounded once."""
    a, weight = whole_numbers(m, 144, 160, block_format, "concatenated gate,up")
    scale = torch.full((m,), 2.0**-4)
    gates, ups = (scale.unsqueeze(1) * (a @ weight.dequantize().T)).double().chunk(2, -1)
    weight = on(device, weight)
    out = poisoned((m, 72), BF16, device)
    with nullcontext() if tactic is None else running(tactic, device=device):
        mm_fp8_fp4(a.to(E4M3).to(device), scale.to(device), weight, fp8_row_scale(weight), out=out, activation="swiglu")
    want = gates * ups / (1 + torch.exp(-gates))
    torch.testing.assert_close(out.cpu().double(), want, rtol=1.01 * 2.0**-8, atol=2.0**-30)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("block_format", BlockFormat)
def test_gates_and_ups(block_format: BlockFormat) -> None:
    for tactic in (None, Fp8Tactic(64), Fp8Tactic(64, 2), ExpandedTactic(176, 2)):
        assert_gated(tactic, 260 if isinstance(tactic, ExpandedTactic) else 40, block_format)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("out_dtype", [BF16, F16])
def test_scales_alpha_and_bias(out_dtype: torch.dtype) -> None:
    with running(Fp8Tactic(128)):
        assert_close(70, 136, 416, NVFP4, out_dtype)
    assert_close(70, 136, 416, NVFP4, out_dtype)  # the reference


RACED = (
    Fp8Tactic(64),
    Fp8Tactic(64, 3),
    Fp8Tactic(128, divided=True),
    Fp8Tactic(128, cluster=2),
    Fp8Tactic(256, 2),
    Fp8Tactic(256, divided=True),
    ExpandedTactic(256, 1),
    ExpandedTactic(144, 2),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tactic", RACED, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_without_a_race(tactic: Tactic, arch: str) -> None:
    m = 300 if isinstance(tactic, ExpandedTactic) else max(70, tactic.tile_m // 2 + 6)
    with running(tactic, races=True):
        assert_exact(m, 136, 416, NVFP4)


@pytest.mark.parametrize("tactic", [Fp8Tactic(128), Fp8Tactic(128, divided=True), Fp8Tactic(128, cluster=2)], ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_tiles_behind_each_other_without_a_race(tactic: Fp8Tactic, arch: str) -> None:
    """A CTA takes several, and of some of them a warpgroup has nothing to write."""
    few = replace(Arch.of(arch), num_sms=2)
    with sim.device(few, races=True), MM_FP8_FP4.forced(tactic):
        assert_exact(300, 136, 160, NVFP4)


@pytest.mark.sim
@pytest.mark.compile
def test_a_strided_output_and_what_lies_around_it() -> None:
    a, weight = whole_numbers(70, 72, 160, NVFP4)
    strided = torch.zeros(70, 192, dtype=torch.uint8)
    strided[:, :160] = a.to(E4M3).view(torch.uint8)
    around = torch.full((70, 96), 7.0, dtype=BF16)
    with running(Fp8Tactic(64)):
        given = strided[:, :160].view(E4M3)
        mm_fp8_fp4(given, torch.ones(70), weight, fp8_row_scale(weight), out=around[:, 8:80])
    assert torch.equal(around[:, 8:80], (a @ weight.dequantize().T).bfloat16())
    assert (around[:, :8] == 7).all()
    assert (around[:, 80:] == 7).all()


@pytest.mark.sim
@pytest.mark.compile
def test_nan_of_a_block_a_token_and_a_scale() -> None:
    a, weight = whole_numbers(40, 72, 160, NVFP4)
    row_scale, scale, given = fp8_row_scale(weight), torch.ones(40), a.to(E4M3)
    row_scale[5], scale[3] = torch.nan, torch.nan
    given.view(torch.uint8)[7, 9] = 0x7F
    with running(Fp8Tactic(64)):
        out = mm_fp8_fp4(given, scale, weight, row_scale)
    want = torch.zeros(40, 72, dtype=torch.bool)
    want[:, 5] = want[3] = want[7] = True
    assert torch.equal(out.isnan(), want)


# ---- selection -------------------------------------------------------------------------------------------------------


def test_many_rows_get_the_tiles_of_the_fewest_clocks() -> None:
    for (m, n), wanted in {
        (2048, 8192): ExpandedTactic(256, 2),  # 3.9 waves
        (2048, 7168): ExpandedTactic(240, 2),  # 4 waves either way
        (2048, 2112): ExpandedTactic(144, 1),  # 2 waves, where 256 rows are 1.03
        (1 << 20, 8192): ExpandedTactic(256, 2),
    }.items():
        assert MM_FP8_FP4.select(problem(m, n, 4096), SM_90A) == wanted
    assert MM_FP8_FP4.select(problem(2048, 1 << 20, 8192), SM_90A) == Fp8Tactic(256)  # more than there are counters


def test_every_problem_has_a_tactic() -> None:
    for m in (1, 32, 64, 65, 128, 129, 512, 8192):
        for n in (8, 2112, 4096, 57344):
            for k in (32, 4096):
                tactic = MM_FP8_FP4.select(problem(m, n, k), SM_90A)
                assert tactic in MM_FP8_FP4.candidates(problem(m, n, k), SM_90A)


def test_every_tactic_makes_a_kernel_that_fits() -> None:
    for tactic in TACTICS:
        spec: Any = KERNEL.specialise(problem(tactic.tile_m, 8192, 8192), tactic)
        assert spec.shared_bytes <= SM_90A.shared_bytes
        assert spec.slots >= 3
    for tactic in expanded_fp8.TACTICS:
        spec = expanded_fp8.KERNEL.specialise(problem(2048, 8192, 8192), tactic)
        assert spec.shared_bytes <= SM_90A.shared_bytes
        assert 4 <= spec.slots <= 5


def test_other_architectures_are_refused() -> None:
    a, weight = whole_numbers(8, 8, 32, NVFP4)
    with (
        sim.device("sm_100a"),
        pytest.raises(UnsupportedArchError, match="mm_fp8_fp4 has no kernel for sm_100a, but for sm_90a"),
    ):
        mm_fp8_fp4(a.to(E4M3), torch.ones(8), weight, fp8_row_scale(weight))
    assert "sm_90a" in str(rejects(problem(64, 64, 1024), TACTICS[0], Arch.of("sm_100a")))
    assert "empty" in str(rejects(problem(64, 64, 1024), Fp8Tactic(128), SM_90A))
    assert "step" in str(rejects(problem(64, 64, 128), Fp8Tactic(64, split=2), SM_90A))
    more = ExpandedTactic(256, 1)
    assert "sm_90a" in str(expanded_fp8.rejects(problem(512, 64, 1024), more, Arch.of("sm_100a")))
    assert "multiplied" in str(expanded_fp8.rejects(problem(256, 64, 1024), more, SM_90A))
    assert "counters" in str(expanded_fp8.rejects(problem(512, 1 << 20, 8192), more, SM_90A))


@pytest.mark.parametrize(
    ("name", "tactic"),
    [
        ("tile_m", Fp8Tactic(48)),
        ("split", Fp8Tactic(64, 5)),
        ("split", Fp8Tactic(256, 2, divided=True)),
        ("cluster", Fp8Tactic(64, cluster=3)),
    ],
    ids=str,
)
def test_impossible_cuts_name_the_field(name: str, tactic: Fp8Tactic) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}:"):
        KERNEL.specialise(problem(256, 64, 1024), tactic)


def test_grids() -> None:
    one = problem(300, 4096, 8192)
    assert geometry(one, Fp8Tactic(256), SM_90A).grid == (64, 1, 1)  # a CTA for each tile
    assert geometry(one, Fp8Tactic(64), SM_90A).grid == (132, 1, 1)  # persistent
    pairs = geometry(one, Fp8Tactic(256, cluster=2, divided=True), SM_90A)
    assert (pairs.grid, pairs.cluster) == ((132, 1, 1), (2, 1, 1))  # all SMs
    split = geometry(one, Fp8Tactic(64, 3), SM_90A)
    assert (split.grid, split.cluster) == ((3 * 160, 1, 1), (3, 1, 1))  # not persistent


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> str:
    needs_sm_90a()
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("block_format", BlockFormat)
def test_each_bit_on_the_gpu(gpu: str, block_format: BlockFormat) -> None:
    for tactic in (Fp8Tactic(64), Fp8Tactic(128), Fp8Tactic(256), *expanded_fp8.TACTICS):
        with running(tactic, device=gpu):
            assert_weights_come_back(520, 1184, block_format, gpu)


@pytest.mark.gpu
def test_gates_and_ups_on_the_gpu(gpu: str) -> None:
    for tactic in (Fp8Tactic(64), Fp8Tactic(256), Fp8Tactic(256, 2), ExpandedTactic(144, 2)):
        assert_gated(tactic, 300, NVFP4, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [40, 100, 256, 700])
@pytest.mark.parametrize("block_format", BlockFormat)
def test_tactics_agree_and_repeat_themselves(gpu: str, m: int, block_format: BlockFormat, whole: bool) -> None:
    n, k = 2120, 1184
    tactics = list(MM_FP8_FP4.candidates(problem(m, n, k), SM_90A))
    for tactic in some(12, tactics, whole=whole):
        with running(tactic, device=gpu):
            assert_exact(m, n, k, block_format, gpu)
            assert torch.equal(
                assert_close(m, n, k, block_format, device=gpu), assert_close(m, n, k, block_format, device=gpu)
            )


@pytest.mark.gpu
def test_in_a_graph_and_behind_each_other(gpu: str) -> None:
    """Each product reads the one before it, by dependent launch; workspaces are memory of the graph."""
    weight = make_weight(2048, 2048, NVFP4, gpu)
    row_scale, alpha = fp8_row_scale(weight), torch.tensor([2.0**-12], device=gpu)
    a, scale = torch.randn(300, 2048, device=gpu).to(E4M3), torch.ones(1, device=gpu)

    def chain() -> torch.Tensor:
        x = a
        for _ in range(6):
            x = mm_fp8_fp4(x, scale, weight, row_scale, alpha).clamp(-4, 4).to(E4M3)
        return x.float()

    for tactic in (None, Fp8Tactic(128, divided=True), ExpandedTactic(144, 2)):
        with running(tactic, device=gpu):
            check_graph_replay(chain)
