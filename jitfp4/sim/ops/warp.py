"""Exchange within a warp: shfl, vote, match, redux, elect, activemask and bar.warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jitfp4.sim.decode import Control, Decode, Source, Step, broadcast, control, step
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import Machine
from jitfp4.sim.ops.floating import extremum
from jitfp4.sim.ptx import TYPES, Array, Pair, Sink
from jitfp4.sim.warps import WarpSync, warp_rows

PRED, B32, U32 = TYPES["pred"], TYPES["b32"], TYPES["u32"]
POISON = np.uint32(0xCDCDCDCD)


def collective(
    body: Step, mask: Source | None = None, group: int = 1, *, forward: bool = True, orders: bool = False
) -> Control:
    """Run ``body`` for threads whose warp (or ``group`` of warps, or member mask) has arrived; the others wait.

    They go on at the next instruction, unless ``forward`` leaves that to the body. Only where it ``orders`` memory do
    lanes see what others wrote: the manual says so of bar.warp.sync, not of exchanges of registers.
    """

    def run(m: Machine, lanes: Lanes, following: int) -> None:
        members = None if mask is None else broadcast(mask(m, lanes), lanes.n)
        if members is not None and lanes.n == m.total and (members == 0xFFFFFFFF).all():
            members = None
        ready = m.unit(WarpSync).arrive(lanes, members, group)
        if ready is None:
            return
        body(m, ready)
        if orders and m.races is not None:
            m.races.warp_sync(ready)
        if forward:
            m.ready.push(following, ready)

    return run


def table(m: Machine, lanes: Lanes, values: Array, absent: Any) -> tuple[Array, Array, Array]:
    """``values`` as [warps, 32] with ``absent`` in lanes that do not take part, and each lane's row and column."""
    row, column = warp_rows(m, lanes)
    out = np.full((int(row[-1]) + 1, 32), absent, values.dtype)
    out[row, column] = values
    return out, row, column


@control("shfl.sync")
def _shfl(d: Decode) -> Control:
    """Read another lane's register. A lane that is not there gives a poison pattern."""
    mode = d.need("up", "down", "bfly", "idx")
    d.need("b32")
    target = d.next()
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    dst, inside = d.dst(B32, first), d.dst(PRED, second)
    a, b, c, mask = d.src(B32), d.src(U32), d.src(U32), d.src(U32)

    def body(m: Machine, lanes: Lanes) -> None:
        values, row, lane = table(m, lanes, broadcast(a(m, lanes), lanes.n), POISON)
        control_word = np.asarray(c(m, lanes)).astype(np.int64)
        by = np.asarray(b(m, lanes)).astype(np.int64) & 31
        segment, clamp = control_word >> 8 & 31, control_word & 31
        low = lane & segment
        high = low | (clamp & ~segment)
        match mode:
            case "up":
                source = lane - by
                valid = source >= high
            case "down":
                source = lane + by
                valid = source <= high
            case "bfly":
                source = lane ^ by
                valid = source <= high
            case _:
                source = low | (by & ~segment)
                valid = source <= high
        source = np.where(valid, source, lane)
        dst(m, lanes, values[row, source])
        inside(m, lanes, valid)

    return collective(body, mask)


@control("vote.sync")
def _vote(d: Decode) -> Control:
    mode = d.need("all", "any", "uni", "ballot")
    kind = d.type()
    dst, read, mask = d.dst(kind), d.src(PRED), d.src(U32)

    def body(m: Machine, lanes: Lanes) -> None:
        holds = broadcast(read(m, lanes), lanes.n)
        row, lane = warp_rows(m, lanes)
        members = broadcast(mask(m, lanes), lanes.n)
        ballot = _ballots(members, holds, row, lane)
        if mode == "ballot":
            dst(m, lanes, ballot)
            return
        present = _ballots(members, np.ones(lanes.n, bool), row, lane)
        yes, no = ballot == present, ballot == 0
        dst(m, lanes, {"all": yes, "any": ~no, "uni": yes | no}[mode])

    return collective(body, mask)


