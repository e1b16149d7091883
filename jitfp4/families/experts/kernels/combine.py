"""experts/combine: the weighted sum over the slots of each token, behind the product down for many rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import Arch, names_with
from jitfp4.errors import ArgumentError
from jitfp4.families.experts.arguments import DownArguments, ResultArguments
from jitfp4.families.experts.parameters import RESIDUAL, RESIDUAL_STRIDE, bind_residual
from jitfp4.families.experts.problem import Problem
from jitfp4.families.experts.results_operation import EXPERTS_RESULTS
from jitfp4.formats import DType
from jitfp4.kernel import Before, Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr

_COLUMNS = 8  # of a thread


@dataclass(frozen=True, slots=True)
class CombineTactic:
    """The threads of a CTA."""

    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineSpec(KernelSpec):
    """A thread adds up eight columns of a token."""

    dtype: DType
    threads: int

    def __post_init__(self) -> None:
        if self.threads not in (128, 256):
            raise ArgumentError("threads", self.threads, "128 or 256")


def specialise(problem: Problem, tactic: CombineTactic) -> CombineSpec:
    """The spec of a tactic for a problem."""
    return CombineSpec(dtype=problem.dtype, **asdict(tactic))


def rejects(problem: Problem, _tactic: CombineTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture: the product before it cannot."""
    if not arch.has_wgmma:
        return f"the product before it is one of {names_with('has_wgmma')}"
    return None if problem.item_rows else "the product before it needs a list of items"


def geometry(problem: Problem, tactic: CombineTactic, _arch: Arch) -> Geometry:
    """Grid: x over tokens, y over columns."""
    grid = (problem.tokens, ceil_div(problem.n, tactic.threads * _COLUMNS), 1)
    return Geometry(grid=grid, block=(tactic.threads, 1, 1))


def _results(arguments: DownArguments, plan: Plan) -> ResultArguments:
    a = arguments
    if a.items is None or a.order is None:
        raise ArgumentError("items", "None", "the list of items")
    return ResultArguments(
        h=a.h,
        w2=a.w2,
        scale2=a.scale2,
        bias2=a.bias2,
        items=a.items,
        order=a.order,
        y=a.y,
        slots=plan.problem.slots,
        mxfp4=a.mxfp4,
        fp8=a.fp8,
        item_rows=a.item_rows,
        enable_pdl=a.enable_pdl,
        names=a.names,
    )


def _bind(arguments: DownArguments, plan: Plan) -> dict[str, Any]:
    expert_map, experts = arguments.expert_map, arguments.w2.shape[0]
    return {
        "y": arguments.y,
        "weights": arguments.weights,
        "ids": arguments.ids,
        "expert_map": expert_map,
        "out": arguments.out,
        "id_bytes": arguments.ids.element_size(),
        "ids_end": experts if expert_map is None else expert_map.shape[0],
        "experts": experts,
        "slots": plan.problem.slots,
        "n": plan.problem.n,
        "out_stride": arguments.out.stride(0),
    } | bind_residual(arguments)


COMBINE = Kernel(
    name="experts/combine",
    spec=CombineSpec,
    params=(
        Ptr("y", "const In", "[tokens * slots, n], by assignment"),
        Ptr("weights", "const float", "[tokens, slots], factors of y; null: 1"),
        Ptr("ids", "const uint8", "[tokens, slots] of id_bytes bytes"),
        Ptr("expert_map", "const int32", "[ids_end]; null: the identity"),
        Ptr("out", "In", "[tokens, n]"),
        RESIDUAL,
        I64("id_bytes", "4 or 8"),
        I64("ids_end", "ids are below it, or skipped"),
        I64("experts"),
        I64("slots", "of a token"),
        I64("n", "columns, a multiple of 32"),
        I64("out_stride", "elements"),
        RESIDUAL_STRIDE,
    ),
    tactics=(CombineTactic(128), CombineTactic(256)),
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
    before=(Before(EXPERTS_RESULTS, _results),),
)
