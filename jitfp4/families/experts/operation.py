"""The operations of a layer of experts: routing, the product up with its activation, the product down with its sum."""

from __future__ import annotations

import torch

from jitfp4.families.experts.arguments import DownArguments, RouteArguments, UpArguments
from jitfp4.families.experts.kernels.combine import COMBINE
from jitfp4.families.experts.kernels.few_down import FEW_DOWN
from jitfp4.families.experts.kernels.narrow import NARROW_DOWN, NARROW_UP
from jitfp4.families.experts.kernels.route import ROUTE
from jitfp4.families.experts.kernels.stream import STREAM_DOWN, STREAM_UP
from jitfp4.families.experts.kernels.wide import WIDE_UP
from jitfp4.families.experts.problem import DTYPES, Problem, Product, RouteProblem
from jitfp4.families.experts.tables import (
    DOWN_TABLE,
    HOPPER_DOWN,
    HOPPER_UP,
    ROUTE_TABLE,
    UP_TABLE,
    down_problems,
    route_problems,
    up_problems,
)
from jitfp4.families.experts.weights import Matrix, gates_first, matrix_of
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.operation import Operation
from jitfp4.reference import experts as reference


def _route_problem(arguments: RouteArguments) -> RouteProblem:
    tokens, slots = arguments.ids.shape
    return RouteProblem(tokens, slots, arguments.experts)


def _up_problem(arguments: UpArguments) -> Problem:
    tokens, slots = arguments.ids.shape
    inter, hidden = arguments.h.shape[1], arguments.x.shape[1]
    return Problem(
        Product.GATED if arguments.gated else Product.PLAIN,
        DTYPES[arguments.x.dtype],
        MXFP4 if arguments.mxfp4 else NVFP4,
        tokens,
        slots,
        experts=arguments.w13.shape[0],
        n=2 * inter if arguments.gated else inter,
        k=hidden,
        item_rows=arguments.item_rows,
        fp8=arguments.fp8,
    )


def _down_problem(arguments: DownArguments) -> Problem:
    tokens, slots = arguments.ids.shape
    return Problem(
        Product.DOWN,
        DTYPES[arguments.h.dtype],
        MXFP4 if arguments.mxfp4 else NVFP4,
        tokens,
        slots,
        experts=arguments.w2.shape[0],
        n=arguments.out.shape[1],
        k=arguments.h.shape[1],
        item_rows=arguments.item_rows,
        fp8=arguments.fp8,
    )


# ---- reference -------------------------------------------------------------------------------------------------------


def _route_reference(arguments: RouteArguments) -> None:
    local = reference.experts_of(arguments.ids, arguments.expert_map, arguments.experts).flatten()
    row = item = 0
    arguments.items.zero_()
    for expert in range(arguments.experts):
        found = (local == expert).nonzero().flatten()
        arguments.order[row : row + len(found)] = found.to(torch.int32)
        for first in range(0, len(found), arguments.item_rows):
            rows = min(arguments.item_rows, len(found) - first)
            arguments.items[item] = torch.tensor([expert, row + first, rows, 0], dtype=torch.int32)
            item += 1
        row += len(found)


def _rows_of_h(
    arguments: UpArguments | DownArguments, local: torch.Tensor, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The assignments of an expert, and their rows of h."""
    assignments = (local == expert).nonzero().flatten()
    if arguments.order is None:
        return assignments, assignments
    of_assignment = torch.empty(local.numel(), dtype=torch.int64)
    count = int((local >= 0).sum())
    of_assignment[arguments.order[:count].long()] = torch.arange(count)
    return assignments, of_assignment[assignments]


def up_matrix(a: UpArguments, expert: int) -> Matrix:
    """w13 of one expert, gates before up rows."""
    inter, hidden, one = a.h.shape[1], a.x.shape[1], slice(expert, expert + 1)
    bias = None if a.bias13 is None else a.bias13[one]
    size = 2 * inter if a.gated else inter, hidden
    matrix = matrix_of(a.w13[one], a.scale13[one], bias, size, fp8=a.fp8)
    return gates_first(matrix) if a.gated else matrix


def down_matrix(a: DownArguments, expert: int) -> Matrix:
    """w2 of one expert."""
    one = slice(expert, expert + 1)
    bias = None if a.bias2 is None else a.bias2[one]
    return matrix_of(a.w2[one], a.scale2[one], bias, (a.out.shape[1], a.h.shape[1]), fp8=a.fp8)


def _up_reference(arguments: UpArguments) -> None:
    a = arguments
    local = reference.experts_of(a.ids, a.expert_map, a.w13.shape[0]).flatten()
    x = a.x.repeat_interleave(a.ids.shape[1], 0)
    if a.input_weights is not None:
        x = (x.float() * a.input_weights.flatten().unsqueeze(-1)).to(x.dtype)
    if a.fp8:
        x = reference.rounded_rows(x)
    for expert in local[local >= 0].unique().tolist():
        assignments, rows = _rows_of_h(a, local, expert)
        sums = reference.linear(x[assignments], *up_matrix(a, expert))
        if a.gated:
            gate, up = sums.chunk(2, -1)
            h = reference.activation(gate, up, a.swiglu_alpha, a.swiglu_beta, a.swiglu_limit)
        else:
            h = sums.clamp(min=0).square()
        a.h[rows] = h.to(a.h.dtype)
    a.done.zero_()


def _down_reference(arguments: DownArguments) -> None:
    a = arguments
    tokens, slots = a.ids.shape
    hidden = a.out.shape[1]
    local = reference.experts_of(a.ids, a.expert_map, a.w2.shape[0])
    for expert in local[local >= 0].unique().tolist():
        assignments, rows = _rows_of_h(a, local.flatten(), expert)
        h = reference.rounded_rows(a.h[rows]) if a.fp8 else a.h[rows]
        a.y[assignments] = reference.linear(h, *down_matrix(a, expert)).to(a.y.dtype)
    total = reference.combine(a.y.view(tokens, slots, hidden), a.weights, local)
    a.out.copy_(total if a.residual is None else total + a.residual)


EXPERTS_ROUTE = Operation(
    RouteArguments,
    name="experts_route",
    kernels=(ROUTE,),
    problem=_route_problem,
    problems=route_problems,
    tables=(ROUTE_TABLE,),
    reference=_route_reference,
    output="items",
    aligned=("items", "order"),
    exclusive=("items", "order"),
    growing=("tokens",),
)

EXPERTS_UP = Operation(
    UpArguments,
    name="experts_up",
    kernels=(NARROW_UP, STREAM_UP, WIDE_UP),
    problem=_up_problem,
    problems=up_problems,
    tables=(UP_TABLE, HOPPER_UP),
    reference=_up_reference,
    output="h",
    aligned=("x", "w13", "scale13", "bias13", "items", "h"),
    exclusive=("h", "done"),
    growing=("tokens",),
)

EXPERTS_DOWN = Operation(
    DownArguments,
    name="experts_down",
    kernels=(FEW_DOWN, NARROW_DOWN, STREAM_DOWN, COMBINE),
    problem=_down_problem,
    problems=down_problems,
    tables=(DOWN_TABLE, HOPPER_DOWN),
    reference=_down_reference,
    output="out",
    aligned=("h", "w2", "scale2", "bias2", "residual", "items", "y", "out"),
    exclusive=("y", "done", "out"),
    zeroed=("done",),
    growing=("tokens",),
)
