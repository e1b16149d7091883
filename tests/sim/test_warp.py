"""Exchange and agreement within a warp."""

from __future__ import annotations

import numpy as np
import pytest

from jitfp4.errors import SimDeadlockError, SimError
from tests.sim.snippets import evaluate

pytestmark = pytest.mark.sim

LANES = np.arange(96, dtype=np.uint32)
LANE = LANES % 32
VALUES = np.random.default_rng(0).integers(0, 1 << 32, 96, dtype=np.uint64).astype(np.uint32)
WARPS = VALUES.reshape(3, 32)


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize(("mode", "by"), [("up", 3), ("down", 5), ("bfly", 6), ("idx", 9)])
def test_shuffles_stay_in_their_segment(mode: str, by: int, width: int) -> None:
    clamp = 0 if mode == "up" else 31
    control = (32 - width) << 8 | clamp
    body = f"shfl.sync.{mode}.b32 %d|%p, %a, {by}, {control}, 0xffffffff; @!%p xor.b32 %d, %d, 0xffffffff;"
    got = evaluate(body, VALUES, out=np.uint32).reshape(3, 32)
    lane = np.arange(32)
    first = lane // width * width
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first + by % width}[mode]
    inside = (source >= first) & (source < first + width)
    want = np.where(inside, WARPS[:, np.where(inside, source, lane)], ~WARPS)
    assert (got == want).all()


def test_a_shuffle_waits_for_lanes_on_another_path() -> None:
    body = """
    .reg .b32 %x; mov.u32 %x, %a; setp.lt.u32 %p, %b, 16; @%p bra low;
    add.u32 %x, %x, 1; add.u32 %x, %x, 1;
    low: shfl.sync.bfly.b32 %d, %x, 16, 31, 0xffffffff;
    """
    got = evaluate(body, VALUES, LANE, out=np.uint32)
    moved = VALUES + np.where(LANE < 16, 0, 2).astype(np.uint32)
    assert (got.reshape(3, 32) == moved.reshape(3, 32)[:, np.arange(32) ^ 16]).all()


def test_half_warps_shuffle_under_their_own_masks() -> None:
    body = "shfl.sync.idx.b32 %d, %a, %b, 31, %c;"
    mask = np.where(LANE < 16, 0x0000FFFF, 0xFFFF0000).astype(np.uint32)
    source = np.where(LANE < 16, 3, 20).astype(np.uint32)
    got = evaluate(body, VALUES, source, mask, out=np.uint32)
    assert (got.reshape(3, 32) == WARPS[:, source[:32]]).all()


def test_exited_lanes_are_not_waited_for() -> None:
    body = "setp.gt.u32 %p, %b, 19; mov.u32 %d, 0; @%p exit; shfl.sync.bfly.b32 %d, %a, 1, 31, 0xffffffff;"
    got = evaluate(body, VALUES, LANE, out=np.uint32).reshape(3, 32)
    assert (got[:, :20] == WARPS[:, np.arange(20) ^ 1]).all()


def test_a_missing_lane_is_a_deadlock_that_is_reported() -> None:
    body = """
    mov.u32 %d, 0; setp.eq.u32 %p, %b, 7; @%p bra other;
    shfl.sync.bfly.b32 %d, %a, 1, 31, 0xffffffff; bra done;
    other: bar.warp.sync 0xffffffff;
    done:
    """
    with pytest.raises(SimDeadlockError) as caught:
        evaluate(body, VALUES[:32], LANE[:32], out=np.uint32)
    assert "31 threads" in str(caught.value) and "shfl.sync" in str(caught.value)
    assert "1 threads (thread (7, 0, 0) of CTA (0, 0, 0)) at PTX line" in str(caught.value)


def test_a_lane_must_be_in_its_own_mask() -> None:
    with pytest.raises(SimError, match="not in its own member mask"):
        evaluate("shfl.sync.bfly.b32 %d, %a, 1, 31, 0x0000ffff;", VALUES, out=np.uint32)


