"""experts/router: the logits of a few tokens, by CTAs that divide the experts, and the choice by those behind them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from jitfp4 import counters, replay
from jitfp4.arch import Arch
from jitfp4.dtypes import FLOATS
from jitfp4.families.experts.kernels.topk import CHOICE, bind_choice, most_of_lane
from jitfp4.families.experts.router_problem import COLUMNS, MOST_HIDDEN, MOST_TOKENS, RouterArguments, RouterProblem
from jitfp4.families.experts.topk_problem import Method
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.spec import I64, WARP, Geometry, KernelSpec, Ptr

_WORDS = counters.COUNTER_BYTES // 4
_VECTORS = (1, 2, 4, 8)
_TOKENS = 8
_CHOICES = 4  # tokens of a CTA that chooses
_REGISTERS = 64  # of a thread, for the weight


@dataclass(frozen=True, slots=True)
class RouterTactic:
    """Experts of a CTA that multiplies, and threads."""

    rows: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec(KernelSpec):
    """A thread has ``vectors`` times eight columns of ``rows`` experts, and multiplies ``tokens`` tokens at a time. A
    lane chooses among ``per_lane`` experts.
    """

    dtype: DType
    weight: DType
    logits: DType
    weights: DType
    method: Method
    per_lane: int
    tokens: int
    vectors: int
    rows: int
    threads: int


def _vectors(problem: RouterProblem, tactic: RouterTactic) -> int:
    return ceil_div(problem.hidden, COLUMNS * tactic.threads)


def _tile(problem: RouterProblem, tactic: RouterTactic) -> int:
    """Tokens that are multiplied at a time: a lane of each warp has a sum for one of them and one row."""
    return min(1 << (problem.tokens - 1).bit_length(), _TOKENS, WARP // tactic.rows)


def _specialise(problem: RouterProblem, tactic: RouterTactic) -> RouterSpec:
    return RouterSpec(
        dtype=problem.dtype,
        weight=problem.weight,
        logits=problem.logits,
        weights=problem.weights,
        method=problem.method,
        per_lane=most_of_lane(problem.experts),
        tokens=_tile(problem, tactic),
        vectors=next(size for size in _VECTORS if _vectors(problem, tactic) <= size),
        rows=tactic.rows,
        threads=tactic.threads,
    )


def most_tokens(experts: int, hidden: int) -> int:
    """Of a launch that multiplies and chooses; 0 where there is none."""
    return min(MOST_TOKENS, _WORDS // experts) if hidden <= MOST_HIDDEN else 0


def _rejects(problem: RouterProblem, tactic: RouterTactic, _arch: Arch) -> str | None:
    if problem.tokens > most_tokens(problem.experts + problem.shared, problem.hidden):
        return f"it is for up to {MOST_TOKENS} tokens, {_WORDS} logits and {MOST_HIDDEN} columns"
    registers = _vectors(problem, tactic) * tactic.rows * (8 if problem.weight == DType.F32 else 4)
    if _vectors(problem, tactic) > max(_VECTORS) or registers > _REGISTERS:
        return f"{tactic.rows} rows of {problem.hidden} columns do not fit in the registers of {tactic.threads} threads"
    return None


def _geometry(problem: RouterProblem, tactic: RouterTactic, _arch: Arch) -> Geometry:
    choices = ceil_div(problem.tokens, _CHOICES)
    grid = ceil_div(problem.experts + problem.shared, tactic.rows) + choices
    return Geometry(grid=(grid, 1, 1), block=(tactic.threads, 1, 1))


def _bind(arguments: RouterArguments, plan: Plan) -> dict[str, Any]:
    x, logits, logit_bias = arguments.x, arguments.logits, arguments.logit_bias
    return {
        "x": x,
        "weight": arguments.weight,
        "logit_bias": logit_bias,
        "logits": logits,
        "words": replay.companion(counters.of, arguments.out_ids),
        "x_stride": x.stride(0),
        "hidden": x.shape[1],
        "logit_bias_type": 0 if logit_bias is None else list(FLOATS).index(logit_bias.dtype),
        "logits_stride": 0 if logits is None else logits.stride(0),
        **bind_choice(arguments, plan.problem.experts),
    }


ROUTER = Kernel(
    name="experts/router",
    spec=RouterSpec,
    params=(
        Ptr("x", "const In", "[tokens, hidden]"),
        Ptr("weight", "const Operand", "[experts, hidden]"),
        Ptr("logit_bias", "const void", "[experts] of logit_bias_type; null: none"),
        Ptr("logits", "Logit", "[tokens, experts]; null: nobody wants them"),
        Ptr("words", "uint32", "[tokens, experts], zero between launches"),
        I64("x_stride", "elements"),
        I64("hidden", "a multiple of 8"),
        I64("logit_bias_type", "as bias_type"),
        I64("logits_stride", "elements"),
        *CHOICE,
    ),
    tactics=tuple(RouterTactic(*cut) for cut in product((1, 2, 4, 8), (128, 256, 512))),
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
)
