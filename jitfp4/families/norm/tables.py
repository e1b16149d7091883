"""The tactics of the norm kernels, and the problems that reach every row.

A norm without addition is bound by instructions: threads with more units need fewer of them, and persistent ones keep
what every row needs. With an addition it is bound by memory: of many rows, a CTA for each keeps more loads in flight.
Of few rows it starts sooner, while the kernel before still runs. Rows behind a gate were not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic
from jitfp4.families.norm.kernels.rows_fp4quant import RowsTactic
from jitfp4.families.norm.problem import MAX_HIDDEN, TURN, Problem, Scale
from jitfp4.selection import Row, Table, rows

_SOME_ELEMENTS, _MANY_ELEMENTS, _MORE_ELEMENTS, _MOST_ELEMENTS = 24000, 76000, 125000, 250000  # of each SM
_A_ROW = 1000  # elements of an SM, where there are one or two rows

Rows = tuple[Row[Tactic | RowsTactic], ...]

_GATED: Rows = rows(
    (RowsTactic(1), {"h": 4096}),
    (RowsTactic(2), {"h": 8192}),
    (RowsTactic(4), {}),
    gate=True,
)
_FEW: Rows = rows(
    (RowsTactic(1), {"h": 4096}),
    (RowsTactic(2), {"elements_per_sm": _A_ROW}),
    (RowsTactic(4), {"elements_per_sm": _A_ROW}),
    (Tactic(2, 8), {}),
    (Tactic(2, 16), {}),
    (Tactic(2, 16, clustered=True), {}),
    (Tactic(8, 16, stream=True), {}),
    few=True,
)
_ADD: Rows = rows(
    (RowsTactic(1), {"h": 2048, "elements_per_sm": _SOME_ELEMENTS}),
    (Tactic(1, 8), {"elements_per_sm": _MANY_ELEMENTS}),
    (RowsTactic(1), {}),
    (Tactic(2, 8), {"h": 6144, "elements_per_sm": _MANY_ELEMENTS}),
    (RowsTactic(2), {"h": 6144}),
    (Tactic(2, 16), {"elements_per_sm": _MORE_ELEMENTS}),
    (RowsTactic(2), {}),
    (RowsTactic(4), {}),
    add=True,
)
_PLAIN: Rows = rows(
    (RowsTactic(1), {"h": 2048, "elements_per_sm": _SOME_ELEMENTS}),
    (Tactic(2, 1), {}),
    (Tactic(3, 1), {}),
    (Tactic(2, 8), {"h": 6144}),
    (Tactic(4, 16), {"h": 8192, "elements_per_sm": _MANY_ELEMENTS}),
    (Tactic(2, 8), {"elements_per_sm": _MOST_ELEMENTS}),
    (Tactic(4, 4), {}),
    (Tactic(4, 8), {}),
    add=False,
)
TABLE: Table[Tactic | RowsTactic] = Table(
    (
        *_GATED,
        Row(Tactic(1, 1), {"h": TURN}),
        *_FEW,
        *_ADD,
        *_PLAIN,
        Row(Tactic(4, 16)),
        Row(Tactic(4, 16, clustered=True)),
        Row(Tactic(8, 16, stream=True)),
    ),
    measured="h200/norm_shapes.csv",
)


def problems(arch: Arch) -> Iterator[Problem]:
    """Rows of every length, in steps of a turn, and numbers of them to each side of every bound."""
    formats = ((16, Scale.E4M3), (32, Scale.E4M3), (32, Scale.UE8M0))
    hidden = range(TURN, MAX_HIDDEN + 1, TURN)
    loads = (0, 4 * _A_ROW, _SOME_ELEMENTS // 2, _MANY_ELEMENTS // 2, _MORE_ELEMENTS - TURN, 2 * _MOST_ELEMENTS)
    for in_dtype, (block, scale), add, h, load in product(HALVES.values(), formats, (False, True), hidden, loads):
        m = max(load * arch.num_sms // h, 1)
        yield Problem(in_dtype, block, scale, add, gate=False, padded=False, m=m, h=h)
    for in_dtype, (block, scale), h in product(HALVES.values(), formats, (4096, 8192, 16384)):
        yield Problem(in_dtype, block, scale, add=False, gate=True, padded=False, m=1, h=h)
