"""CTA barriers (bar, barrier.cta) and the cluster barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim.clocks import Release
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.ptx import Array

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine

COUNT = 16


class Barriers:
    """The sixteen barriers of every CTA.

    Arrivals are counted in threads. A barrier without a thread count completes when every live thread of the CTA has
    arrived; with one, when that many have. An ``.aligned`` barrier demands that the threads of a warp wait together.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        shape = (machine.ctas, COUNT)
        self.arrived = np.zeros(shape, np.int64)
        self.expected = np.zeros(shape, np.int64)  # 0: every live thread; fixed by the first arrival
        self.open = np.zeros(shape, bool)  # somebody has arrived and the barrier is not complete
        self.at = np.full(machine.total, -1, np.int64)  # barrier at which a thread waits
        self.value = np.zeros(machine.total, bool)  # operand of a reduction
        self.aligned = np.zeros(machine.total, bool)
        self.clock: dict[int, Release] = {}  # for the race detector: what arrivals published
        machine.on_exit.append(self.threads_left)

    def arrive(self, lanes: Lanes, number: Array, expected: Array, *, wait: bool, aligned: bool) -> Array:
        """Count arrivals at barriers ``number``. Returns the waiting threads that are released, in ascending order."""
        m = self.machine
        if number.max() >= COUNT:
            raise m.error(SimError, f"barrier {number.max()} is not below {COUNT}", lanes.ids)
        cta = m.cta[lanes.sel]
        key = cta * COUNT + number
        fresh = ~self.open.flat[key]
        self.expected.flat[key[fresh]] = expected[fresh]
        conflict = self.expected.flat[key] != expected
        if conflict.any():
            raise m.error(SimError, "threads disagree about the barrier's thread count", lanes.ids[conflict])
        self.open.flat[key] = True
        self.arrived += np.bincount(key, minlength=self.arrived.size).reshape(self.arrived.shape)
        if m.races is not None:
            m.races.publish(self.clock, lanes, key)
        if wait:
            self.at[lanes.sel] = number
            self.aligned[lanes.sel] = aligned
            m.suspend(lanes)
        return self.complete(np.unique(key))

    def complete(self, keys: Array) -> Array:
        """Release what waits at those of the barriers (``cta * COUNT + number``) that are complete."""
        m = self.machine
        live = np.bincount(m.cta[m.live], minlength=m.ctas)
        expected = np.where(self.expected.flat[keys] > 0, self.expected.flat[keys], live[keys // COUNT])
        arrived = self.arrived.flat[keys]
        over = arrived > expected
        if over.any():
            number = int(keys[over][0]) % COUNT
            text = f"barrier {number}: {arrived[over][0]} threads arrived, it takes {expected[over][0]}"
            raise m.error(SimError, text, m.ids[:0])
        done = keys[self.open.flat[keys] & (arrived == expected)]
        if not len(done):
            return m.ids[:0]
        self.open.flat[done] = False
        self.arrived.flat[done] = 0
        released = np.flatnonzero((self.at >= 0) & np.isin(m.cta * COUNT + self.at, done))
        self.check_aligned(released)
        if m.races is not None:
            m.races.acquire(self.clock, released, (m.cta * COUNT + self.at)[released], done)
        self.at[released] = -1
        return released

    def check_aligned(self, released: Array) -> None:
        """Threads of one warp must have waited at one aligned barrier instruction."""
        m = self.machine
        ids = released[self.aligned[released]]
        if not len(ids):
            return
        order = np.lexsort((m.waiting[ids], m.warp[ids]))
        warp, pc = m.warp[ids][order], m.waiting[ids][order]
        split = (warp[1:] == warp[:-1]) & (pc[1:] != pc[:-1])
        if split.any():
            at = int(np.flatnonzero(split)[0])
            raise m.error(SimError, "a warp is divided at an aligned barrier", ids[order][at : at + 2], int(pc[at]))

    def threads_left(self, ids: Array) -> None:
        """Exited threads no longer count for barriers that wait for everyone."""
        m = self.machine
        ctas = np.unique(m.cta[ids])
        keys = (ctas[:, None] * COUNT + np.arange(COUNT)).reshape(-1)
        keys = keys[self.open.flat[keys] & (self.expected.flat[keys] == 0)]
        if len(keys):
            self.release(self.complete(keys))

    def release(self, ids: Array) -> None:
        """Let threads go on after the barrier at which they wait. Reductions deliver their result first."""
        m = self.machine
        for pc in np.unique(m.waiting[ids]):
            here = ids[m.waiting[ids] == pc]
            finish = m.program.barrier_results.get(int(pc))
            if finish is not None:
                finish(m, m.lanes(here))
            m.resume(here, int(pc) + 1)

    def report(self) -> list[str]:
        """Open barriers, for the deadlock message."""
        return [
            f"barrier {number} of CTA {tuple(int(axis[cta]) for axis in self.machine.cta_index)}: "
            f"{self.arrived[cta, number]} of {self.expected[cta, number] or 'all live'} threads arrived"
            for cta, number in zip(*np.nonzero(self.open), strict=True)
        ]


class ClusterBarrier:
    """The barrier of each cluster: every live thread arrives, then waits for the phase that it arrived in."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cluster = machine.cta // machine.cluster_size
        clusters = machine.ctas // machine.cluster_size
        self.phase = np.zeros(clusters, np.int64)
        self.arrived = np.zeros(machine.total, bool)
        self.waits_for = np.full(machine.total, -1, np.int64)  # the phase whose end a thread awaits
        self.blocked = np.zeros(machine.total, bool)
        self.clock: dict[int, Release] = {}  # of the phases that somebody may still wait for
        machine.on_exit.append(self.threads_left)

    def keys(self, phase: Array, cluster: Array) -> Array:
        """Of phases in ``clock``."""
        return phase * len(self.phase) + cluster

    def arrive(self, lanes: Lanes, *, relaxed: bool = False) -> None:
        m = self.machine
        again = self.arrived[lanes.sel] | (self.waits_for[lanes.sel] >= 0)
        if again.any():
            raise m.error(SimError, "barrier.cluster.arrive twice without a wait between", lanes.ids[again])
        self.arrived[lanes.sel] = True
        self.waits_for[lanes.sel] = self.phase[self.cluster[lanes.sel]]
        if m.races is not None:
            keys = self.keys(self.waits_for[lanes.sel], self.cluster[lanes.sel])
            m.races.publish(self.clock, lanes, keys, relaxed=relaxed)
        self.complete(np.unique(self.cluster[lanes.sel]))

    def complete(self, clusters: Array) -> None:
        m = self.machine
        for cluster in clusters:
            members = self.cluster == cluster
            if (self.arrived | ~m.live)[members].all() and self.arrived[members].any():
                self.clock.pop(int(self.keys(self.phase[cluster] - 1, cluster)), None)  # all came through long ago
                self.phase[cluster] += 1
                self.arrived[members] = False
                waiting = np.flatnonzero(members & self.blocked)
                self.blocked[waiting] = False
                for pc in np.unique(m.waiting[waiting]):
                    m.resume(waiting[m.waiting[waiting] == pc], int(pc))

    def wait(self, lanes: Lanes) -> tuple[Lanes | None, Lanes | None]:
        """Threads whose phase has ended, and those that must wait; a woken thread comes here again."""
        m = self.machine
        if (self.waits_for[lanes.sel] < 0).any():
            raise m.error(SimError, "barrier.cluster.wait without an arrive", lanes.ids[self.waits_for[lanes.sel] < 0])
        done = self.phase[self.cluster[lanes.sel]] > self.waits_for[lanes.sel]
        through, stay = m.split(lanes, done)
        if through is not None:
            if m.races is not None:
                keys = self.keys(self.waits_for[through.sel], self.cluster[through.sel])
                m.races.acquire(self.clock, through.ids, keys)
            self.waits_for[through.sel] = -1
        if stay is not None:
            self.blocked[stay.sel] = True
            m.suspend(stay)
        return through, stay

    def threads_left(self, ids: Array) -> None:
        self.complete(np.unique(self.cluster[ids]))
