"""E4M3 to NVFP4 by a table of thresholds, on GPUs without an instruction for E2M1."""

from __future__ import annotations

from dataclasses import dataclass

from jitfp4.arch import Arch
from jitfp4.families.quantize.launches import SF, Q, bind_rows, sector_geometry
from jitfp4.families.quantize.problem import Problem
from jitfp4.formats import DType
from jitfp4.kernel import Kernel
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.spec import I64, WARP, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class TableTactic:
    """Blocks of a thread, and CTAs of an SM."""

    blocks_per_thread: int
    ctas_per_sm: int


TACTICS = (TableTactic(4, ctas_per_sm=4), TableTactic(2, ctas_per_sm=4))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec(KernelSpec):
    """E4M3 to NVFP4 by a table of thresholds, which each CTA computes; for GPUs without an instruction for E2M1."""

    sf_layout: SfLayout
    blocks_per_thread: int

    threads = 256  # of a CTA


def specialise(problem: Problem, tactic: TableTactic) -> TableSpec:
    return TableSpec(sf_layout=problem.sf_layout, blocks_per_thread=tactic.blocks_per_thread)


def rejects(problem: Problem, _tactic: TableTactic, arch: Arch) -> str | None:
    if arch.has_e2m1_cvt:
        return "the GPU converts to E2M1 itself"
    if problem.in_dtype is not DType.E4M3 or problem.by_row:
        return "it takes E4M3 with one global scale"
    return None


def geometry(problem: Problem, tactic: TableTactic, arch: Arch) -> Geometry:
    """Persistent CTAs, so that a table serves many blocks."""
    per_cta = sector_geometry(
        problem.sf_layout,
        m=problem.m,
        cols=problem.cols,
        sectors_per_warp=tactic.blocks_per_thread,
        threads=WARP,
    )  # with CTAs of one warp, the grid has one CTA for each task
    tasks = per_cta.grid[0] * per_cta.grid[1] * per_cta.grid[2]
    ctas = min(ceil_div(tasks * WARP, TableSpec.threads), tactic.ctas_per_sm * arch.num_sms)
    return Geometry(grid=(ctas, 1, 1), block=(TableSpec.threads, 1, 1))


KERNEL = Kernel(
    name="quantize/e4m3",
    spec=TableSpec,
    params=(
        Ptr("x", "const In", "[m, k], rows x_stride elements apart"),
        Ptr("global_scale", "const float", "[1], encode"),
        Q,
        SF,
        I64("m"),
        I64("k"),
        I64("x_stride"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind_rows,
)
