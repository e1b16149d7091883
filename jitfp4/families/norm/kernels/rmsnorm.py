"""The kernel that normalises rows to 16-bit floats: its problems, tactics, spec, launches and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.norm.problem import MAX_HIDDEN, TURN, UNIT
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.operation import Written
from jitfp4.selection import Row, Table
from jitfp4.spec import F32, I64, WARP, Geometry, KernelSpec, Ptr


class Arguments(NamedTuple):
    """Rows [m, h]: ``input``, or None where ``out`` holds it and is overwritten; ``residual`` or None.

    ``gate`` [b, s, h], b * s = m, with any strides of b and s, or None.
    """

    input: torch.Tensor | None
    residual: Written | None
    weight: torch.Tensor
    gate: torch.Tensor | None
    out: Written
    eps: float
    weight_bias: float
    enable_pdl: bool | None
    names: str


class Problem(NamedTuple):
    """m rows of h elements, with an addition to a residual before, or a gate behind."""

    in_dtype: DType
    add: bool
    gate: bool
    m: int
    h: int


@dataclass(frozen=True, slots=True)
class Tactic:
    """The tunable fields of Spec."""

    units: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A row is shared by up to ``warps`` warps, whose threads hold ``units`` units of 16 elements each.

    With one warp and one unit, several rows may share a warp.
    """

    in_dtype: DType
    add: bool
    gate: bool
    units: int
    warps: int

    def __post_init__(self) -> None:
        for name in ("units", "warps"):
            if getattr(self, name) not in (1, 2, 4, 8, 16):
                raise ArgumentError(name, getattr(self, name), "1, 2, 4, 8 or 16")

    @property
    def max_threads(self) -> int:
        """The most threads of a CTA. Where one warp takes a row, a CTA has four warps."""
        return WARP * (4 if self.warps == 1 else self.warps)


TACTICS = tuple(Tactic(units, warps) for units, warps in ((1, 1), (2, 1), (1, 8), (1, 16), (2, 16), (4, 16), (8, 16)))
TABLE = Table(tuple(Row(tactic, {"h": TURN * tactic.units * tactic.warps}) for tactic in TACTICS), measured=None)


def problem(arguments: Arguments) -> Problem:
    """The problem of a call."""
    m, h = arguments.out.shape
    return Problem(HALVES[arguments.out.dtype], arguments.residual is not None, arguments.gate is not None, m, h)


def problems(_arch: Arch) -> Iterator[Problem]:
    """A row of each tactic's length, for each type and each use."""
    lengths = [min(MAX_HIDDEN, TURN * tactic.units * tactic.warps) for tactic in TACTICS]
    uses = ((False, False), (True, False), (False, True))
    for in_dtype, (add, gate), h in product(HALVES.values(), uses, lengths):
        yield Problem(in_dtype, add, gate, m=1, h=h)


def specialise(problem: Problem, tactic: Tactic) -> Spec:
    """The spec of a tactic for a problem."""
    return Spec(in_dtype=problem.in_dtype, add=problem.add, gate=problem.gate, **asdict(tactic))


def rejects(problem: Problem, tactic: Tactic, _arch: Arch) -> str | None:
    """Why a tactic cannot hold the rows of a problem."""
    capacity = TURN * tactic.units * tactic.warps
    return f"it holds rows of at most {capacity} elements" if problem.h > capacity else None


def row_threads(h: int, units: int, warps: int) -> int:
    """Threads of a CTA that share a row: a power of two within a warp, or whole warps."""
    if warps == 1 and units == 1:
        return 1 << (ceil_div(h, UNIT) - 1).bit_length()
    return WARP * ceil_div(h, TURN * units)


def geometry(problem: Problem, tactic: Tactic, _arch: Arch) -> Geometry:
    """A CTA for each row, or for four warps of rows."""
    spec = specialise(problem, tactic)
    share = row_threads(problem.h, spec.units, spec.warps)
    threads = share if spec.warps > 1 else spec.max_threads
    return Geometry(grid=(ceil_div(problem.m * share, threads), 1, 1), block=(threads, 1, 1))


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    gate, x = arguments.gate, arguments.out if arguments.input is None else arguments.input
    return {
        "x": x,
        "residual": arguments.residual,
        "weight": arguments.weight,
        "gate": gate,
        "y": arguments.out,
        "m": plan.problem.m,
        "h": plan.problem.h,
        "x_stride": x.stride(0),
        "gate_rows": 1 if gate is None else gate.shape[1],
        "gate_stride": 0 if gate is None else gate.stride(1),
        "gate_outer_stride": 0 if gate is None else gate.stride(0),
        "row_threads": row_threads(plan.problem.h, plan.spec.units, plan.spec.warps),
        "eps": arguments.eps,
        "weight_bias": arguments.weight_bias,
    }


KERNEL = Kernel(
    name="norm/rmsnorm",
    spec=Spec,
    params=(
        Ptr("x", "const In", "[m, h]"),
        Ptr("residual", "In", "[m, h], updated in place; null without an addition"),
        Ptr("weight", "const In", "[h]"),
        Ptr("gate", "const In", "[m / gate_rows, gate_rows, h]; null without a gate"),
        Ptr("y", "In", "[m, h]; may be x"),
        I64("m"),
        I64("h"),
        I64("x_stride", "elements"),
        I64("gate_rows"),
        I64("gate_stride"),
        I64("gate_outer_stride"),
        I64("row_threads"),
        F32("eps"),
        F32("weight_bias"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
