"""experts/narrow_up, experts/narrow_down: products for few rows of each expert, at the speed of memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.experts.arguments import DownArguments, UpArguments
from jitfp4.families.experts.parameters import IDS, MATRIX, ROUTING, SWIGLU, WEIGHT, bind_rows_down, bind_rows_up
from jitfp4.families.experts.problem import COUNTER_ROWS, Problem, Product
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr, fields_of
from jitfp4.weight import TILE_COLS, TILE_ROWS, tile_bytes

TILE_MS = (8, 16, 32, 64)
FOUND = 128  # assignments among which a CTA finds its rows by itself
_BLOCK_ROWS = 16
_MAX_CLUSTER = 8
_MAX_THREADS = 1024
_MAX_GRID = 65535
_ROW_BYTES = TILE_COLS * 2  # one row of a chunk of activations


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
class NarrowSpec(KernelSpec):
    """A CTA takes ``tile_m`` rows of an expert, and 16 * ``warp_blocks`` * ``row_warps`` rows of its weight.

    It has ``groups`` groups of ``row_warps`` warps, which take chunks of 128 columns in turn; each warp has a ring of
    ``stages`` pieces of 16 * ``warp_blocks`` rows. ``ctas`` CTAs fit on an SM. ``listed``: rows are those of an item of
    experts/route's list; otherwise a CTA finds them among all ids.
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
        for name, allowed in (
            ("tile_m", TILE_MS),
            ("warp_blocks", (1, 2, 3, 4, 5)),
            ("row_warps", (1, 2, 4)),
            ("stages", (2, 3, 4, 5, 6)),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")
        if not 0 < self.threads <= _MAX_THREADS or self.threads < self.tile_m:
            raise ArgumentError("groups", self.groups, f"from tile_m to {_MAX_THREADS} threads")
        if self.row_warps > 1 and self.groups > 15:
            raise ArgumentError("groups", self.groups, "at most 15 that need a barrier each")

    @property
    def threads(self) -> int:
        return 32 * self.groups * self.row_warps

    @property
    def rows(self) -> int:
        """Rows of the weight that a CTA takes."""
        return _BLOCK_ROWS * self.warp_blocks * self.row_warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: the ring of stages, which is later overwritten by the sums, and its rows."""
        stages = self.groups * self.stages
        weights = stages * self.rows * tile_bytes(self.format) // TILE_ROWS
        barriers = 8 * stages * self.row_warps
        chunks = 2 * self.groups * self.tile_m * _ROW_BYTES
        ring = round_up(weights, 128) + chunks + barriers
        sums = 4 * self.groups * self.tile_m * (self.rows + 4)
        return round_up(max(ring, sums), 128) + round_up(16 * self.tile_m + 8 * self.rows, 128)


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
    spec = specialise(problem, tactic)
    if spec.shared_bytes > arch.shared_of(tactic.ctas):
        return f"{tactic.ctas} CTAs of {spec.shared_bytes} bytes of shared memory do not fit on an SM"
    if tactic.split > 1 and not arch.has_tma:
        return "it needs clusters"
    if not 0 < tactic.split <= min(_MAX_CLUSTER, ceil_div(problem.k, TILE_COLS)):
        return f"a cluster has 1 to {_MAX_CLUSTER} CTAs with a chunk of {TILE_COLS} columns each"
    if spec.rows < COUNTER_ROWS * tactic.split:
        return f"a counter of finished slots is for {COUNTER_ROWS} rows or more"
    if problem.item_rows == 0 and problem.assignments > FOUND:
        return f"a CTA finds its rows among up to {FOUND} assignments"
    if problem.item_rows and tactic.tile_m > problem.item_rows:
        return "items have fewer rows"
    if _parts(problem, tactic.tile_m) * problem.items > _MAX_GRID:
        return f"a grid has up to {_MAX_GRID} items"
    return None


def _parts(problem: Problem, tile_m: int) -> int:
    """CTAs that share the rows of an item."""
    return max(1, ceil_div(problem.item_rows, tile_m))


def geometry(problem: Problem, tactic: NarrowTactic, _arch: Arch) -> Geometry:
    """Grid: x over the CTAs of a cluster, which split the columns; y over rows of the weight; z over parts of items."""
    spec = specialise(problem, tactic)
    grid = (tactic.split, ceil_div(problem.n, spec.rows), _parts(problem, tactic.tile_m) * problem.items)
    return Geometry(grid=grid, block=(spec.threads, 1, 1), cluster=(tactic.split, 1, 1), shared_bytes=spec.shared_bytes)


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
        (3, 1, 3, 3, 5),
        (3, 1, 4, 3, 3),
        (3, 1, 6, 4, 2),
        (3, 1, 12, 3, 1),
        (4, 1, 2, 3, 6),
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
        *ROUTING,
        _PARTS,
        *MATRIX,
        I64("x_stride", "elements, as all strides"),
        I64("out_stride"),
    ),
    tactics=NARROW_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind_down,
)
