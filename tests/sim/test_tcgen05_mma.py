"""tcgen05.mma on tiles that TMA wrote and scales that tcgen05.cp copied, against dequantised matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jitfp4.arch import Arch
from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim import tmem
from jitfp4.sim.swizzle import Swizzle
from jitfp4.sim.tcgen05 import Cta, mma_block_scale
from jitfp4.sim.tmem import Allocations
from tests.sim.tcgen05_problems import (
    A_AT,
    B_AT,
    SFA_AT,
    SFA_COLUMN,
    SFB_COLUMN,
    Fp4Problem,
    assert_close,
    copy_scales,
    descriptor,
    new_cta,
    pack,
    run_k64,
    scale_atoms,
    tma_write,
)


@pytest.mark.parametrize("n", [8, 64, 128, 256])
def test_nvfp4_with_one_cta(n: int) -> None:
    problem, cta = Fp4Problem(128, n, 512), new_cta()
    run_k64(problem, (cta,))
    assert_close(cta.tmem[:, :n].view(np.float32), problem.expected)
    assert (cta.tmem[:, n:SFA_COLUMN] == 0x7FC00000).all()


def test_nvfp4_with_a_pair_of_ctas() -> None:
    problem, ctas = Fp4Problem(256, 256, 256), (new_cta(), new_cta())
    run_k64(problem, ctas)
    got = np.concatenate([c.tmem[:, :256].view(np.float32) for c in ctas])
    assert_close(got, problem.expected)


def test_half_the_rows_per_cta_put_the_right_columns_in_the_upper_lanes() -> None:
    problem, ctas = Fp4Problem(128, 128, 256), (new_cta(), new_cta())
    sfa = np.zeros((256, 16), np.uint8)
    sfa[:64], sfa[128:192] = problem.sfa[:64], problem.sfa[64:]
    fa, fb = scale_atoms(sfa), scale_atoms(problem.sfb)
    for v, cta in enumerate(ctas):
        for at, codes in ((A_AT, problem.a), (B_AT, problem.b)):
            tma_write(cta.shared, at, pack(codes[64 * v : 64 * v + 64]))
    for j in range(4):
        for v, cta in enumerate(ctas):
            cta.shared[SFA_AT : SFA_AT + 512] = fa[v, j]
            source = descriptor(SFA_AT, sbo=128, swizzle=Swizzle.NONE)
            tmem.copy(cta.tmem, SFA_COLUMN, source, cta.shared, "32x128b.warpx4")
            words = fb[0, j].reshape(32, 16).view(np.uint32)  # word n / 32 of lane n % 32
            cta.tmem[:64, SFB_COLUMN : SFB_COLUMN + 2] = np.tile(words[:, :2], (2, 1))
            cta.tmem[64:, SFB_COLUMN : SFB_COLUMN + 2] = np.tile(words[:, 2:], (2, 1))
        mma_block_scale(
            ctas, "mxf4nvf4", 16, 0, descriptor(A_AT + 32 * j, sbo=1024), descriptor(B_AT + 32 * j, sbo=1024),
            problem.idesc(), (SFA_COLUMN, SFB_COLUMN), enable_input_d=j > 0, arch=Arch.of("sm_100a"),
        )  # fmt: skip
    for v, cta in enumerate(ctas):
        d = cta.tmem[:, :64].view(np.float32)
        assert_close(np.concatenate([d[:64], d[64:]], 1), problem.expected[64 * v : 64 * v + 64])


@pytest.mark.parametrize(
    ("kind", "block", "ue4m3"), [("mxf4", 32, False), ("mxf4nvf4", 32, False), ("mxf4nvf4", 16, False)]
)
def test_ue8m0_scales(kind: str, block: int, ue4m3: bool) -> None:
    problem, cta = Fp4Problem(128, 128, 512, block, ue4m3), new_cta()
    run_k64(problem, (cta,), kind)
    assert_close(cta.tmem[:, :128].view(np.float32), problem.expected)


def run_k96(problem: Fp4Problem, cta: Cta, arch: str = "sm_103a", wrap: bool = True) -> None:
    """A K tile of 768: three 128-byte buffers, eight instructions, scale words as CUTLASS schedules them."""
    step = 8 if problem.n > 128 else 4
    for buffer in range(3):
        part = slice(128 * buffer, 128 * buffer + 128)
        tma_write(cta.shared, A_AT + 16384 * buffer, pack(problem.a)[:, part])
        tma_write(cta.shared, B_AT + 128 * problem.n * buffer, pack(problem.b)[:, part])
    per = 6 if problem.block == 16 else 3  # scales of one instruction
    for i in range(8):
        buffer, chunk = divmod(3 * i, 8)
        following = buffer + (1 if chunk + 3 > 8 and wrap else 0)
        word, sf_id = divmod(per * i % 12, 4)
        copy_scales((cta,), problem, per * i // 12 * 3, 3)
        mma_block_scale(
            (cta,), "mxf4nvf4", problem.block, 0,
            descriptor(A_AT + 16384 * buffer + 16 * chunk, sbo=1024, lbo=A_AT + 16384 * following, absolute=True),
            descriptor(B_AT + 128 * problem.n * buffer + 16 * chunk, sbo=1024,
                       lbo=B_AT + 128 * problem.n * following, absolute=True),
            problem.idesc(k96=True, sf_id=sf_id), (SFA_COLUMN + 4 * word, SFB_COLUMN + step * word),
            enable_input_d=i > 0, arch=Arch.of(arch),
        )  # fmt: skip


@pytest.mark.parametrize("n", [128, 256])
@pytest.mark.parametrize(("block", "ue4m3"), [(16, True), (32, False)])
def test_k96_wraps_into_the_next_buffer(n: int, block: int, ue4m3: bool) -> None:
    problem, cta = Fp4Problem(128, n, 768, block, ue4m3), new_cta()
    run_k96(problem, cta)
    assert_close(cta.tmem[:, :n].view(np.float32), problem.expected)


def test_k96_without_the_next_buffer_is_wrong_and_belongs_to_sm_103a() -> None:
    problem, cta = Fp4Problem(128, 128, 768), new_cta()
    run_k96(problem, cta, wrap=False)
    assert np.abs(cta.tmem[:, :128].view(np.float32) - problem.expected).max() > 1
    with pytest.raises(SimError, match="only sm_103a"):
        run_k96(problem, cta, arch="sm_100a")


def swap_nibbles(problem: Fp4Problem) -> None:
    problem.a = problem.a.reshape(problem.m, -1, 2)[:, :, ::-1].reshape(problem.m, -1).copy()


def roll_scales(problem: Fp4Problem) -> None:
    problem.sfb = np.roll(problem.sfb, 1, 1)


@pytest.mark.parametrize("fault", [swap_nibbles, roll_scales])
def test_planted_data_faults_change_the_result(fault: Callable[[Fp4Problem], None]) -> None:
    problem, cta = Fp4Problem(128, 64, 256), new_cta()
    expected = problem.expected
    fault(problem)
    run_k64(problem, (cta,))
    assert (np.abs(cta.tmem[:, :64].view(np.float32) - expected) > 1e-3 * np.abs(expected).max()).mean() > 0.5


@pytest.mark.parametrize("swizzle", [Swizzle.NONE, Swizzle.B64])
def test_a_wrong_swizzle_changes_the_result(swizzle: Swizzle) -> None:
    problem, cta = Fp4Problem(128, 64, 256), new_cta()
    run_k64(problem, (cta,))
    good = cta.tmem[:, :64].copy()
    wrong = descriptor(A_AT, sbo=1024, swizzle=swizzle)
    run_k64(problem, (cta,), a=wrong)
    assert (cta.tmem[:, :64] != good).any()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param({"scales": (SFA_COLUMN, SFB_COLUMN + 1)}, "even column", id="odd SFB column"),
        pytest.param({"scales": (SFA_COLUMN | 2 << 30, SFB_COLUMN)}, "different ids", id="id in the address differs"),
        pytest.param({"idesc": 0x08400480 | 1 << 3}, "reserved", id="reserved bit"),
        pytest.param({"idesc": 0x08400480 | 1 << 2}, "sparse", id="sparse"),
        pytest.param({"idesc": 0x88400480}, "only sm_103a", id="K = 96"),
        pytest.param({"idesc": 0x08400480 | 2 << 29}, "scale ids", id="block-16 scale id"),
        pytest.param({"idesc": 0x10400480}, "M = 256", id="M of a pair"),
        pytest.param({"idesc": 0x08408480}, "reserved", id="transposed"),
        pytest.param({"a": 0x40 << 32 | 2 << 61}, "46-48", id="descriptor constant"),
        pytest.param({"a": descriptor(A_AT + 112, sbo=1024)}, "runs over", id="descriptor over the row"),
        pytest.param(
            {"a": descriptor(A_AT, sbo=1024, absolute=True)}, "belongs to K = 96", id="absolute mode at K = 64"
        ),
        pytest.param({"d": 300}, "column", id="D past the end"),
        pytest.param({"d": 32 << 16}, "lane", id="D at a lane"),
    ],
)
def test_illegal_instructions_are_errors(override: dict[str, Any], message: str) -> None:
    problem, cta = Fp4Problem(128, 256, 256), new_cta()
    with pytest.raises(SimError, match=message):
        run_k64(problem, (cta,), **override)


def test_scales_that_differ_between_quadrants_are_errors() -> None:
    problem, cta = Fp4Problem(128, 64, 256), new_cta()
    run_k64(problem, (cta,))
    cta.tmem[70, SFA_COLUMN] ^= 1
    call = (descriptor(A_AT, sbo=1024), descriptor(B_AT, sbo=1024), problem.idesc(), (SFA_COLUMN, SFB_COLUMN))
    with pytest.raises(SimError, match="quadrants"):
        mma_block_scale((cta,), "mxf4nvf4", 16, 0, *call, enable_input_d=False, arch=Arch.of("sm_100a"))


def test_columns_must_be_allocated() -> None:
    problem, full = Fp4Problem(128, 64, 256), new_cta()
    cta = Cta(shared=full.shared, tmem=full.tmem, allocations=Allocations(blocks=((0, 256),)))
    with pytest.raises(SimMemoryError, match="allocated"):
        run_k64(problem, (cta,))


@pytest.mark.parametrize(("m", "n", "k", "bits"), [(128, 256, 64, 0x08400480), (256, 256, 96, 0x90400480)])
def test_descriptor_values_known_from_elsewhere(m: int, n: int, k: int, bits: int) -> None:
    assert Fp4Problem(m, n, 96).idesc(k96=k == 96) == bits
