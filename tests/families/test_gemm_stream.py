"""mm_bf16_fp4 with few rows of activations on GPUs with TMA: the kernel that streams the weight, and its cuts."""

from __future__ import annotations

import pytest
import torch

from jitfp4 import ArgumentError, mm_bf16_fp4, sim
from jitfp4.arch import Arch
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import Problem
from jitfp4.families.gemm.stream import StreamTactic, geometry, rejects, specialise
from jitfp4.families.gemm.tables import STREAM_TACTICS
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from tests.support.gemm import assert_close, assert_product, make_weight

BF16, F16 = torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]
SM_90A = Arch.of("sm_90a")


def problem(m: int, n: int, k: int) -> Problem:
    return Problem(DType.BF16, DType.BF16, NVFP4, m, n, k)


# ---- results ---------------------------------------------------------------------------------------------------------

CASES = (  # with rows, rows of the weight and columns that are no whole tiles
    (StreamTactic(8, 4, 1, 4), 5, 72, 672, NVFP4, BF16, BF16),
    (StreamTactic(8, 2, 2, 2, split=2), 8, 200, 672, NVFP4, F16, BF16),
    (StreamTactic(16, 4, 2, 3, 2, split=3), 13, 264, 416, MXFP4, BF16, F16),
    (StreamTactic(16, 1, 1, 5, 2, split=2, fill=2), 14, 264, 416, MXFP4, F16, F16),
    (StreamTactic(32, 2, 4, 2), 30, 136, 160, NVFP4, BF16, BF16),
)


@pytest.mark.parametrize(("tactic", "m", "n", "k", "block_format", "dtype", "out_dtype"), CASES, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM), pytest.param("sm_100a", marks=SIM)])
def test_cuts_formats_and_dtypes_without_a_race(
    tactic: StreamTactic,
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    arch: str,
) -> None:
    with sim.device(arch, races=True), MM_BF16_FP4.forced(tactic):
        assert_product(m, n, k, block_format, dtype, out_dtype)


@pytest.mark.parametrize(
    ("tactic", "n", "k"),
    [
        (StreamTactic(8, 1, 1, 9, 2), 72, 5120),  # of which slots are no multiple
        (StreamTactic(8, 4, 4, 4), 72, 3072),
        (StreamTactic(8, 1, 1, 2), 2160, 160),  # two blocks for some, in as many passes
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_slots_are_filled_again(tactic: StreamTactic, n: int, k: int, arch: str) -> None:
    """More chunks than slots, or more blocks than a CTA takes at a time."""
    with sim.device(arch, races=True), MM_BF16_FP4.forced(tactic):
        assert_product(3, n, k, plain=True)


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_more_rows_than_a_tile_in_a_strided_output(arch: str) -> None:
    weight = make_weight(72, 160, NVFP4)
    a = torch.randn(19, 168, generator=torch.Generator().manual_seed(1)).bfloat16()[:, :160]
    wide = torch.full((19, 96), 7.0, dtype=BF16)
    with sim.device(arch, races=True), MM_BF16_FP4.forced(StreamTactic(8, 4, 1, 2)):
        mm_bf16_fp4(a, weight, out=wide[:, 8:80])
    assert_close(wide[:, 8:80], a, weight, None, None)
    assert (wide[:, :8] == 7).all()
    assert (wide[:, 80:] == 7).all()


# ---- tactics ---------------------------------------------------------------------------------------------------------


def test_every_tactic_makes_a_kernel_that_fits() -> None:
    for tactic in STREAM_TACTICS:
        spec = specialise(problem(tactic.tile_m, 8192, 8192), tactic)
        assert spec.shared_bytes <= SM_90A.shared_of(tactic.ctas)
        assert spec.slots > spec.groups  # some are filled while others are read


def test_why_a_tactic_is_rejected() -> None:
    assert "TMA" in str(rejects(problem(8, 64, 1024), StreamTactic(8, 4, 1, 4), Arch.of("sm_120a")))
    assert "chunk" in str(rejects(problem(8, 64, 128), StreamTactic(8, 4, 1, 4, split=2), SM_90A))
    assert "at a time" in str(rejects(problem(8, 8192, 1024), StreamTactic(8, 4, 1, 4, split=2), SM_90A))
    assert "room" in str(rejects(problem(8, 64, 1024), StreamTactic(8, 4, 1, 4, fill=2), SM_90A))
    assert "empty" in str(rejects(problem(8, 64, 1024), StreamTactic(16, 4, 1, 4), SM_90A))


@pytest.mark.parametrize(
    ("name", "tactic"),
    [
        ("tile_m", StreamTactic(64, 4, 1, 4)),
        ("warp_blocks", StreamTactic(8, 5, 1, 4)),
        ("row_warps", StreamTactic(8, 4, 3, 4)),
        ("groups", StreamTactic(8, 1, 1, 32)),
        ("groups", StreamTactic(32, 4, 4, 7)),
    ],
    ids=str,
)
def test_impossible_cuts_name_the_field(name: str, tactic: StreamTactic) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}:"):
        specialise(problem(16, 64, 1024), tactic)


def test_grids() -> None:
    one = problem(9, 8192, 8192)
    assert geometry(one, StreamTactic(8, 4, 1, 16), SM_90A).grid == (1, 132, 2)  # all SMs
    assert geometry(one, StreamTactic(8, 2, 1, 8, 2, split=2, fill=2), SM_90A).grid == (2, 132, 2)
    assert geometry(problem(8, 72, 8192), StreamTactic(8, 4, 1, 16), SM_90A).grid == (1, 5, 1)  # a block for each
