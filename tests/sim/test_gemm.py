"""Whole tiles of GEMM pass the sanitised run, and a missing piece of their pipelines does not."""

from __future__ import annotations

import numpy as np
import pytest

from jitfp4 import sim
from jitfp4.errors import SimError
from jitfp4.spec import Geometry
from tests.sim import gemm_kernels as gemm
from tests.sim.cuda import compiled

pytestmark = [pytest.mark.sim, pytest.mark.compile]


def run_wgmma(k: int = 320, seed: int | None = None, **instead: str) -> None:
    args, want = gemm.wgmma_problem(k)
    ptx = compiled(gemm.with_pieces(gemm.WGMMA, gemm.WGMMA_PIECES, **instead), "sm_90a")
    geometry = Geometry((1, 1, 1), (160, 1, 1), shared_bytes=gemm.STAGES * 24576)
    sim.run(ptx, args, geometry, "sm_90a", races=True, seed=seed)
    np.testing.assert_array_equal(args[2], want)


def run_tcgen05(k: int = 1280, seed: int | None = None, **instead: str) -> None:
    args, want = gemm.tcgen05_problem(k)
    ptx = compiled(gemm.with_pieces(gemm.TCGEN05, gemm.TCGEN05_PIECES, **instead), "sm_100a")
    geometry = Geometry((1, 1, 1), (128, 1, 1), shared_bytes=gemm.STAGES * 55296)
    sim.run(ptx, args, geometry, "sm_100a", races=True, seed=seed)
    np.testing.assert_array_equal(args[4], want)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_wgmma_tile_passes(seed: int | None) -> None:
    run_wgmma(1024 if seed is None else 320, seed)


@pytest.mark.parametrize("seed", [None, 3])
def test_an_nvfp4_tcgen05_tile_passes(seed: int | None) -> None:
    run_tcgen05(1024 if seed is None else 1280, seed)


@pytest.mark.parametrize(
    ("piece", "instead", "message"),
    [
        ("WAIT_EMPTY", "{}", "overwrites|asynchronous work that was not waited for|more arrivals"),
        ("WAIT_FULL", "", "was not written or is still being copied|not waited for"),
        ("FENCE", "", "before the first wgmma.fence|accessed after the last wgmma.fence"),
        ("WAIT_WGMMA", "", "before wgmma.wait_group|asynchronous work that was not waited for"),
        ("ARRIVE_EMPTY", "if (t % 32 == 0 && i < 3) arrive(empty + s);", "every live thread waits"),
        (
            "EMPTY_COUNT",
            "1",
            "more arrivals|overwrites|every live thread waits|not waited for",
        ),
    ],
)
def test_a_missing_piece_of_the_wgmma_pipeline_is_found(piece: str, instead: str, message: str) -> None:
    with pytest.raises(SimError, match=message):
        run_wgmma(640, **{piece: instead})


@pytest.mark.parametrize(
    ("piece", "instead", "message"),
    [
        ("WAIT_EMPTY", "{}", "overwrites|asynchronous work that was not waited for|more arrivals"),
        ("WAIT_FULL", "", "was not written or is still being copied|not waited for"),
        ("COMMIT_EMPTY", "", "every live thread waits"),
        ("COMMIT_DONE", "", "every live thread waits"),
        ("WAIT_DONE", "", "before the queued work|unordered write|nothing wrote"),
        ("AFTER", "", "tcgen05 read follows an unordered write"),
        ("WAIT_LD", "", "accessed before tcgen05.wait::ld"),
    ],
)
def test_a_missing_piece_of_the_tcgen05_pipeline_is_found(piece: str, instead: str, message: str) -> None:
    with pytest.raises(SimError, match=message):
        run_tcgen05(1280, **{piece: instead})
