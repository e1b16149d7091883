"""The kernel for few rows of activations that streams the weight: how it can be cut, and how it is launched."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.gemm.problem import Problem
from jitfp4.families.gemm.weight import TILE_COLS, TILE_ROWS, tile_bytes
from jitfp4.formats import BlockFormat, DType
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import Geometry, KernelSpec

STREAM_TILE_MS = (8, 16, 32)
_BLOCK_ROWS = 16
_BARRIERS = 16  # bytes of a slot
_MOST_SLOTS = 32
_MAX_THREADS = 1024
_MAX_CLUSTER = 8
_SHARED_BYTES = 232448  # of a CTA that has an SM for itself
_RESERVE = 1024  # bytes of shared memory that a CTA takes besides


@dataclass(frozen=True, slots=True)
class StreamTactic:
    """How the kernel is cut: fields of its Spec, over how many CTAs of a cluster the columns are split, and how many
    CTAs a launch has for each SM.
    """

    tile_m: int
    warp_blocks: int
    row_warps: int
    groups: int
    ctas: int = 1
    unrolled: bool = False
    split: int = 1
    fill: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec(KernelSpec):
    """A CTA takes ``tile_m`` rows of x at a time and, of the weight, 16 * ``warp_blocks`` * ``row_warps`` rows or less.

    It has ``groups`` groups of ``row_warps`` warps, which take chunks of 128 columns in turn, and one warp that loads.
    There is room for ``ctas`` on an SM. With ``unrolled``, both halves of a chunk are one piece of code.
    """

    dtype: DType
    out_dtype: DType
    format: BlockFormat
    tile_m: int
    warp_blocks: int
    row_warps: int
    groups: int
    ctas: int
    unrolled: bool

    def __post_init__(self) -> None:
        for name, allowed in (("tile_m", STREAM_TILE_MS), ("warp_blocks", (1, 2, 3, 4)), ("row_warps", (1, 2, 4))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")
        if not 0 < self.threads <= _MAX_THREADS:
            raise ArgumentError("groups", self.groups, f"groups * row_warps from 1 to {_MAX_THREADS // 32 - 1}")
        if self.slots < self.groups:
            raise ArgumentError("groups", self.groups, "so few that shared memory has a slot for each")

    @property
    def threads(self) -> int:
        return 32 * (self.groups * self.row_warps + 1)

    @property
    def rows(self) -> int:
        """Of the weight, that a CTA takes at a time."""
        return _BLOCK_ROWS * self.warp_blocks * self.row_warps

    @property
    def slots(self) -> int:
        """Chunks in flight: as many as shared memory has room for."""
        room = (_SHARED_BYTES + _RESERVE) // self.ctas - _RESERVE
        return max((slots for slots in range(1, _MOST_SLOTS + 1) if self._bytes(slots) <= room), default=0)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a CTA uses."""
        return self._bytes(self.slots)

    def _bytes(self, slots: int) -> int:
        weight = self.rows * tile_bytes(self.format) // TILE_ROWS
        sums = 4 * ceil_div(self.groups, 2) * self.tile_m * (self.rows + 4)
        return round_up(slots * (self.tile_m * 2 * TILE_COLS + weight + _BARRIERS) + sums, 1024)


def specialise(problem: Problem, tactic: StreamTactic) -> StreamSpec:
    """The kernel that a tactic makes for a problem."""
    cut = asdict(tactic)
    del cut["split"], cut["fill"]
    return StreamSpec(dtype=problem.dtype, out_dtype=problem.out_dtype, format=problem.format, **cut)


def _blocks(problem: Problem) -> int:
    return ceil_div(problem.n, _BLOCK_ROWS)


def _clusters(problem: Problem, tactic: StreamTactic, arch: Arch) -> int:
    return min(_blocks(problem), arch.num_sms * tactic.fill // tactic.split)


def rejects(problem: Problem, tactic: StreamTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if not arch.has_tma or arch.shared_bytes < _SHARED_BYTES:
        return f"it needs TMA and {_SHARED_BYTES} bytes of shared memory"
    if not 0 < tactic.split <= min(_MAX_CLUSTER, ceil_div(problem.k, TILE_COLS)):
        return f"a cluster has 1 to {_MAX_CLUSTER} CTAs with a chunk of {TILE_COLS} columns each"
    if tactic.split > 1 and _blocks(problem) > _clusters(problem, tactic, arch) * tactic.warp_blocks * tactic.row_warps:
        return "a cluster of several CTAs takes all its rows at a time"
    if not 0 < tactic.fill <= tactic.ctas:
        return f"{tactic.fill} CTAs do not fit on an SM that has room for {tactic.ctas}"
    if tactic.tile_m > STREAM_TILE_MS[0] and tactic.tile_m >= 2 * problem.m:
        return "half of its rows of x would be empty"
    return None


def geometry(problem: Problem, tactic: StreamTactic, arch: Arch) -> Geometry:
    """Clusters of CTAs that share the columns, on all SMs; along z, ``tile_m`` rows of x at a time.

    Where an SM has room for more CTAs than a launch fills it with, the next launch loads its weight there meanwhile.
    """
    spec = specialise(problem, tactic)
    grid = (tactic.split, _clusters(problem, tactic, arch), ceil_div(problem.m, spec.tile_m))
    return Geometry(grid=grid, block=(spec.threads, 1, 1), cluster=(tactic.split, 1, 1), shared_bytes=spec.shared_bytes)
