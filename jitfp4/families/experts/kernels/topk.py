"""experts/topk: a warp chooses the experts of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.dtypes import FLOATS
from jitfp4.families.experts.router_problem import RouterArguments
from jitfp4.families.experts.topk_problem import Method, TopkArguments, TopkProblem
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.spec import F32, I64, WARP, Geometry, KernelSpec, Ptr

_PER_LANE = (2, 4, 8, 12, 16, 32)


@dataclass(frozen=True, slots=True)
class TopkTactic:
    """Warps of a CTA, each with a token."""

    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkSpec(KernelSpec):
    """A lane has up to ``per_lane`` experts."""

    logits: DType
    weights: DType
    method: Method
    per_lane: int
    warps: int


def most_of_lane(experts: int) -> int:
    """How many experts the kernel has room for in a lane."""
    return next(size for size in _PER_LANE if experts <= WARP * size)


def _specialise(problem: TopkProblem, tactic: TopkTactic) -> TopkSpec:
    return TopkSpec(
        logits=problem.logits,
        weights=problem.weights,
        method=problem.method,
        per_lane=most_of_lane(problem.experts),
        warps=tactic.warps,
    )


def _rejects(problem: TopkProblem, _tactic: TopkTactic, _arch: Arch) -> str | None:
    most = WARP * max(_PER_LANE)
    return f"a warp takes a token, and up to {most} experts" if problem.experts > most else None


def _geometry(problem: TopkProblem, tactic: TopkTactic, _arch: Arch) -> Geometry:
    return Geometry(grid=(ceil_div(problem.tokens, tactic.warps), 1, 1), block=(WARP * tactic.warps, 1, 1))


CHOICE = (
    Ptr("bias", "const void", "[experts] of bias_type; null: none"),
    Ptr("out_ids", "int32", "[tokens, top_k + shared]"),
    Ptr("out_weights", "Weight", "[tokens, top_k + shared]"),
    I64("bias_type", "0 float, 1 bf16, 2 f16"),
    I64("tokens"),
    I64("experts"),
    I64("top_k"),
    I64("renormalize", "0 or 1"),
    I64("groups", "1: none"),
    I64("topk_groups"),
    I64("shared", "0 or 1: whether the last logit is that of an expert which all tokens have"),
    F32("scale"),
)
"""The parameters of a choice, behind those of the logits."""


def bind_choice(arguments: TopkArguments | RouterArguments, experts: int) -> dict[str, Any]:
    """The values of CHOICE."""
    bias, ids = arguments.bias, arguments.out_ids
    return {
        "bias": bias,
        "out_ids": ids,
        "out_weights": arguments.out_weights,
        "bias_type": 0 if bias is None else list(FLOATS).index(bias.dtype),
        "tokens": ids.shape[0],
        "experts": experts,
        "top_k": ids.shape[1] - arguments.shared,
        "renormalize": int(arguments.renormalize),
        "groups": arguments.groups,
        "topk_groups": arguments.topk_groups,
        "shared": int(arguments.shared),
        "scale": arguments.scale,
    }


def _bind(arguments: TopkArguments, plan: Plan) -> dict[str, Any]:
    logits = arguments.logits
    return {"logits": logits, "logits_stride": logits.stride(0), **bind_choice(arguments, plan.problem.experts)}


TOPK = Kernel(
    name="experts/topk",
    spec=TopkSpec,
    params=(
        Ptr("logits", "const Logit", "[tokens, experts + shared]"),
        I64("logits_stride", "elements"),
        *CHOICE,
    ),
    tactics=(TopkTactic(1), TopkTactic(4), TopkTactic(8)),
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
)
