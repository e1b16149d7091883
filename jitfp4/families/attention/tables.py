"""Which tactic of the decode kernel a problem gets, and the problems that meet every row.

Twelve warps with three tiles in flight each keep an SM's memory busy. Short requests end often: several CTAs then fill
each other's pauses. Little work is over sooner with fewer parts to add up. Where the rows of a head do not follow each
other, warps that take the heads of one token use whole sectors of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.families.attention.problem import Pages, Problem, Tactic
from jitfp4.formats import DType
from jitfp4.selection import Row, Table, rows

_FEW_UNITS = 32  # for each SM
_MANY_UNITS = 128
_SHORT = 128  # tiles of a request

_NARROW = rows(  # eight query rows, heads of up to 128
    (Tactic(8, 3, 1), {"units_per_sm": _FEW_UNITS}),
    (Tactic(4, 3, 3), {"packed": True, "tiles": _SHORT}),
    (Tactic(12, 3, 1), {"packed": True}),
    (Tactic(12, 3, 1), {"units_per_sm": _MANY_UNITS}),
    (Tactic(8, 3, 1, head_warps=8), {}),
    (Tactic(12, 3, 1, head_warps=4), {}),
    (Tactic(12, 3, 1, head_warps=2), {}),
    (Tactic(12, 3, 1), {}),
    rows=8,
    wide=False,
)
_WIDE = (Row(Tactic(4, 3, 2)), Row(Tactic(4, 2, 2)), Row(Tactic(4, 2, 1)), Row(Tactic(2, 2, 1)))

TABLE = Table((*_NARROW, *_WIDE), measured="h200/attention_search.csv")

TACTICS = tuple(dict.fromkeys(row.tactic for row in TABLE.rows))


def problems(arch: Arch) -> Iterator[Problem]:
    """What engines ask for: 16-bit queries and outputs of one type, every layout, little and much work."""
    loads = ((32, _FEW_UNITS), (_SHORT, 4 * _MANY_UNITS), (4096, 4 * _MANY_UNITS), (4096, _MANY_UNITS))
    for dtype, head_dim, query_rows, interleaved, pages, packed in product(
        (DType.BF16, DType.F16), (128, 64), (8, 16), (False, True), (Pages.WHOLE, Pages.HALVES), (True, False)
    ):
        for tiles, each in loads:
            yield Problem(
                q_dtype=dtype,
                out_dtype=dtype,
                head_dim=head_dim,
                rows=query_rows,
                heads=8,
                interleaved=interleaved,
                pages=pages,
                packed=packed,
                two_tables=False,
                tiles=tiles,
                units=each * arch.num_sms,
            )
