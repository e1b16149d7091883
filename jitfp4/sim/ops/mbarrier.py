"""mbarrier: initialise, arrive, expect bytes, wait.

Operations that name no scope are taken as those of the cluster, because kernels rely on it across CTAs; the manual says
that they are of the CTA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim.decode import Control, Decode, Source, Step, broadcast, control, step
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import Machine
from jitfp4.sim.mbarriers import MBarriers
from jitfp4.sim.ops.memory import space_of
from jitfp4.sim.ptx import TYPES, Addr, Array

U32, U64, PRED = TYPES["u32"], TYPES["u64"], TYPES["pred"]


def _scope(d: Decode) -> str:
    """Consume semantics, scope and type. Returns the state space."""
    d.ignore("acquire", "release", "relaxed", "cta", "cluster")
    space = space_of(d)
    d.need("b64")
    return space


def _each(m: Machine, space: str, lanes: Lanes, address: Source) -> tuple[MBarriers, Array]:
    units = m.unit(MBarriers)
    keys = units.keys(space, lanes.ids, address(m, lanes))
    units.use(keys, lanes.ids)
    return units, keys


@step("mbarrier.init", "mbarrier.inval")
def _init(d: Decode) -> Step:
    first = d.instr.mods[0] == "init"
    space = _scope(d)
    address = d.address()
    count = d.src(U32) if first else None

    def run(m: Machine, lanes: Lanes) -> None:
        units = m.unit(MBarriers)
        keys = units.keys(space, lanes.ids, address(m, lanes))
        counts = broadcast(np.uint32(0) if count is None else count(m, lanes), lanes.n)
        for position, key in enumerate(keys):
            ids = lanes.ids[position : position + 1]
            if first:
                units.init(int(key), int(counts[position]), ids)
            else:
                units.invalidate(int(key), ids)

    return run


def _grouped(keys: Array, amounts: Array) -> list[tuple[int, int, Array]]:
    """Per mbarrier: key, sum of the amounts, positions of its lanes."""
    out = []
    for key in np.unique(keys):
        where = np.flatnonzero(keys == key)
        out.append((int(key), int(amounts[where].sum()), where))
    return out


@step("mbarrier.arrive", "mbarrier.arrive_drop")
def _arrive(d: Decode) -> Step:
    """Arrive, optionally after expecting bytes. The result is the state before the arrival."""
    drop = d.instr.mods[0] == "arrive_drop"
    expect, no_complete = d.flag("expect_tx"), d.flag("noComplete")
    relaxed, narrow = "relaxed" in d.mods, "cta" in d.mods
    space = _scope(d)
    has_state = not isinstance(d.operands[0], Addr)
    dst = d.dst(U64) if has_state else None
    address = d.address()
    amount = d.src(U32) if d.operands else None
    if (expect or no_complete) and amount is None:
        raise d.error("a count is missing")

    def run(m: Machine, lanes: Lanes) -> None:
        units, keys = _each(m, space, lanes, address)
        one = np.ones(lanes.n, np.int64)
        given = one if amount is None else broadcast(amount(m, lanes), lanes.n).astype(np.int64)
        state = np.empty(lanes.n, np.uint64)
        groups = _grouped(keys, given)
        arrivals = one if expect else given
        apart = any(arrivals[where].sum() > units.get(key, lanes.ids[where]).pending for key, _, where in groups)
        if not apart:
            units.publish(lanes, keys, relaxed=relaxed, narrow=narrow)
        for key, total, where in groups:
            ids = lanes.ids[where]
            if expect:
                units.expect(key, total, ids)
            before = units.get(key, ids).phase
            for turn in units.by_phase(key, arrivals[where], ids) if apart else (np.arange(len(where)),):
                if apart:
                    units.publish(m.lanes(ids[turn]), keys[where[turn]], relaxed=relaxed, narrow=narrow)
                base = units.arrive(key, int(arrivals[where[turn]].sum()), ids[turn], drop=drop)
                state[where[turn]] = base - np.arange(len(turn))
            if no_complete and units.get(key, ids).phase != before:
                raise m.error(SimError, "mbarrier.arrive.noComplete completed a phase", ids)
        if dst is not None:
            dst(m, lanes, state)

    return run


@step("mbarrier.expect_tx", "mbarrier.complete_tx")
def _transactions(d: Decode) -> Step:
    expect = d.instr.mods[0] == "expect_tx"
    space = _scope(d)
    address, amount = d.address(), d.src(U32)

    def run(m: Machine, lanes: Lanes) -> None:
        units, keys = _each(m, space, lanes, address)
        given = broadcast(amount(m, lanes), lanes.n).astype(np.int64)
        for key, total, where in _grouped(keys, given):
            (units.expect if expect else units.complete_tx)(key, total, lanes.ids[where])

    return run


@step("mbarrier.pending_count")
def _pending(d: Decode) -> Step:
    d.need("b64")
    dst, state = d.dst(U32), d.src(U64)
    return lambda m, lanes: dst(m, lanes, (state(m, lanes) & np.uint64(0xFFFFF)).astype(np.uint32))


def _phase_done(d: Decode) -> tuple[Any, Callable[[Machine, Lanes], tuple[MBarriers, Array, Array]]]:
    """Destination, and a test of which lanes' phases have completed; it acquires what they published."""
    parity, relaxed, narrow = d.flag("parity"), "relaxed" in d.mods, "cta" in d.mods
    space = _scope(d)
    dst, address = d.dst(PRED), d.address()
    phase = d.src(U32 if parity else U64)
    if d.operands:
        d.src(U32)  # the suspend-time hint

    def test(m: Machine, lanes: Lanes) -> tuple[MBarriers, Array, Array]:
        units, keys = _each(m, space, lanes, address)
        wanted = broadcast(phase(m, lanes), lanes.n)
        phases: dict[int, int] = {}
        for i, key in enumerate(keys.tolist()):
            if key not in phases:
                phases[key] = units.get(key, lanes.ids[i : i + 1]).phase
        at = np.array([phases[key] for key in keys.tolist()], np.int64)
        done = at & 1 != wanted.astype(np.int64) & 1 if parity else at > (wanted >> np.uint64(20)).astype(np.int64)
        units.acquire(lanes.ids[done], keys[done], relaxed=relaxed, narrow=narrow)
        return units, keys, done

    return dst, test


