"""What the operators of a layer of experts take."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.operation import Written


class RouteArguments(NamedTuple):
    """The list of items of a routing.

    ``ids`` int32 or int64 [tokens, slots]; ``expert_map`` int32 [global experts], the number of each expert among the
    ``experts`` of this GPU or -1, None for the identity. Slots whose id is outside, or maps outside, are skipped.

    ``items`` int32 [most_items, 4]: expert, first, rows, 0: an item is up to ``item_rows`` rows of one expert. Items
    are in the order of experts; behind the last all are zero. ``order`` int32 [tokens * slots]: items[i] has rows
    ``first`` to ``first + rows - 1`` of it, and order[row] is the assignment ``token * slots + slot``. Behind the last
    row it is unwritten.
    """

    ids: torch.Tensor
    expert_map: torch.Tensor | None
    items: Written
    order: Written
    experts: int
    item_rows: int
    enable_pdl: bool | None
    names: str


class GatherArguments(NamedTuple):
    """rows [tokens * slots, hidden] = the rows of x in the order of the list (``items``, ``order``).

    Without an ``order`` x has that order. ``input_weights`` float32 [tokens, slots] or None: factors of them. Rows of
    skipped slots are unwritten. With ``scales`` float32 [tokens * slots], rows are E4M3, as bytes, and ``scales`` their
    decode scales; each 16 columns are 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 for t from 0 to 3.
    """

    x: torch.Tensor
    input_weights: torch.Tensor | None
    items: torch.Tensor
    order: torch.Tensor | None
    rows: Written
    scales: Written | None
    slots: int
    item_rows: int
    enable_pdl: bool | None
    names: str


class UpArguments(NamedTuple):
    """h [tokens * slots, inter] = activation(x [tokens, hidden] times w13).

    With a list (``items``, ``order``), rows of h are in the order of the list; without one, in that of assignments,
    ``token * slots + slot``. Rows of skipped slots are unwritten. ``input_weights`` float32 [tokens, slots] or None:
    factors of x. ``done`` int32 [counters()] becomes zero. With ``fp8`` the operands of the product are E4M3.
    """

    x: torch.Tensor
    w13: torch.Tensor
    scale13: torch.Tensor
    bias13: torch.Tensor | None
    ids: torch.Tensor
    expert_map: torch.Tensor | None
    input_weights: torch.Tensor | None
    items: torch.Tensor | None
    order: torch.Tensor | None
    h: Written
    done: Written
    swiglu_alpha: float
    swiglu_beta: float
    swiglu_limit: float
    gated: bool
    mxfp4: bool
    fp8: bool
    item_rows: int
    enable_pdl: bool | None
    names: str


class ResultArguments(NamedTuple):
    """y [tokens * slots, hidden] = h times w2, without weights and sums: the first part of the product down.

    Rows of h are in the order of the list (``items``, ``order``), those of y in that of assignments; rows of skipped
    slots are unwritten.
    """

    h: torch.Tensor
    w2: torch.Tensor
    scale2: torch.Tensor
    bias2: torch.Tensor | None
    items: torch.Tensor
    order: torch.Tensor
    y: Written
    slots: int
    mxfp4: bool
    fp8: bool
    item_rows: int
    enable_pdl: bool | None
    names: str


class DownArguments(NamedTuple):
    """out [tokens, hidden] = for each token the sum over its slots of weight times (h times w2), and ``residual``.

    ``y`` [tokens * slots, hidden] is for results of slots, by assignment. ``weights`` float32 [tokens, slots]; None
    means 1. ``done`` must be zero. ``x`` and ``input_weights`` are what the product up
    may still read while zeros are written to ``out``.
    """

    h: torch.Tensor
    w2: torch.Tensor
    scale2: torch.Tensor
    bias2: torch.Tensor | None
    ids: torch.Tensor
    expert_map: torch.Tensor | None
    weights: torch.Tensor | None
    residual: torch.Tensor | None
    x: torch.Tensor
    input_weights: torch.Tensor | None
    items: torch.Tensor | None
    order: torch.Tensor | None
    y: Written
    done: Written
    out: Written
    mxfp4: bool
    fp8: bool
    item_rows: int
    enable_pdl: bool | None
    names: str
