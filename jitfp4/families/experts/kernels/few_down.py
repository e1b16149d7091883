"""experts/few_down: the product down for the slots of one token or a few; a CTA has the results of all slots."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.experts.arguments import DownArguments
from jitfp4.families.experts.parameters import (
    IDS,
    MATRIX,
    RESIDUAL,
    RESIDUAL_STRIDE,
    ROUTING,
    WEIGHT,
    bind_down,
    bind_residual,
    bind_routing,
)
from jitfp4.families.experts.problem import Problem
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.narrow import BLOCK_ROWS, ROW_BYTES, indivisible, launch, overfills, piece_bytes
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr

ASSIGNMENTS = 8


@dataclass(frozen=True, slots=True)
class FewTactic:
    """The tunable fields of FewSpec, and the number of CTAs of a cluster over which the columns are split."""

    warp_blocks: int
    groups: int
    stages: int
    ctas: int
    split: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FewSpec(KernelSpec):
    """A CTA takes 16 * ``warp_blocks`` rows of the weights of all experts that are chosen.

    It has ``groups`` warps, which take chunks of 128 columns in turn; each has a ring of ``stages`` pieces. ``ctas``
    CTAs fit on an SM.
    """

    dtype: DType
    format: BlockFormat
    warp_blocks: int
    groups: int
    stages: int
    ctas: int

    def __post_init__(self) -> None:
        for name, low, high in (("warp_blocks", 1, 5), ("groups", 1, 32), ("stages", 2, 8)):
            if not low <= getattr(self, name) <= high:
                raise ArgumentError(name, getattr(self, name), f"{low} to {high}")

    @property
    def threads(self) -> int:
        return 32 * self.groups

    @property
    def rows(self) -> int:
        """Rows of the weight that a CTA takes."""
        return BLOCK_ROWS * self.warp_blocks

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: the ring of stages, later overwritten by the sums; scales, biases and results."""
        stages = self.groups * self.stages
        ring = piece_bytes(stages * self.rows, self.format) + (2 * self.groups + 1) * ROW_BYTES + 8 * stages
        sums = 4 * self.groups * ASSIGNMENTS * (self.rows + 4)
        return round_up(max(ring, sums), 128) + round_up(4 * ASSIGNMENTS * (3 * self.rows + 2), 128)


def specialise(problem: Problem, tactic: FewTactic) -> FewSpec:
    """The spec of a tactic for a problem."""
    cut = asdict(tactic)
    del cut["split"]
    return FewSpec(dtype=problem.dtype, format=problem.format, **cut)


def rejects(problem: Problem, tactic: FewTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if problem.fp8:
        return "its products are in 16 bits"
    spec = specialise(problem, tactic)
    if problem.item_rows:
        return "it takes no list"
    if problem.assignments > ASSIGNMENTS:
        return f"it has {ASSIGNMENTS} columns of sums"
    return overfills(spec.shared_bytes, tactic.ctas, arch) or indivisible(problem.k, tactic.split, arch)


def geometry(problem: Problem, tactic: FewTactic, _arch: Arch) -> Geometry:
    """Grid: y over rows of the weight."""
    spec = specialise(problem, tactic)
    return launch(tactic.split, ceil_div(problem.n, spec.rows), 1, spec.threads, spec.shared_bytes)


def _bind(arguments: DownArguments, plan: Plan) -> dict[str, Any]:
    own = {
        "x": arguments.h,
        "weights": arguments.weights,
        "out": arguments.out,
        "out_stride": arguments.out.stride(0),
    }
    return own | bind_down(arguments) | bind_routing(arguments, plan) | bind_residual(arguments)


_CUTS = (  # blocks of a warp, warps, stages, CTAs of an SM
    (1, 32, 2, 1),
    (1, 24, 3, 2),
    (1, 16, 2, 3),
    (1, 16, 3, 2),
    (1, 12, 3, 3),
    (1, 12, 4, 2),
    (1, 8, 4, 4),
    (2, 24, 2, 1),
    (2, 16, 3, 1),
    (2, 16, 2, 2),
    (2, 12, 2, 2),
    (2, 8, 3, 2),
    (2, 8, 2, 3),
    (3, 16, 2, 1),
    (3, 8, 2, 2),
    (4, 16, 2, 1),
    (4, 8, 2, 2),
)
FEW_TACTICS = tuple(FewTactic(*cut, split) for cut, split in product(_CUTS, (1, 2, 3, 4)))

FEW_DOWN = Kernel(
    name="experts/few_down",
    spec=FewSpec,
    params=(
        Ptr("x", "const In", "h [tokens * slots, k]"),
        *WEIGHT,
        Ptr("weights", "const float", "[tokens, slots], factors of results; null: 1"),
        *IDS,
        Ptr("out", "In", "[tokens, n]"),
        RESIDUAL,
        *ROUTING,
        *MATRIX,
        I64("out_stride", "elements"),
        RESIDUAL_STRIDE,
    ),
    tactics=FEW_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
