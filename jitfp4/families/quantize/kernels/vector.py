"""Rows to codes and block scales: every thread loads and quantizes whole blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.quantize.arguments import Arguments
from jitfp4.families.quantize.launches import SF, Q, bind_rows, sector_geometry
from jitfp4.families.quantize.problem import Problem
from jitfp4.formats import MXFP4, BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class VectorTactic:
    """Blocks of a thread along k, and threads of a CTA."""

    blocks_per_thread: int
    threads: int


TACTICS = tuple(VectorTactic(blocks, threads) for blocks, threads in product((1, 2, 4), (64, 128, 256)))


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec(KernelSpec):
    """Every thread loads and quantizes ``blocks_per_thread`` whole blocks along k."""

    block_format: BlockFormat
    in_dtype: DType
    sf_layout: SfLayout
    silu: bool
    four_over_six: bool
    blocks_per_thread: int

    max_threads = 256  # of a CTA

    def __post_init__(self) -> None:
        if self.block_format is MXFP4 and (self.silu or self.in_dtype not in HALVES.values()):
            raise ArgumentError("spec", str(self), "mxfp4 of bf16 or f16, without silu")
        if self.silu and self.in_dtype not in HALVES.values():
            raise ArgumentError("spec", str(self), "silu of bf16 or f16")
        if self.four_over_six and (self.block_format is MXFP4 or self.in_dtype not in HALVES.values()):
            raise ArgumentError("spec", str(self), "four_over_six with nvfp4 of bf16 or f16")


def specialise(problem: Problem, tactic: VectorTactic) -> VectorSpec:
    return VectorSpec(
        block_format=problem.block_format,
        in_dtype=problem.in_dtype,
        sf_layout=problem.sf_layout,
        silu=problem.silu,
        four_over_six=problem.four_over_six,
        blocks_per_thread=tactic.blocks_per_thread,
    )


def rejects(_problem: Problem, _tactic: VectorTactic, _arch: Arch) -> None:
    """The kernel runs every problem."""


def geometry(problem: Problem, tactic: VectorTactic, _arch: Arch) -> Geometry:
    """A warp for each group of ``blocks_per_thread`` sectors."""
    return sector_geometry(
        problem.sf_layout,
        m=problem.m,
        cols=problem.cols,
        sectors_per_warp=tactic.blocks_per_thread,
        threads=tactic.threads,
    )


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    more = {"scale_stride": int(plan.problem.by_row), "four_over_six": arguments.four_over_six}
    return bind_rows(arguments, plan) | more


KERNEL = Kernel(
    name="quantize/vector",
    spec=VectorSpec,
    params=(
        Ptr("x", "const In", "[m, k], of silu_and_mul [m, 2k]; rows x_stride elements apart"),
        Ptr("global_scale", "const float", "encode scale of row r at r * scale_stride; null for MXFP4"),
        Q,
        SF,
        I64("m"),
        I64("k"),
        I64("x_stride"),
        I64("scale_stride"),
        I64("four_over_six", "bits of a recipe; 0 unless kFourOverSix"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
