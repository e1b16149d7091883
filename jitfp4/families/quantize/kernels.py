"""The quantize kernels: their specialisations, launch geometries, and which of them a problem gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import inf

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.layouts import SfLayout, ceil_div, round_up
from jitfp4.registry import Family, register
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr, TensorMapParam

HALVES = (DType.BF16, DType.F16)

_WARP = 32
_MAX_GRID_YZ = 65535
_TMA_CONSUMERS = 16  # warps, besides the one that copies
TMA_BOX_COLS = 64  # elements of a 128-byte row of a box
_TMA_STAGE_BYTES = 16384  # of a tile that is one sector of scales wide


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a problem of fewer than ``limit`` elements gets: blocks of a thread along k, and threads of a CTA."""

    limit: float
    blocks_per_thread: int
    threads: int


# Measured on an H200: bench/results/h200/quantize_variants.csv.
_NVFP4 = (Tuning(1 << 23, 1, 128), Tuning(1 << 25, 2, 128), Tuning(inf, 4, 256))
_MXFP4 = (Tuning(1 << 27, 1, 128), Tuning(inf, 2, 128))
_SILU = (Tuning(1 << 24, 1, 64), Tuning(inf, 2, 128))
_GROUPED = Tuning(inf, 2, 256)

# E4M3 input without the FP4 instructions: converting each element is bound by instructions; a table is not.
_TABLE_WORK, _TABLE_BLOCKS, _TABLE_THREADS, _TABLE_CTAS_PER_SM = 1 << 23, 4, 256, 4

