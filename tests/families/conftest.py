"""Where a family's tests run: on the reference, on simulated GPUs, and on a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jitfp4 import sim

SIM = [pytest.mark.sim, pytest.mark.compile]


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("sm_90a", marks=SIM),
        pytest.param("sm_100a", marks=[*SIM, pytest.mark.one_in(4)]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The torch device of a test's tensors; under an architecture's name, CPU tensors run its kernels simulated."""
    if request.param.startswith("sm_"):
        with sim.device(request.param):
            yield "cpu"
    else:
        yield request.param
