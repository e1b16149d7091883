"""Problems, tactics and specs of quantization and dequantization, and the geometry of their launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.layouts import SfLayout, ceil_div, round_up
from jitfp4.spec import Geometry, KernelSpec

_WARP = 32
_MAX_GRID_YZ = 65535
_MAX_MAP_SIZE = 1 << 32  # elements along a dimension of a tensor map

# FlashInfer #2838 measured on a B200 that copies by TMA are faster from log2(m) + log2(k) = 25 on, with these shapes.
_TMA_LOG2_WORK, _TMA_MIN_ROWS, _TMA_K_MULTIPLE = 25, 1024, 512


# ---- a matrix --------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A matrix [m, k] to quantize; ``by_row``: every row has its own global scale."""

    block_format: BlockFormat
    in_dtype: DType
    sf_layout: SfLayout
    silu: bool
    by_row: bool
    m: int
    k: int

    @property
    def work(self) -> int:
        return self.m * self.k

    @property
    def cols(self) -> int:
        """Blocks of a row."""
        return self.k // self.block_format.block

    @property
    def suits_tma(self) -> bool:
        log2_work = self.m.bit_length() + self.k.bit_length() - 2
        return log2_work >= _TMA_LOG2_WORK and self.m >= _TMA_MIN_ROWS and self.k % _TMA_K_MULTIPLE == 0


@dataclass(frozen=True, slots=True)
class VectorTactic:
    """Blocks of a thread along k, and threads of a CTA."""

    blocks_per_thread: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec(KernelSpec):
    """Every thread loads and quantizes ``blocks_per_thread`` whole blocks along k."""

    block_format: BlockFormat
    in_dtype: DType
    sf_layout: SfLayout
    silu: bool
    blocks_per_thread: int

    max_threads = 256  # of a CTA

    def __post_init__(self) -> None:
        if self.block_format is MXFP4 and (self.silu or self.in_dtype not in HALVES.values()):
            raise ArgumentError("spec", str(self), "mxfp4 of bf16 or f16, without silu")
        if self.silu and self.in_dtype not in HALVES.values():
            raise ArgumentError("spec", str(self), "silu of bf16 or f16")


def vector_spec(problem: Problem, tactic: VectorTactic) -> VectorSpec:
    return VectorSpec(
        block_format=problem.block_format,
        in_dtype=problem.in_dtype,
        sf_layout=problem.sf_layout,
        silu=problem.silu,
        blocks_per_thread=tactic.blocks_per_thread,
    )


def vector_rejects(_problem: Problem, _tactic: VectorTactic, _arch: Arch) -> None:
    """The kernel runs every problem."""


def vector_geometry(problem: Problem, tactic: VectorTactic, _arch: Arch) -> Geometry:
    """A warp for each group of ``blocks_per_thread`` sectors."""
    return sector_geometry(
        problem.sf_layout,
        m=problem.m,
        cols=problem.cols,
        sectors_per_warp=tactic.blocks_per_thread,
        threads=tactic.threads,
    )


@dataclass(frozen=True, slots=True)
class TmaTactic:
    """Tiles in flight in a CTA, CTAs of an SM, and blocks of a thread in a tile."""

    stages: int
    ctas_per_sm: int
    blocks_per_thread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TmaSpec(KernelSpec):
    """Persistent CTAs: a producer warp keeps ``stages`` tiles in flight, consumer warps quantize them to NVFP4."""

    in_dtype: DType
    sf_layout: SfLayout
    stages: int
    ctas_per_sm: int
    blocks_per_thread: int

    consumers = 16  # warps, besides the one that copies
    box_cols = 64  # elements of a 128-byte row of a box

    @property
    def box_rows(self) -> int:
        """Rows of a box: those of a tile, or in 128x4 8 neighbouring rows, one box for each of four outer rows."""
        return {SfLayout.layout_128x4: 8, SfLayout.layout_8x4: 32, SfLayout.layout_linear: 16}[self.sf_layout]

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and blocks of a tile."""
        rows, cols = (16, 32) if self.sf_layout is SfLayout.layout_linear else (32, 16)
        return rows, cols * self.blocks_per_thread

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: a ring of tiles of 16-bit elements, then two barriers for each tile."""
        rows, blocks = self.tile
        return round_up(self.stages * (rows * blocks * NVFP4.block * 2 + 16), 1024)


