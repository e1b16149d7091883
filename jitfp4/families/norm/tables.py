"""The tactics of the norm kernel, and the problems that reach every row.

A norm without addition is bound by instructions, and threads with more units need fewer of them. With an addition it is
bound by memory, and more warps hide the latency.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic
from jitfp4.families.norm.problem import MAX_HIDDEN, TURN, Problem, Scale
from jitfp4.selection import Row, Table, rows

_MANY_ELEMENTS = 76000  # of each SM

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


def problems(arch: Arch) -> Iterator[Problem]:
    """Few, some and many rows of every length, in steps of a turn."""
    formats = ((16, Scale.E4M3), (32, Scale.E4M3), (32, Scale.UE8M0))
    hidden = range(TURN, MAX_HIDDEN + 1, TURN)
    loads = (0, _MANY_ELEMENTS // 2, 2 * _MANY_ELEMENTS)
    for in_dtype, (block, scale), add, h, load in product(HALVES.values(), formats, (False, True), hidden, loads):
        m = max(load * arch.num_sms // h, 1)
        yield Problem(in_dtype, block, scale, add, padded=False, m=m, h=h)
