"""Which tactic of the norm kernel a problem gets, and the problems that meet every row.

A plain norm is bound by instructions, of which more units in a thread cost fewer; with an addition, memory is the
bound, and warps that wait are what helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.families.norm.problem import IN_DTYPES, MAX_HIDDEN, TURN, Problem, Scale, Tactic
from jitfp4.selection import Row, Table, rows

_MANY_ELEMENTS = 76000  # for each SM

TABLE = Table(
    (
        Row(Tactic(1, 1), {"h": TURN}),
        *rows(
            (Tactic(1, 8), {"m": 16, "h": 2048}),
            (Tactic(2, 8), {}),
            (Tactic(2, 16), {}),
            (Tactic(2, 16, clustered=True), {}),
            (Tactic(8, 16, stream=True), {}),
            few=True,
        ),
        *rows(
            (Tactic(1, 8), {"elements_per_sm": _MANY_ELEMENTS}),
            (Tactic(2, 1), {}),
            (Tactic(3, 1), {}),
            (Tactic(2, 8), {"h": 6144}),
            (Tactic(2, 16), {}),
            add=True,
        ),
        *rows(
            (Tactic(2, 1), {}),
            (Tactic(3, 1), {}),
            (Tactic(2, 8), {"h": 6144}),
            (Tactic(4, 4), {}),
            (Tactic(4, 8), {}),
            add=False,
        ),
        Row(Tactic(4, 16)),
        Row(Tactic(4, 16, clustered=True)),
        Row(Tactic(8, 16, stream=True)),
    ),
    measured="h200/norm_shapes.csv",
)

TACTICS = tuple(dict.fromkeys(row.tactic for row in TABLE.rows))


def problems(arch: Arch) -> Iterator[Problem]:
    """Few, some and many rows of every length that differs."""
    formats = ((16, Scale.E4M3), (32, Scale.E4M3), (32, Scale.UE8M0))
    hidden = range(TURN, MAX_HIDDEN + 1, TURN)
    loads = (0, _MANY_ELEMENTS // 2, 2 * _MANY_ELEMENTS)
    for in_dtype, (block, scale), add, h, load in product(IN_DTYPES.values(), formats, (False, True), hidden, loads):
        m = max(load * arch.num_sms // h, 1)
        yield Problem(in_dtype, block, scale, add, padded=False, m=m, h=h)
