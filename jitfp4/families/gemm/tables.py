"""Which tactic a product gets, and the problems that meet every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.families.gemm.problem import DTYPES, TILE_MS, NarrowTactic, Problem
from jitfp4.families.gemm.weight import TILE_ROWS
from jitfp4.formats import BlockFormat
from jitfp4.selection import Row, Table, rows

TABLE = Table(
    (
        *rows(
            (NarrowTactic(8, 4, 1, 16, 2, 1, split=2), {"tiles_per_sm": 0.5}),
            (NarrowTactic(8, 4, 1, 16, 2, 1), {"tiles_per_sm": 1.0}),
            (NarrowTactic(8, 4, 1, 8, 2, 2, split=2), {"tiles_per_sm": 2.0}),
            (NarrowTactic(8, 4, 1, 4, 2, 4), {}),
            m=8,
        ),
        *rows(
            (NarrowTactic(16, 4, 1, 8, 3, 1, split=2), {"tiles_per_sm": 0.5}),
            (NarrowTactic(16, 4, 1, 8, 3, 1), {"tiles_per_sm": 1.0}),
            (NarrowTactic(16, 4, 1, 4, 2, 3, split=2), {"tiles_per_sm": 2.0}),
            (NarrowTactic(16, 4, 2, 4, 2, 2), {}),
            m=16,
        ),
        *rows(
            (NarrowTactic(32, 4, 1, 8, 2, 1, split=2), {"tiles_per_sm": 0.5}),
            (NarrowTactic(32, 4, 1, 8, 2, 1), {"tiles_per_sm": 1.0}),
            (NarrowTactic(32, 4, 2, 2, 3, 2), {}),
            m=32,
        ),
        Row(NarrowTactic(64, 2, 4, 2, 3, 1, split=4), {"tiles_per_sm": 0.5}),
        Row(NarrowTactic(64, 2, 4, 2, 3, 1, split=2), {"tiles_per_sm": 1.0}),
        Row(NarrowTactic(64, 2, 4, 2, 3, 1)),
        # less shared memory, no clusters
        *(Row(NarrowTactic(tile_m, 1, 4, 4 if tile_m < 32 else 2, 2, 1), {"m": tile_m}) for tile_m in TILE_MS[:-1]),
        Row(NarrowTactic(64, 1, 4, 2, 2, 1)),
    ),
    measured="h200/gemm_search.csv",
)

_CUTS = {  # by rows of x: blocks and warps of a group, groups, stages, CTAs of an SM
    8: (
        (4, 1, 16, 2, 1),
        (4, 1, 8, 2, 2),
        (4, 1, 8, 4, 1),
        (4, 1, 4, 2, 4),
        (4, 1, 4, 2, 3),
        (2, 2, 8, 2, 2),
        (2, 2, 4, 2, 4),
        (2, 2, 12, 2, 1),
        (2, 1, 16, 3, 1),
        (1, 4, 4, 3, 2),
    ),
    16: (
        (4, 1, 8, 3, 1),
        (4, 1, 4, 2, 3),
        (4, 2, 4, 2, 2),
        (4, 2, 8, 2, 1),
        (2, 2, 8, 3, 1),
        (2, 4, 6, 2, 1),
        (2, 2, 4, 3, 2),
        (2, 2, 4, 2, 3),
        (1, 8, 2, 3, 2),
    ),
    32: (
        (4, 1, 8, 2, 1),
        (4, 2, 4, 3, 1),
        (4, 2, 2, 3, 2),
        (2, 2, 8, 2, 1),
        (2, 4, 4, 3, 1),
        (2, 4, 2, 3, 2),
        (2, 8, 2, 3, 1),
        (2, 2, 4, 2, 2),
        (1, 8, 4, 2, 1),
    ),
    64: (
        (4, 2, 2, 4, 1),
        (2, 4, 2, 3, 1),
        (2, 8, 1, 4, 1),
        (2, 2, 4, 2, 1),
        (2, 4, 1, 3, 2),
        (1, 8, 2, 3, 1),
        (1, 4, 2, 2, 2),
    ),
}
_SPLITS = (1, 2, 3, 4, 6, 8)

_searched = (NarrowTactic(tile_m, *cut, split) for tile_m in TILE_MS for cut in _CUTS[tile_m] for split in _SPLITS)
TACTICS = tuple(dict.fromkeys((*(row.tactic for row in TABLE.rows), *_searched)))


def problems(arch: Arch) -> Iterator[Problem]:
    """Few, some and many rows of the weight, for every number of rows of x that differs."""
    loads = (0.25, 0.75, 1.5, 4.0)
    for dtype, block_format, m, load in product(DTYPES.values(), BlockFormat, TILE_MS, loads):
        n = round(load * arch.num_sms) * TILE_ROWS
        yield Problem(dtype, dtype, block_format, m=m, n=n, k=4096)
