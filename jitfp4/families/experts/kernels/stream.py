"""experts/stream_up, experts/stream_down: products for few assignments, as one stream of weights through each CTA."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
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
from jitfp4.families.experts.problem import Problem, Product
from jitfp4.families.experts.weights import MOST_EXPERTS
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel
from jitfp4.layouts import ceil_div, round_up
from jitfp4.narrow import BLOCK_ROWS, ROW_BYTES, overfills, piece_bytes
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr

STREAMED = 512  # assignments
_TILE_M = 8
_STAGES = 2
_SCALES = 4  # units whose scales are kept


@dataclass(frozen=True, slots=True)
class StreamTactic:
    """The tunable fields of StreamSpec."""

    warp_blocks: int
    warps: int
    ctas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec(KernelSpec):
    """A unit of work is up to eight rows of an expert, and 16 * ``warp_blocks`` rows of its weight.

    Of a CTA, ``warps`` warps take chunks of 128 columns in turn; ``ctas`` CTAs fit on an SM.
    """

    dtype: DType
    format: BlockFormat
    warp_blocks: int
    warps: int
    ctas: int

    most = STREAMED
    most_experts = MOST_EXPERTS

    def __post_init__(self) -> None:
        for name, allowed in (("warp_blocks", (1, 2, 4)), ("warps", range(1, 31))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {tuple(allowed)}")

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def rows(self) -> int:
        """Rows of the weight in a unit of work."""
        return BLOCK_ROWS * self.warp_blocks

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: stages of weights and of activations, sums, scales, the list of items, barriers."""
        stages = self.warps * _STAGES
        ring = piece_bytes(stages * self.rows, self.format)
        chunks = stages * _TILE_M * ROW_BYTES
        sums = 4 * self.warps * _TILE_M * (self.rows + 4) + 8 * _SCALES * self.rows
        items = STREAMED * (4 + 8 + 2 + 2 + 2) + 4 * MOST_EXPERTS + 16
        return round_up(ring + chunks + sums + items + 8 * (stages + 2), 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSpec(StreamSpec):
    """The product up."""

    product: Product


@dataclass(frozen=True, slots=True, kw_only=True)
class DownSpec(StreamSpec):
    """The product down."""

    product = Product.DOWN


def specialise(problem: Problem, tactic: StreamTactic) -> UpSpec | DownSpec:
    """The spec of a tactic for a problem."""
    cut = {"dtype": problem.dtype, "format": problem.format, **asdict(tactic)}
    return DownSpec(**cut) if problem.product is Product.DOWN else UpSpec(product=problem.product, **cut)


def rejects(problem: Problem, tactic: StreamTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if problem.fp8:
        return "its products are in 16 bits"
    spec = specialise(problem, tactic)
    if not arch.has_tma:
        return "it needs bulk copies"
    if problem.item_rows:
        return "it takes no list"
    if problem.assignments > STREAMED:
        return f"a CTA finds its rows among up to {STREAMED} assignments"
    return overfills(spec.shared_bytes, tactic.ctas, arch)


def resident(tactic: StreamTactic, arch: Arch) -> int:
    """CTAs that are on the GPU at once."""
    return tactic.ctas * arch.num_sms


def geometry(problem: Problem, tactic: StreamTactic, arch: Arch) -> Geometry:
    """Grid: as many CTAs as fit on the GPU, or as there may be units of work."""
    spec = specialise(problem, tactic)
    units = problem.items * ceil_div(problem.n, spec.rows)
    return Geometry(
        grid=(min(resident(tactic, arch), units), 1, 1), block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes
    )


STREAM_TACTICS = tuple(
    StreamTactic(*cut)
    for cut in (
        (4, 3, 3),
        (4, 4, 2),
        (4, 5, 2),
        (4, 6, 1),
        (4, 6, 2),
        (4, 8, 1),
        (4, 10, 1),
        (4, 12, 1),
        (2, 4, 3),
        (2, 4, 4),
        (2, 6, 3),
        (2, 8, 2),
        (2, 10, 2),
        (2, 16, 1),
        (2, 20, 1),
    )
)

STREAM_UP = Kernel(
    name="experts/stream_up",
    spec=UpSpec,
    params=(
        Ptr("x", "const In", "[tokens, k]"),
        *WEIGHT,
        Ptr("input_weights", "const float", "[tokens, slots], factors of x; null: none"),
        *IDS,
        Ptr("h", "In", "[tokens * slots, n, with gates n / 2]"),
        Ptr("done", "int32", "[counters]"),
        *ROUTING,
        *MATRIX,
        I64("x_stride", "elements, as all strides"),
        *SWIGLU,
    ),
    tactics=STREAM_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind_rows_up,
)

STREAM_DOWN = Kernel(
    name="experts/stream_down",
    spec=DownSpec,
    params=(
        Ptr("x", "const In", "h [tokens * slots, k]"),
        *WEIGHT,
        Ptr("weights", "const float", "[tokens, slots], factors of y; null: 1"),
        *IDS,
        Ptr("y", "In", "[tokens * slots, n]"),
        Ptr("done", "int32", "[tokens, tiles of kRows rows], zero"),
        Ptr("out", "In", "[tokens, n]"),
        RESIDUAL,
        *ROUTING,
        *MATRIX,
        I64("x_stride", "elements, as all strides"),
        I64("out_stride"),
        RESIDUAL_STRIDE,
    ),
    tactics=STREAM_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind_rows_down,
)