def _ballots(members: Array, holds: Array, row: Array, lane: Array) -> Array:
    """For each lane, the bit mask of the lanes of its member mask for which ``holds`` is set."""
    bits = np.bincount(row, np.ldexp(holds.astype(float), lane)).astype(np.uint32)
    return bits[row] & members


@control("match.any.sync", "match.all.sync")
def _match(d: Decode) -> Control:
    """Lanes of the member mask that hold the same value as this one, or all of them, or none."""
    everyone = d.instr.mods[0] == "all"
    kind = d.type()
    target = d.next()
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    dst, same = d.dst(B32, first), d.dst(PRED, second)
    read, mask = d.src(kind), d.src(U32)

    def body(m: Machine, lanes: Lanes) -> None:
        value = broadcast(read(m, lanes), lanes.n)
        members = broadcast(mask(m, lanes), lanes.n)
        values, row, _ = table(m, lanes, value, 0)
        there, _, _ = table(m, lanes, np.ones(lanes.n, bool), False)
        equal = (values[row] == value[:, None]) & there[row]
        found = (equal.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32) & members
        if everyone:
            present = (there[row].astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
            whole = found == present & members
            found = np.where(whole, found, np.uint32(0))
            same(m, lanes, whole)
        dst(m, lanes, found)

    return collective(body, mask)


@control("redux.sync")
def _redux(d: Decode) -> Control:
    """Reduction over the member mask: integers of every architecture, f32 min and max on sm_100a."""
    op = d.need("add", "min", "max", "and", "or", "xor")
    absolute, nan = d.flag("abs"), d.flag("NaN")
    kind = d.type()
    dst, read, mask = d.dst(kind), d.src(kind), d.src(U32)
    reduce: dict[str, Callable[[Array, Array], Array]] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    fn = extremum(op, nan, False) if kind.is_float else reduce[op]

    def body(m: Machine, lanes: Lanes) -> None:
        value = broadcast(read(m, lanes), lanes.n)
        members = broadcast(mask(m, lanes), lanes.n)
        if absolute:
            value = np.abs(value)
        values, row, _ = table(m, lanes, value, 0)
        there, _, _ = table(m, lanes, np.ones(lanes.n, bool), False)
        out, begun = value.copy(), np.zeros(lanes.n, bool)
        for other in range(32):
            term = values[row, other]
            use = there[row, other] & (members >> np.uint32(other) & np.uint32(1) != 0)
            out = np.where(use, np.where(begun, fn(out, term), term), out)
            begun |= use
        dst(m, lanes, out)

    return collective(body, mask)


@control("elect.sync")
def _elect(d: Decode) -> Control:
    """One lane of the member mask gets a true predicate: here the lowest."""
    target = d.next()
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    dst, chosen = d.dst(B32, first), d.dst(PRED, second)
    mask = d.src(U32)

    def body(m: Machine, lanes: Lanes) -> None:
        row, lane = warp_rows(m, lanes)
        present = _ballots(broadcast(mask(m, lanes), lanes.n), np.ones(lanes.n, bool), row, lane)
        leader = np.bitwise_count((present & (~present + np.uint32(1))) - np.uint32(1)).astype(np.uint32)
        dst(m, lanes, leader)
        chosen(m, lanes, lane == leader)

    return collective(body, mask)


@control("bar.warp.sync")
def _bar_warp(d: Decode) -> Control:
    return collective(lambda _m, _lanes: None, d.src(U32), orders=True)


@step("activemask")
def _activemask(d: Decode) -> Step:
    """The lanes of the warp that execute this instruction together here; the GPU may group them differently."""
    d.need("b32")
    dst = d.dst(B32)

    def run(m: Machine, lanes: Lanes) -> None:
        row, lane = warp_rows(m, lanes)
        full = np.full(lanes.n, 0xFFFFFFFF, np.uint32)
        dst(m, lanes, _ballots(full, np.ones(lanes.n, bool), row, lane))

    return run