def tma_spec(problem: Problem, tactic: TmaTactic) -> TmaSpec:
    return TmaSpec(
        in_dtype=problem.in_dtype,
        sf_layout=problem.sf_layout,
        stages=tactic.stages,
        ctas_per_sm=tactic.ctas_per_sm,
        blocks_per_thread=tactic.blocks_per_thread,
    )


def tma_rejects(problem: Problem, tactic: TmaTactic, arch: Arch) -> str | None:
    if not arch.has_tma:
        return "it copies by TMA"
    if problem.block_format is not NVFP4 or problem.in_dtype not in HALVES.values() or problem.silu or problem.by_row:
        return "it takes bf16 or f16 to NVFP4, without silu, with one global scale"
    if max(problem.m, problem.k) > _MAX_MAP_SIZE:
        return f"a tensor map has at most {_MAX_MAP_SIZE} elements along a dimension"
    if tma_spec(problem, tactic).shared_bytes * tactic.ctas_per_sm > arch.shared_bytes:
        return "its ring does not fit in shared memory"
    return None


def tma_geometry(problem: Problem, tactic: TmaTactic, arch: Arch) -> Geometry:
    """As many CTAs as run on the GPU at once, but no more than tiles."""
    spec = tma_spec(problem, tactic)
    rows, blocks = spec.tile
    tiles = ceil_div(problem.m, rows) * ceil_div(problem.cols, blocks)
    return Geometry(
        grid=(min(tiles, spec.ctas_per_sm * arch.num_sms), 1, 1),
        block=((spec.consumers + 1) * _WARP, 1, 1),
        shared_bytes=spec.shared_bytes,
    )


@dataclass(frozen=True, slots=True)
class TableTactic:
    """Blocks of a thread, and CTAs of an SM."""

    blocks_per_thread: int
    ctas_per_sm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec(KernelSpec):
    """E4M3 to NVFP4 by a table of thresholds, which each CTA computes; for GPUs without an instruction for E2M1."""

    sf_layout: SfLayout
    blocks_per_thread: int

    threads = 256  # of a CTA


def table_spec(problem: Problem, tactic: TableTactic) -> TableSpec:
    return TableSpec(sf_layout=problem.sf_layout, blocks_per_thread=tactic.blocks_per_thread)


def table_rejects(problem: Problem, _tactic: TableTactic, arch: Arch) -> str | None:
    if arch.has_e2m1_cvt:
        return "the GPU converts to E2M1 itself"
    if problem.in_dtype is not DType.E4M3 or problem.by_row:
        return "it takes E4M3 with one global scale"
    return None


def table_geometry(problem: Problem, tactic: TableTactic, arch: Arch) -> Geometry:
    """Persistent CTAs, so that a table serves many blocks."""
    per_cta = sector_geometry(
        problem.sf_layout,
        m=problem.m,
        cols=problem.cols,
        sectors_per_warp=tactic.blocks_per_thread,
        threads=_WARP,
    )  # with CTAs of one warp, the grid has one CTA for each task
    tasks = per_cta.grid[0] * per_cta.grid[1] * per_cta.grid[2]
    ctas = min(ceil_div(tasks * _WARP, TableSpec.threads), tactic.ctas_per_sm * arch.num_sms)
    return Geometry(grid=(ctas, 1, 1), block=(TableSpec.threads, 1, 1))


