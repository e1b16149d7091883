"""The tactics for products of two FP4 matrices, and the problems that reach every row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.gemm.kernels.portable import PortableTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.model import cheapest
from jitfp4.families.gemm.problem import Fp4Problem
from jitfp4.formats import BlockFormat, DType
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.selection import Row, Table, rows

# With few rows of a, the output has few tiles; then groups of warps and CTAs of a cluster share the columns of a tile.
TABLE = Table(
    (
        Row(PortableTactic(16, 128, 16, 32, 2, 3, split=4), {"m": 16, "tiles_per_sm": 0.25}),
        Row(PortableTactic(16, 128, 16, 32, 2, 3, split=2), {"m": 16, "tiles_per_sm": 0.5}),
        Row(PortableTactic(16, 128, 16, 32, 2, 3), {"m": 16}),
        Row(PortableTactic(32, 128, 32, 32, 2, 3, split=2), {"m": 32, "tiles_per_sm": 0.5}),
        Row(PortableTactic(32, 128, 32, 32, 2, 3), {"m": 32}),
        Row(PortableTactic(64, 128, 64, 32, 1, 4, split=4), {"m": 64, "tiles_per_sm": 0.25}),
        Row(PortableTactic(64, 128, 64, 32, 1, 4, split=2), {"m": 64, "tiles_per_sm": 0.5}),
        Row(PortableTactic(64, 128, 64, 32, 1, 4), {"m": 64}),
        Row(PortableTactic(128, 128, 64, 32, 1, 4, split=2), {"tiles_per_sm": 0.5}),
        Row(PortableTactic(128, 128, 64, 32, 1, 4)),
        Row(PortableTactic(16, 32, 16, 32, 2, 3)),  # few rows of b
    ),
    measured=None,
)

SCALED = Table(
    tuple(Row(replace(row.tactic, scaled_mma=True), row.when) for row in TABLE.rows),
    measured=None,
    needs="has_scaled_mma",
)

HOPPER: Table[Any] = Table(
    (
        *rows(
            (WideTactic(32, 1, 2, 2), {"tiles_per_sm": 0.25}),
            (WideTactic(32, 1, 2), {"tiles_per_sm": 0.45}),
            (WideTactic(32, 2, 2, 2), {"tiles_per_sm": 0.5}),
            (WideTactic(32, 4, divided=True), {"tiles_per_sm": 1.25}),
            (WideTactic(32, 4), {"tiles_per_sm": 2.0}),
            (WideTactic(32, 4, divided=True), {}),
            m=32,
        ),
        *rows(
            (WideTactic(64, 1, 2, 3), {"tiles_per_sm": 0.165}),
            (WideTactic(64, 1, 2, 2), {"tiles_per_sm": 0.25}),
            (WideTactic(64, 1, 2), {"tiles_per_sm": 0.45}),
            (WideTactic(64, 2, 2, 2), {"tiles_per_sm": 0.5}),
            (WideTactic(64, 3, split=2), {"tiles_per_sm": 1.25}),
            (WideTactic(64, 4), {"tiles_per_sm": 2.0}),
            (WideTactic(64, 4, divided=True), {}),
            m=64,
        ),
        *rows(
            (WideTactic(128, 1, 2, 3), {"tiles_per_sm": 0.165}),
            (WideTactic(128, 1, 2, 2), {"tiles_per_sm": 0.25}),
            (WideTactic(128, 1, 2), {"tiles_per_sm": 0.5}),
            (WideTactic(128, 3, split=2), {"tiles_per_sm": 1.25}),
            (WideTactic(128, 3, divided=True), {}),
            m=128,
        ),
        *rows(
            (WideTactic(128, 1, 2, 2), {"tiles_per_sm": 0.26}),
            (WideTactic(128, 1, 2), {"tiles_per_sm": 0.5}),
            (WideTactic(128, 3, split=2), {"tiles_per_sm": 0.75}),
            (WideTactic(256, 1, 2), {"tiles_per_sm": 0.9}),
            (WideTactic(256, 2, split=2), {"tiles_per_sm": 1.0}),
            (WideTactic(256, 2, divided=True), {}),
            m=256,
        ),
        *rows(
            (WideTactic(128, 1, 2), {"tiles_per_sm": 0.52}),
            (WideTactic(256, 1, 2), {"tiles_per_sm": 1.0, "k": 8192}),
            (WideTactic(256, 2, split=2), {"tiles_per_sm": 1.0}),
            (WideTactic(128, 3), {"tiles_per_sm": 1.5}),
            (WideTactic(256, 2), {"tiles_per_sm": 2.0}),
            m=512,
        ),
        Row(WideTactic(256, 1, 2), {"m": 2048, "n": 2112}),
        Row(WideTactic(256, 2, divided=True), {"n": 2112}),
        Row(WideTactic(256, 2), {"tiles_per_sm": 8.0, "idle": 0.05}),
        Row(WideTactic(256, 2, cluster=2, divided=True, band=8)),
    ),
    measured="h200/mm_fp4_search.csv",
    needs="has_wgmma",
)

BLOCKSCALED: Table[Any] = Table(
    (Row(cheapest), *TABLE.rows),
    measured=None,
    needs="has_tcgen05",
)

_HOPPER_LOADS = {  # tiles for each SM, by rows of a
    32: (0.2, 0.4, 0.48, 1.0, 1.7, 3.0),
    64: (0.15, 0.2, 0.4, 0.48, 1.0, 1.7, 3.0),
    128: (0.15, 0.2, 0.4, 1.0, 3.0),
    256: (0.25, 0.48, 0.7, 0.85, 0.97, 3.0),
    512: (0.5, 0.97, 1.4, 1.9),
    1024: (0.7, 3.9, 6.8),
    4096: (0.5,),
}
_BLOCKSCALED_SHAPES = (  # m and n
    *((m, n) for m in (8, 16, 32, 64) for n in (2048, 14336)),
    *((64, 8192), (128, 14336), (256, 4096), (256, 8192), (256, 14336), (512, 6144), (512, 14336)),
)


def problems(arch: Arch) -> Iterator[Fp4Problem]:
    """Few, some and many tiles of the output, for every number of rows of a that tables distinguish."""
    layouts, dtypes = (SfLayout.layout_128x4, SfLayout.layout_8x4), (DType.BF16, DType.F16)
    if arch.has_wgmma:
        for block_format, dtype, (m, loads) in product(BlockFormat, dtypes, _HOPPER_LOADS.items()):
            for load, k in product(loads, (4096, 16384)):
                n = int(load * arch.num_sms) // ceil_div(m, 128) * 128
                yield Fp4Problem(block_format, SfLayout.layout_128x4, dtype, m=m, n=n, k=k)
        return
    for block_format, layout, dtype in product(BlockFormat, layouts, dtypes):
        for m, load in product((16, 32, 64, 128), (0.2, 0.4, 2.0)):
            yield Fp4Problem(block_format, layout, dtype, m=m, n=round(load * arch.num_sms) * 128, k=4096)
        yield Fp4Problem(block_format, layout, dtype, m=16, n=32, k=4096)  # few rows of b
    if arch.has_tcgen05:
        for block_format, dtype, (m, n) in product(BlockFormat, dtypes, _BLOCKSCALED_SHAPES):
            yield Fp4Problem(block_format, SfLayout.layout_128x4, dtype, m=m, n=n, k=4096)
