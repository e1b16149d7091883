"""The kernel that normalises a few rows and multiplies them by a small matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

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
_BLOCK, _STEP = 16, 32  # rows and columns of the matrix that a warp loads at once
_STEPS = (2, 4, 6, 8, 12, 16)  # pairs


class Arguments(NamedTuple):
    """Rows [m, h] and a ``matrix`` [n, h] to ``out`` [m, h] and ``product`` [m, n]."""

    input: torch.Tensor
    weight: torch.Tensor
    matrix: torch.Tensor
    bias: torch.Tensor | None
    out: Written
    product: Written
    eps: float
    weight_bias: float
    enable_pdl: bool | None


class Problem(NamedTuple):
    """m rows of h elements, by n rows of the matrix."""

    in_dtype: DType
    out_dtype: DType
    m: int
    h: int
    n: int


@dataclass(frozen=True, slots=True)
class Tactic:
    """Warps of a CTA, which divide the columns of 16 rows of the matrix."""

    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A warp takes ``steps`` steps of 32 columns, by ``eights`` eights of rows."""

    in_dtype: DType
    out_dtype: DType
    steps: int
    eights: int
    warps: int

    def __post_init__(self) -> None:
        for name, allowed in (("steps", _STEPS), ("eights", (1, 2)), ("warps", (8, 16))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")


TACTICS = (Tactic(8), Tactic(16))
TABLE = Table((Row(Tactic(8), {"h": 2048}), Row(Tactic(16))), measured=None)


def problem(arguments: Arguments) -> Problem:
    """The problem of a call."""
    m, h = arguments.out.shape
    dtypes = HALVES[arguments.out.dtype], FLOATS[arguments.product.dtype]
    return Problem(*dtypes, m, h, arguments.matrix.shape[0])


def problems(_arch: Arch) -> Iterator[Problem]:
    """Both numbers of eights, of models' sizes."""
    for in_dtype, m in product(HALVES.values(), (8, MOST_ROWS)):
        for out_dtype in (in_dtype, DType.F32):
            yield from (Problem(in_dtype, out_dtype, m, h, n) for h, n in ((2048, 64), (2880, 128)))


def _specialise(problem: Problem, tactic: Tactic) -> Spec:
    return Spec(
        in_dtype=problem.in_dtype,
        out_dtype=problem.out_dtype,
        steps=next(steps for steps in _STEPS if problem.h <= _STEP * tactic.warps * steps),
        eights=ceil_div(problem.m, 8),
        warps=tactic.warps,
    )


def _rejects(problem: Problem, _tactic: Tactic, _arch: Arch) -> str | None:
    if problem.m > MOST_ROWS or problem.h > MOST_HIDDEN or problem.m * problem.h > MOST_ELEMENTS:
        return f"it has up to {MOST_ROWS} rows of up to {MOST_HIDDEN} elements, {MOST_ELEMENTS} together"
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
        "m": plan.problem.m,
        "h": plan.problem.h,
        "n": plan.problem.n,
        "x_stride": a.input.stride(0),
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
        I64("m"),
        I64("h"),
        I64("n"),
        I64("x_stride", "elements"),
        F32("eps"),
        F32("weight_bias"),
    ),
    tactics=TACTICS,
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
)
