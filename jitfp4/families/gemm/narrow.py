"""The kernel for few rows of x: its specialisations, launch geometry and parameters."""

from __future__ import annotations

from dataclasses import dataclass

from jitfp4.errors import ArgumentError
from jitfp4.families.gemm.weight import TILE_COLS, TILE_ROWS, tile_bytes
from jitfp4.formats import BlockFormat, DType
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec, Param, Ptr

TILE_MS = (8, 16, 32, 64)
MAX_CLUSTER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A CTA takes ``tile_m`` rows of x at a time and, of the weight, 16 * ``warp_blocks`` * ``row_warps`` rows.

    It has ``groups`` groups of ``row_warps`` warps, which take chunks of 128 columns in turn; each warp has a ring of
    ``stages`` pieces of 16 * ``warp_blocks`` rows. ``ctas`` of them run on an SM.
    """

    dtype: DType
    out_dtype: DType
    format: BlockFormat
    tile_m: int
    warp_blocks: int
    row_warps: int
    groups: int
    stages: int
    ctas: int

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tile_m", TILE_MS),
            ("warp_blocks", (1, 2, 4)),
            ("row_warps", (1, 2, 4, 8, 16)),
            ("groups", (1, 2, 4, 8, 16)),
            ("stages", (2, 3, 4, 5, 6)),
            ("ctas", (1, 2, 3, 4)),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")

    @property
    def warps(self) -> int:
        return self.row_warps * self.groups

    @property
    def rows(self) -> int:
        """Of the weight, that a CTA takes."""
        return 16 * self.warp_blocks * self.row_warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a CTA uses: the ring of stages, or the sums that take its place."""
        piece = tile_bytes(self.format) * self.warp_blocks * 16 // TILE_ROWS
        weights = round_up(self.warps * self.stages * piece, 128)
        x = self.groups * self.stages * self.tile_m * TILE_COLS * 2
        ring = weights + x + 8 * self.warps * self.stages
        sums = 4 * self.groups * self.tile_m * (self.rows + 4)
        return round_up(max(ring, sums), 128)


def geometry(spec: Spec, *, m: int, n: int, split: int) -> Geometry:
    """A cluster of ``split`` CTAs shares the columns of a few rows; along z, ``tile_m`` rows of x at a time."""
    grid = (split, ceil_div(n, spec.rows), ceil_div(m, spec.tile_m))
    return Geometry(grid=grid, block=(32 * spec.warps, 1, 1), cluster=(split, 1, 1), shared_bytes=spec.shared_bytes)


PARAMS: tuple[Param, ...] = (
    Ptr("x", "const In", "[m, k]"),
    Ptr("weight", "const uint8", "[ceil(n / 64), ceil(k / 128), kTileBytes]"),
    Ptr("row_scale", "const float", "[round_up(n, 64)] of MXFP4, else null"),
    Ptr("alpha", "const float", "[1]; null: 1"),
    Ptr("bias", "const Out", "[n]; null: none"),
    Ptr("out", "Out", "[m, n]"),
    I64("m"),
    I64("n", "a multiple of 8"),
    I64("k", "a multiple of 32"),
    I64("x_stride", "elements, as all strides"),
    I64("out_stride"),
)
