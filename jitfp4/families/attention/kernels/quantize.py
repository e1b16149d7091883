"""attention/quantize: outputs to NVFP4, behind the attention that wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.attention.arguments import OutputArguments
from jitfp4.families.attention.problem import OutputProblem
from jitfp4.formats import NVFP4, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.spec import F32, I64, Geometry, KernelSpec, Ptr

_MOST_BLOCKS = 1 << 32  # the kernel counts them in 32 bits


@dataclass(frozen=True, slots=True)
class OutputTactic:
    """The kernel has one shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec(KernelSpec):
    """A thread quantizes a block."""

    dtype: DType

    threads = 128


def _geometry(problem: OutputProblem, _tactic: OutputTactic, _arch: Arch) -> Geometry:
    ctas = ceil_div(problem.rows * problem.cols, OutputSpec.threads)
    return Geometry(grid=(ctas, 1, 1), block=(OutputSpec.threads, 1, 1))


def _rejects(problem: OutputProblem, _tactic: OutputTactic, _arch: Arch) -> str | None:
    blocks = problem.rows * problem.cols + OutputSpec.threads
    return f"it counts at most {_MOST_BLOCKS} blocks" if blocks > _MOST_BLOCKS else None


def _bind(arguments: OutputArguments, plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.x,
        "q": arguments.out,
        "sf": arguments.out_scales,
        "rows": plan.problem.rows,
        "cols": plan.problem.cols,
        "first_row": arguments.first_row,
        "encode_scale": arguments.encode_scale,
    }


KERNEL = Kernel(
    name="attention/quantize",
    spec=OutputSpec,
    params=(
        Ptr("x", "const In", f"[rows, cols * {NVFP4.block}]"),
        Ptr("q", "uint8", f"[rows, cols * {NVFP4.block // 2}], low nibble first"),
        Ptr("sf", "uint8", "E4M3 scales in the 128x4 layout, of first_row + rows rows or more"),
        I64("rows"),
        I64("cols", "blocks of a row"),
        I64("first_row"),
        F32("encode_scale"),
    ),
    tactics=(OutputTactic(),),
    rejects=_rejects,
    specialise=lambda problem, _tactic: OutputSpec(dtype=problem.dtype),
    geometry=_geometry,
    bind=_bind,
)
