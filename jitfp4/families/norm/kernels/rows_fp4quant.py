"""The kernel that normalises rows and quantizes them, with a CTA for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.norm.arguments import Arguments
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import PARAMS, bind
from jitfp4.families.norm.problem import TURN, UNIT, Problem, Scale
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.spec import I64, WARP, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class RowsTactic:
    """The tunable field of RowsSpec."""

    units: int


TACTICS = (RowsTactic(1), RowsTactic(2), RowsTactic(4))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSpec(KernelSpec):
    """A row is shared by up to ``warps`` warps, whose threads hold ``units`` units of 16 elements each.

    With a ``gate``, each head of a row is normalised by itself.
    """

    in_dtype: DType
    block: int
    scale: Scale
    add: bool
    gate: bool
    units: int

    warps = 8  # of a CTA, at most

    @property
    def min_ctas(self) -> int:
        """CTAs that an SM must hold at once. They leave a thread 64, 80 or 128 registers, as its units need."""
        threads = {1: 1024, 2: 768 if self.add or self.gate else 1024}.get(self.units, 512)
        return threads // (WARP * self.warps)


def specialise(problem: Problem, tactic: RowsTactic) -> RowsSpec:
    """The spec of a tactic for a problem."""
    return RowsSpec(
        in_dtype=problem.in_dtype,
        block=problem.block,
        scale=problem.scale,
        add=problem.add,
        gate=problem.gate,
        units=tactic.units,
    )


def rejects(problem: Problem, tactic: RowsTactic, _arch: Arch) -> str | None:
    """Why a tactic cannot hold the rows of a problem."""
    capacity = TURN * tactic.units * RowsSpec.warps
    return f"it holds rows of at most {capacity} elements" if problem.h > capacity else None


def geometry(problem: Problem, tactic: RowsTactic, _arch: Arch) -> Geometry:
    """A CTA for each row, also for the padding of the scales."""
    rows = SfLayout.layout_128x4.shape(problem.m, 1)[0] if problem.padded else problem.m
    return Geometry(grid=(rows, 1, 1), block=(WARP * ceil_div(problem.h, TURN * tactic.units), 1, 1))


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return bind(arguments, plan) | {"gate": arguments.gate, "head_units": arguments.weight.shape[0] // UNIT}


KERNEL = Kernel(
    name="norm/rows_fp4quant",
    spec=RowsSpec,
    params=(
        *PARAMS,
        Ptr("gate", "const In", "[m, h]; with it, weight is that of a head; or null"),
        I64("head_units", "of the elements that are normalised together, with a gate"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
