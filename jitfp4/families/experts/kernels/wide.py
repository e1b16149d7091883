"""experts/wide_up, experts/wide_down: products for many rows of each expert, on the tensor cores of warpgroups."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import Arch, names_with, shared_bytes_with
from jitfp4.errors import ArgumentError
from jitfp4.families.experts.arguments import ResultArguments, UpArguments
from jitfp4.families.experts.problem import Problem, Product
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import F32, I64, Geometry, KernelSpec, Ptr
from jitfp4.weight import TILE_COLS, TILE_ROWS, tile_bytes

_SHARED_BYTES = shared_bytes_with("has_wgmma")
_MOST_SLOTS = 24
_HALF_ROW_BYTES = TILE_COLS  # half a step of 16-bit elements
_BARRIER_BYTES = 8
_MOST_STAGED = 64  # rows of results
_MOST_ROWS = 256  # of a product
_MAX_TEAMS = 4
_MAX_SUMS = 512  # rows of x, over all warpgroups


@dataclass(frozen=True, slots=True)
class WideTactic:
    """The tunable fields of WideSpec."""

    tile_m: int
    step_m: int
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WideSpec(KernelSpec):
    """A CTA takes items of up to ``tile_m`` rows of an expert by 64 * ``groups`` rows of its weight.

    The rows of an item are rounded up to a multiple of ``step_m``, and there is code for each multiple.
    """

    dtype: DType
    format: BlockFormat
    tile_m: int
    step_m: int
    groups: int

    gated = False

    def __post_init__(self) -> None:
        if not 0 < self.tile_m <= _MOST_ROWS or self.tile_m % 16:
            raise ArgumentError("tile_m", self.tile_m, f"a multiple of 16 up to {_MOST_ROWS}")
        if self.step_m not in (8, 16, 32, 64, 128, 256) or self.tile_m % self.step_m:
            raise ArgumentError("step_m", self.step_m, "a power of two from 8 that divides tile_m")
        if not 2 <= self.groups <= _MAX_TEAMS or self.groups * self.tile_m > _MAX_SUMS:
            enough = f"2 to {_MAX_TEAMS}, times tile_m at most {_MAX_SUMS}: registers"
            raise ArgumentError("groups", self.groups, enough)

    @property
    def product_rows(self) -> range:
        """The rows of x of products on the tensor cores."""
        return range(self.step_m, self.tile_m + 1, self.step_m)

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
    def slots(self) -> int:
        """Half steps of x in flight: as many as fit in shared memory."""
        return max(slots for slots in range(2, _MOST_SLOTS + 1) if self._bytes(slots) <= _SHARED_BYTES)

    @property
    def weight_slots(self) -> int:
        """Steps of the weight in flight."""
        return _weight_slots(self.slots)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, in bytes."""
        return self._bytes(self.slots)

    @property
    def tile_bytes(self) -> int:
        """Bytes of 64 rows of a step of the weight: codes and scales."""
        return tile_bytes(self.format)

    def _bytes(self, slots: int) -> int:
        x = slots * (self.tile_m * _HALF_ROW_BYTES + 3 * _BARRIER_BYTES)
        weights = _weight_slots(slots) * (self.groups * self.tile_bytes + 2 * _BARRIER_BYTES)
        staged = self.groups * self.staged_rows * 2 * self.staged_cols
        affine = 2 * 4 * self.groups * TILE_ROWS
        return round_up(x + weights + staged + affine, 1024)


def _weight_slots(slots: int) -> int:
    return slots // 2 + 1


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
    cut = {"dtype": problem.dtype, "format": problem.format, **asdict(tactic)}
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
    """A CTA for each tile, but at most as many as fill the GPU: they are persistent."""
    spec = specialise(problem, tactic)
    tiles = problem.items * ceil_div(problem.n, TILE_ROWS * spec.groups)
    grid = (min(arch.num_sms, tiles), 1, 1)
    return Geometry(grid=grid, block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes)


def _bind_up(arguments: UpArguments, plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.x,
        "weight": arguments.w13,
        "scale": arguments.scale13,
        "bias": arguments.bias13,
        "input_weights": arguments.input_weights,
        "items": arguments.items,
        "order": arguments.order,
        "h": arguments.h,
        "done": arguments.done,
        "items_end": plan.problem.items,
        "slots": plan.problem.slots,
        "n": plan.problem.n,
        "k": plan.problem.k,
        "x_stride": arguments.x.stride(0),
        "counters": arguments.done.shape[0],
        "swiglu_alpha": arguments.swiglu_alpha,
        "swiglu_beta": arguments.swiglu_beta,
        "swiglu_limit": arguments.swiglu_limit,
    }


def _bind_down(arguments: ResultArguments, plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.h,
        "weight": arguments.w2,
        "scale": arguments.scale2,
        "bias": arguments.bias2,
        "items": arguments.items,
        "order": arguments.order,
        "y": arguments.y,
        "items_end": plan.problem.items,
        "slots": plan.problem.slots,
        "n": plan.problem.n,
        "k": plan.problem.k,
        "x_stride": arguments.h.stride(0),
    }


_WEIGHT = (
    Ptr("weight", "const uint8", "[experts, ceil(n / 64), ceil(k / 128), kTileBytes]"),
    Ptr("scale", "const float", "[experts, round_up(n, 64)]"),
    Ptr("bias", "const float", "as scale; null: none"),
)
_LIST = (
    Ptr("items", "const int4", "[items_end]"),
    Ptr("order", "const int32", "[tokens * slots]"),
)
_SIZES = (
    I64("items_end"),
    I64("slots", "of a token"),
    I64("n", "rows of the weight"),
    I64("k", "columns, a multiple of 32"),
    I64("x_stride", "elements, as all strides"),
)

WIDE_TACTICS = (
    *(WideTactic(16, 8, groups) for groups in (3, 4)),
    *(WideTactic(32, 8, groups) for groups in (3, 4)),
    *(WideTactic(64, 16, groups) for groups in (3, 4)),
    *(WideTactic(80, 16, groups) for groups in (3, 4)),
    WideTactic(96, 16, 3),
    *(WideTactic(128, 32, groups) for groups in (2, 3)),
    *(WideTactic(160, 32, groups) for groups in (2, 3)),
    WideTactic(256, 64, 2),
)

WIDE_UP = Kernel(
    name="experts/wide_up",
    spec=UpSpec,
    params=(
        Ptr("x", "const In", "[tokens, k]"),
        *_WEIGHT,
        Ptr("input_weights", "const float", "[tokens, slots], factors of x; null: none"),
        *_LIST,
        Ptr("h", "In", "[tokens * slots, n, with gates n / 2]"),
        Ptr("done", "int32", "[counters]"),
        *_SIZES,
        I64("counters"),
        F32("swiglu_alpha"),
        F32("swiglu_beta"),
        F32("swiglu_limit"),
    ),
    tactics=WIDE_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind_up,
)

WIDE_DOWN = Kernel(
    name="experts/wide_down",
    spec=DownSpec,
    params=(
        Ptr("x", "const In", "h [tokens * slots, k], in the order of the list"),
        *_WEIGHT,
        *_LIST,
        Ptr("y", "In", "[tokens * slots, n], by assignment"),
        *_SIZES,
    ),
    tactics=WIDE_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind_down,
)