@pytest.mark.parametrize("mode", ["all", "any", "uni"])
def test_votes(mode: str) -> None:
    a = LANES.copy()
    a[:32], a[32:64] = 5, 200
    body = f"setp.gt.u32 %p, %a, 80; vote.sync.{mode}.pred %q, %p, 0xffffffff; selp.u32 %d, 1, 0, %q;"
    got = evaluate(body, a, out=np.uint32).reshape(3, 32)
    holds = (a > 80).reshape(3, 32)
    want = {"all": holds.all(1), "any": holds.any(1), "uni": holds.all(1) | ~holds.any(1)}[mode]
    assert (got == want[:, None]).all()


def test_ballot_and_population_of_the_active_lanes() -> None:
    body = "setp.lt.u32 %p, %a, 0x80000000; vote.sync.ballot.b32 %d, %p, 0xffffffff;"
    got = evaluate(body, VALUES, out=np.uint32).reshape(3, 32)
    want = ((WARPS < 0x80000000).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1)
    assert (got == want[:, None]).all()


@pytest.mark.parametrize(
    ("op", "kind"), [("add", "u32"), ("min", "s32"), ("max", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32")]
)
def test_integer_reductions(op: str, kind: str) -> None:
    fn = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    dtype = np.int32 if kind == "s32" else np.uint32
    got = evaluate(f"redux.sync.{op}.{kind} %d, %a, 0xffffffff;", VALUES, out=np.uint32).view(dtype)
    want = fn[op].reduce(WARPS.view(dtype), axis=1, dtype=dtype)
    assert (got.reshape(3, 32) == want[:, None]).all()


@pytest.mark.parametrize(("form", "want"), [("max", 5.0), ("min", -7.0), ("max.abs", 7.0), ("min.NaN", np.nan)])
def test_float_reductions(form: str, want: float) -> None:
    a = np.linspace(-7, 5, 32).astype(np.float32)
    a[13] = np.nan
    got = evaluate(f"redux.sync.{form}.f32 %d, %a, 0xffffffff;", a, out=np.float32)
    np.testing.assert_equal(got, np.full(32, want, np.float32))


def test_match_finds_equal_lanes() -> None:
    a = (VALUES % 3).astype(np.uint32)
    got = evaluate("match.any.sync.b32 %d, %a, 0xffffffff;", a, out=np.uint32).reshape(3, 32)
    rows = a.reshape(3, 32)
    want = ((rows[:, :, None] == rows[:, None, :]).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(2)
    assert (got == want).all()
    a[:32] = 9
    body = "match.all.sync.b32 %d|%p, %a, 0xffffffff; @%p add.u32 %d, %d, 1;"
    got = evaluate(body, a, out=np.uint32).reshape(3, 32)
    assert (got[0] == 0).all() and (got[1:] == 0).all()  # 0xffffffff + 1 wraps, and no match gives 0


def test_elect_chooses_one_lane() -> None:
    body = "setp.lt.u32 %q, %b, 8; mov.u32 %d, 0; @%q bra done;"
    body += "elect.sync %d|%p, 0xffffff00; @%p add.u32 %d, %d, 100; done:"
    got = evaluate(body, VALUES, LANE, out=np.uint32).reshape(3, 32)
    assert (got == np.where(np.arange(32) < 8, 0, np.where(np.arange(32) == 8, 108, 8))).all()


def test_activemask_sees_the_lanes_of_its_path() -> None:
    body = "mov.u32 %d, 0; setp.lt.u32 %p, %b, 5; @!%p bra done; activemask.b32 %d; done:"
    assert (evaluate(body, VALUES, LANE, out=np.uint32).reshape(3, 32)[:, :5] == 31).all()


def test_lane_masks() -> None:
    for name, want in (("lt", (1 << LANE.astype(object)) - 1), ("ge", 0xFFFFFFFF & ~((1 << LANE.astype(object)) - 1))):
        assert evaluate(f"mov.u32 %d, %lanemask_{name};", VALUES, out=np.uint32).tolist() == want.tolist()
