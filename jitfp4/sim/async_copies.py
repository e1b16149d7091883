"""Copies that run beside the threads: cp.async, cp.async.bulk, cp.async.bulk.tensor.

Nothing lands before it must. A bulk copy is performed, in the order of issue, only when no thread can run, when a wait
for its group demands it, or on a fairness turn of the scheduler; cp.async data lands when its thread waits. Until then
its shared destination counts as being written, so that a thread that reads or writes there without waiting is an
error. A bulk copy reads its source when it is performed, so that overwriting it too early changes the result.
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
from jitfp4.sim.memory import IN_FLIGHT, MBARRIER, RANK_BITS, WRITTEN, Part
from jitfp4.sim.ptx import Array

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine


Merge = Callable[[Array, Array], Array]
"""Combines the destination's old bytes with new ones, for reductions."""
_OFFSET = (1 << RANK_BITS) - 1


@dataclass(slots=True)
class _Copy:
    """One bulk copy of one thread: ``read`` takes the source, ``write`` delivers it and signals.

    ``group`` numbers the thread's bulk groups; None for a copy that signals an mbarrier.
    """

    thread: int
    pc: int
    read: Callable[[], Array]
    write: Callable[[Array], None]
    group: int | None
    data: Array | None = None

    def fetch(self) -> Array:
        """The source's bytes, read once."""
        if self.data is None:
            self.data = self.read()
        return self.data


class BulkCopies:
    """The engine of cp.async.bulk: pending copies in order of issue, and every thread's groups."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pending: deque[_Copy] = deque()
        self.committed = np.zeros(machine.total, np.int64)
        self.waited = np.zeros(machine.total, np.int64)  # groups whose sources have been read for sure
        self.grouped: dict[int, tuple[int, int]] = {}  # each thread's last group, and where it was issued
        machine.engines.insert(0, self)  # before the tensor pipe
        machine.on_exit.append(self.threads_left)

    def issue(self, one: Lanes, read: Callable[[], Array], write: Callable[[Array], None], *, grouped: bool) -> None:
        """Queue a copy of one thread."""
        thread = int(one.ids[0])
        group = int(self.committed[thread]) if grouped else None
        if group is not None:
            self.grouped[thread] = group, self.machine.pc
        self.pending.append(_Copy(thread, self.machine.pc, read, write, group))

    def advance(self) -> bool:
        if not self.pending:
            return False
        self.perform(self.pending.popleft())
        return True

    def perform(self, copy: _Copy) -> None:
        """Carry out a copy; its errors name the instruction that issued it."""
        now, self.machine.pc = self.machine.pc, copy.pc
        copy.write(copy.fetch())
        self.machine.pc = now

    def wait(self, lanes: Lanes, allowed: int, *, read_only: bool) -> None:
        """Complete (or only read the sources of) all but the last ``allowed`` groups of each thread."""
        waiting = set(lanes.ids.tolist())
        self.waited[lanes.sel] = np.maximum(self.waited[lanes.sel], self.committed[lanes.sel] - allowed)
        kept: deque[_Copy] = deque()
        while self.pending:
            copy = self.pending.popleft()
            grouped = copy.group is not None and copy.thread in waiting
            due = grouped and copy.group < int(self.committed[copy.thread]) - allowed  # type: ignore[operator]
            if due and not read_only:
                self.perform(copy)
                continue
            if due:
                copy.fetch()
            kept.append(copy)
        self.pending = kept
        if self.machine.races is not None:
            self.machine.races.copies.waited(lanes.ids, self.committed[lanes.sel] - allowed, read_only=read_only)

    def threads_left(self, ids: Array) -> None:
        """A CTA's shared memory ends with it: its threads must wait for copies out of it."""
        for thread in self.grouped.keys() & set(ids.tolist()):
            group, pc = self.grouped[thread]
            if group >= self.waited[thread]:
                text = "a thread exits before its bulk copy has read shared memory (cp.async.bulk.wait_group)"
                raise self.machine.error(SimMemoryError, text, np.array([thread]), pc)


@dataclass(slots=True)
class _Landing:
    """One executed cp.async: threads, their group numbers, where the data goes, and uint8 [threads, size] data."""

    ids: Array
    group: Array
    part: Part
    data: Array


class SmallCopies:
    """cp.async: 4 to 16 bytes per thread, complete when the thread waits for the group."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.committed = np.zeros(machine.total, np.int64)
        self.pending: list[_Landing] = []
        self.arrivals: deque[tuple[Array, Array]] = deque()  # threads and mbarriers of cp.async.mbarrier.arrive
        machine.engines.append(self)

    def issue(self, lanes: Lanes, part: Part, data: Array) -> None:
        """Queue data already fetched: nobody may change the source meanwhile."""
        self.pending.append(_Landing(lanes.ids, self.committed[lanes.sel].copy(), part, data))

    def wait(self, ids: Array, allowed: int | None) -> None:
        """Land the copies of all but each thread's last ``allowed`` groups; None is everything, committed or not."""
        inside = np.zeros(self.machine.total, bool)
        inside[ids] = True
        kept = []
        for copies in self.pending:
            due = inside[copies.ids]
            if allowed is not None:
                due &= copies.group < self.committed[copies.ids] - allowed
            self.land(copies, due)
            if not due.all():
                rest = ~due
                part = Part(copies.part.region, None, copies.part.offset[rest], copies.part.space)
                kept.append(_Landing(copies.ids[rest], copies.group[rest], part, copies.data[rest]))
        self.pending = kept

    def land(self, copies: _Landing, due: Array) -> None:
        size = copies.data.shape[1]
        cells = copies.part.offset[due][:, None] + np.arange(size)
        memory, races = self.machine.memory, self.machine.races
        if races is not None and due.any():
            races.write(Part(copies.part.region, None, copies.part.offset[due], "shared"), copies.ids[due], size)
        memory.shared.data[cells] = copies.data[due]
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
        barriers.publish(self.machine.lanes(ids), keys)
        for key in np.unique(keys):
            where = ids[keys == key]
            barriers.arrive(int(key), len(where), where)
        return True


