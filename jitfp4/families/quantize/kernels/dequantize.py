"""Codes and block scales to floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.quantize.arguments import DequantizeArguments
from jitfp4.families.quantize.launches import sector_geometry
from jitfp4.families.quantize.problem import DequantizeProblem
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class DequantizeTactic:
    """Threads of a CTA."""

    threads: int


TACTICS = (DequantizeTactic(256), DequantizeTactic(128))


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizeSpec(KernelSpec):
    """One block format to one float type, from one scale layout."""

    block_format: BlockFormat
    out_dtype: DType
    sf_layout: SfLayout

    max_threads = 256  # of a CTA


def specialise(problem: DequantizeProblem, _tactic: DequantizeTactic) -> DequantizeSpec:
    return DequantizeSpec(block_format=problem.block_format, out_dtype=problem.out_dtype, sf_layout=problem.sf_layout)


def rejects(_problem: DequantizeProblem, _tactic: DequantizeTactic, _arch: Arch) -> None:
    """The kernel runs every problem."""


def geometry(problem: DequantizeProblem, tactic: DequantizeTactic, _arch: Arch) -> Geometry:
    """A warp for every sector."""
    cols = problem.k // problem.block_format.block
    return sector_geometry(problem.sf_layout, m=problem.m, cols=cols, sectors_per_warp=1, threads=tactic.threads)


def _bind(arguments: DequantizeArguments, plan: Plan) -> dict[str, Any]:
    return {
        "q": arguments.a_fp4,
        "sf": arguments.a_sf,
        "global_scale": arguments.scale,
        "out": arguments.out,
        "m": plan.problem.m,
        "k": plan.problem.k,
    }


KERNEL = Kernel(
    name="quantize/dequantize",
    spec=DequantizeSpec,
    params=(
        Ptr("q", "const uint8", "[m, k/2], low nibble first"),
        Ptr("sf", "const uint8", "block scales in kSfLayout"),
        Ptr("global_scale", "const float", "[1], decode; null for UE8M0"),
        Ptr("out", "Out", "[m, k]"),
        I64("m"),
        I64("k"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
