"""The operation before experts/combine: the results of all slots, for many rows of each expert."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.families.experts.arguments import ResultArguments
from jitfp4.families.experts.kernels.wide import WIDE_DOWN, WideTactic
from jitfp4.families.experts.problem import DTYPES, Problem, Product
from jitfp4.families.experts.weights import matrix_of
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.operation import Operation
from jitfp4.reference import experts as reference
from jitfp4.selection import Row, Table

TABLE: Table[WideTactic] = Table(
    (
        Row(WideTactic(16, 8, 5), {"item_rows": 16, "n": 4096}),
        Row(WideTactic(16, 8, 4), {"item_rows": 16}),
        Row(WideTactic(32, 16, 5), {"item_rows": 32}),
        Row(WideTactic(48, 8, 4, 2), {"item_rows": 48}),
        Row(WideTactic(80, 8, 4, 2), {"item_rows": 80}),
        Row(WideTactic(96, 8, 4, 2), {"item_rows": 96}),
        Row(WideTactic(160, 16, 3), {"item_rows": 160, "fp8": True}),
        Row(WideTactic(160, 16, 3, 2), {"item_rows": 160}),
        Row(WideTactic(256, 64, 2, 2)),
    ),
    measured=None,
)
_ITEM_ROWS = (16, 32, 48, 80, 96, 160, 256)


def _problem(arguments: ResultArguments) -> Problem:
    return Problem(
        Product.DOWN,
        DTYPES[arguments.h.dtype],
        MXFP4 if arguments.mxfp4 else NVFP4,
        arguments.y.shape[0] // arguments.slots,
        arguments.slots,
        experts=arguments.w2.shape[0],
        n=arguments.y.shape[1],
        k=arguments.h.shape[1],
        item_rows=arguments.item_rows,
        fp8=arguments.fp8,
    )


def _problems(arch: Arch) -> Iterator[Problem]:
    """One for each row of the table, where the kernel exists."""
    if arch.has_wgmma:
        sizes = [(2048, item_rows) for item_rows in _ITEM_ROWS] + [(7168, 16)]
        for dtype, block_format, (n, item_rows), fp8 in product(DTYPES.values(), BlockFormat, sizes, (False, True)):
            yield Problem(Product.DOWN, dtype, block_format, 2048, 8, 128, n, 768, item_rows, fp8)


def _reference(arguments: ResultArguments) -> None:
    a = arguments
    for expert, first, rows, _ in a.items.tolist():
        if rows:
            one = slice(expert, expert + 1)
            bias = None if a.bias2 is None else a.bias2[one]
            matrix = matrix_of(a.w2[one], a.scale2[one], bias, (a.y.shape[1], a.h.shape[1]), fp8=a.fp8)
            h = a.h[first : first + rows]
            sums = reference.linear(reference.rounded_rows(h) if a.fp8 else h, *matrix)
            a.y[a.order[first : first + rows].long()] = sums.to(a.y.dtype)


EXPERTS_RESULTS = Operation(
    ResultArguments,
    name="experts_results",
    kernels=(WIDE_DOWN,),
    problem=_problem,
    problems=_problems,
    tables=(TABLE,),
    reference=_reference,
    output="y",
    aligned=("h", "w2", "scale2", "bias2", "items", "y"),
    exclusive=("y",),
    growing=("tokens",),
)
