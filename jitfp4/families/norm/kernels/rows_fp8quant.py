"""The kernel that quantizes rows, normalised or as they are, to E4M3: its problems, tactics, spec and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.norm.kernels.rmsnorm import row_threads
from jitfp4.families.norm.problem import MAX_HIDDEN, TURN
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.operation import Written
from jitfp4.selection import Row, Table
from jitfp4.spec import F32, I64, WARP, Geometry, KernelSpec, Ptr


class Fp8Arguments(NamedTuple):
    """Rows [m, h], what is added to them, and their weights, both or each None; E4M3 as bytes, and a scale a row."""

    input: torch.Tensor
    residual: Written | None
    weight: torch.Tensor | None
    y_fp8: Written
    y_scale: Written
    eps: float
    enable_pdl: bool | None
    names: str


class Fp8Problem(NamedTuple):
    """m rows of h elements; with a norm, and an addition to a residual before that."""

    in_dtype: DType
    norm: bool
    add: bool
    m: int
    h: int


@dataclass(frozen=True, slots=True)
class Fp8Tactic:
    """The tunable fields of Fp8Spec."""

    units: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Spec(KernelSpec):
    """A row is shared by up to ``warps`` warps, whose threads hold ``units`` units of 16 elements each.

    With one warp and one unit, several rows may share a warp.
    """

    in_dtype: DType
    norm: bool
    add: bool
    units: int
    warps: int

    @property
    def max_threads(self) -> int:
        """The most threads of a CTA. Where one warp takes a row, a CTA has four warps."""
        return WARP * (4 if self.warps == 1 else self.warps)


TACTICS = tuple(
    Fp8Tactic(units, warps) for units, warps in ((1, 1), (2, 1), (1, 8), (1, 16), (2, 16), (4, 16), (8, 16))
)
TABLE = Table(tuple(Row(tactic, {"h": TURN * tactic.units * tactic.warps}) for tactic in TACTICS), measured=None)


def problem(arguments: Fp8Arguments) -> Fp8Problem:
    """The problem of a call."""
    m, h = arguments.input.shape
    norm, add = arguments.weight is not None, arguments.residual is not None
    return Fp8Problem(HALVES[arguments.input.dtype], norm, add, m, h)


def problems(_arch: Arch) -> Iterator[Fp8Problem]:
    """A row of each tactic's length, for each type and each use."""
    lengths = [min(MAX_HIDDEN, TURN * tactic.units * tactic.warps) for tactic in TACTICS]
    uses = ((False, False), (True, False), (True, True))
    for in_dtype, (norm, add), h in product(HALVES.values(), uses, lengths):
        yield Fp8Problem(in_dtype, norm, add, m=1, h=h)


def specialise(problem: Fp8Problem, tactic: Fp8Tactic) -> Fp8Spec:
    """The spec of a tactic for a problem."""
    return Fp8Spec(in_dtype=problem.in_dtype, norm=problem.norm, add=problem.add, **asdict(tactic))


def rejects(problem: Fp8Problem, tactic: Fp8Tactic, _arch: Arch) -> str | None:
    """Why a tactic cannot hold the rows of a problem."""
    capacity = TURN * tactic.units * tactic.warps
    return f"it holds rows of at most {capacity} elements" if problem.h > capacity else None


def geometry(problem: Fp8Problem, tactic: Fp8Tactic, _arch: Arch) -> Geometry:
    """A CTA for each row, or for four warps of rows."""
    spec = specialise(problem, tactic)
    share = row_threads(problem.h, spec.units, spec.warps)
    threads = share if spec.warps > 1 else spec.max_threads
    return Geometry(grid=(ceil_div(problem.m * share, threads), 1, 1), block=(threads, 1, 1))


def _bind(arguments: Fp8Arguments, plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.input,
        "residual": arguments.residual,
        "weight": arguments.weight,
        "y": arguments.y_fp8,
        "y_scale": arguments.y_scale,
        "m": plan.problem.m,
        "h": plan.problem.h,
        "x_stride": arguments.input.stride(0),
        "row_threads": row_threads(plan.problem.h, plan.spec.units, plan.spec.warps),
        "eps": arguments.eps,
    }


KERNEL = Kernel(
    name="norm/rows_fp8quant",
    spec=Fp8Spec,
    params=(
        Ptr("x", "const In", "[m, h]"),
        Ptr("residual", "In", "[m, h], updated in place; null without an addition"),
        Ptr("weight", "const In", "[h]; null without a norm"),
        Ptr("y", "uint8", "[m, h], E4M3"),
        Ptr("y_scale", "float", "[m], decode"),
        I64("m"),
        I64("h"),
        I64("x_stride", "elements"),
        I64("row_threads"),
        F32("eps"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
