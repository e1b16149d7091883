"""The tactics for products with an FP4 weight, and the problems that reach every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.problem import DTYPES, Problem
from jitfp4.formats import BlockFormat
from jitfp4.narrow import TILE_MS
from jitfp4.selection import Row, Table, rows
from jitfp4.weight import TILE_ROWS

_MOST_NARROW = 8  # rows of x
_IN_A_STEP = "h200/step_search.csv"

TABLE = Table(
    (
        Row(NarrowTactic(8, 1, 1, 16, 2, 2), {"m": 8, "tiles_per_sm": 0.25}),
        # the fastest between the other kernels of a step
        Row(NarrowTactic(8, 2, 1, 16, 2, 1), {"m": 8, "tiles_per_sm": 0.5}, _IN_A_STEP),
        Row(NarrowTactic(8, 3, 1, 12, 2, 1, x_stages=4), {"m": 8, "tiles_per_sm": 0.75}, _IN_A_STEP),
        *rows(
            (NarrowTactic(8, 2, 1, 12, 2, 2), {"tiles_per_sm": 0.9}),
            (NarrowTactic(8, 4, 1, 16, 2, 1), {"tiles_per_sm": 1.0}),
            (NarrowTactic(8, 5, 1, 12, 2, 1), {"tiles_per_sm": 1.25}),
            (NarrowTactic(8, 4, 1, 4, 2, 4), {}),
            m=8,
        ),
        *rows(
            (NarrowTactic(16, 1, 1, 10, 2, 2), {"tiles_per_sm": 0.5, "k": 8192}),
            (NarrowTactic(16, 4, 1, 12, 2, 1, split=2), {"tiles_per_sm": 0.5}),
            (NarrowTactic(16, 3, 1, 12, 2, 1), {"tiles_per_sm": 0.75}),
            (NarrowTactic(16, 2, 1, 8, 2, 2), {"tiles_per_sm": 0.9, "k": 2048}),
            (NarrowTactic(16, 4, 1, 12, 2, 1), {"tiles_per_sm": 1.0, "k": 8192}),
            (NarrowTactic(16, 4, 2, 8, 2, 1, split=2), {"tiles_per_sm": 1.0}),
            (NarrowTactic(16, 5, 2, 6, 2, 1, split=2), {"tiles_per_sm": 1.25}),
            (NarrowTactic(16, 4, 2, 4, 2, 2), {"tiles_per_sm": 5.0}),
            (NarrowTactic(16, 4, 1, 4, 2, 3), {}),
            m=16,
        ),
        *rows(
            (NarrowTactic(32, 4, 1, 8, 2, 1, split=3), {"tiles_per_sm": 0.25}),
            (NarrowTactic(32, 4, 1, 8, 2, 1, split=2), {"tiles_per_sm": 0.5}),
            (NarrowTactic(32, 4, 1, 8, 2, 1), {"tiles_per_sm": 1.0}),
            (NarrowTactic(32, 4, 2, 4, 3, 1), {"tiles_per_sm": 1.5}),
            (NarrowTactic(32, 4, 2, 2, 3, 2), {}),
            m=32,
        ),
        # the file has no case of 64 rows of x
        Row(NarrowTactic(64, 2, 4, 2, 3, 1, split=4), {"tiles_per_sm": 0.5}),
        Row(NarrowTactic(64, 2, 4, 2, 3, 1, split=2), {"tiles_per_sm": 1.0}),
        Row(NarrowTactic(64, 2, 4, 2, 3, 1)),
        # less shared memory, no clusters
        *(Row(NarrowTactic(tile_m, 1, 4, 4 if tile_m < 32 else 2, 2, 1), {"m": tile_m}) for tile_m in TILE_MS[:-1]),
        Row(NarrowTactic(64, 1, 4, 2, 2, 1)),
    ),
    measured="h200/gemm_search.csv",
)

# The rows of TABLE for up to 8 rows of x; of those with equal conditions, the first.
_narrow = {repr(row.when): row for row in reversed(TABLE.rows) if row.tactic.tile_m <= _MOST_NARROW}
HOPPER: Table[Any] = Table(
    (
        *reversed(_narrow.values()),
        *rows(
            (NarrowTactic(16, 1, 1, 10, 2, 2), {"tiles_per_sm": 0.25}),
            (NarrowTactic(16, 1, 1, 10, 2, 2), {"tiles_per_sm": 0.5, "k": 4096}),
            (WideTactic(16, 1, 4, 2), {"tiles_per_sm": 0.5}),
            (NarrowTactic(16, 3, 1, 12, 2, 1), {"tiles_per_sm": 0.75}),
            (NarrowTactic(16, 2, 1, 8, 2, 2), {"tiles_per_sm": 0.9, "k": 2048}),
            (WideTactic(16, 1, 4), {"tiles_per_sm": 1.0, "k": 8192}),
            (WideTactic(16, 2, 2, 2), {"tiles_per_sm": 1.0}),
            (NarrowTactic(16, 5, 2, 6, 2, 1, split=2), {"tiles_per_sm": 1.25}),
            (WideTactic(16, 2, 2), {"tiles_per_sm": 2.0}),
            (WideTactic(16, 3, cluster=2, common=True), {"tiles_per_sm": 2.5}),
            (WideTactic(16, 4, cluster=2, common=True), {}),
            (WideTactic(16, 4), {}),  # for one step
            m=16,
        ),
        *rows(
            (WideTactic(32, 1, 2, 3), {"tiles_per_sm": 0.25}),
            (WideTactic(32, 1, 2, 2), {"tiles_per_sm": 0.5}),
            (WideTactic(32, 1, 4), {"tiles_per_sm": 1.0}),
            (WideTactic(32, 3, split=2), {"tiles_per_sm": 1.3}),
            (WideTactic(32, 2, 2), {"tiles_per_sm": 2.0}),
            (WideTactic(32, 3, cluster=2, common=True), {"tiles_per_sm": 2.5}),
            (WideTactic(32, 4, cluster=2, common=True), {}),
            (WideTactic(32, 4), {}),  # for one step
            m=32,
        ),
        *rows(
            (WideTactic(64, 1, 2, 3), {"tiles_per_sm": 0.25}),
            (WideTactic(64, 1, 2, 2), {"tiles_per_sm": 0.5}),
            (WideTactic(64, 1, 2), {"tiles_per_sm": 1.0, "k": 8192}),
            (WideTactic(64, 2, 2, 2), {"tiles_per_sm": 1.0}),
            (WideTactic(64, 3, split=2), {"tiles_per_sm": 1.3}),
            (WideTactic(64, 2, 2), {"tiles_per_sm": 2.0}),
            (WideTactic(64, 3, cluster=2, common=True), {"tiles_per_sm": 2.5}),
            (WideTactic(64, 4), {}),
            m=64,
        ),
        *rows(
            (WideTactic(64, 1, 2, 2), {"tiles_per_sm": 0.25}),
            (WideTactic(128, 1, 2, 2), {"tiles_per_sm": 0.5}),
            (WideTactic(128, 1, 2), {"tiles_per_sm": 1.0, "k": 8192}),
            (WideTactic(128, 2, split=2), {"tiles_per_sm": 1.0}),
            (WideTactic(128, 3, split=2), {"tiles_per_sm": 1.3}),
            (WideTactic(128, 3, divided=True), {}),
            m=128,
        ),
        *rows(
            (WideTactic(128, 1, 2, 2), {"tiles_per_sm": 0.25}),
            (WideTactic(128, 1, 2), {"tiles_per_sm": 0.5, "k": 4096}),
            (WideTactic(256, 1, 2, 2), {"tiles_per_sm": 0.5}),
            (WideTactic(128, 3, split=2), {"tiles_per_sm": 0.75}),
            (WideTactic(256, 1, 2), {"tiles_per_sm": 1.0}),
            (WideTactic(256, 2, divided=True), {"tiles_per_sm": 1.5}),
            (WideTactic(256, 2, cluster=2, divided=True, band=8), {}),
            m=256,
        ),
        *rows(
            (WideTactic(256, 1, 2, 2), {"tiles_per_sm": 0.25}),
            (WideTactic(256, 1, 2), {"tiles_per_sm": 0.5}),
            (WideTactic(128, 3), {"tiles_per_sm": 0.75}),
            (WideTactic(256, 2), {"tiles_per_sm": 1.0}),
            m=512,
        ),
        Row(WideTactic(256, 1, 2), {"m": 2048, "tiles_per_sm": 0.25}),
        Row(WideTactic(256, 2, divided=True), {"tiles_per_sm": 0.25}),
        Row(WideTactic(256, 2), {"waves": 4.0, "idle": 0.05}),
        Row(WideTactic(256, 2, cluster=2, divided=True, band=8)),
    ),
    measured="h200/gemm_wide_search.csv",
    needs="has_wgmma",
    elsewhere={NarrowTactic: "h200/gemm_search.csv"},
)

_LOADS = {
    8: (0.5,),
    16: (0.25, 0.5, 0.75, 0.95, 1.25, 2.0, 2.5, 6.0),
    32: (1.0, 2.0, 2.5, 8.0),
    64: (0.25, 0.5, 0.8, 1.0, 1.3, 2.0, 2.5, 4.0, 8.0),
    128: (0.25, 0.5, 1.0, 1.3, 2.0),
    256: (0.25, 0.5, 0.75, 1.0, 1.3, 2.0),
    512: (0.25, 0.5, 0.75, 1.0, 2.0),
    1024: (0.25, 0.75),
    4096: (0.25,),
}


def problems(arch: Arch) -> Iterator[Problem]:
    """Few, some and many rows of the weight, for every number of rows of x that tables distinguish; of gates, too."""
    for problem in _plain(arch):
        yield problem
        if problem.n % 16 == 0:
            yield problem._replace(gated=True)


def _plain(arch: Arch) -> Iterator[Problem]:
    loads = (0.25, 0.4, 0.75, 1.25, 4.0)
    for dtype, block_format, m, load in product(DTYPES.values(), BlockFormat, (1, *TILE_MS), loads):
        n = round(load * arch.num_sms) * TILE_ROWS
        yield Problem(dtype, dtype, block_format, m=m, n=n, k=4096)
    for dtype, block_format, (m, more) in product(DTYPES.values(), BlockFormat, _LOADS.items()):
        if m > TILE_MS[-1] and not arch.has_wgmma:
            continue
        for load in more:
            yield Problem(dtype, dtype, block_format, m=m, n=int(load * arch.num_sms) * TILE_ROWS, k=4096)
        for n, k in ((8, 32), (57344, 128), (7168, 2048), (4096, 16384), (8192, 16384)):  # too few columns; few; many
            yield Problem(dtype, dtype, block_format, m=m, n=n, k=k)
