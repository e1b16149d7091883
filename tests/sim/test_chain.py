"""Launches that overlap, and orders drawn from a seed."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from jitfp4 import sim
from jitfp4.errors import SimRaceError
from jitfp4.spec import Geometry
from tests.sim.cuda import compiled, launch

pytestmark = [pytest.mark.sim, pytest.mark.compile]

STEP = """
extern "C" __global__ void kernel(const int* weights, const int* x, int* y) {
  const int t = threadIdx.x, w = weights[t];
  EARLY;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  WAIT;
  y[t] = x[t] * w + seen;
}
"""
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory")'


def step(
    chain: sim.Chain, arrays: tuple[np.ndarray, ...], early: str = "int seen = 0", wait: str = WAIT, source: str = STEP
) -> None:
    source = source.replace("EARLY", early).replace("WAIT", wait)
    sim.run(
        compiled(source, "sm_90a"), list(arrays), Geometry((1, 1, 1), (64, 1, 1)), "sm_90a", races=True, chain=chain
    )


def arrays() -> tuple[np.ndarray, ...]:
    return np.full(64, 3, np.int32), np.arange(64, dtype=np.int32), np.zeros(64, np.int32), np.zeros(64, np.int32)


def test_a_dependent_launch_that_waits_passes() -> None:
    w, x, y, z = arrays()
    chain = sim.Chain(constant=[w], after_unknown=True)
    step(chain, (w, x, y))
    step(chain, (w, y, z))
    assert (z == 9 * x).all()


@pytest.mark.parametrize(
    ("early", "wait", "message"),
    [
        ("int seen = 0", "", "the grid before this one"),
        ("int seen = x[t]", WAIT, "a read follows an unordered write by the grid before"),
        ("int seen = 0; y[t] = 1", WAIT, "a write follows an unordered read by the grid before"),
    ],
)
def test_touching_what_the_grid_before_uses_needs_the_wait(early: str, wait: str, message: str) -> None:
    w, x, y, _ = arrays()
    chain = sim.Chain(constant=[w])
    step(chain, (w, x, y))
    with pytest.raises(SimRaceError, match=message):
        step(chain, (w, y, x), early, wait)


def test_a_constant_must_be_declared() -> None:
    w, x, y, _ = arrays()
    with pytest.raises(SimRaceError, match="the grid before this one"):
        step(sim.Chain(after_unknown=True), (w, x, y))


def test_a_grid_that_does_not_wait_leaves_the_one_before_it_running() -> None:
    w, x, y, z = arrays()
    other = np.zeros(64, np.int32)
    chain = sim.Chain(constant=[w])
    step(chain, (w, x, y))
    step(chain, (w, other, z), wait="")  # touches nothing of the first
    with pytest.raises(SimRaceError, match="the grid before this one"):
        step(chain, (w, y, other), "int seen = x[t]", WAIT)


def before_others(wait: str) -> str:
    """A kernel that waits before some thread of it lets others begin."""
    return (
        STEP.replace("  WAIT;\n", "").replace("  asm", f"  {wait}; if (t >= 32) asm").replace("y[t]", "WAIT;\n  y[t]")
    )


@pytest.mark.parametrize(
    ("source", "complete"),
    [
        (STEP, False),
        (before_others("WAIT"), True),
        (before_others("if (t < 32) WAIT"), False),  # another warp is no help
        (before_others("if (t < 32) WAIT; __syncthreads()"), True),
    ],
    ids=["lets others begin", "waits", "another warp waits", "waits for another warp"],
)
def test_what_lies_before_the_grid_before_is_complete_if_that_one_waits_first(source: str, complete: bool) -> None:
    w, x, y, z = arrays()
    chain = sim.Chain(constant=[w])
    step(chain, (w, x, y))
    step(chain, (w, x, z), source=source)
    with nullcontext() if complete else pytest.raises(SimRaceError, match="the grid before this one"):
        step(chain, (w, y, np.zeros(64, np.int32)), "int seen = x[t]")


def test_the_wait_of_one_warp_reaches_others_through_a_barrier() -> None:
    w, x, y, _ = arrays()
    step(sim.Chain(constant=[w], after_unknown=True), (w, x, y), wait=f"if (t < 32) {WAIT}; __syncthreads()")
    with pytest.raises(SimRaceError, match="the grid before this one"):
        step(sim.Chain(constant=[w], after_unknown=True), (w, x, y), wait=f"if (t < 32) {WAIT}")


def test_a_device_block_chains_the_calls_in_it() -> None:
    w, x, y, _ = arrays()
    source = STEP.replace("EARLY", "int seen = 0").replace("WAIT", "")
    with sim.device("sm_90a", races=True, chain=sim.Chain(constant=[w])):
        launch(source, [w, x, y], block=64, races=True)
        with pytest.raises(SimRaceError, match="the grid before this one"):
            launch(source, [w, y, x], block=64, races=True)


ORDER = """
extern "C" __global__ void kernel(int* count, int* who) {
  const int t = threadIdx.x;
  who[blockIdx.x * 64 + t] = atomicAdd(count, 1);
}
"""


def order(seed: int | None) -> np.ndarray:
    count, who = np.zeros(1, np.int32), np.zeros(256, np.int32)
    sim.run(compiled(ORDER, "sm_90a"), [count, who], Geometry((4, 1, 1), (64, 1, 1)), "sm_90a", seed=seed, batch=64)
    assert sorted(who) == list(range(256))
    return who


def test_a_seed_draws_one_order_of_ctas_warps_and_atomics() -> None:
    assert (order(None) == np.arange(256)).all()
    first = order(1)
    assert (first == order(1)).all()
    assert (first != order(2)).any() and (first != np.arange(256)).any()
    by_cta = first.reshape(4, 64).min(axis=1)
    assert any((order(seed).reshape(4, 64).min(axis=1).argsort() != by_cta.argsort()).any() for seed in range(2, 8))
