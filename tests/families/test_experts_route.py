"""The list of items of a routing: the kernel against the reference, simulated with races on, and on the GPU."""

from __future__ import annotations

import pytest
import torch

from jitfp4 import sim
from jitfp4.arch import Arch
from jitfp4.families.experts.arguments import RouteArguments
from jitfp4.families.experts.kernels.route import RouteTactic
from jitfp4.families.experts.operation import EXPERTS_ROUTE
from jitfp4.families.experts.problem import RouteProblem, most_items
from jitfp4.reference.experts import experts_of
from tests.support.compare import poisoned
from tests.support.sample import SIM_ARCHS

EXPERTS = 40


def assert_routed(ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int, item_rows: int) -> None:
    """Items in the order of experts, then zeros; rows of an expert are its assignments, in any order."""
    items = poisoned((most_items(ids.numel(), experts, item_rows), 4), torch.int32, ids.device)
    order = poisoned((ids.numel(),), torch.int32, ids.device)
    EXPERTS_ROUTE(RouteArguments(ids, expert_map, items, order, experts, item_rows, None, ""))
    local, first, want = experts_of(ids, expert_map, experts).flatten().cpu(), 0, torch.zeros_like(items, device="cpu")
    item = 0
    for expert in range(experts):
        found = (local == expert).nonzero().flatten()
        for start in range(0, len(found), item_rows):
            rows = min(item_rows, len(found) - start)
            want[item], item = torch.tensor([expert, first + start, rows, 0]), item + 1
        assert order[first : first + len(found)].sort().values.tolist() == found.tolist()
        first += len(found)
    assert torch.equal(items.cpu(), want)


def make_ids(tokens: int, slots: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Ids from -1 to one above the last."""
    return torch.randint(-1, EXPERTS + 1, (tokens, slots), generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("ctas", [1, 2, 8])
@pytest.mark.parametrize("arch", SIM_ARCHS)
def test_clusters_without_a_race(ctas: int, arch: str) -> None:
    """More assignments than threads, skipped ones, an expert map, one expert with everything, fewer than CTAs."""
    with sim.device(arch, races=True), EXPERTS_ROUTE.forced(RouteTactic(ctas)):
        assert_routed(make_ids(1300, 8), None, EXPERTS, 16)
        other = torch.arange(EXPERTS, dtype=torch.int32).flip(0) - 5
        assert_routed(make_ids(150, 3, torch.int64), other, EXPERTS - 5, 8)
        assert_routed(torch.full((40, 30), 7, dtype=torch.int32), None, EXPERTS, 48)
        assert_routed(make_ids(1, 3), None, EXPERTS, 8)


@pytest.mark.sim
@pytest.mark.compile
def test_more_assignments_than_a_batch() -> None:
    with sim.device("sm_90a", races=True):
        assert_routed(make_ids(9000, 8), None, EXPERTS, 256)


def test_a_cluster_only_for_many() -> None:
    sizes = {(name, t): EXPERTS_ROUTE.select(RouteProblem(t, 8, 128), Arch.of(name)).ctas
             for name in ("sm_80", "sm_90a", "sm_100a") for t in (8, 2048)}  # fmt: skip
    assert sizes == {("sm_80", 8): 1, ("sm_80", 2048): 1} | {
        (name, t): 1 if t == 8 else 8 for name in ("sm_90a", "sm_100a") for t in (8, 2048)
    }


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [1, 2, 4, 8])
def test_on_the_gpu(ctas: int) -> None:
    with EXPERTS_ROUTE.forced(RouteTactic(ctas)):
        for tokens in (1, 40, 700, 5000, 20000):
            assert_routed(make_ids(tokens, 8).cuda(), None, EXPERTS, 64)
