"""Copies that run beside the threads: cp.async, cp.async.bulk, cp.async.bulk.tensor.

Nothing lands before it must. A bulk copy is performed, in the order of issue, only when no thread can run, when a wait for
its group demands it, or on a fairness turn of the scheduler; cp.async data lands when its thread waits. Until then its shared
destination counts as being written, so that a thread that reads or writes there without waiting is an error. A source is read
when the copy is performed, so that overwriting it too early changes the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.mbarriers import MBarriers
from jitfp4.sim.memory import IN_FLIGHT, MBARRIER, WRITTEN, Part
from jitfp4.sim.ptx import Array

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine


@dataclass(slots=True)
class BulkCopy:
    """One bulk copy of one thread: ``read`` takes the source, ``write`` delivers it and signals.

    ``group`` numbers the thread's bulk groups; None for a copy that signals an mbarrier.
    """

    thread: int
    pc: int
    read: Callable[[], Array]
    write: Callable[[Array], None]
    group: int | None
    data: Array | None = None

    def fetch(self) -> None:
        if self.data is None:
            self.data = self.read()

    def perform(self) -> None:
        self.fetch()
        assert self.data is not None
        self.write(self.data)


class BulkCopies:
    """The engine of cp.async.bulk: pending copies in order of issue, and every thread's groups."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pending: deque[BulkCopy] = deque()
        self.committed = np.zeros(machine.total, np.int64)
        machine.engines.insert(0, self)  # before the tensor pipe
        machine.on_exit.append(self.threads_left)

    def issue(self, thread: int, read: Callable[[], Array], write: Callable[[Array], None], *, grouped: bool) -> None:
        group = int(self.committed[thread]) if grouped else None
        self.pending.append(BulkCopy(thread, self.machine.pc, read, write, group))

    def advance(self) -> bool:
        if not self.pending:
            return False
        self.at_issue(self.pending.popleft())
        return True

    def at_issue(self, copy: BulkCopy) -> None:
        """Perform a copy; its errors name the instruction that issued it."""
        now, self.machine.pc = self.machine.pc, copy.pc
        copy.perform()
        self.machine.pc = now

    def wait(self, lanes: Lanes, allowed: int, *, read_only: bool) -> None:
        """Complete (or only read the sources of) all but the last ``allowed`` groups of each thread."""
        waiting = set(lanes.ids.tolist())
        kept: deque[BulkCopy] = deque()
        while self.pending:
            copy = self.pending.popleft()
            due = copy.thread in waiting and copy.group is not None
            if due and copy.group is not None and copy.group < int(self.committed[copy.thread]) - allowed:
                if not read_only:
                    self.at_issue(copy)
                    continue
                copy.fetch()
            kept.append(copy)
        self.pending = kept

    def threads_left(self, ids: Array) -> None:
        """A CTA's shared memory ends with it: its threads must wait for copies out of it."""
        if not self.pending:
            return
        gone = set(ids.tolist())
        for copy in self.pending:
            if copy.thread in gone and copy.group is not None and copy.data is None:
                raise self.machine.error(
                    SimMemoryError,
                    "a thread exits before its bulk copy has read shared memory (cp.async.bulk.wait_group)",
                    np.array([copy.thread]),
                    copy.pc,
                )


@dataclass(slots=True)
class SmallCopies:
    """One executed cp.async: threads, their group numbers, and where the data goes."""

    ids: Array
    group: Array
    part: Part
    source: Array
    pc: int


