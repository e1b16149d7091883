"""The kernel of mm_fp4 for sm_90a, and the one that expands its left operand: specs, and geometry of launches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from jitfp4.arch import Arch
from jitfp4.families.gemm import wide
from jitfp4.families.gemm.fp4_problem import Fp4Problem
from jitfp4.families.gemm.wide import WIDE_TILE_MS, WideSpec, WideTactic
from jitfp4.formats import NVFP4, BlockFormat, DType
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.spec import Geometry, KernelSpec
from jitfp4.weight import CODE_BYTES, TILE_COLS

_SCALE_ROWS = 128  # of a tile of scales


def dtype_of(block_format: BlockFormat) -> DType:
    """The type that operands are multiplied in: fp16 has the range of NVFP4, and bf16 that of MXFP4."""
    return DType.F16 if block_format is NVFP4 else DType.BF16


# ---- the product -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4WideSpec(WideSpec):
    """A WideSpec whose weight is b, as the quantizers leave it."""

    packed = True

    @property
    def tile_bytes(self) -> int:
        return CODE_BYTES + _SCALE_ROWS * TILE_COLS // self.format.block

    @property
    def scale_words(self) -> int:
        """Words of 8 bytes of a tile's scales."""
        return (self.tile_bytes - CODE_BYTES) // 8


def specialise(problem: Fp4Problem, tactic: WideTactic) -> Fp4WideSpec:
    """The spec of a tactic for a problem."""
    dtype = dtype_of(problem.format)
    return Fp4WideSpec(dtype=dtype, out_dtype=problem.out_dtype, format=problem.format, **asdict(tactic))


def rejects(problem: Fp4Problem, tactic: WideTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture. The smallest tiles take any number of rows."""
    return wide.rejects(problem._replace(m=max(problem.m, WIDE_TILE_MS[0])), tactic, arch)


def geometry(problem: Fp4Problem, tactic: WideTactic, arch: Arch) -> Geometry:
    """The geometry of a tactic for a problem."""
    return wide.launch(specialise(problem, tactic), problem, arch)


# ---- the expansion ---------------------------------------------------------------------------------------------------


class ExpandProblem(NamedTuple):
    """x [m, k] in fp16 or bf16 from FP4 with block scales."""

    format: BlockFormat
    a_layout: SfLayout
    m: int
    k: int


@dataclass(frozen=True, slots=True)
class ExpandTactic:
    """The rows that a CTA takes."""

    tile_m: int


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


def specialise_expand(problem: ExpandProblem, tactic: ExpandTactic) -> ExpandSpec:
    """The spec of a tactic for a problem."""
    dtype = dtype_of(problem.format)
    return ExpandSpec(dtype=dtype, format=problem.format, a_layout=problem.a_layout, **asdict(tactic))


def rejects_expand(problem: ExpandProblem, tactic: ExpandTactic, arch: Arch) -> str | None:  # noqa: ARG001
    """Why a tactic cannot run a problem on an architecture."""
    return None if arch.name == "sm_90a" else "only a kernel of sm_90a takes what it writes"


def geometry_expand(problem: ExpandProblem, tactic: ExpandTactic, arch: Arch) -> Geometry:  # noqa: ARG001
    """Grid: x over rows, y over columns."""
    spec = specialise_expand(problem, tactic)
    grid = (ceil_div(problem.m, spec.tile_m), ceil_div(problem.k, TILE_COLS * spec.steps), 1)
    return Geometry(grid=grid, block=(8 * spec.steps, spec.tile_m, 1))
