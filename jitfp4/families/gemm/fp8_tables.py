"""The tactics for products of E4M3 activations with an FP4 weight, and the problems that reach every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.gemm.kernels.expanded_fp8 import TACTICS, ExpandedTactic
from jitfp4.families.gemm.kernels.wide_fp8 import Fp8Tactic
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.formats import BlockFormat
from jitfp4.layouts import ceil_div
from jitfp4.selection import Row, Table

_SPLITS = ((4, 0.25), (3, 1 / 3), (2, 0.5))  # and the most waves of their tiles
_SOME_ROWS = 512  # of x, up to which the weight is not expanded


def _rows(tile_m: int, **when: float) -> tuple[Row[Fp8Tactic], ...]:
    """Rows for tiles that do not fill half of the SMs."""
    return tuple(Row(Fp8Tactic(tile_m, split), {**when, "waves": waves}) for split, waves in _SPLITS)


def expanded(problem: Fp8Problem, arch: Arch) -> ExpandedTactic:
    """The tiles of the fewest clocks, of all their waves; of equal ones, the largest, and clusters.

    For 128 rows of the weight by 32 columns, the tensor cores take as many clocks as there are rows of x, and 128 bytes
    a clock go to and from shared memory: what is copied there, and both operands of each warpgroup's product.
    """

    def clocks(tactic: ExpandedTactic) -> tuple[float, int, int]:
        rows = 128 * tactic.cluster
        clusters = ceil_div(problem.m, tactic.tile_m) * ceil_div(problem.n, rows)
        waves = ceil_div(clusters, arch.num_sms // tactic.cluster)
        return waves * max(tactic.tile_m, 64 + 0.75 * tactic.tile_m), -tactic.tile_m, -tactic.cluster

    return min(TACTICS, key=clocks)


# The rows count waves of tiles. The file has no case of fewer than 512 rows of x.
TABLE: Table[Any] = Table(
    (
        *_rows(64, m=64),
        Row(Fp8Tactic(64), {"m": 64}),
        *_rows(128, m=128),
        Row(Fp8Tactic(128), {"m": 128}),
        *_rows(256, m=_SOME_ROWS),
        Row(Fp8Tactic(256), {"m": _SOME_ROWS, "waves": 1.0}),
        Row(Fp8Tactic(256, divided=True), {"m": _SOME_ROWS, "waves": 1.25}),
        Row(Fp8Tactic(256), {"m": _SOME_ROWS}),
        Row(expanded),
        Row(Fp8Tactic(256)),
    ),
    measured="h200/fp8_search.csv",
)


def problems(arch: Arch) -> Iterator[Fp8Problem]:
    """Few and many rows of x, few and many tiles, for both formats; of gates, too."""
    if not arch.has_wgmma:
        return
    few = *product((64, 128, 256), (4096, 5120, 8192, 16384)), (512, 2112), (512, 10240), (512, 16384), (100, 8)
    many = *product((1024, 2048, 2304), (2112, 4096, 6144, 7168, 8192)), (1280, 1 << 20), (1408, 8448)
    for dtype, block_format, (m, n), gated in product(HALVES.values(), BlockFormat, (*few, *many), (False, True)):
        for k in (128, 4096):
            yield Fp8Problem(dtype, block_format, m=m, n=n, k=k, gated=gated and n % 16 == 0)
