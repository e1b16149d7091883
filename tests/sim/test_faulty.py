"""Each rule of the sanitised run: a kernel that is wrong by the manual is reported, its correct twin passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jitfp4 import sim
from jitfp4.errors import SimError
from tests.sim.cuda import compiled
from tests.sim.faulty import GLOBAL, PROXIES, Case
from tests.sim.faulty_clusters import CLUSTERS
from tests.sim.faulty_maps import TENSOR_MAPS
from tests.sim.faulty_matrix import MATRIX

pytestmark = [pytest.mark.sim, pytest.mark.compile]

CASES = [*PROXIES, *GLOBAL, *CLUSTERS, *MATRIX, *TENSOR_MAPS]


def run(case: Case, piece: str, **options: object) -> list[Any]:
    args = case.args()
    sim.run(compiled(case.text(piece), case.arch), args, case.geometry, case.arch, **options)
    return args


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_missing_piece_is_reported(case: Case) -> None:
    with pytest.raises(SimError, match=case.message):
        run(case, case.wrong, races=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("seed", [None, 1])
def test_the_correct_twin_passes(case: Case, seed: int | None) -> None:
    plain = run(case, case.right)
    for got, want in zip(run(case, case.right, races=True, seed=seed), plain, strict=True):
        if isinstance(got, sim.TensorMap):
            continue
        assert not isinstance(got, np.ndarray) or not np.isnan(got.astype(float)).any()
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("piece", ["wait(done, 0);", "wait(done + 1, 0);"])
def test_two_commits_reach_another_cta_in_any_order(piece: str) -> None:
    """To wait for one of them is not enough, whichever it is: some order shows it."""
    (case,) = (case for case in CLUSTERS if "commits" in case.name)
    with pytest.raises(SimError, match=case.message):
        for seed in (None, 1, 2, 3, 4):
            run(case, piece, races=True, seed=seed)
