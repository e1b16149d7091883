"""experts/narrow_up, experts/narrow_down: products for few rows of each expert, at the speed of memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.experts.arguments import DownArguments, UpArguments
from jitfp4.families.experts.parameters import (
    IDS,
    MATRIX,
    RESIDUAL,
    RESIDUAL_STRIDE,
    ROUTING,
    SWIGLU,
    WEIGHT,
    bind_rows_down,
    bind_rows_up,
)
from jitfp4.families.experts.problem import COUNTER_ROWS, Problem, Product
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.narrow import TILE_MS, Groups, indivisible, launch, overfills
from jitfp4.spec import I64, MAX_GRID_YZ, Geometry, KernelSpec, Ptr, fields_of

FOUND = 128  # assignments among which a CTA finds its rows by itself


@dataclass(frozen=True, slots=True)
class NarrowTactic:
    """The tunable fields of NarrowSpec, and the number of CTAs of a cluster over which the columns are split."""

    tile_m: int
    warp_blocks: int
    row_warps: int
    groups: int
    stages: int
    ctas: int
    split: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowSpec(Groups, KernelSpec):
    """A CTA takes ``tile_m`` rows of an expert, and 16 * ``warp_blocks`` * ``row_warps`` rows of its weight.

    ``ctas`` CTAs fit on an SM. ``listed``: rows are those of an item of experts/route's list; otherwise a CTA finds
    them among all ids.
    """

    dtype: DType
    format: BlockFormat
    listed: bool
    tile_m: int
    warp_blocks: int
    row_warps: int
    groups: int
    stages: int
    ctas: int

    def __post_init__(self) -> None:
        self.check_groups()
        if self.threads < self.tile_m:
            raise ArgumentError("groups", self.groups, f"as many threads as rows, {self.tile_m}, or more")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: the ring of stages, which is later overwritten by the sums, and its rows."""
        return self.ring_bytes(2 * self.tile_m) + round_up(16 * self.tile_m + 8 * self.rows, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSpec(NarrowSpec):
    """The product up."""

    product: Product


@dataclass(frozen=True, slots=True, kw_only=True)
class DownSpec(NarrowSpec):
    """The product down."""

    product = Product.DOWN


def specialise(problem: Problem, tactic: NarrowTactic) -> UpSpec | DownSpec:
    """The spec of a tactic for a problem."""
    cut: dict[str, Any] = fields_of(tactic)
    del cut["split"]
    cut |= {"dtype": problem.dtype, "format": problem.format, "listed": problem.item_rows > 0}
    return DownSpec(**cut) if problem.product is Product.DOWN else UpSpec(product=problem.product, **cut)


def rejects(problem: Problem, tactic: NarrowTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if problem.fp8:
        return "its products are in 16 bits"
    spec = specialise(problem, tactic)
    if why := overfills(spec.shared_bytes, tactic.ctas, arch) or indivisible(problem.k, tactic.split, arch):
        return why
    if spec.rows < COUNTER_ROWS * tactic.split:
        return f"a counter of finished slots is for {COUNTER_ROWS} rows or more"
    if problem.item_rows == 0 and problem.assignments > FOUND:
        return f"a CTA finds its rows among up to {FOUND} assignments"
    if problem.item_rows and tactic.tile_m > problem.item_rows:
        return "items have fewer rows"
    if _parts(problem, tactic.tile_m) * problem.items > MAX_GRID_YZ:
        return f"a grid has up to {MAX_GRID_YZ} items"
    return None


def _parts(problem: Problem, tile_m: int) -> int:
    """CTAs that share the rows of an item."""
    return max(1, ceil_div(problem.item_rows, tile_m))


def geometry(problem: Problem, tactic: NarrowTactic, _arch: Arch) -> Geometry:
    """Grid: y over rows of the weight; z over parts of items."""
    spec, parts = specialise(problem, tactic), _parts(problem, tactic.tile_m)
    return launch(tactic.split, ceil_div(problem.n, spec.rows), parts * problem.items, spec.threads, spec.shared_bytes)


def _bind_list(arguments: UpArguments | DownArguments, plan: Plan) -> dict[str, Any]:
    """The list of items, if there is one, and what shares an item."""
    parts = _parts(plan.problem, plan.spec.tile_m)
    return {"items": arguments.items, "order": arguments.order, "parts": parts}


def _bind_up(arguments: UpArguments, plan: Plan) -> dict[str, Any]:
    return bind_rows_up(arguments, plan) | _bind_list(arguments, plan)


def _bind_down(arguments: DownArguments, plan: Plan) -> dict[str, Any]:
    return bind_rows_down(arguments, plan) | _bind_list(arguments, plan)


_LIST = (
    Ptr("items", "const int4", "[gridDim.z / parts]; null without a list"),
    Ptr("order", "const int32", "[tokens * slots]; null without a list"),
)
_PARTS = I64("parts", "CTAs that share the rows of an item")

_CUTS = {  # by rows of activations: blocks and warps of a group, groups, stages, CTAs of an SM
    8: (
        (1, 1, 4, 4, 6),
        (1, 1, 8, 4, 3),
        (1, 1, 12, 4, 2),
        (1, 1, 16, 2, 2),
        (2, 1, 3, 4, 5),
        (2, 1, 4, 3, 5),
        (2, 1, 4, 4, 4),
        (2, 1, 6, 3, 3),
        (2, 1, 8, 2, 3),
        (2, 1, 8, 4, 2),
        (2, 1, 12, 4, 1),
        (2, 2, 8, 2, 1),
        (3, 1, 3, 3, 5),
        (3, 1, 4, 2, 4),
        (3, 1, 4, 3, 3),
        (3, 1, 6, 4, 2),
        (3, 1, 12, 3, 1),
        (3, 2, 4, 2, 2),
        (4, 1, 2, 3, 6),
        (4, 1, 3, 2, 5),
        (4, 1, 3, 3, 4),
        (4, 1, 4, 2, 4),
        (4, 1, 4, 3, 3),
        (4, 1, 4, 4, 2),
        (4, 1, 6, 3, 2),
        (4, 1, 8, 2, 2),
        (4, 1, 12, 3, 1),
        (5, 1, 3, 3, 3),
        (5, 1, 4, 2, 3),
        (5, 1, 6, 2, 2),
        (5, 1, 8, 3, 1),
    ),
    16: (
        (2, 1, 4, 4, 3),
        (2, 2, 2, 4, 4),
        (2, 2, 3, 3, 3),
        (3, 1, 3, 3, 4),
        (3, 1, 4, 3, 3),
        (3, 2, 2, 4, 3),
        (3, 2, 3, 4, 2),
        (4, 1, 2, 3, 5),
        (4, 1, 3, 3, 3),
        (4, 1, 4, 3, 2),
        (4, 1, 6, 2, 2),
        (4, 2, 2, 2, 4),
        (4, 2, 2, 3, 3),
        (4, 2, 3, 3, 2),
        (4, 2, 4, 2, 2),
    ),
    32: (
        (4, 1, 8, 2, 1),
        (4, 1, 4, 2, 2),
        (4, 2, 4, 3, 1),
        (4, 2, 2, 3, 2),
        (2, 2, 6, 2, 1),
        (2, 4, 2, 3, 2),
        (2, 2, 3, 2, 2),
    ),
    64: (
        (2, 4, 2, 3, 1),
        (2, 2, 4, 2, 1),
        (2, 4, 1, 3, 2),
        (1, 4, 2, 2, 2),
        (1, 4, 2, 2, 1),
    ),
}
_SMALL = (NarrowTactic(8, 1, 4, 4, 2, 1), NarrowTactic(16, 1, 4, 4, 2, 1), NarrowTactic(32, 1, 4, 2, 2, 1))
NARROW_TACTICS = tuple(
    dict.fromkeys(
        (*_SMALL, *(NarrowTactic(m, *cut, split) for m in TILE_MS for cut, split in product(_CUTS[m], (1, 2))))
    )
)

NARROW_UP = Kernel(
    name="experts/narrow_up",
    spec=UpSpec,
    params=(
        Ptr("x", "const In", "[tokens, k]"),
        *WEIGHT,
        Ptr("input_weights", "const float", "[tokens, slots], factors of x; null: none"),
        *IDS,
        *_LIST,
        Ptr("h", "In", "[tokens * slots, n, with gates n / 2]"),
        Ptr("done", "int32", "[counters]"),
        *ROUTING,
        _PARTS,
        *MATRIX,
        I64("x_stride", "elements, as all strides"),
        *SWIGLU,
    ),
    tactics=NARROW_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind_up,
)

NARROW_DOWN = Kernel(
    name="experts/narrow_down",
    spec=DownSpec,
    params=(
        Ptr("x", "const In", "h [tokens * slots, k]"),
        *WEIGHT,
        Ptr("weights", "const float", "[tokens, slots], factors of y; null: 1"),
        *IDS,
        *_LIST,
        Ptr("y", "In", "[tokens * slots, n]"),
        Ptr("done", "int32", "[tokens, gridDim.y, gridDim.x], zero"),
        Ptr("out", "In", "[tokens, n]"),
        RESIDUAL,
        *ROUTING,
        _PARTS,
        *MATRIX,
        I64("x_stride", "elements, as all strides"),
        I64("out_stride"),
        RESIDUAL_STRIDE,
    ),
    tactics=NARROW_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind_down,
)
