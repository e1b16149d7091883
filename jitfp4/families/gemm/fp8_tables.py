"""The tactics for products of E4M3 activations with an FP4 weight, and the problems that reach every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.gemm.kernels.wide_fp8 import Fp8Tactic
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.formats import BlockFormat
from jitfp4.selection import Row, Table

_SPLITS = ((4, 0.25), (3, 1 / 3), (2, 0.5))  # and the most waves of their tiles


def _rows(tile_m: int, **when: float) -> tuple[Row[Fp8Tactic], ...]:
    """Rows for tiles that do not fill half of the SMs."""
    return tuple(Row(Fp8Tactic(tile_m, split), {**when, "waves": waves}) for split, waves in _SPLITS)


# The rows count waves of tiles. What they give was timed (h200/fp8.csv), but not beside other tactics.
TABLE = Table(
    (
        *_rows(64, m=64),
        Row(Fp8Tactic(64), {"m": 64}),
        *_rows(128, m=128),
        Row(Fp8Tactic(128), {"m": 128}),
        *_rows(256),
        Row(Fp8Tactic(256), {"waves": 1.0}),
        Row(Fp8Tactic(256, divided=True), {"waves": 1.25}),
        Row(Fp8Tactic(256)),
    ),
    measured=None,
)


def problems(arch: Arch) -> Iterator[Fp8Problem]:
    """Few and many rows of x, few and many tiles, for both formats."""
    if not arch.has_wgmma:
        return
    sizes = *product((64, 128, 256), (4096, 5120, 8192, 16384)), (2048, 2112), (2048, 8192), (100, 8)
    for dtype, block_format, (m, n) in product(HALVES.values(), BlockFormat, sizes):
        for k in (128, 4096):
            yield Fp8Problem(dtype, block_format, m=m, n=n, k=k)
