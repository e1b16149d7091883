"""wgmma: the groups of multiplies that each warpgroup has in flight.

A multiply takes effect when its warpgroup waits for its group. Shared memory is read then, so that overwriting an
operand too early changes the result; A registers are taken at issue. Until then the accumulator registers hold a NaN
pattern.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim.decode import Dest, Source, broadcast
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.ptx import Array
from jitfp4.sim.registers import RegisterWatch

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine

IN_FLIGHT = np.uint32(0x7FFFDEAD)
WARP, WARPGROUP = 32, 128


def gather(m: Machine, lanes: Lanes, reads: list[Source]) -> Array:
    """Registers as uint32 [warps, 32, count]."""
    columns = [broadcast(r(m, lanes), lanes.n) for r in reads]
    return np.stack(columns, axis=1).reshape(-1, WARP, len(reads))


def scatter(m: Machine, lanes: Lanes, writes: list[Dest], values: Array) -> None:
    """Write registers given as uint32 [warps, 32, count]."""
    flat = values.reshape(lanes.n, len(writes))
    for j, write in enumerate(writes):
        write(m, lanes, flat[:, j].copy())


@dataclass(frozen=True, slots=True)
class Accumulator:
    """The d registers of a multiply; ``places`` identifies them."""

    places: tuple[int, ...]
    reads: list[Source]
    writes: list[Dest]


@dataclass(slots=True)
class _Held:
    """Accumulator values while ``owed`` multiplies have yet to be performed on them."""

    values: Array
    owed: int = 0


@dataclass(frozen=True, slots=True)
class _Multiply:
    group: int
    pc: int
    lanes: Lanes
    accumulator: Accumulator
    fragments: tuple[int, ...]  # the registers of A
    function: Callable[..., Array]


class WarpGroups:
    """Pending wgmma of every warpgroup of the batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        per_cta = -(-machine.block_threads // WARPGROUP)
        self.number = machine.cta * per_cta + machine.tid // WARPGROUP
        count = machine.ctas * per_cta
        self.committed = np.zeros(count, np.int64)
        self.fenced = np.zeros(count, bool)
        self.queue: list[deque[_Multiply]] = [deque() for _ in range(count)]
        self.held: dict[tuple[int, tuple[int, ...]], _Held] = {}

    def of(self, lanes: Lanes) -> list[tuple[int, Array]]:
        """Each warpgroup among ``lanes``, which must be whole: its number and its threads."""
        numbers = self.number[lanes.sel]
        out = [(int(n), lanes.ids[numbers == n]) for n in np.unique(numbers)]
        for _, ids in out:
            if len(ids) != WARPGROUP:
                raise self.machine.error(SimError, f"wgmma by {len(ids)} threads of a warpgroup", ids)
        return out

    def note_operand(self, ids: Array, where: Array) -> None:
        """A multiply of the warpgroup ``ids`` reads shared addresses: every warp must be allowed to."""
        m = self.machine
        if m.races is None:
            return
        number, races = int(self.number[ids[0]]), m.races
        agent = races.clocks.agent(("wgmma", number), int(ids[0]))
        cell = races.shared.of_bytes(int(m.cta[ids[0]]) * m.memory.shared_stride + where)
        for thread in ids[::WARP].tolist():
            races.agent_reads("shared", races.shared, cell, thread, agent, int(self.committed[number]) + 1)

    def issue(
        self,
        number: int,
        lanes: Lanes,
        accumulator: Accumulator,
        fragments: tuple[int, ...],
        function: Callable[..., Array],
    ) -> None:
        """Queue ``function(d=..., shared=...)``, which returns the new d, and poison the registers of d."""
        m = self.machine
        if not self.fenced[number]:
            raise m.error(SimError, "wgmma.mma_async before the first wgmma.fence", lanes.ids)
        if m.races is not None:
            m.unit(RegisterWatch).multiply(lanes.ids, (*accumulator.places, *fragments))
        key = (number, accumulator.places)
        if key not in self.held:
            self.held[key] = _Held(gather(m, lanes, accumulator.reads))
            for write in accumulator.writes:
                write(m, lanes, np.full(lanes.n, IN_FLIGHT))
        self.held[key].owed += 1
        group = int(self.committed[number])
        self.queue[number].append(_Multiply(group, m.pc, lanes, accumulator, fragments, function))

    def wait(self, number: int, ids: Array, allowed: int) -> None:
        """Perform all but the last ``allowed`` committed groups of a warpgroup."""
        queue = self.queue[number]
        while queue and queue[0].group < self.committed[number] - allowed:
            self.perform(number, queue.popleft())
        races = self.machine.races
        if races is not None:
            agent = races.clocks.agent(("wgmma", number), int(ids[0]))
            races.clocks.done(ids, agent, int(self.committed[number]) - allowed + 1)
            watch = self.machine.unit(RegisterWatch)
            watch.land(ids)
            for work in queue:
                watch.fly(ids, (*work.accumulator.places, *work.fragments))

    def perform(self, number: int, work: _Multiply) -> None:
        m = self.machine
        now, m.pc = m.pc, work.pc
        key = (number, work.accumulator.places)
        held = self.held[key]
        shared = m.memory.of_cta(int(m.cta[work.lanes.ids[0]]))
        held.values = work.function(d=held.values, shared=shared)
        held.owed -= 1
        if held.owed == 0:
            scatter(m, work.lanes, work.accumulator.writes, held.values)
            del self.held[key]
        m.pc = now
