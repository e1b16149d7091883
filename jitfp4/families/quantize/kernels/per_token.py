"""Rows to codes, block scales and a scale of each row, in one pass over memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.quantize.arguments import TokenArguments
from jitfp4.families.quantize.launches import SF, Q
from jitfp4.families.quantize.problem import TokenProblem
from jitfp4.formats import NVFP4, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.spec import I64, WARP, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class TokenTactic:
    """Blocks that a thread holds, the most warps that share a row, and whether the row is read twice."""

    units: int
    warps: int
    stream: bool = False

    @property
    def turn(self) -> int:
        """Elements that a warp holds."""
        return WARP * self.units * NVFP4.block


TACTICS = (
    *(TokenTactic(units, warps) for units, warps in ((1, 1), (2, 1), (2, 8), (4, 16))),
    TokenTactic(4, 16, stream=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpec(KernelSpec):
    """A row is shared by up to ``warps`` warps, whose threads hold ``units`` blocks each, or with ``stream`` read them
    twice.
    """

    in_dtype: DType
    sf_layout: SfLayout
    four_over_six: bool
    units: int
    warps: int
    stream: bool

    @property
    def max_threads(self) -> int:
        """The most threads of a CTA. Where one warp takes a row, a CTA has eight warps."""
        return WARP * (8 if self.warps == 1 else self.warps)

    @property
    def min_ctas(self) -> int:
        """CTAs that an SM must hold at once. They leave a thread 64 registers, or 128 for two candidates of a block."""
        return (512 if self.four_over_six else 1024) // self.max_threads


def specialise(problem: TokenProblem, tactic: TokenTactic) -> TokenSpec:
    return TokenSpec(
        in_dtype=problem.in_dtype,
        sf_layout=problem.sf_layout,
        four_over_six=problem.four_over_six,
        **asdict(tactic),
    )


def rejects(problem: TokenProblem, tactic: TokenTactic, _arch: Arch) -> str | None:
    """Why a tactic cannot hold the rows of a problem."""
    capacity = tactic.turn * tactic.warps
    too_long = problem.k > capacity and not tactic.stream
    return f"it holds rows of at most {capacity} elements" if too_long else None


def geometry(problem: TokenProblem, tactic: TokenTactic, _arch: Arch) -> Geometry:
    """A CTA for each row, also for the padding of the scales, or for eight warps of rows."""
    spec = specialise(problem, tactic)
    rows = problem.sf_layout.shape(problem.m, 1)[0]
    if spec.warps == 1:
        return Geometry(grid=(ceil_div(rows * WARP, spec.max_threads), 1, 1), block=(spec.max_threads, 1, 1))
    warps = min(ceil_div(problem.k, tactic.turn), spec.warps)
    return Geometry(grid=(rows, 1, 1), block=(WARP * warps, 1, 1))


def _bind(arguments: TokenArguments, plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.a,
        "inverse_base": arguments.inverse_base,
        "q": arguments.out,
        "sf": arguments.out_sf,
        "decode_scale": arguments.decode,
        "m": plan.problem.m,
        "k": plan.problem.k,
        "x_stride": arguments.a.stride(0),
        "four_over_six": arguments.four_over_six,
    }


KERNEL = Kernel(
    name="quantize/per_token",
    spec=TokenSpec,
    params=(
        Ptr("x", "const In", "[m, k], rows x_stride elements apart"),
        Ptr("inverse_base", "const float", "[1], 1 / (448 * 6)"),
        Q,
        SF,
        Ptr("decode_scale", "float", "[m]"),
        I64("m"),
        I64("k"),
        I64("x_stride"),
        I64("four_over_six", "bits of a recipe; 0 unless kFourOverSix"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
