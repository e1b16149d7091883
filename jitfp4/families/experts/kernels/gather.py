"""experts/gather: rows of activations in the order of the list of items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.experts.arguments import GatherArguments
from jitfp4.families.experts.problem import GatherProblem
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class GatherTactic:
    """The kernel has one shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSpec(KernelSpec):
    """A warp has a row."""

    dtype: DType

    warps = 8


def _geometry(problem: GatherProblem, _tactic: GatherTactic, _arch: Arch) -> Geometry:
    """Grid: x over items, y over rows of an item."""
    grid = (problem.items, ceil_div(problem.item_rows, GatherSpec.warps), 1)
    return Geometry(grid=grid, block=(32 * GatherSpec.warps, 1, 1))


def _rejects(problem: GatherProblem, _tactic: GatherTactic, _arch: Arch) -> str | None:
    return "rows become E4M3" if problem.fp8 else None


def bind(arguments: GatherArguments, plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.x,
        "input_weights": arguments.input_weights,
        "items": arguments.items,
        "order": arguments.order,
        "rows": arguments.rows,
        "slots": plan.problem.slots,
        "k": arguments.x.shape[1],
        "x_stride": arguments.x.stride(0),
    }


GATHER = Kernel(
    name="experts/gather",
    spec=GatherSpec,
    params=(
        Ptr("x", "const In", "[tokens, k]"),
        Ptr("input_weights", "const float", "[tokens, slots], factors of x; null: none"),
        Ptr("items", "const int4", "[gridDim.x]"),
        Ptr("order", "const int32", "[tokens * slots]"),
        Ptr("rows", "In", "[tokens * slots, k]"),
        I64("slots", "of a token"),
        I64("k", "columns, a multiple of 32"),
        I64("x_stride", "elements"),
    ),
    tactics=(GatherTactic(),),
    rejects=_rejects,
    specialise=lambda problem, _tactic: GatherSpec(dtype=problem.dtype),
    geometry=_geometry,
    bind=bind,
)
