"""Calls of the mutation campaign: layers of experts, on small inputs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import jitfp4
from jitfp4.families.experts.kernels.combine import CombineTactic
from jitfp4.families.experts.kernels.few_down import FewTactic
from jitfp4.families.experts.kernels.narrow import NarrowTactic
from jitfp4.families.experts.kernels.route import RouteTactic
from jitfp4.families.experts.kernels.stream import StreamTactic
from jitfp4.families.experts.kernels.wide import WideTactic
from jitfp4.families.experts.operation import EXPERTS_DOWN, EXPERTS_ROUTE, EXPERTS_UP
from jitfp4.families.experts.results_operation import EXPERTS_RESULTS
from jitfp4.families.experts.tables import forced_item_rows
from tests.families import test_norm_linear as norm_linear
from tests.families.test_experts_route import EXPERTS, assert_routed, make_ids
from tests.mutants.calls import few_sms
from tests.support.experts import assert_layer, make_layer, make_routing, make_x
from tests.support.routing import ROUTERS, make_logits


def topk() -> None:
    router = ROUTERS["uneven groups"]
    logits, bias = make_logits(router, 3)
    jitfp4.route_experts(logits, router.top_k, **router.options(bias))


def route(ctas: int) -> None:
    """More assignments than a CTA has threads."""
    with EXPERTS_ROUTE.forced(RouteTactic(ctas)):
        assert_routed(make_ids(170, 8), None, EXPERTS, 16)


def layer(
    tactic: NarrowTactic | StreamTactic | WideTactic,
    tokens: int,
    *,
    listed: bool = True,
    size: int = 288,
    slots: int = 2,
    activations: str | None = None,
) -> None:
    """A layer with more chunks than stages, and tiles, chunks and items that are not whole; some slots are skipped."""
    experts = slots + 1
    rows = getattr(tactic, "tile_m", 0) if listed else 0
    down: Any = CombineTactic(128) if isinstance(tactic, WideTactic) else tactic
    results = EXPERTS_RESULTS.forced(tactic) if isinstance(tactic, WideTactic) else nullcontext()
    with few_sms(), forced_item_rows(rows), EXPERTS_UP.forced(tactic), EXPERTS_DOWN.forced(down), results:
        ids, weights = make_routing(tokens, slots, experts, skipped=True)
        assert_layer(make_layer(experts, size, size), make_x(tokens, size), ids, weights, activations=activations)


def behind_a_norm() -> None:
    """Experts that are chosen, one of which all tokens have."""
    norm_linear.check(3, 80, 33, 5, torch.bfloat16)


def many_in_e4m3() -> None:
    """With five halves of steps."""
    layer(WideTactic(32, 16, 2, 2), tokens=40, size=544, activations="fp8")


def few(tactic: FewTactic) -> None:
    """One token, of whose slots one is skipped."""
    ids, weights = make_routing(1, 4, 4)
    ids[0, 1] = -1
    with EXPERTS_DOWN.forced(tactic):
        assert_layer(make_layer(4, 96, 288), make_x(1, 96), ids, weights)
