"""The operation before products for many rows of each expert: rows in the order of the list, or in E4M3."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.families.experts.arguments import GatherArguments
from jitfp4.families.experts.kernels.gather import GATHER, GatherTactic
from jitfp4.families.experts.kernels.quantize import QUANTIZE, QuantizeTactic
from jitfp4.families.experts.problem import DTYPES, GatherProblem
from jitfp4.operation import Operation
from jitfp4.reference.norm import quantize_rows
from jitfp4.selection import Row, Table


def _problem(arguments: GatherArguments) -> GatherProblem:
    a = arguments
    return GatherProblem(DTYPES[a.x.dtype], a.x.shape[0], a.slots, a.items.shape[0], a.item_rows, a.scales is not None)


def _problems(arch: Arch) -> Iterator[GatherProblem]:
    """Where a product takes what it writes."""
    if arch.has_wgmma:
        for dtype, fp8 in product(DTYPES.values(), (False, True)):
            yield GatherProblem(dtype, tokens=2048, slots=8, items=256, item_rows=160, fp8=fp8)


def _reference(arguments: GatherArguments) -> None:
    a = arguments
    for _, first, rows, _ in a.items.tolist():
        here = slice(first, first + rows)
        x = a.x[here] if a.order is None else a.x[a.order[here].long() // a.slots]
        if a.input_weights is not None and a.order is not None:
            x = (x.float() * a.input_weights.flatten()[a.order[here].long()].unsqueeze(-1)).to(x.dtype)
        if a.scales is not None:
            x, a.scales[here] = quantize_rows(x)
            x = x.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)
        a.rows[here] = x


EXPERTS_GATHER = Operation(
    GatherArguments,
    name="experts_gather",
    kernels=(GATHER, QUANTIZE),
    problem=_problem,
    problems=_problems,
    tables=(Table((Row(GatherTactic()), Row(QuantizeTactic())), measured=None),),
    reference=_reference,
    output="rows",
    aligned=("x", "items", "rows"),
    exclusive=("rows", "scales"),
    growing=("tokens",),
)
