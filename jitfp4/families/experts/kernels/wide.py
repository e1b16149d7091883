"""experts/wide_up, experts/wide_down: products for many rows of each expert, on the tensor cores of warpgroups."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from jitfp4.arch import Arch, names_with, shared_bytes_with
from jitfp4.errors import ArgumentError
from jitfp4.families.experts.arguments import GatherArguments, ResultArguments, UpArguments
from jitfp4.families.experts.gather_operation import EXPERTS_GATHER
from jitfp4.families.experts.parameters import MATRIX, SWIGLU, WEIGHT, bind_down, bind_up
from jitfp4.families.experts.problem import Problem, Product
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Before, Kernel, Plan, Scratch
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr, TensorMapParam, TileMap
from jitfp4.weight import TILE_COLS, TILE_ROWS, tile_bytes

_SHARED_BYTES = shared_bytes_with("has_wgmma")
_MOST_STAGES = 16
_ROW_BYTES = TILE_COLS * 2  # of a step of x
_BARRIER_BYTES = 8
_MOST_STAGED = 64  # rows of results
_STORED_ROWS = 16  # of results, which a warp writes at a time
_FEW_ROWS, _FEWEST_ROWS = 32, 8
_MOST_ROWS = 256  # of a product
_MAX_TEAMS = 6
_MAX_SUMS = 512  # rows of x, over all warpgroups
_CLUSTERS = (1, 2)


@dataclass(frozen=True, slots=True)
class WideTactic:
    """The tunable fields of WideSpec."""

    tile_m: int
    step_m: int
    groups: int
    cluster: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WideSpec(KernelSpec):
    """A CTA takes items of up to ``tile_m`` rows of an expert by 64 * ``groups`` rows of its weight.

    The rows of an item are rounded up to a multiple of ``step_m``, and there is code for each multiple. ``cluster``
    CTAs share the rows of an item, each with different rows of the weight. ``fp8``: products are of E4M3, and a step
    has 256 columns instead of 128.
    """

    dtype: DType
    format: BlockFormat
    tile_m: int
    step_m: int
    groups: int
    cluster: int
    fp8: bool

    gated = False

    def __post_init__(self) -> None:
        if not 0 < self.tile_m <= _MOST_ROWS or self.tile_m % _STORED_ROWS:
            raise ArgumentError("tile_m", self.tile_m, f"a multiple of {_STORED_ROWS} up to {_MOST_ROWS}")
        if self.step_m not in (8, 16, 32, 64, 128, 256) or self.tile_m % self.step_m:
            raise ArgumentError("step_m", self.step_m, "a power of two from 8 that divides tile_m")
        if not 2 <= self.groups <= _MAX_TEAMS or self.groups * self.tile_m > _MAX_SUMS:
            enough = f"2 to {_MAX_TEAMS}, times tile_m at most {_MAX_SUMS}: registers"
            raise ArgumentError("groups", self.groups, enough)
        if self.cluster not in _CLUSTERS:
            raise ArgumentError("cluster", self.cluster, f"one of {_CLUSTERS}")

    @property
    def product_rows(self) -> range:
        """The rows of x of products on the tensor cores."""
        return range(self.step_m, self.tile_m + 1, self.step_m)

    @property
    def box_m(self) -> int:
        """Rows of x that are copied at a time: none of a product is missing."""
        return max(self.step_m, _STORED_ROWS if self.tile_m > _FEW_ROWS else _FEWEST_ROWS)

    @property
    def staged_rows(self) -> int:
        """Rows of results that a warpgroup writes at a time."""
        return min(self.tile_m, _MOST_STAGED)

    @property
    def staged_cols(self) -> int:
        """Columns of results of a warpgroup."""
        return TILE_ROWS // 2 if self.gated else TILE_ROWS

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def stages(self) -> int:
        """Steps in flight: as many as fit in shared memory."""
        return max(stages for stages in range(1, _MOST_STAGES + 1) if self._bytes(stages) <= _SHARED_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, in bytes."""
        return self._bytes(self.stages)

    @property
    def tile_bytes(self) -> int:
        """Bytes of 64 rows of a step of the weight: codes and scales."""
        return tile_bytes(self.format)

    def _bytes(self, stages: int) -> int:
        stage = round_up(self.tile_m * _ROW_BYTES + self.groups * self.tile_bytes * (1 + self.fp8), 1024)
        staged = self.groups * self.staged_rows * 2 * self.staged_cols
        aside = 4 * self.groups * (2 * TILE_ROWS + self.tile_m * (1 + self.fp8))
        return round_up(stages * (stage + 2 * _BARRIER_BYTES) + staged + aside, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSpec(WideSpec):
    """The product up."""

    product: Product

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return self.product is Product.GATED


@dataclass(frozen=True, slots=True, kw_only=True)
class DownSpec(WideSpec):
    """The product down."""

    product = Product.DOWN


def specialise(problem: Problem, tactic: WideTactic) -> UpSpec | DownSpec:
    """The spec of a tactic for a problem."""
    cut = {"dtype": problem.dtype, "format": problem.format, "fp8": problem.fp8, **asdict(tactic)}
    return DownSpec(**cut) if problem.product is Product.DOWN else UpSpec(product=problem.product, **cut)


def rejects(problem: Problem, tactic: WideTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if not arch.has_wgmma:
        return f"its products are instructions of {names_with('has_wgmma')}"
    if problem.item_rows == 0:
        return "it needs a list of items"
    if problem.item_rows > tactic.tile_m:
        return "items have more rows"
    return None


def geometry(problem: Problem, tactic: WideTactic, arch: Arch) -> Geometry:
    """A cluster for each tile, but at most as many as fill the GPU: they are persistent."""
    spec = specialise(problem, tactic)
    tiles = problem.items * ceil_div(problem.n, TILE_ROWS * spec.groups * spec.cluster)
    grid = (min(arch.num_sms // spec.cluster, tiles) * spec.cluster, 1, 1)
    cluster = (spec.cluster, 1, 1)
    return Geometry(grid=grid, block=(spec.threads, 1, 1), cluster=cluster, shared_bytes=spec.shared_bytes)


def _map(rows: torch.Tensor, spec: WideSpec) -> TileMap:
    return TileMap(rows.view(torch.uint16), (spec.box_m, TILE_COLS // 2), swizzle=128)


def _sorted_rows(arguments: UpArguments, plan: Plan) -> dict[str, Scratch]:
    shape = plan.problem.assignments, plan.problem.k
    return _e4m3_rows(arguments, plan) or {"rows": Scratch(shape, arguments.x.dtype)}


def _e4m3_rows(_arguments: UpArguments | ResultArguments, plan: Plan) -> dict[str, Scratch]:
    if not plan.problem.fp8:
        return {}
    shape = plan.problem.assignments, plan.problem.k
    return {"rows": Scratch(shape, torch.uint8), "scales": Scratch(shape[:1], torch.float32)}


def _gather(
    arguments: UpArguments, plan: Plan, rows: torch.Tensor, scales: torch.Tensor | None = None
) -> GatherArguments:
    a = arguments
    if a.items is None or a.order is None:
        raise ArgumentError("items", "None", "the list of items")
    return GatherArguments(
        x=a.x,
        input_weights=a.input_weights,
        items=a.items,
        order=a.order,
        rows=rows,
        scales=scales,
        slots=plan.problem.slots,
        item_rows=a.item_rows,
        enable_pdl=a.enable_pdl,
        names=a.names,
    )


def _quantize(
    arguments: ResultArguments, _plan: Plan, rows: torch.Tensor | None = None, scales: torch.Tensor | None = None
) -> GatherArguments | None:
    """Of h, whose rows have the order of the list."""
    a = arguments
    if rows is None:
        return None
    return GatherArguments(
        x=a.h,
        input_weights=None,
        items=a.items,
        order=None,
        rows=rows,
        scales=scales,
        slots=1,
        item_rows=a.item_rows,
        enable_pdl=a.enable_pdl,
        names=a.names,
    )


def _bind_items(arguments: UpArguments | ResultArguments, plan: Plan) -> dict[str, Any]:
    problem: Problem = plan.problem
    return {"items": arguments.items, "items_end": problem.items, "n": problem.n, "k": problem.k}


def _bind_up(
    arguments: UpArguments, plan: Plan, rows: torch.Tensor, scales: torch.Tensor | None = None
) -> dict[str, Any]:
    own = {"x": _map(rows, plan.spec), "x_scale": scales}
    return own | bind_up(arguments) | _bind_items(arguments, plan)


def _bind_down(
    arguments: ResultArguments, plan: Plan, rows: torch.Tensor | None = None, scales: torch.Tensor | None = None
) -> dict[str, Any]:
    x = _map(arguments.h if rows is None else rows, plan.spec)
    own = {"x": x, "x_scale": scales, "order": arguments.order, "y": arguments.y}
    return own | bind_down(arguments) | _bind_items(arguments, plan)


_ITEMS = Ptr("items", "const int4", "[items_end]")
_SIZES = (I64("items_end"), *MATRIX)
_X_SCALE = Ptr("x_scale", "const float", "[tokens * slots], of rows of E4M3; else null")

_CUTS = ((16, 8, (4, 5, 6)), (32, 8, (4, 5)), (48, 8, (4,)), (80, 8, (4,)), (96, 8, (4,)), (160, 16, (3,)))
WIDE_TACTICS = (
    *(
        WideTactic(tile_m, step_m, groups, cluster)
        for tile_m, step_m, several in _CUTS
        for groups in several
        for cluster in _CLUSTERS
    ),
    WideTactic(32, 16, 5),
    WideTactic(256, 64, 2, 2),
)

WIDE_UP = Kernel(
    name="experts/wide_up",
    spec=UpSpec,
    params=(
        TensorMapParam("x", "[tokens * slots, k], boxes [kBoxM, kHalf]; of E4M3 as pairs"),
        *WEIGHT,
        _ITEMS,
        Ptr("h", "In", "[tokens * slots, n, with gates n / 2]"),
        Ptr("done", "int32", "[counters]"),
        *_SIZES,
        *SWIGLU,
        _X_SCALE,
    ),
    tactics=WIDE_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind_up,
    scratch=_sorted_rows,
    before=(Before(EXPERTS_GATHER, _gather),),
)

WIDE_DOWN = Kernel(
    name="experts/wide_down",
    spec=DownSpec,
    params=(
        TensorMapParam("x", "h [tokens * slots, k], boxes [kBoxM, kHalf]; of E4M3 as pairs"),
        *WEIGHT,
        _ITEMS,
        Ptr("order", "const int32", "[tokens * slots]"),
        Ptr("y", "In", "[tokens * slots, n], by assignment"),
        *_SIZES,
        _X_SCALE,
    ),
    tactics=WIDE_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind_down,
    scratch=_e4m3_rows,
    before=(Before(EXPERTS_GATHER, _quantize),),
)
