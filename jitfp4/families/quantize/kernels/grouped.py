"""A batch of matrices to NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.quantize.arguments import BatchArguments
from jitfp4.families.quantize.launches import sector_geometry
from jitfp4.families.quantize.problem import BatchProblem
from jitfp4.formats import NVFP4, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout
from jitfp4.spec import I64, MAX_GRID_YZ, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class GroupedTactic:
    """Blocks of a thread along k, and threads of a CTA."""

    blocks_per_thread: int
    threads: int


TACTICS = (GroupedTactic(2, 256), GroupedTactic(1, 128), GroupedTactic(4, 256))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSpec(KernelSpec):
    """A batch of matrices to NVFP4 with 128x4 scales; if ``masked``, only the first rows of each are quantized."""

    in_dtype: DType
    masked: bool
    silu: bool
    four_over_six: bool
    blocks_per_thread: int

    max_threads = 256  # of a CTA


def specialise(problem: BatchProblem, tactic: GroupedTactic) -> GroupedSpec:
    return GroupedSpec(
        in_dtype=problem.in_dtype,
        masked=problem.masked,
        silu=problem.silu,
        four_over_six=problem.four_over_six,
        blocks_per_thread=tactic.blocks_per_thread,
    )


def rejects(problem: BatchProblem, tactic: GroupedTactic, _arch: Arch) -> str | None:
    if max(_grid(problem, tactic).grid[1:]) > MAX_GRID_YZ:
        return f"{problem.batch} matrices of {problem.m} rows: a grid has at most {MAX_GRID_YZ} sectors and matrices"
    return None


def geometry(problem: BatchProblem, tactic: GroupedTactic, _arch: Arch) -> Geometry:
    """A warp for each group of ``blocks_per_thread`` sectors of each matrix."""
    return _grid(problem, tactic)


def _grid(problem: BatchProblem, tactic: GroupedTactic) -> Geometry:
    return sector_geometry(
        SfLayout.layout_128x4,
        m=problem.m,
        cols=problem.k // NVFP4.block,
        sectors_per_warp=tactic.blocks_per_thread,
        threads=tactic.threads,
        batch=problem.batch,
    )


def _bind(arguments: BatchArguments, plan: Plan) -> dict[str, Any]:
    by_matrix = arguments.scale.numel() > 1 and not arguments.by_row
    return {
        "x": arguments.a,
        "mask": arguments.mask,
        "global_scale": arguments.scale,
        "q": arguments.out,
        "sf": arguments.out_sf,
        "m": plan.problem.m,
        "k": plan.problem.k,
        "x_stride": arguments.a.stride(1),
        "x_batch_stride": arguments.a.stride(0),
        "scale_stride": int(arguments.by_row),
        "scale_batch_stride": int(by_matrix),
        "four_over_six": arguments.four_over_six,
    }


KERNEL = Kernel(
    name="quantize/grouped",
    spec=GroupedSpec,
    params=(
        Ptr("x", "const In", "[batch, m, k], of silu_and_mul [batch, m, 2k]"),
        Ptr("mask", "const int32", "[batch] filled rows; null unless kMasked"),
        Ptr("global_scale", "const float", "encode scale of row r of batch b"),
        Ptr("q", "uint8", "[batch, m, k/2], low nibble first"),
        Ptr("sf", "uint8", "[batch], E4M3 scales in the 128x4 layout"),
        I64("m"),
        I64("k"),
        I64("x_stride"),
        I64("x_batch_stride"),
        I64("scale_stride"),
        I64("scale_batch_stride"),
        I64("four_over_six", "bits of a recipe; 0 unless kFourOverSix"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
