"""experts/quantize: rows of activations in the order of the list of items, in E4M3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch, names_with
from jitfp4.families.experts.arguments import GatherArguments
from jitfp4.families.experts.kernels import gather
from jitfp4.families.experts.problem import GatherProblem
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class QuantizeTactic:
    """The kernel has one shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSpec(KernelSpec):
    """A warp has a row."""

    dtype: DType

    warps = 8


def _geometry(problem: GatherProblem, _tactic: QuantizeTactic, _arch: Arch) -> Geometry:
    """Grid: x over items, y over rows of an item."""
    grid = (problem.items, ceil_div(problem.item_rows, QuantizeSpec.warps), 1)
    return Geometry(grid=grid, block=(32 * QuantizeSpec.warps, 1, 1))


def _rejects(problem: GatherProblem, _tactic: QuantizeTactic, arch: Arch) -> str | None:
    if not problem.fp8:
        return "rows stay in 16 bits"
    return None if arch.has_wgmma else f"its rows are for products of {names_with('has_wgmma')}"


def _bind(arguments: GatherArguments, plan: Plan) -> dict[str, Any]:
    return {**gather.bind(arguments, plan), "scales": arguments.scales}


QUANTIZE = Kernel(
    name="experts/quantize",
    spec=QuantizeSpec,
    params=(
        Ptr("x", "const In", "[tokens, k]"),
        Ptr("input_weights", "const float", "[tokens, slots], factors of x; null: none"),
        Ptr("items", "const int4", "[gridDim.x]"),
        Ptr("order", "const int32", "[tokens * slots]; null: rows of x have the order of the list"),
        Ptr("rows", "uint8", "[tokens * slots, k]"),
        Ptr("scales", "float", "[tokens * slots]"),
        I64("slots", "of a token"),
        I64("k", "columns, a multiple of 32"),
        I64("x_stride", "elements"),
    ),
    tactics=(QuantizeTactic(),),
    rejects=_rejects,
    specialise=lambda problem, _tactic: QuantizeSpec(dtype=problem.dtype),
    geometry=_geometry,
    bind=_bind,
)