# On an H200 the vector kernel wins at every size (same file). FlashInfer #2838 measured a B200: copies by TMA win from
# log2(m) + log2(k) = 25 on, with m >= 1024 and k % 512 == 0. Only there, and not measured by us, they are selected.
_TMA_ARCHS = ("sm_100a", "sm_103a")
_TMA_LOG2_WORK, _TMA_MIN_ROWS, _TMA_K_MULTIPLE = 25, 1024, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec(KernelSpec):
    """Every thread loads and converts whole blocks, ``blocks_per_thread`` of them along k."""

    block_format: BlockFormat
    in_dtype: DType
    sf_layout: SfLayout
    silu: bool
    blocks_per_thread: int

    def __post_init__(self) -> None:
        if self.block_format is MXFP4 and (self.silu or self.in_dtype not in HALVES):
            raise ArgumentError("spec", str(self), "mxfp4 of bf16 or f16, without silu")
        if self.silu and self.in_dtype not in HALVES:
            raise ArgumentError("spec", str(self), "silu of bf16 or f16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TmaSpec(KernelSpec):
    """Persistent CTAs: a producer warp keeps ``stages`` tiles in flight, consumer warps convert them to NVFP4."""

    in_dtype: DType
    sf_layout: SfLayout
    stages: int
    ctas_per_sm: int
    blocks_per_thread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec(KernelSpec):
    """E4M3 input to NVFP4 through a table of thresholds that each CTA makes; for GPUs without E2M1 conversion."""

    sf_layout: SfLayout
    blocks_per_thread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSpec(KernelSpec):
    """A batch of matrices to NVFP4 with 128x4 scales; ``masked`` ones fill only their first rows."""

    in_dtype: DType
    sf_layout: SfLayout
    masked: bool
    silu: bool
    blocks_per_thread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScaleSpec(KernelSpec):
    """The encode scale of every row."""

    in_dtype: DType


def tunings(block_format: BlockFormat, *, silu: bool) -> tuple[Tuning, ...]:
    """The table that select() walks."""
    return _MXFP4 if block_format is MXFP4 else _SILU if silu else _NVFP4


def vector_specs(_arch: Arch) -> Iterator[VectorSpec]:
    """Every architecture has every specialisation."""
    kinds = [(NVFP4, in_dtype, False) for in_dtype in (*HALVES, DType.E4M3)]
    kinds += [(NVFP4, in_dtype, True) for in_dtype in HALVES] + [(MXFP4, in_dtype, False) for in_dtype in HALVES]
    for (block_format, in_dtype, silu), sf_layout in product(kinds, SfLayout):
        for tuning in tunings(block_format, silu=silu):
            yield VectorSpec(
                block_format=block_format,
                in_dtype=in_dtype,
                sf_layout=sf_layout,
                silu=silu,
                blocks_per_thread=tuning.blocks_per_thread,
            )


def tma_specs(arch: Arch) -> Iterator[TmaSpec]:
    """On the architectures on which select() returns them."""
    if arch.name in _TMA_ARCHS:
        yield from (tma_spec(in_dtype, sf_layout) for in_dtype, sf_layout in product(HALVES, SfLayout))


def table_specs(arch: Arch) -> Iterator[TableSpec]:
    """On the architectures without E2M1 conversion."""
    if not arch.has_e2m1_cvt:
        yield from (TableSpec(sf_layout=sf_layout, blocks_per_thread=_TABLE_BLOCKS) for sf_layout in SfLayout)


def grouped_specs(_arch: Arch) -> Iterator[GroupedSpec]:
    """Every architecture has every specialisation: masked with and without silu, the plain batch without."""
    for in_dtype, (masked, silu) in product(HALVES, ((False, False), (True, False), (True, True))):
        yield grouped_spec(in_dtype, masked=masked, silu=silu)


def row_scale_specs(_arch: Arch) -> Iterator[RowScaleSpec]:
    """Every architecture has both."""
    yield from (RowScaleSpec(in_dtype=in_dtype) for in_dtype in HALVES)


def tma_spec(in_dtype: DType, sf_layout: SfLayout) -> TmaSpec:
    """The ring that was fastest on an H200 (same file as above)."""
    return TmaSpec(in_dtype=in_dtype, sf_layout=sf_layout, stages=6, ctas_per_sm=1, blocks_per_thread=2)


def grouped_spec(in_dtype: DType, *, masked: bool, silu: bool) -> GroupedSpec:
    """There is one for each kind of input."""
    layout, blocks = SfLayout.layout_128x4, _GROUPED.blocks_per_thread
    return GroupedSpec(in_dtype=in_dtype, sf_layout=layout, masked=masked, silu=silu, blocks_per_thread=blocks)


def select(
    *,
    block_format: BlockFormat,
    in_dtype: DType,
    sf_layout: SfLayout,
    silu: bool,
    by_row: bool,
    m: int,
    k: int,
    arch: Arch,
) -> tuple[VectorSpec, Tuning] | TableSpec | TmaSpec:
    """The specialisation for a problem; ``by_row``: every row has its own global scale.

    Pure: reads no device, no clock and no environment.
    """
    if in_dtype is DType.E4M3 and not (arch.has_e2m1_cvt or by_row) and m * k >= _TABLE_WORK:
        return TableSpec(sf_layout=sf_layout, blocks_per_thread=_TABLE_BLOCKS)
    plain = block_format is NVFP4 and in_dtype in HALVES and not (silu or by_row)
    log2_work = m.bit_length() + k.bit_length() - 2
    if (
        plain
        and arch.name in _TMA_ARCHS
        and log2_work >= _TMA_LOG2_WORK
        and m >= _TMA_MIN_ROWS
        and k % _TMA_K_MULTIPLE == 0
    ):
        return tma_spec(in_dtype, sf_layout)
    tuning = next(t for t in tunings(block_format, silu=silu) if m * k < t.limit)
    spec = VectorSpec(
        block_format=block_format,
        in_dtype=in_dtype,
        sf_layout=sf_layout,
        silu=silu,
        blocks_per_thread=tuning.blocks_per_thread,
    )
    return spec, tuning


def sector_geometry(
    sf_layout: SfLayout, *, m: int, cols: int, sectors_per_warp: int, threads: int, batch: int | None = None
) -> Geometry:
    """A CTA is w warps along k by h sectors of 32 scales down the matrix; ``cols`` counts blocks. z is the batch's."""
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


def vector_geometry(spec: VectorSpec, *, m: int, cols: int, threads: int) -> Geometry:
    """As many warps as there are groups of ``blocks_per_thread`` sectors."""
    return sector_geometry(spec.sf_layout, m=m, cols=cols, sectors_per_warp=spec.blocks_per_thread, threads=threads)


def table_geometry(spec: TableSpec, *, m: int, cols: int, num_sms: int) -> Geometry:
    """Persistent CTAs, so that a table serves many blocks."""
    per_cta = sector_geometry(
        spec.sf_layout, m=m, cols=cols, sectors_per_warp=spec.blocks_per_thread, threads=_WARP
    )  # a CTA of one warp: what is left is the tasks
    tasks = per_cta.grid[0] * per_cta.grid[1] * per_cta.grid[2]
    ctas = min(ceil_div(tasks * _WARP, _TABLE_THREADS), _TABLE_CTAS_PER_SM * num_sms)
    return Geometry(grid=(ctas, 1, 1), block=(_TABLE_THREADS, 1, 1))


def grouped_geometry(spec: GroupedSpec, *, batch: int, m: int, cols: int) -> Geometry:
    """As vector_geometry() for each matrix. Raises ArgumentError for more rows or matrices than a grid holds."""
    geometry = sector_geometry(
        spec.sf_layout,
        m=m,
        cols=cols,
        sectors_per_warp=spec.blocks_per_thread,
        threads=_GROUPED.threads,
        batch=batch,
    )
    if max(geometry.grid[1:]) > _MAX_GRID_YZ:
        raise ArgumentError(
            "a", f"{batch} matrices of {m} rows", f"grids of at most {_MAX_GRID_YZ} sectors and matrices"
        )
    return geometry


def tma_box_rows(layout: SfLayout) -> int:
    """Rows of a box: a tile's, or in 128x4 the 8 neighbours in each of its four outer rows."""
    return {SfLayout.layout_128x4: 8, SfLayout.layout_8x4: 32, SfLayout.layout_linear: 16}[layout]


def tma_geometry(spec: TmaSpec, *, m: int, cols: int, num_sms: int) -> Geometry:
    """As many CTAs as fit on the GPU at once, and no more than there are tiles."""
    rows, blocks = (16, 32) if spec.sf_layout is SfLayout.layout_linear else (32, 16)  # a tile, per block of a thread
    tiles = ceil_div(m, rows) * ceil_div(cols, blocks * spec.blocks_per_thread)
    ring = spec.stages * spec.blocks_per_thread * _TMA_STAGE_BYTES + 16 * spec.stages  # tiles, then two barriers each
    return Geometry(
        grid=(min(tiles, spec.ctas_per_sm * num_sms), 1, 1),
        block=((_TMA_CONSUMERS + 1) * _WARP, 1, 1),
        shared_bytes=round_up(ring, 1024),
    )


_Q = Ptr("q", "uint8", "[m, k/2], low nibble first")
_SF = Ptr("sf", "uint8", "block scales in kSfLayout")

VECTOR = register(
    Family(
        name="quantize/vector",
        spec=VectorSpec,
        params=(
            Ptr("x", "const In", "[m, k], of silu_and_mul [m, 2k]; rows x_stride elements apart"),
            Ptr("global_scale", "const float", "encode scale of row r at r * scale_stride; null for MXFP4"),
            _Q,
            _SF,
            I64("m"),
            I64("k"),
            I64("x_stride"),
            I64("scale_stride"),
        ),
        specs=vector_specs,
    )
)
TMA = register(
    Family(
        name="quantize/tma",
        spec=TmaSpec,
        params=(
            TensorMapParam("x", "[m, k]"),
            Ptr("global_scale", "const float", "[1], encode"),
            _Q,
            _SF,
            I64("m"),
            I64("k"),
        ),
        specs=tma_specs,
    )
)
TABLE = register(
    Family(
        name="quantize/e4m3",
        spec=TableSpec,
        params=(
            Ptr("x", "const In", "[m, k], rows x_stride elements apart"),
            Ptr("global_scale", "const float", "[1], encode"),
            _Q,
            _SF,
            I64("m"),
            I64("k"),
            I64("x_stride"),
        ),
        specs=table_specs,
    )
)
GROUPED = register(
    Family(
        name="quantize/grouped",
        spec=GroupedSpec,
        params=(
            Ptr("x", "const In", "[batch, m, k], of silu_and_mul [batch, m, 2k]"),
            Ptr("mask", "const int32", "[batch] filled rows; null unless kMasked"),
            Ptr("global_scale", "const float", "encode scale of row r of batch b"),
            Ptr("q", "uint8", "[batch, m, k/2], low nibble first"),
            Ptr("sf", "uint8", "[batch], E4M3 scales in the 128x4 layout"),
            I64("m"),
            I64("k"),
            I64("x_stride"),
            I64("x_batch_stride"),
            I64("scale_stride"),
            I64("scale_batch_stride"),
        ),
        specs=grouped_specs,
    )
)
ROW_SCALE = register(
    Family(
        name="quantize/row_scale",
        spec=RowScaleSpec,
        params=(
            Ptr("x", "const In", "[m, k], rows x_stride elements apart"),
            Ptr("inverse_base", "const float", "[1], 1 / (448 * 6)"),
            Ptr("encode_scale", "float", "[m]"),
            Ptr("decode_scale", "float", "[m]"),
            I64("k"),
            I64("x_stride"),
        ),
        specs=row_scale_specs,
    )
)
