"""mm_bf16_fp4: products against float64 on CPU, simulator and GPU, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, mm_bf16_fp4, prepare_fp4_weight, sim
from jitfp4.arch import ARCHS, Arch
from jitfp4.families.gemm.kernels.narrow import KERNEL as NARROW
from jitfp4.families.gemm.kernels.narrow import NarrowTactic, geometry, rejects
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import Problem
from jitfp4.families.gemm.tables import TABLE, problems
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from tests.support.gemm import (
    LINEAR,
    assert_close,
    assert_product,
    assert_weights_come_back,
    check_graph_replay,
    make_codes,
    make_weight,
)
from tests.support.sample import SIM_ARCHS, some

BF16, F16 = torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]


def problem(m: int, n: int, k: int) -> Problem:
    return Problem(DType.BF16, DType.BF16, NVFP4, m, n, k)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_format", BlockFormat)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_format_and_dtype(device: str, block_format: BlockFormat, dtype: torch.dtype) -> None:
    assert_product(3, 72, 416, block_format, dtype, device=device)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 32), (9, 136, 160), (17, 64, 384)])
def test_ragged_sizes(device: str, m: int, n: int, k: int) -> None:
    assert_product(m, n, k, device=device, plain=True)


@pytest.mark.parametrize(("block_format", "dtype"), [(NVFP4, BF16), (NVFP4, F16), (MXFP4, BF16)])
def test_weights_come_back_exactly(device: str, block_format: BlockFormat, dtype: torch.dtype) -> None:
    assert_weights_come_back(72, 160, block_format, dtype, device)


def test_the_other_output_dtype(device: str) -> None:
    assert_product(2, 64, 128, out_dtype=F16, device=device)
    assert_product(2, 64, 128, dtype=F16, out_dtype=BF16, device=device)


def test_leading_dimensions_and_strides(device: str) -> None:
    weight = make_weight(72, 160, NVFP4, device)
    a = torch.randn(2, 3, 168, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)[..., :160]
    assert mm_bf16_fp4(a, weight).shape == (2, 3, 72)
    wide = torch.full((6, 96), 7.0, dtype=BF16, device=device)
    mm_bf16_fp4(a.flatten(0, 1), weight, out=wide[:, 8:80])
    assert_close(wide[:, 8:80], a.flatten(0, 1), weight, None, None)
    assert (wide[:, :8] == 7).all()
    assert (wide[:, 80:] == 7).all()
    assert mm_bf16_fp4(a[0, 0], weight).shape == (72,)


def test_finite_activations_of_any_size(device: str) -> None:
    """bf16 beyond the range of fp16, and below it."""
    weight = make_weight(64, 256, NVFP4, device)
    a = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
    a = (a * torch.tensor([1e30, 1e-30, 1.0, 0.0]).unsqueeze(-1)).bfloat16().to(device)
    out = mm_bf16_fp4(a, weight)
    assert out.isfinite().all()
    assert_close(out, a, weight, None, None)
    assert not out[3].any()


def test_nan_stays_in_its_row(device: str) -> None:
    codes, scales = make_codes(64, 128, NVFP4)
    scales[5, 3] = 0x7F
    weight = prepare_fp4_weight(codes.to(device), scales.to(device), sf_layout=LINEAR)
    a = torch.ones(3, 128, dtype=BF16, device=device)
    a[1, 100] = torch.nan
    out = mm_bf16_fp4(a, weight)
    assert out[1].isnan().all()
    assert out[:, 5].isnan().all()
    assert out[0, :5].isfinite().all()
    assert out[2, 6:].isfinite().all()


def test_no_rows(device: str) -> None:
    weight = make_weight(64, 128, NVFP4, device)
    assert mm_bf16_fp4(torch.empty(0, 128, dtype=BF16, device=device), weight).shape == (0, 64)


SIMULATED = (
    NarrowTactic(8, 4, 1, 4, 2, 1),
    NarrowTactic(8, 2, 2, 2, 2, 1, split=2),
    NarrowTactic(16, 1, 4, 2, 2, 1),
    NarrowTactic(16, 4, 2, 2, 2, 1, split=3),
    NarrowTactic(32, 2, 2, 2, 2, 1),
    NarrowTactic(64, 1, 4, 1, 2, 1),
    NarrowTactic(8, 2, 1, 2, 3, 2),
    NarrowTactic(8, 5, 1, 2, 2, 2),
    NarrowTactic(16, 3, 2, 2, 4, 1, split=2),
)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(3)
@pytest.mark.parametrize("tactic", SIMULATED, ids=str)
@pytest.mark.parametrize("arch", SIM_ARCHS)
def test_every_cut_without_a_race(tactic: NarrowTactic, arch: str) -> None:
    """More chunks than stages, a last CTA with rows to spare, a last chunk that is not whole."""
    with sim.device(arch, races=True), MM_BF16_FP4.forced(tactic):
        assert_product(tactic.tile_m - 3, 72, 672, device="cpu")


@pytest.mark.sim
@pytest.mark.compile
def test_more_rows_than_a_tile() -> None:
    with sim.device("sm_90a", races=True), MM_BF16_FP4.forced(NarrowTactic(8, 4, 1, 2, 2, 1)):
        assert_product(11, 64, 160)


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=SIM), pytest.param("sm_120a", marks=SIM)])
@pytest.mark.parametrize("block_format", BlockFormat)
def test_other_architectures(arch: str, block_format: BlockFormat) -> None:
    with sim.device(arch, races=True):
        assert_product(5, 72, 416, block_format)


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named() -> None:
    weight, a = make_weight(72, 160, NVFP4), torch.zeros(4, 160, dtype=BF16)
    out = torch.zeros(4, 72, dtype=BF16)
    for error, name, arguments in (
        (ArgumentTypeError, "weight", {"weight": weight.data}),
        (ArgumentTypeError, "^a:", {"a": a.float()}),
        (ArgumentError, "^a: got shape", {"a": a[:, :128]}),
        (ArgumentError, "^a: got strides", {"a": torch.zeros(160, 4, dtype=BF16).T}),
        (ArgumentError, "^a: got a row stride", {"a": torch.zeros(4, 161, dtype=BF16)[:, :160]}),
        (ArgumentTypeError, "alpha", {"alpha": torch.ones(1, dtype=BF16)}),
        (ArgumentError, "alpha", {"alpha": torch.ones(2)}),
        (ArgumentTypeError, "bias", {"bias": torch.zeros(72)}),
        (ArgumentError, "bias", {"bias": torch.zeros(64, dtype=BF16)}),
        (ArgumentError, "bias", {"bias": torch.zeros(144, dtype=BF16)[::2]}),
        (ArgumentError, "out_dtype", {"out_dtype": torch.float32}),
        (ArgumentTypeError, "out: got torch.bfloat16", {"out": out, "out_dtype": F16}),
        (ArgumentError, "out: got shape", {"out": out[:3]}),
        (ArgumentError, "out: got a row stride", {"out": torch.zeros(4, 76, dtype=BF16)[:, :72]}),
        (ArgumentError, "out: got memory of bias", {"out": out, "bias": out[1]}),
        (ArgumentError, "16-byte", {"a": torch.zeros(641, dtype=BF16)[1:].view(4, 160)}),
    ):
        with pytest.raises(error, match=name):
            mm_bf16_fp4(**{"a": a, "weight": weight, **arguments})  # type: ignore[arg-type]


# ---- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ARCHS)
def test_every_architecture_has_a_tactic(name: str) -> None:
    arch = Arch.of(name)
    for one in (*problems(arch), problem(1, 8, 32), problem(1000, 57344, 28672)):
        assert MM_BF16_FP4.select(one, arch) in MM_BF16_FP4.candidates(one, arch)


def test_every_row_of_the_table_is_met() -> None:
    met = {MM_BF16_FP4.select(one, arch) for arch in ARCHS.values() for one in problems(arch)}
    assert met >= {row.tactic for row in TABLE.rows}


def test_why_a_tactic_is_rejected() -> None:
    sm_80, sm_90a = Arch.of("sm_80"), Arch.of("sm_90a")
    assert "shared memory" in str(rejects(problem(8, 64, 1024), NarrowTactic(8, 4, 1, 16, 4, 1), sm_90a))
    assert "clusters" in str(rejects(problem(8, 64, 1024), NarrowTactic(8, 4, 1, 4, 2, 1, split=2), sm_80))
    assert "chunk" in str(rejects(problem(8, 64, 128), NarrowTactic(8, 4, 1, 4, 2, 1, split=2), sm_90a))
    assert "empty" in str(rejects(problem(8, 64, 1024), NarrowTactic(16, 4, 1, 4, 2, 1), sm_90a))
    with pytest.raises(ArgumentError, match="groups"):
        NARROW.specialise(problem(8, 64, 1024), NarrowTactic(8, 1, 2, 16, 2, 1))


def test_a_small_grid_is_filled_up() -> None:
    """Every SM gets as many CTAs, so that those of the next kernel spread evenly."""
    sm_90a, tactic = Arch.of("sm_90a"), NarrowTactic(8, 4, 1, 8, 2, 2)
    grids = [geometry(problem(8, n, 1024), replace(tactic, split=2), sm_90a).grid for n in (64, 4224, 8192)]
    assert grids == [(2, 66, 1), (2, 66, 1), (2, 128, 1)]
    assert geometry(problem(8, 64, 1024), tactic, Arch.of("sm_80")).grid == (1, 1, 1)
    assert geometry(problem(16, 64, 1024), tactic, sm_90a).grid == (1, 1, 2)


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 13, 32, 64, 100])
def test_tactics_agree_and_repeat_themselves(m: int, whole: bool) -> None:
    """Of up to 241 tactics, each of which is a kernel to compile, 24."""
    n, k = 2112, 1184
    arch = Arch.of_capability(*torch.cuda.get_device_capability())
    for tactic in some(24, MM_BF16_FP4.candidates(problem(m, n, k), arch), whole=whole):
        with MM_BF16_FP4.forced(tactic):
            first = assert_product(m, n, k, device="cuda")
            assert torch.equal(first, assert_product(m, n, k, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("block_format", [NVFP4, MXFP4])
def test_in_a_graph_and_behind_each_other(block_format: BlockFormat) -> None:
    """Each product reads the one before it, by dependent launch."""
    weight = make_weight(1024, 1024, block_format, "cuda")
    alpha = torch.tensor([2.0**-9], device="cuda")
    a = torch.randn(4, 1024, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        x = a
        for _ in range(20):
            x = mm_bf16_fp4(x, weight, alpha).clamp(-1, 1)
            x = mm_bf16_fp4(x, weight, alpha)
        return x

    check_graph_replay(chain)