@step("mbarrier.test_wait")
def _test_wait(d: Decode) -> Step:
    dst, test = _phase_done(d)

    def run(m: Machine, lanes: Lanes) -> None:
        _, _, done = test(m, lanes)
        dst(m, lanes, done)

    return run


@control("mbarrier.try_wait")
def _try_wait(d: Decode) -> Control:
    """Suspends until the phase completes: the time limit never runs out, so the result is always true."""
    dst, test = _phase_done(d)

    def run(m: Machine, lanes: Lanes, following: int) -> None:
        units, keys, done = test(m, lanes)
        through, stay = m.split(lanes, done)
        if through is not None:
            dst(m, through, np.True_)
            m.ready.push(following, through)
        if stay is not None:
            units.suspend(stay, keys[~done])

    return run


@step("mapa")
def _mapa(d: Decode) -> Step:
    """The address of the same variable in another CTA of the cluster."""
    d.take("shared::cluster")
    kind = d.type()
    dst, read, rank = d.dst(kind), d.src(kind), d.src(U32)
    low = kind.dtype.type(0xFFFFFF)
    high = kind.dtype.type(0xFFFFFFFF00000000 & ((1 << kind.bits) - 1))  # the window of a generic address

    def run(m: Machine, lanes: Lanes) -> None:
        value = read(m, lanes)
        to = np.asarray(rank(m, lanes)).astype(kind.dtype)
        dst(m, lanes, (value & low) | (value & high) | to << kind.dtype.type(24))

    return run


@step("getctarank")
def _getctarank(d: Decode) -> Step:
    d.take("shared::cluster")
    kind = d.type()
    dst, read = d.dst(U32), d.src(kind)
    byte = kind.dtype.type(0xFF)
    return lambda m, lanes: dst(m, lanes, (read(m, lanes) >> kind.dtype.type(24) & byte).astype(np.uint32))