# Delivery into shared memory


@dataclass(frozen=True, slots=True)
class Signal:
    """The mbarrier address that a copy signals, the CTAs that a multicast goes to, and whether cta_group::2 is on."""

    address: int
    mask: int | None = None
    pair: bool = False

    def ranks(self, own: int) -> list[int]:
        """Ranks of the CTAs that the mask names, or the one given."""
        return [own] if self.mask is None else [rank for rank in range(16) if self.mask >> rank & 1]

    def barrier_rank(self, destination: int) -> int:
        """Whose mbarrier is signalled for data that lands in ``destination``: with a pair, that of the same parity."""
        at = self.address >> RANK_BITS
        if self.mask is None:
            return at
        return destination & ~1 | at & 1 if self.pair else destination


@dataclass(frozen=True, slots=True)
class Delivery:
    """Bytes that will land at shared addresses ``cells``, in the order of the source, and what they signal."""

    space: str
    cells: Array
    signal: Signal
    merge: Merge | None


def plan(m: Machine, one: Lanes, delivery: Delivery) -> Callable[[Array], None]:
    """Check and claim a delivery at issue. Returns what carries it out."""
    cells, signal = delivery.cells, delivery.signal
    first = np.array([int(cells.min())])
    (start,) = m.memory.locate(delivery.space, one.ids, first, min(16, len(cells)))
    m.memory.bound_shared(one.ids, start.offset, span(cells), "copy")
    local = (cells & _OFFSET).astype(np.int64)
    targets = []
    for rank in signal.ranks(int(first[0]) >> RANK_BITS):
        at = signal.barrier_rank(rank)
        if at != rank and not signal.pair and delivery.merge is None:
            raise m.error(SimError, "the copy's mbarrier lies in another CTA than its destination", one.ids)
        address = np.array([at << RANK_BITS | signal.address & _OFFSET])
        key = int(m.unit(MBarriers).keys("shared::cluster", one.ids, address)[0])
        base = _rank_base(m, one, rank)
        if delivery.merge is None:
            _claim(m, base + local, one)
        if m.races is not None:
            m.races.copies.deliver(one, base + local, key, combined=delivery.merge is not None)
        targets.append((base, key))

    def carry_out(data: Array) -> None:
        barriers = m.unit(MBarriers)
        for base, key in targets:
            where = base + local
            new = data if delivery.merge is None else delivery.merge(m.memory.shared.data[where], data)
            _deliver(m, where, new, one)
            if m.races is not None:
                m.races.copies.delivered(one, where, key)
            barriers.complete_tx(key, len(data), one.ids)

    return carry_out


def span(cells: Array) -> int:
    """Bytes from the lowest to the highest address: more than there are where a swizzle leads out of a short box."""
    return int(cells.max() - cells.min()) + 1


def _claim(m: Machine, where: Array, one: Lanes) -> None:
    """Mark flat offsets of shared memory as being written by a copy in flight."""
    state = m.memory.state.data[where]
    if (state >= MBARRIER).any():
        what = "an mbarrier" if (state == MBARRIER).any() else "the destination of a copy that has not completed"
        raise m.error(SimMemoryError, f"a copy overwrites {what}", one.ids)
    m.memory.state.data[where] = IN_FLIGHT


def _deliver(m: Machine, where: Array, data: Array, one: Lanes) -> None:
    """Write bytes at flat shared offsets of a CTA that must still be running."""
    if m.live_in_cta[int(where[0]) // m.memory.shared_stride] == 0:
        raise m.error(SimMemoryError, "a copy arrives in a CTA that has exited", one.ids)
    m.memory.shared.data[where] = data
    m.memory.state.data[where] = WRITTEN


def initialised(m: Machine, where: Array, one: Lanes) -> Array:
    """Bytes at flat offsets of shared memory that a copy reads."""
    fresh = m.memory.state.data[where] != WRITTEN
    if fresh.any():
        offset = int(where[fresh].min()) % m.memory.shared_stride
        raise m.error(SimMemoryError, f"a copy reads shared memory at {offset:#x} which nothing wrote", one.ids)
    return np.asarray(m.memory.shared.data[where])


def _rank_base(m: Machine, one: Lanes, rank: int) -> int:
    """Flat offset of the shared memory of the CTA with ``rank`` in a thread's cluster."""
    if not 0 <= rank < m.cluster_size:
        raise m.error(SimError, f"CTA rank {rank} is not in the cluster", one.ids)
    thread = int(one.ids[0])
    cta = int(m.cta[thread]) - int(m.rank[thread]) + rank
    return cta * m.memory.shared_stride
