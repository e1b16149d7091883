"""What the kernels for few rows by a prepared weight share: how warps and clusters divide the weight."""

from __future__ import annotations

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.formats import BlockFormat
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import Geometry
from jitfp4.weight import TILE_COLS, TILE_ROWS, tile_bytes

TILE_MS = (8, 16, 32, 64)  # rows of activations
BLOCK_ROWS = 16  # of the weight, for one instruction
ROW_BYTES = TILE_COLS * 2  # one row of a chunk of activations
_MAX_CLUSTER = 8
_MAX_THREADS = 1024


class Groups:
    """Of a spec: ``groups`` groups of ``row_warps`` warps take chunks of 128 columns in turn. Each warp has a ring of
    ``stages`` pieces of 16 * ``warp_blocks`` rows of the weight.
    """

    __slots__ = ()

    format: BlockFormat
    tile_m: int
    warp_blocks: int
    row_warps: int
    groups: int
    stages: int

    def check_groups(self) -> None:
        """Check the fields. Raises ArgumentError."""
        for name, allowed in (
            ("tile_m", TILE_MS),
            ("warp_blocks", (1, 2, 3, 4, 5)),
            ("row_warps", (1, 2, 4)),
            ("stages", (2, 3, 4, 5, 6)),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")
        if not 0 < self.threads <= _MAX_THREADS:
            raise ArgumentError("groups", self.groups, f"groups * row_warps from 1 to {_MAX_THREADS // 32}")
        if self.row_warps > 1 and self.groups > 15:
            raise ArgumentError("groups", self.groups, "at most 15 that need a barrier each")

    @property
    def threads(self) -> int:
        return 32 * self.groups * self.row_warps

    @property
    def rows(self) -> int:
        """Rows of the weight that a CTA takes."""
        return BLOCK_ROWS * self.warp_blocks * self.row_warps

    def ring_bytes(self, chunk_rows: int) -> int:
        """Shared memory of the rings, with ``chunk_rows`` rows of activations for each group, later of the sums."""
        stages = self.groups * self.stages
        ring = piece_bytes(stages * self.rows, self.format) + self.groups * chunk_rows * ROW_BYTES
        sums = 4 * self.groups * self.tile_m * (self.rows + 4)
        return round_up(max(ring + 8 * stages * self.row_warps, sums), 128)


def piece_bytes(rows: int, block_format: BlockFormat) -> int:
    """Shared memory of pieces of the weight with so many rows in all."""
    return round_up(rows * tile_bytes(block_format) // TILE_ROWS, 128)


def overfills(shared_bytes: int, ctas: int, arch: Arch) -> str | None:
    """Why so many CTAs of these bytes of shared memory do not fit on an SM; None where they do."""
    if shared_bytes > arch.shared_of(ctas):
        return f"{ctas} CTAs of {shared_bytes} bytes of shared memory do not fit on an SM"
    return None


def indivisible(k: int, split: int, arch: Arch) -> str | None:
    """Why a cluster of ``split`` CTAs cannot divide k columns; None where it can."""
    if split > 1 and not arch.has_tma:
        return "it needs clusters"
    if not 0 < split <= min(_MAX_CLUSTER, ceil_div(k, TILE_COLS)):
        return f"a cluster has 1 to {_MAX_CLUSTER} CTAs with a chunk of {TILE_COLS} columns each"
    return None


def launch(split: int, down: int, deep: int, threads: int, shared_bytes: int) -> Geometry:
    """Grid: x over the CTAs of a cluster, which split the columns; y is ``down``, z is ``deep``."""
    return Geometry(grid=(split, down, deep), block=(threads, 1, 1), cluster=(split, 1, 1), shared_bytes=shared_bytes)