def sector_geometry(
    sf_layout: SfLayout, *, m: int, cols: int, sectors_per_warp: int, threads: int, batch: int | None = None
) -> Geometry:
    """A CTA is w warps along k by h sectors of 32 scales down the matrix; ``cols`` counts blocks, z the ``batch``."""
    outer, inner, tile_cols = sf_layout.tile
    sector_cols = _WARP if sf_layout is SfLayout.layout_linear else tile_cols
    sectors = ceil_div(m, outer * inner) * ceil_div(outer * inner * sector_cols, _WARP)
    tasks = ceil_div(cols, sector_cols * sectors_per_warp)
    warps = threads // _WARP
    wide = min(warps, 1 << (tasks - 1).bit_length())
    down = ceil_div(sectors, warps // wide)
    z = ceil_div(down, _MAX_GRID_YZ) if batch is None else batch
    y = ceil_div(down, z) if batch is None else down
    return Geometry(grid=(ceil_div(tasks, wide), y, z), block=(_WARP * wide, warps // wide, 1))


# ---- a batch ---------------------------------------------------------------------------------------------------------


class BatchProblem(NamedTuple):
    """Matrices [batch, m, k] to NVFP4 with 128x4 scales; if ``masked``, only the first rows of each are quantized."""

    in_dtype: DType
    masked: bool
    silu: bool
    batch: int
    m: int
    k: int


@dataclass(frozen=True, slots=True)
class GroupedTactic:
    """Blocks of a thread along k, and threads of a CTA."""

    blocks_per_thread: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSpec(KernelSpec):
    """A batch of matrices to NVFP4 with 128x4 scales; if ``masked``, only the first rows of each are quantized."""

    in_dtype: DType
    masked: bool
    silu: bool
    blocks_per_thread: int

    max_threads = 256  # of a CTA


def grouped_spec(problem: BatchProblem, tactic: GroupedTactic) -> GroupedSpec:
    return GroupedSpec(
        in_dtype=problem.in_dtype,
        masked=problem.masked,
        silu=problem.silu,
        blocks_per_thread=tactic.blocks_per_thread,
    )


def grouped_rejects(problem: BatchProblem, tactic: GroupedTactic, _arch: Arch) -> str | None:
    if max(_grouped_geometry(problem, tactic).grid[1:]) > _MAX_GRID_YZ:
        return f"{problem.batch} matrices of {problem.m} rows: a grid has at most {_MAX_GRID_YZ} sectors and matrices"
    return None


def grouped_geometry(problem: BatchProblem, tactic: GroupedTactic, _arch: Arch) -> Geometry:
    """As vector_geometry() for each matrix."""
    return _grouped_geometry(problem, tactic)


def _grouped_geometry(problem: BatchProblem, tactic: GroupedTactic) -> Geometry:
    return sector_geometry(
        SfLayout.layout_128x4,
        m=problem.m,
        cols=problem.k // NVFP4.block,
        sectors_per_warp=tactic.blocks_per_thread,
        threads=tactic.threads,
        batch=problem.batch,
    )


# ---- the scale of each row -------------------------------------------------------------------------------------------


class RowScaleProblem(NamedTuple):
    """The scales of m rows."""

    in_dtype: DType
    m: int


@dataclass(frozen=True, slots=True)
class RowScaleTactic:
    """The only tactic: a CTA takes a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScaleSpec(KernelSpec):
    """The encode scale of every row."""

    in_dtype: DType

    threads = 256  # of a CTA


# ---- back to floats --------------------------------------------------------------------------------------------------


class DequantizeProblem(NamedTuple):
    """Codes and scales to [m, k] floats."""

    block_format: BlockFormat
    out_dtype: DType
    sf_layout: SfLayout
    m: int
    k: int


@dataclass(frozen=True, slots=True)
class DequantizeTactic:
    """Threads of a CTA."""

    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizeSpec(KernelSpec):
    """One block format to one float type, from one scale layout."""

    block_format: BlockFormat
    out_dtype: DType
    sf_layout: SfLayout

    max_threads = 256  # of a CTA


def dequantize_geometry(problem: DequantizeProblem, tactic: DequantizeTactic, _arch: Arch) -> Geometry:
    """A warp for every sector."""
    cols = problem.k // problem.block_format.block
    return sector_geometry(problem.sf_layout, m=problem.m, cols=cols, sectors_per_warp=1, threads=tactic.threads)
