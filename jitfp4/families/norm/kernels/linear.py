"""The kernel that normalises a few rows, multiplies them by a small matrix, and may choose experts by the product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from jitfp4 import counters, replay
from jitfp4.arch import Arch
from jitfp4.dtypes import FLOATS, HALVES
from jitfp4.errors import ArgumentError
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.operation import Written
from jitfp4.selection import Row, Table
from jitfp4.spec import F32, I64, WARP, Geometry, KernelSpec, Ptr

MOST_ROWS = 16
MOST_ELEMENTS = 48 << 10  # of all rows, which lie in shared memory
MOST_HIDDEN = 4096
MOST_TAKEN = WARP - 1  # a lane has a slot, and the shared expert has one
MOST_PRODUCTS = counters.COUNTER_BYTES // 4  # among which experts are chosen
_BLOCK, _STEP = 16, 32  # rows and columns of the matrix that a warp loads at once
_STEPS, _PER_LANE = (2, 4, 6, 8, 12, 16), (0, 2, 4, 8, 16, 32)  # steps are pairs
MOST_EXPERTS = WARP * _PER_LANE[-1]


class Arguments(NamedTuple):
    """Rows [m, h] and a ``matrix`` [n, h] to ``out`` [m, h] and ``product`` [m, n]; the choice of experts, or None."""

    input: torch.Tensor
    weight: torch.Tensor
    matrix: torch.Tensor
    bias: torch.Tensor | None
    out: Written
    product: Written
    ids: Written | None
    weights: Written | None
    eps: float
    weight_bias: float
    top_k: int
    shared: bool
    renormalize: bool
    enable_pdl: bool | None
    names: str


class Problem(NamedTuple):
    """m rows of h elements, by n rows of the matrix, among whose products experts are chosen or not."""

    in_dtype: DType
    out_dtype: DType
    choose: bool
    m: int
    h: int
    n: int


@dataclass(frozen=True, slots=True)
class Tactic:
    """Warps of a CTA, which divide the columns of 16 rows of the matrix."""

    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A warp takes ``steps`` steps of 32 columns, by ``eights`` eights of rows.

    A lane has ``per_lane`` experts; 0: none are chosen.
    """

    in_dtype: DType
    out_dtype: DType
    steps: int
    eights: int
    warps: int
    per_lane: int

    def __post_init__(self) -> None:
        for name, allowed in (("steps", _STEPS), ("eights", (1, 2)), ("per_lane", _PER_LANE), ("warps", (8, 16))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")


TACTICS = (Tactic(8), Tactic(16))
TABLE = Table((Row(Tactic(8), {"h": 2048}), Row(Tactic(16))), measured=None)


def problem(arguments: Arguments) -> Problem:
    """The problem of a call."""
    m, h = arguments.out.shape
    dtypes = HALVES[arguments.out.dtype], FLOATS[arguments.product.dtype]
    return Problem(*dtypes, arguments.ids is not None, m, h, arguments.matrix.shape[0])


def problems(_arch: Arch) -> Iterator[Problem]:
    """Both numbers of eights, of models' sizes."""
    for in_dtype, m in product(HALVES.values(), (8, MOST_ROWS)):
        yield from (Problem(in_dtype, out_dtype, False, m, 2048, 64) for out_dtype in (in_dtype, DType.F32))
        yield from (Problem(in_dtype, DType.F32, True, m, h, n) for h, n in ((2048, 513), (2048, 128), (2880, 128)))


def _specialise(problem: Problem, tactic: Tactic) -> Spec:
    return Spec(
        in_dtype=problem.in_dtype,
        out_dtype=problem.out_dtype,
        steps=next(steps for steps in _STEPS if problem.h <= _STEP * tactic.warps * steps),
        eights=ceil_div(problem.m, 8),
        warps=tactic.warps,
        per_lane=next(count for count in _PER_LANE[1:] if problem.n <= WARP * count + 1) if problem.choose else 0,
    )


def _rejects(problem: Problem, _tactic: Tactic, _arch: Arch) -> str | None:
    if problem.m > MOST_ROWS or problem.h > MOST_HIDDEN or problem.m * problem.h > MOST_ELEMENTS:
        return f"it has up to {MOST_ROWS} rows of up to {MOST_HIDDEN} elements, {MOST_ELEMENTS} together"
    if problem.choose and (problem.n > MOST_EXPERTS + 1 or problem.m * problem.n > MOST_PRODUCTS):
        return f"a warp chooses among up to {MOST_EXPERTS} experts, a CTA among {MOST_PRODUCTS}"
    return None


def _geometry(problem: Problem, tactic: Tactic, _arch: Arch) -> Geometry:
    """CTAs for all rows of the matrix."""
    grid = (ceil_div(problem.n, _BLOCK), 1, 1)
    pitch = round_up(2 * problem.h, 128) + 64
    return Geometry(grid=grid, block=(WARP * tactic.warps, 1, 1), shared_bytes=problem.m * pitch)


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    a = arguments
    return {
        "x": a.input,
        "weight": a.weight,
        "matrix": a.matrix,
        "bias": a.bias,
        "y": a.out,
        "product": a.product,
        "ids": a.ids,
        "weights": a.weights,
        "keys": replay.companion(counters.of, a.product) if plan.problem.choose else None,
        "m": plan.problem.m,
        "h": plan.problem.h,
        "n": plan.problem.n,
        "x_stride": a.input.stride(0),
        "top_k": a.top_k,
        "shared": int(a.shared),
        "renormalize": int(a.renormalize),
        "eps": a.eps,
        "weight_bias": a.weight_bias,
    }


KERNEL = Kernel(
    name="norm/linear",
    spec=Spec,
    params=(
        Ptr("x", "const In", "[m, h]"),
        Ptr("weight", "const In", "[h]"),
        Ptr("matrix", "const In", "[n, h]"),
        Ptr("bias", "const In", "[n]; null: none"),
        Ptr("y", "In", "[m, h]"),
        Ptr("product", "Out", "[m, n]"),
        Ptr("ids", "int32", "[m, top_k + shared]; null where none are chosen"),
        Ptr("weights", "float", "[m, top_k + shared]; null where none are chosen"),
        Ptr("keys", "uint32", "[m, n], 0; null where none are chosen"),
        I64("m"),
        I64("h"),
        I64("n"),
        I64("x_stride", "elements"),
        I64("top_k"),
        I64("shared", "0 or 1: whether the last row of the matrix is a shared expert's"),
        I64("renormalize", "0 or 1"),
        F32("eps"),
        F32("weight_bias"),
    ),
    tactics=TACTICS,
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
)
