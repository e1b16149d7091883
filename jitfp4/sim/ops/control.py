"""Branches, calls, exit, and hints that have no effect on results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim.decode import Control, Decode, Step, broadcast, control, step
from jitfp4.sim.ptx import TYPES, Label, Vec

if TYPE_CHECKING:
    from jitfp4.sim.lanes import Lanes
    from jitfp4.sim.machine import Machine

MAX_DEPTH = 32


class CallStack:
    """Return addresses of every thread."""

    def __init__(self, machine: Machine) -> None:
        self.depth = np.zeros(machine.total, np.int64)
        self.back = np.zeros((MAX_DEPTH, machine.total), np.int64)


@control("bra")
def _bra(d: Decode) -> Control:
    d.flag("uni")
    d.next()
    (target,) = d.instr.targets
    return lambda m, lanes, _following: m.ready.push(target, lanes)


@control("brx.idx")
def _brx(d: Decode) -> Control:
    """Branch to one of a list of labels."""
    d.flag("uni")
    index = d.src(TYPES["u32"])
    d.next()
    targets = d.instr.targets

    def run(m: Machine, lanes: Lanes, _following: int) -> None:
        chosen = broadcast(index(m, lanes), lanes.n)
        for value in np.unique(chosen):
            if value >= len(targets):
                raise m.error(SimError, f"brx.idx index {value} is beyond its {len(targets)} targets", lanes.ids)
            m.ready.push(targets[int(value)], m.lanes(lanes.ids[chosen == value]))

    return run


@control("call")
def _call(d: Decode) -> Control:
    """Call of a device function; arguments travel in .param variables, which are copied to the callee's own."""
    d.flag("uni")
    results = d.next() if isinstance(d.operands[0], Vec) else Vec(())
    callee = d.next()
    arguments = d.next() if d.operands else Vec(())
    functions = d.program.module.functions
    if not isinstance(callee, Label) or callee.name not in functions:
        raise d.error("call of something that is not a function of this module")
    if functions[callee.name].end == 0:
        return _missing(callee.name)
    if not isinstance(results, Vec) or not isinstance(arguments, Vec):
        raise d.error("a call has its parameters in parentheses")
    function = functions[callee.name]
    copies_in = d.program.param_copies(arguments, function.params, d)
    d.program.return_copies[d.pc] = d.program.param_copies(results, function.returns, d)
    here = d.pc

    def run(m: Machine, lanes: Lanes, _following: int) -> None:
        stack = m.unit(CallStack)
        depth = stack.depth[lanes.sel]
        if depth.max() >= MAX_DEPTH:
            raise m.error(SimError, f"more than {MAX_DEPTH} nested calls", lanes.ids)
        for outer, inner, size in copies_in:
            m.memory.copy_local(lanes.ids, outer, inner, size)
        stack.back[depth, lanes.ids] = here
        stack.depth[lanes.sel] += 1
        m.ready.push(function.start, lanes)

    return run


def _missing(name: str) -> Control:
    """A call of a system function such as __assertfail or vprintf: an error of the threads that reach it."""

    def run(m: Machine, lanes: Lanes, _following: int) -> None:
        raise m.error(SimError, f"call of {name}, which has no body in this module", lanes.ids)

    return run


@control("ret")
def _ret(d: Decode) -> Control:
    """Return to the caller; from an entry, exit."""
    d.flag("uni")

    def run(m: Machine, lanes: Lanes, _following: int) -> None:
        stack = m.units.get(CallStack)
        if stack is None or not stack.depth[lanes.sel].any():
            m.exit(lanes)
            return
        depth = stack.depth[lanes.sel]
        returning, leaving = m.split(lanes, depth > 0)
        if leaving is not None:
            m.exit(leaving)
        if returning is None:
            return
        stack.depth[returning.sel] -= 1
        sites = stack.back[stack.depth[returning.sel], returning.ids]
        for site in np.unique(sites):
            back = m.lanes(returning.ids[sites == site])
            for outer, inner, size in m.program.return_copies[int(site)]:
                m.memory.copy_local(back.ids, inner, outer, size)
            m.ready.push(int(site) + 1, back)

    return run


@control("exit")
def _exit(d: Decode) -> Control:
    del d
    return lambda m, lanes, _following: m.exit(lanes)


@control("trap")
def _trap(d: Decode) -> Control:
    del d

    def run(m: Machine, lanes: Lanes, _following: int) -> None:
        raise m.error(SimError, "trap", lanes.ids)

    return run


@step("nanosleep", "pmevent", "applypriority")
def _hint(d: Decode) -> Step:
    """Timing and cache hints."""
    d.mods.clear()
    d.operands.clear()
    return lambda _m, _lanes: None


@step("setmaxnreg")
def _setmaxnreg(d: Decode) -> Step:
    """Register reallocation between warpgroups: the machine has as many registers as the code names."""
    d.need("inc", "dec")
    d.need("sync")
    d.need("aligned")
    d.need("u32")
    count = d.immediate()
    if count % 8 or not 24 <= count <= 256:
        raise d.error("setmaxnreg takes a multiple of 8 in [24, 256]")
    return lambda _m, _lanes: None


@step("griddepcontrol")
def _griddepcontrol(d: Decode) -> Step:
    """Launches run one after the other, so nothing waits; the race detector knows what lies behind a wait."""
    waits = d.need("wait", "launch_dependents") == "wait"

    def run(m: Machine, lanes: Lanes) -> None:
        if m.races is None:
            return
        clocks, history, ctas = m.races.clocks, m.races.history, set((m.first + m.cta[lanes.ids]).tolist())
        if waits:
            clocks.previous_done(lanes.ids)
            history.waited |= ctas
        elif not clocks.is_previous_done(lanes.ids):
            history.early |= ctas

    return run
