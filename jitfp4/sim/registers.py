"""Registers that asynchronous instructions own: accumulators and A fragments of wgmma, destinations of tcgen05.ld.

PTX ISA, "wgmma.mma_async": accessing them before ``wgmma.wait_group`` is undefined; "wgmma.fence": an access by any
other instruction needs a fence before the next wgmma on the same registers. "tcgen05.wait": the destinations of
``tcgen05.ld`` hold the data only past ``wait::ld``. Compilers put plain ``mov`` between the operands of inline assembly
and its statements, on either side of a fence, and ptxas renames registers: a ``mov`` counts as what it copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.ptx import Addr, Array, Instr, Not, Operand, Pair, Reg, Vec

if TYPE_CHECKING:
    from jitfp4.sim.decode import Control, Step
    from jitfp4.sim.machine import Machine

_OWNERS = ("wgmma.mma_async", "tcgen05.ld")


def registers_of(operands: Sequence[Operand]) -> set[int]:
    """Every register that operands name."""
    found: set[int] = set()
    for operand in operands:
        match operand:
            case Reg():
                found.add(operand.index)
            case Vec(items):
                found |= registers_of(items)
            case Addr(base, _, rest):
                found |= registers_of([base, *rest])
            case Not(reg):
                found.add(reg.index)
            case Pair(first, second):
                found |= registers_of([first, second])
    return found


def owner(instr: Instr) -> bool:
    """Whether an instruction leaves registers to asynchronous work."""
    return ".".join((instr.name, *instr.mods[:1])) in _OWNERS


def owned(code: Sequence[Instr]) -> frozenset[int]:
    """The registers of a module that asynchronous work owns at times."""
    found: set[int] = set()
    for instr in code:
        if owner(instr):
            found |= registers_of([o for o in instr.operands if isinstance(o, Vec)])
    copies = [_copy(instr) for instr in code if instr.name == "mov"] if found else []
    size = 0
    while len(found) != size:  # and what is copied into them
        size = len(found)
        found |= {source for target, source in filter(None, copies) if target in found}
    return frozenset(found)


def _copy(instr: Instr) -> tuple[int, int] | None:
    """Target and source of a ``mov`` between registers."""
    target, source = instr.operands[:2]
    return (target.index, source.index) if isinstance(target, Reg) and isinstance(source, Reg) else None


def watched(step: Step, instr: Instr, places: frozenset[int]) -> Step:
    """``step``, which must not touch registers ``places`` while asynchronous work owns them."""
    move = instr.name == "mov" and isinstance(instr.operands[0], Reg)
    copy = (_copy(instr) or (-1, -1)) if move else None

    def run(m: Machine, lanes: Lanes) -> None:
        if m.races is not None:
            m.unit(RegisterWatch).touch(lanes, places, copy)
        step(m, lanes)

    return run


def watched_control(control: Control, places: frozenset[int]) -> Control:
    """The same for an instruction that moves threads."""

    def run(m: Machine, lanes: Lanes, following: int) -> None:
        if m.races is not None:
            m.unit(RegisterWatch).touch(lanes, places, None)
        control(m, lanes, following)

    return run


class RegisterWatch:
    """Which threads' registers are in flight, by register, and which were touched since the last wgmma.fence."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.multiplied: dict[int, Array] = {}
        self.loaded: dict[int, Array] = {}
        self.touched: dict[int, Array] = {}

    def touch(self, lanes: Lanes, places: frozenset[int], copy: tuple[int, int] | None) -> None:
        """An instruction accesses ``places``; ``copy`` has target and source of a ``mov`` (-1, -1 of a constant)."""
        for place in places:
            for table, text in (
                (self.multiplied, "an accumulator or A register of wgmma is accessed before wgmma.wait_group"),
                (self.loaded, "a destination of tcgen05.ld is accessed before tcgen05.wait::ld"),
            ):
                flying = table.get(place)
                if flying is None or not flying[lanes.sel].any():
                    continue
                if table is self.loaded and copy is not None and copy[1] == place:
                    self._of(table, copy[0], False)[lanes.ids[flying[lanes.sel]]] = True
                    continue
                raise self.machine.error(SimError, text, lanes.ids[flying[lanes.sel]])
            if copy is None:
                self._of(self.touched, place, True)[lanes.sel] = True
        if copy is not None and copy[1] in self.machine.program.owned:
            target, source = (self._of(self.touched, place, True) for place in copy)
            target[lanes.sel] = source[lanes.sel]

    def _of(self, table: dict[int, Array], place: int, value: bool) -> Array:
        found = table.get(place)
        if found is None:
            found = table[place] = np.full(self.machine.total, value)
        return found

    def fence(self, ids: Array) -> None:
        """wgmma.fence."""
        for place in self.machine.program.owned:
            self._of(self.touched, place, True)[ids] = False

    def multiply(self, ids: Array, places: Sequence[int]) -> None:
        """A wgmma takes accumulators and A registers."""
        for place in places:
            if self._of(self.touched, place, True)[ids].any():
                text = "wgmma.mma_async on registers that were accessed after the last wgmma.fence"
                raise self.machine.error(SimError, text, ids)
        self.fly(ids, places)

    def fly(self, ids: Array, places: Sequence[int]) -> None:
        for place in places:
            self._of(self.multiplied, place, False)[ids] = True

    def land(self, ids: Array) -> None:
        """No wgmma of these threads is in flight."""
        for flying in self.multiplied.values():
            flying[ids] = False

    def load(self, ids: Array, places: Sequence[int]) -> None:
        """A tcgen05.ld begins."""
        for place in places:
            self._of(self.loaded, place, False)[ids] = True

    def loads_done(self, ids: Array) -> None:
        """tcgen05.wait::ld."""
        for flying in self.loaded.values():
            flying[ids] = False
