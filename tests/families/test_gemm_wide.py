"""mm_bf16_fp4 with many rows of activations: the kernel of sm_90a, its cuts, and what selection gives."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from jitfp4 import ArgumentError, mm_bf16_fp4, sim
from jitfp4.arch import Arch
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.wide import TACTICS, WideTactic, geometry, rejects, specialise
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import Problem
from jitfp4.families.gemm.tables import HOPPER, problems
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from tests.support.gemm import assert_close, assert_product, check_graph_replay, make_weight
from tests.support.gpu import needs_sm_90a
from tests.support.sample import some

BF16, F16 = torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]
SM_90A = Arch.of("sm_90a")


def problem(m: int, n: int, k: int) -> Problem:
    return Problem(DType.BF16, DType.BF16, NVFP4, m, n, k)


# ---- results ---------------------------------------------------------------------------------------------------------

CASES = (  # with rows, rows of the weight and columns that are no whole tiles
    (WideTactic(64, 1, 2), 40, 72, 416, NVFP4, BF16, BF16),
    (WideTactic(64, 4, split=2), 60, 264, 416, MXFP4, BF16, BF16),
    (WideTactic(64, 2, 2, 4), 64, 136, 1056, NVFP4, F16, F16),
    (WideTactic(64, 1, 4), 33, 72, 416, NVFP4, BF16, BF16),  # steps and warpgroups that do not come out even
    (WideTactic(64, 1, 4, 2), 64, 72, 1056, MXFP4, F16, F16),
    (WideTactic(32, 1, 4), 20, 72, 416, MXFP4, BF16, F16),
    (WideTactic(64, 3), 40, 72, 160, MXFP4, BF16, BF16),
    (WideTactic(128, 1, 2, 3), 130, 72, 416, NVFP4, F16, BF16),
    (WideTactic(64, 2, cluster=2, divided=True), 130, 520, 416, NVFP4, BF16, F16),
    (WideTactic(256, 2), 200, 136, 160, MXFP4, F16, F16),
    (WideTactic(32, 2, 2, 2, 2), 29, 264, 672, MXFP4, F16, BF16),
    (WideTactic(32, 2, divided=True), 40, 264, 416, NVFP4, BF16, F16),
    (WideTactic(16, 1, 2, ctas=2), 12, 72, 416, NVFP4, BF16, BF16),
    (WideTactic(32, 2, cluster=2, common=True), 40, 200, 544, MXFP4, BF16, F16),
    # rounds of slots, and steps before and after them
    (WideTactic(64, 4, cluster=2, common=True), 40, 456, 1440, NVFP4, BF16, BF16),
    (WideTactic(64, 2, 2), 40, 72, 1440, NVFP4, BF16, BF16),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("tactic", "m", "n", "k", "block_format", "dtype", "out_dtype"), CASES, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_cuts_formats_and_dtypes(
    tactic: WideTactic,
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    arch: str,
) -> None:
    with sim.device(arch), MM_BF16_FP4.forced(tactic):
        assert_product(m, n, k, block_format, dtype, out_dtype)


RACED = (
    WideTactic(64, 1, 2, 2),
    WideTactic(64, 2, divided=True),
    WideTactic(64, 2, cluster=2),
    WideTactic(64, 1, 4, 2),
    WideTactic(32, 1, 2, 2, cluster=2),
    WideTactic(16, 1, 2, ctas=2),
    WideTactic(32, 2, cluster=2, common=True),
    WideTactic(256, 2, divided=True),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tactic", RACED, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_without_a_race(tactic: WideTactic, arch: str) -> None:
    with sim.device(arch, races=True), MM_BF16_FP4.forced(tactic):
        m, steps = max(tactic.tile_m, 64) // 2 + 38, max(4, tactic.depth * tactic.split)
        assert_product(m, 136, 128 * steps - 96, plain=True)


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_a_tile_divided_among_as_many_as_it_has_steps(arch: str) -> None:
    """The last cluster collects from all others, in an output of which it has one tile."""
    with sim.device(arch), MM_BF16_FP4.forced(WideTactic(64, 2, divided=True)):
        assert_product(64, 128, 416)


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_a_strided_output_and_what_lies_around_it(arch: str) -> None:
    weight = make_weight(72, 160, NVFP4)
    a = torch.randn(70, 168, generator=torch.Generator().manual_seed(1)).bfloat16()[:, :160]
    wide = torch.full((70, 96), 7.0, dtype=BF16)
    with sim.device(arch), MM_BF16_FP4.forced(WideTactic(64, 1, 2)):
        mm_bf16_fp4(a, weight, out=wide[:, 8:80])
    assert_close(wide[:, 8:80], a, weight, None, None)
    assert (wide[:, :8] == 7).all()
    assert (wide[:, 80:] == 7).all()


# ---- selection -------------------------------------------------------------------------------------------------------


def test_who_takes_how_many_rows() -> None:
    for m in (1, 8, 16):
        assert isinstance(MM_BF16_FP4.select(problem(m, 4096, 4096), SM_90A), NarrowTactic)
    for m in (17, 32, 33, 64, 65, 128, 129, 512, 513, 8192):
        for n in (8, 2112, 4096, 8192, 10240, 28672, 57344):
            for k in (32, 4096):
                tactic = MM_BF16_FP4.select(problem(m, n, k), SM_90A)
                assert isinstance(tactic, WideTactic)
                assert rejects(problem(m, n, k), tactic, SM_90A) is None
    assert isinstance(MM_BF16_FP4.select(problem(512, 4096, 4096), Arch.of("sm_100a")), NarrowTactic)


def test_every_row_of_the_table_is_met() -> None:
    met = {MM_BF16_FP4.select(one, SM_90A) for one in problems(SM_90A)}
    assert met >= {row.tactic for row in HOPPER.rows}


def test_every_tactic_makes_a_kernel_that_fits() -> None:
    for tactic in TACTICS:
        spec = specialise(problem(tactic.tile_m, 8192, 8192), tactic)
        assert spec.shared_bytes <= SM_90A.shared_bytes
        assert spec.parts <= max(2, spec.sharers)


def test_why_a_tactic_is_rejected() -> None:
    assert "sm_90a" in str(rejects(problem(64, 64, 1024), WideTactic(64, 1, 2), Arch.of("sm_100a")))
    assert "empty" in str(rejects(problem(64, 64, 1024), WideTactic(128, 1, 2), SM_90A))
    assert "step" in str(rejects(problem(64, 64, 128), WideTactic(64, 1, 2, 2), SM_90A))
    assert "4 steps" in str(rejects(problem(64, 64, 896), WideTactic(64, 1, 4, 2), SM_90A))
    assert rejects(problem(64, 64, 1024), WideTactic(64, 1, 4, 2), SM_90A) is None


@pytest.mark.parametrize(
    ("name", "tactic"),
    [
        ("tile_m", WideTactic(48, 1)),
        ("depth", WideTactic(64, 1, 3)),
        ("cluster", WideTactic(64, 2, cluster=3)),
        ("cluster", WideTactic(16, 2, cluster=4)),
        ("cluster", WideTactic(64, 2, split=4, cluster=4)),
        ("ctas", WideTactic(64, 2, ctas=3)),
        ("ctas", WideTactic(64, 2, cluster=2, ctas=2, common=True)),  # with a slot for each turn it would never end
        ("ctas", WideTactic(64, 1, depth=4, ctas=2)),
        ("common", WideTactic(64, 2, common=True)),
        ("split", WideTactic(64, 2, split=9)),
        ("split", WideTactic(64, 2, split=2, divided=True)),
        ("split", WideTactic(128, 1, depth=2, cluster=2)),
        ("groups", WideTactic(64, 1)),
        ("groups", WideTactic(64, 3, depth=2)),
        ("groups", WideTactic(256, 4)),
    ],
    ids=str,
)
def test_impossible_cuts_name_the_field(name: str, tactic: WideTactic) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}:"):
        specialise(problem(256, 64, 1024), tactic)


def test_grids() -> None:
    one = problem(300, 8192, 8192)
    assert geometry(one, WideTactic(256, 2), SM_90A).grid == (128, 1, 1)  # a CTA for each tile
    assert geometry(one, WideTactic(256, 2, divided=True), SM_90A).grid == (132, 1, 1)  # all SMs
    assert geometry(one, WideTactic(128, 2), SM_90A).grid == (132, 1, 1)  # of 192 tiles
    split = geometry(one, WideTactic(128, 1, 2, 2), SM_90A)
    assert (split.grid, split.cluster) == ((2 * 384, 1, 1), (2, 1, 1))  # not persistent
    assert geometry(problem(64, 64, 256), WideTactic(64, 2, divided=True), SM_90A).grid == (2, 1, 1)  # of two steps


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("m", [33, 64, 100, 256, 700])
@pytest.mark.parametrize("block_format", [NVFP4, MXFP4])
def test_tactics_agree_and_repeat_themselves(m: int, block_format: BlockFormat, whole: bool) -> None:
    needs_sm_90a()
    n, k = 2120, 1184
    tactics = [tactic for tactic in TACTICS if rejects(problem(m, n, k), tactic, SM_90A) is None]
    for tactic in some(12, tactics, whole=whole):
        with MM_BF16_FP4.forced(tactic):
            first = assert_product(m, n, k, block_format, device="cuda")
            assert torch.equal(first, assert_product(m, n, k, block_format, device="cuda"))


@pytest.mark.gpu
def test_a_slot_is_not_refilled_while_it_is_read() -> None:
    """Divided tiles stall warpgroups, so that rings are full: a slot given back too early shows within a few calls."""
    needs_sm_90a()
    n, k = 57344, 8192
    weight = make_weight(n // 32, k, NVFP4, "cuda")
    weight = type(weight)(weight.data.repeat(32, 1, 1), None, n, k, NVFP4)
    a = torch.randn(64, k, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    with MM_BF16_FP4.forced(WideTactic(64, 3)):
        want = mm_bf16_fp4(a, weight).float()
    with MM_BF16_FP4.forced(WideTactic(64, 3, divided=True)):
        outs = [mm_bf16_fp4(a, weight) for _ in range(40)]
    for out in outs:
        assert torch.equal(out, outs[0])
    assert (outs[0].float() - want).abs().max() <= 0.01 * want.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [64, 128, 300])
def test_in_a_graph_and_behind_each_other(m: int) -> None:
    """Each product reads the one before it, by dependent launch; workspaces are memory of the graph."""
    needs_sm_90a()
    weight = make_weight(2048, 2048, NVFP4, "cuda")
    alpha = torch.tensor([2.0**-9], device="cuda")
    a = torch.randn(m, 2048, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        x = a
        for _ in range(6):
            x = mm_bf16_fp4(x, weight, alpha).clamp(-1, 1)
            x = mm_bf16_fp4(x, weight, alpha)
        return x

    for choice in (nullcontext(), MM_BF16_FP4.forced(WideTactic(64, 4, divided=True))):
        with choice:
            check_graph_replay(chain)
