"""Parameters that kernels of products have in common, and what they are bound to."""

from __future__ import annotations

from typing import Any

from jitfp4.families.experts.arguments import DownArguments, ResultArguments, UpArguments
from jitfp4.families.experts.problem import Problem
from jitfp4.kernel import Plan
from jitfp4.spec import F32, I64, Ptr

WEIGHT = (
    Ptr("weight", "const uint8", "[experts, ceil(n / 64), ceil(k / 128), kTileBytes]"),
    Ptr("scale", "const float", "[experts, round_up(n, 64)]"),
    Ptr("bias", "const float", "as scale; null: none"),
)
IDS = (
    Ptr("ids", "const uint8", "[tokens, slots] of id_bytes bytes"),
    Ptr("expert_map", "const int32", "[ids_end]; null: the identity"),
)
ROUTING = (
    I64("id_bytes", "4 or 8"),
    I64("ids_end", "ids are below it, or skipped"),
    I64("experts"),
    I64("tokens"),
    I64("slots"),
)
RESIDUAL = Ptr("residual", "const In", "[tokens, n], added to the sums; null: none")
RESIDUAL_STRIDE = I64("residual_stride")
MATRIX = (I64("n", "rows of the weight"), I64("k", "columns, a multiple of 32"))
SWIGLU = (I64("counters"), F32("swiglu_alpha"), F32("swiglu_beta"), F32("swiglu_limit"))


def bind_routing(arguments: UpArguments | DownArguments, plan: Plan) -> dict[str, Any]:
    """IDS, ROUTING and MATRIX."""
    problem: Problem = plan.problem
    return {
        "ids": arguments.ids,
        "expert_map": arguments.expert_map,
        "id_bytes": arguments.ids.element_size(),
        "ids_end": problem.experts if arguments.expert_map is None else arguments.expert_map.shape[0],
        "experts": problem.experts,
        "tokens": problem.tokens,
        "slots": problem.slots,
        "n": problem.n,
        "k": problem.k,
    }


def bind_up(arguments: UpArguments) -> dict[str, Any]:
    """WEIGHT and SWIGLU of the product up, ``h`` and ``done``."""
    return {
        "weight": arguments.w13,
        "scale": arguments.scale13,
        "bias": arguments.bias13,
        "h": arguments.h,
        "done": arguments.done,
        "counters": arguments.done.shape[0],
        "swiglu_alpha": arguments.swiglu_alpha,
        "swiglu_beta": arguments.swiglu_beta,
        "swiglu_limit": arguments.swiglu_limit,
    }


def bind_down(arguments: DownArguments | ResultArguments) -> dict[str, Any]:
    """WEIGHT of the product down."""
    return {"weight": arguments.w2, "scale": arguments.scale2, "bias": arguments.bias2}


def bind_rows_up(arguments: UpArguments, plan: Plan) -> dict[str, Any]:
    """All of a kernel up that finds rows by their ids."""
    own = {"x": arguments.x, "input_weights": arguments.input_weights, "x_stride": arguments.x.stride(0)}
    return own | bind_up(arguments) | bind_routing(arguments, plan)


def bind_residual(arguments: DownArguments) -> dict[str, Any]:
    """RESIDUAL and its stride."""
    residual = arguments.residual
    return {"residual": residual, "residual_stride": 0 if residual is None else residual.stride(0)}


def bind_rows_down(arguments: DownArguments, plan: Plan) -> dict[str, Any]:
    """All of a kernel down that finds rows by their ids, and adds up slots that are finished."""
    own = {
        "x": arguments.h,
        "weights": arguments.weights,
        "y": arguments.y,
        "done": arguments.done,
        "out": arguments.out,
        "x_stride": arguments.h.stride(0),
        "out_stride": arguments.out.stride(0),
    }
    return own | bind_down(arguments) | bind_routing(arguments, plan) | bind_residual(arguments)
