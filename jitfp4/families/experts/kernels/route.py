"""experts/route: a cluster of CTAs sorts the assignments of tokens by expert, and cuts them into items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.experts.arguments import RouteArguments
from jitfp4.families.experts.problem import RouteProblem
from jitfp4.families.experts.weights import MOST_EXPERTS
from jitfp4.kernel import Kernel, Plan
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class RouteTactic:
    """The CTAs of the cluster, which divide the assignments."""

    ctas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpec(KernelSpec):
    """A CTA has a thread for each expert."""

    threads = MOST_EXPERTS


def _bind(arguments: RouteArguments, plan: Plan) -> dict[str, Any]:
    ids, expert_map = arguments.ids, arguments.expert_map
    return {
        "ids": ids,
        "expert_map": expert_map,
        "items": arguments.items,
        "order": arguments.order,
        "id_bytes": ids.element_size(),
        "ids_end": arguments.experts if expert_map is None else expert_map.shape[0],
        "experts": arguments.experts,
        "assignments": plan.problem.tokens * plan.problem.slots,
        "item_rows": arguments.item_rows,
        "items_end": arguments.items.shape[0],
    }


def _rejects(_problem: RouteProblem, tactic: RouteTactic, arch: Arch) -> str | None:
    return "it needs clusters" if tactic.ctas > 1 and not arch.has_tma else None


def _geometry(_problem: RouteProblem, tactic: RouteTactic, _arch: Arch) -> Geometry:
    """Grid: the CTAs of one cluster."""
    line = (tactic.ctas, 1, 1)
    return Geometry(grid=line, block=(RouteSpec.threads, 1, 1), cluster=line)


ROUTE = Kernel(
    name="experts/route",
    spec=RouteSpec,
    params=(
        Ptr("ids", "const uint8", "[tokens, slots] of id_bytes bytes"),
        Ptr("expert_map", "const int32", "[ids_end]; null: the identity"),
        Ptr("items", "int4", "[items_end]"),
        Ptr("order", "int32", "[assignments]"),
        I64("id_bytes", "4 or 8"),
        I64("ids_end", "ids are below it, or skipped"),
        I64("experts"),
        I64("assignments"),
        I64("item_rows"),
        I64("items_end"),
    ),
    tactics=tuple(RouteTactic(ctas) for ctas in (1, 2, 4, 8)),
    rejects=_rejects,
    specialise=lambda _problem, _tactic: RouteSpec(),
    geometry=_geometry,
    bind=_bind,
)
