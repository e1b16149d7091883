"""The operation before the product up for many rows of each expert: rows of x in the order of the list."""

from __future__ import annotations

from collections.abc import Iterator

from jitfp4.arch import Arch
from jitfp4.families.experts.arguments import GatherArguments
from jitfp4.families.experts.kernels.gather import GATHER, GatherTactic
from jitfp4.families.experts.problem import DTYPES, GatherProblem
from jitfp4.operation import Operation
from jitfp4.selection import Row, Table


def _problem(arguments: GatherArguments) -> GatherProblem:
    a = arguments
    return GatherProblem(DTYPES[a.x.dtype], a.x.shape[0], a.slots, a.items.shape[0], a.item_rows)


def _problems(arch: Arch) -> Iterator[GatherProblem]:
    """Where a product takes what it writes."""
    if arch.has_wgmma:
        for dtype in DTYPES.values():
            yield GatherProblem(dtype, tokens=2048, slots=8, items=256, item_rows=160)


def _reference(arguments: GatherArguments) -> None:
    a = arguments
    for _, first, rows, _ in a.items.tolist():
        assignments = a.order[first : first + rows].long()
        x = a.x[assignments // a.slots]
        if a.input_weights is not None:
            x = (x.float() * a.input_weights.flatten()[assignments].unsqueeze(-1)).to(x.dtype)
        a.rows[first : first + rows] = x


EXPERTS_GATHER = Operation(
    GatherArguments,
    name="experts_gather",
    kernels=(GATHER,),
    problem=_problem,
    problems=_problems,
    tables=(Table((Row(GatherTactic()),), measured=None),),
    reference=_reference,
    output="rows",
    aligned=("x", "items", "rows"),
    exclusive=("rows",),
    growing=("tokens",),
)