class AsyncCopies:
    """cp.async: 4 to 16 bytes per thread, complete when the thread waits for the group."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.committed = np.zeros(machine.total, np.int64)
        self.pending: list[SmallCopies] = []
        self.arrivals: deque[tuple[Array, Array]] = deque()  # threads and mbarriers of cp.async.mbarrier.arrive
        machine.engines.append(self)

    def issue(self, lanes: Lanes, part: Part, source: Array) -> None:
        """``source`` is uint8 [lanes, size], already fetched: global memory that nobody may change meanwhile."""
        group = self.committed[lanes.sel].copy()
        self.pending.append(SmallCopies(lanes.ids, group, part, source, self.machine.pc))

    def wait(self, ids: Array, allowed: int | None) -> None:
        """Land the copies of all but each thread's last ``allowed`` groups; None is everything, committed or not."""
        inside = np.zeros(self.machine.total, bool)
        inside[ids] = True
        kept = []
        for copies in self.pending:
            due = inside[copies.ids]
            if allowed is not None:
                due &= copies.group < self.committed[copies.ids] - allowed
            if due.any():
                self.land(copies, due)
            if not due.all():
                rest = ~due
                part = Part(copies.part.region, None, copies.part.offset[rest], copies.part.space)
                kept.append(SmallCopies(copies.ids[rest], copies.group[rest], part, copies.source[rest], copies.pc))
        self.pending = kept

    def land(self, copies: SmallCopies, due: Array) -> None:
        offset, source = copies.part.offset[due], copies.source[due]
        cells = offset[:, None] + np.arange(source.shape[1])
        memory = self.machine.memory
        memory.shared.data[cells] = source
        memory.state.data[cells] = WRITTEN

    def arrive_later(self, lanes: Lanes, keys: Array) -> None:
        self.arrivals.append((lanes.ids, keys))

    def advance(self) -> bool:
        """Deliver the oldest cp.async.mbarrier.arrive after its threads' copies."""
        if not self.arrivals:
            return False
        ids, keys = self.arrivals.popleft()
        self.wait(ids, None)
        barriers = self.machine.unit(MBarriers)
        for key in np.unique(keys):
            where = ids[keys == key]
            barriers.arrive(int(key), len(where), where)
        return True


def claim(machine: Machine, start: int, size: int, thread: int) -> None:
    """Mark a flat range of shared memory as being written by a copy in flight."""
    state = machine.memory.state.data[start : start + size]
    if (state >= MBARRIER).any():
        what = "an mbarrier" if (state == MBARRIER).any() else "the destination of a copy that has not completed"
        raise machine.error(SimMemoryError, f"a copy overwrites {what}", np.array([thread]))
    machine.memory.mark(start, size, IN_FLIGHT)
    if machine.races is not None:
        machine.races.write(np.array([thread]), np.array([start]), size)


def deliver(machine: Machine, cells: slice | Array, data: Array, thread: int) -> None:
    """Write bytes at flat shared offsets of a CTA that must still be running."""
    first = cells.start if isinstance(cells, slice) else int(cells[0])
    if machine.live_in_cta[first // machine.memory.shared_stride] == 0:
        raise machine.error(SimMemoryError, "a copy arrives in a CTA that has exited", np.array([thread]))
    machine.memory.shared.data[cells] = data
    machine.memory.state.data[cells] = WRITTEN


def initialised(machine: Machine, start: int, size: int, thread: int) -> Array:
    """Bytes of a flat range of shared memory that a copy reads."""
    state = machine.memory.state.data[start : start + size]
    if (state != WRITTEN).any():
        at = int(np.flatnonzero(state != WRITTEN)[0])
        offset = start % machine.memory.shared_stride + at
        raise machine.error(SimMemoryError, f"a copy reads shared memory at {offset:#x} which nothing wrote", np.array([thread]))
    return machine.memory.shared.data[start : start + size]


def rank_base(machine: Machine, thread: int, rank: int) -> int:
    """Flat offset of the shared memory of the CTA with ``rank`` in a thread's cluster."""
    if not 0 <= rank < machine.cluster_size:
        raise machine.error(SimError, f"CTA rank {rank} is not in the cluster", np.array([thread]))
    cta = int(machine.cta[thread]) - int(machine.rank[thread]) + rank
    return cta * machine.memory.shared_stride


def signal_ranks(mask: int | None, own: int) -> list[int]:
    """Ranks of the CTAs that a multicast mask names, or the one of the address."""
    return [own] if mask is None else [rank for rank in range(16) if mask >> rank & 1]
