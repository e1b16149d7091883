"""mbarrier objects: phases of arrivals and transaction bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError, SimMemoryError, SimRaceError
from jitfp4.sim.clocks import Release
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.memory import MBARRIER, UNWRITTEN, Part
from jitfp4.sim.ptx import Array

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine

SIZE = 8
MAX_COUNT = (1 << 20) - 1


@dataclass(slots=True)
class MBarrier:
    """``phase`` counts completed phases. The current one completes when ``pending`` and ``tx`` are both zero."""

    count: int
    pending: int
    tx: int = 0
    phase: int = 0


class MBarriers:
    """Every mbarrier of the batch, by its flat offset in shared memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.table: dict[int, MBarrier] = {}
        self.waits_at = np.full(machine.total, -1, np.int64)
        self.clock: dict[int, Release] = {}  # what arrivals and completions published, for the race detector
        self.done: dict[int, Release] = {}  # the same when the last phase completed
        self.unpublished: dict[int, int] = {}  # mbarriers that the async proxy may not know yet: who made them
        self.remote: dict[int, dict[int, tuple[int, int]]] = {}  # by CTA, threads of others: when, where they last used

    def keys(self, space: str, ids: Array, address: Array) -> Array:
        """Flat offsets of 8-byte shared addresses; generic addresses must point into shared memory."""
        out = np.empty(len(ids), np.int64)
        for part in self.machine.memory.locate(space, ids, address, SIZE):
            if part.space != "shared":
                raise self.machine.error(SimMemoryError, f"mbarrier in {part.space} memory", part.of(ids))
            out[slice(None) if part.pick is None else part.pick] = part.offset
        return out

    def name(self, key: int) -> str:
        stride = self.machine.memory.shared_stride
        cta = tuple(int(axis[key // stride]) for axis in self.machine.cta_index)
        return f"mbarrier at shared {key % stride:#x} of CTA {cta}"

    def get(self, key: int, ids: Array) -> MBarrier:
        found = self.table.get(key)
        if found is None:
            raise self.machine.error(SimMemoryError, f"no {self.name(key)}: it was not initialised", ids)
        if self.machine.live_in_cta[key // self.machine.memory.shared_stride] == 0:
            raise self.machine.error(SimMemoryError, f"{self.name(key)} is used after its CTA has exited", ids)
        return found

    def init(self, key: int, count: int, ids: Array) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise self.machine.error(SimError, f"mbarrier count {count} is not in [1, {MAX_COUNT}]", ids)
        if key in self.table:
            raise self.machine.error(SimError, f"{self.name(key)} is initialised again without mbarrier.inval", ids)
        self.machine.memory.mark(key, SIZE, MBARRIER)
        self.table[key] = MBarrier(count, count)
        races = self.machine.races
        if races is not None:
            races.write(Part(self.machine.memory.shared, None, np.array([key]), "shared"), ids, SIZE)
            self.unpublished[key] = int(ids[0])

    def publish_init(self, ids: Array) -> None:
        """A fence of these threads makes what they initialised known to the async proxy."""
        if self.unpublished:
            inside = set(ids.tolist())
            self.unpublished = {key: thread for key, thread in self.unpublished.items() if thread not in inside}

    def use(self, keys: Array, ids: Array) -> None:
        """Threads use mbarriers: their initialisation must lie behind them."""
        m = self.machine
        if m.races is None:
            return
        m.races.require_behind(Part(m.memory.shared, None, keys, "shared"), ids, SIZE)
        home = keys // m.memory.shared_stride
        for at in np.flatnonzero(home != m.cta[ids]).tolist():
            thread = int(ids[at])
            self.remote.setdefault(int(home[at]), {})[thread] = (int(m.races.clocks.now[m.warp[thread]]), m.pc)

    def use_async(self, key: int, ids: Array) -> None:
        """A thread hands an mbarrier to the async proxy, which must have been told of its initialisation."""
        if self.machine.races is not None:
            self.use(np.array([key]), ids)
            if key in self.unpublished:
                text = (
                    f"the async proxy signals {self.name(key)}, whose initialisation no fence.mbarrier_init or "
                    "fence.proxy.async has made visible to it"
                )
                raise self.machine.error(SimRaceError, text, ids)

    def invalidate(self, key: int, ids: Array) -> None:
        self.get(key, ids)
        self.clock.pop(key, None)
        self.done.pop(key, None)
        del self.table[key]
        self.machine.memory.mark(key, SIZE, UNWRITTEN)

    def arrive(self, key: int, arrivals: int, ids: Array, *, drop: bool = False) -> int:
        """Count arrivals. Returns the state before them: completed phases above 20 bits of pending count."""
        barrier = self.get(key, ids)
        state = barrier.phase << 20 | barrier.pending
        while arrivals:
            if barrier.pending == 0:
                raise self.machine.error(SimError, f"{self.name(key)}: more arrivals than it expects", ids)
            step = min(arrivals, barrier.pending)
            barrier.pending -= step
            barrier.count -= step if drop else 0
            arrivals -= step
            self.advance(key, barrier)
        return state

    def by_phase(self, key: int, arrivals: Array, ids: Array) -> Iterator[Array]:
        """Positions of lanes that arrive together, in order, phase by phase: what the later ones did, a phase that the
        earlier ones complete does not publish."""
        left, start = self.get(key, ids).pending, 0
        for at, count in enumerate(arrivals.tolist()):
            if left <= 0 and at > start:
                yield np.arange(start, at)
                left, start = self.get(key, ids).pending, at
            left -= count
        yield np.arange(start, len(arrivals))

    def expect(self, key: int, size: int, ids: Array) -> None:
        barrier = self.get(key, ids)
        barrier.tx += size
        if barrier.tx > MAX_COUNT:
            raise self.machine.error(SimError, f"{self.name(key)}: {barrier.tx} transaction bytes are too many", ids)

    def complete_tx(self, key: int, size: int, ids: Array) -> None:
        barrier = self.get(key, ids)
        barrier.tx -= size
        self.advance(key, barrier)

    def advance(self, key: int, barrier: MBarrier) -> None:
        """Begin the next phase and wake the waiting threads when the current one is complete."""
        if barrier.pending or barrier.tx:
            return
        barrier.phase += 1
        barrier.pending = barrier.count
        if key in self.clock:
            self.done[key] = self.clock[key]
        ids = np.flatnonzero(self.waits_at == key)
        self.waits_at[ids] = -1
        m = self.machine
        for pc in np.unique(m.waiting[ids]):
            m.resume(ids[m.waiting[ids] == pc], int(pc))

    def suspend(self, lanes: Lanes, keys: Array) -> None:
        self.waits_at[lanes.sel] = keys
        self.machine.suspend(lanes)

    def report(self) -> list[str]:
        """Barriers that somebody waits at, for the deadlock message."""
        lines = []
        for key in np.unique(self.waits_at[self.waits_at >= 0]):
            b = self.table[int(key)]
            missing = f"{b.pending} of {b.count} arrivals and {b.tx} bytes are missing"
            lines.append(f"{self.name(int(key))}: phase {b.phase}, {missing}")
        return lines
