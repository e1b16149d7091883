"""FP4 with block scales to fp16 or bf16: the left operand of wide_fp4."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import Arch, names_with
from jitfp4.families.gemm.arguments import ExpandArguments
from jitfp4.families.gemm.problem import ExpandProblem
from jitfp4.formats import NVFP4, BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr
from jitfp4.weight import TILE_COLS


@dataclass(frozen=True, slots=True)
class ExpandTactic:
    """The rows that a CTA takes."""

    tile_m: int


TACTICS = tuple(ExpandTactic(tile_m) for tile_m in (1, 2, 4, 8, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandSpec(KernelSpec):
    """A CTA takes ``tile_m`` rows by ``steps`` steps of 128 columns, with eight threads for each step of a row."""

    dtype: DType
    format: BlockFormat
    a_layout: SfLayout
    tile_m: int

    threads = 256

    @property
    def steps(self) -> int:
        return self.threads // 8 // self.tile_m


def dtype_of(block_format: BlockFormat) -> DType:
    """The type that operands are multiplied in: fp16 has the range of NVFP4, and bf16 that of MXFP4."""
    return DType.F16 if block_format is NVFP4 else DType.BF16


def specialise(problem: ExpandProblem, tactic: ExpandTactic) -> ExpandSpec:
    """The spec of a tactic for a problem."""
    dtype = dtype_of(problem.format)
    return ExpandSpec(dtype=dtype, format=problem.format, a_layout=problem.a_layout, **asdict(tactic))


def rejects(problem: ExpandProblem, tactic: ExpandTactic, arch: Arch) -> str | None:  # noqa: ARG001
    """Why a tactic cannot run a problem on an architecture."""
    return None if arch.has_wgmma else f"only a kernel of {names_with('has_wgmma')} takes what it writes"


def geometry(problem: ExpandProblem, tactic: ExpandTactic, arch: Arch) -> Geometry:  # noqa: ARG001
    """Grid: x over rows, y over columns."""
    spec = specialise(problem, tactic)
    grid = (ceil_div(problem.m, spec.tile_m), ceil_div(problem.k, TILE_COLS * spec.steps), 1)
    return Geometry(grid=grid, block=(8 * spec.steps, spec.tile_m, 1))


def _bind(arguments: ExpandArguments, plan: Plan) -> dict[str, Any]:
    return {
        "a": arguments.a,
        "scales": arguments.a_descale,
        "x": arguments.x,
        "m": plan.problem.m,
        "k": plan.problem.k,
        "a_stride": arguments.a.stride(0),
        "x_stride": arguments.x.stride(0),
    }


KERNEL = Kernel(
    name="gemm/expand",
    spec=ExpandSpec,
    params=(
        Ptr("a", "const uint8", "[m, k / 2]"),
        Ptr("scales", "const uint8", "in kLayout"),
        Ptr("x", "Out", "[m, round_up(k, 128)]"),
        I64("m"),
        I64("k", "a multiple of 32"),
        I64("a_stride", "bytes"),
        I64("x_stride", "elements"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
