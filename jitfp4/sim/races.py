"""The shared-memory race detector.

Two accesses to one byte by different threads, at least one of them a write, are a race unless something orders them:
- threads of different warps: a chain of CTA barriers, cluster barriers, or mbarrier arrives and waits (vector clocks);
- threads of one warp: a warp-level ``.sync`` instruction or one of the above between the two accesses.
Issuing a bulk copy into shared memory is a write by its thread; waiting for its mbarrier orders the data before the
waiter. Atomics do not race.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimRaceError
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.ptx import Array

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine


class Races:
    """Clocks of every warp, and the last accesses to every shared byte.

    ``clock[w, v]`` is the latest time of warp ``v`` that warp ``w`` knows to lie behind it. Warps are numbered within
    their cluster; a byte's cluster follows from its offset.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.width = machine.cluster_size * machine.block_warps
        warps = machine.ctas * machine.block_warps
        self.clock = np.zeros((warps, self.width), np.int64)
        self.own = np.arange(warps) % self.width
        self.clock[np.arange(warps), self.own] = 1
        self.turn = np.zeros(warps, np.int64)  # number of meetings of the warp, for races inside it
        size = machine.ctas * machine.memory.shared_stride
        self.write_warp = np.full(size, -1, np.int32)
        self.write_time = np.zeros(size, np.int64)
        self.write_turn = np.zeros(size, np.int64)
        self.write_thread = np.full(size, -1, np.int64)
        self.write_pc = np.zeros(size, np.int32)
        self.read_time = np.zeros((size, self.width), np.int64)
        self.read_turn = np.full(size, -1, np.int64)
        self.read_thread = np.full(size, -1, np.int64)  # last reader; -2 for several of one warp in one turn
        self.read_warp = np.full(size, -1, np.int32)

    # Accesses

    def read(self, ids: Array, offset: Array, size: int) -> None:
        """``ids`` read ``size`` bytes each at flat shared offsets."""
        cells, threads, warps = self._spread(ids, offset, size)
        self._against_writes(cells, threads, warps, "read")
        self.read_time[cells, self.own[warps]] = self.clock[warps, self.own[warps]]
        same = (self.read_warp[cells] == warps) & (self.read_turn[cells] == self.turn[warps])
        several = same & (self.read_thread[cells] != threads)
        self.read_warp[cells], self.read_turn[cells] = warps, self.turn[warps]
        self.read_thread[cells] = np.where(several, -2, threads)
        order = np.argsort(cells, kind="stable")
        twice = (np.diff(cells[order]) == 0) & (np.diff(threads[order]) != 0)
        self.read_thread[cells[order][1:][twice]] = -2

    def write(self, ids: Array, offset: Array, size: int) -> None:
        """``ids`` write."""
        cells, threads, warps = self._spread(ids, offset, size)
        order = np.argsort(cells, kind="stable")
        clash = (np.diff(cells[order]) == 0) & (np.diff(threads[order]) != 0)
        if clash.any():
            at = order[:-1][clash][0]
            self._fail("two threads write one byte in one instruction", int(cells[at]), int(threads[at]), None)
        self._against_writes(cells, threads, warps, "write")
        behind = self.read_time[cells] > self.clock[warps]
        behind[np.arange(len(cells)), self.own[warps]] = False
        if behind.any():
            at = int(np.flatnonzero(behind.any(axis=1))[0])
            self._fail("a write follows an unordered read by another warp", int(cells[at]), int(threads[at]), None)
        same = (self.read_warp[cells] == warps) & (self.read_turn[cells] == self.turn[warps])
        inside = same & (self.read_thread[cells] != threads)
        if inside.any():
            at = int(np.flatnonzero(inside)[0])
            text = "a write follows a read by another lane without a warp sync"
            self._fail(text, int(cells[at]), int(threads[at]), None)
        self.write_warp[cells], self.write_time[cells] = warps, self.clock[warps, self.own[warps]]
        self.write_turn[cells], self.write_thread[cells] = self.turn[warps], threads
        self.write_pc[cells] = self.machine.pc

    def _spread(self, ids: Array, offset: Array, size: int) -> tuple[Array, Array, Array]:
        cells = (offset[:, None] + np.arange(size)).reshape(-1)
        threads = np.repeat(ids, size)
        return cells, threads, self.machine.warp[threads]

    def _against_writes(self, cells: Array, threads: Array, warps: Array, verb: str) -> None:
        writer = self.write_warp[cells]
        other = (writer >= 0) & (writer != warps)
        known = self.clock[warps, self.own[np.maximum(writer, 0)]]
        bad = other & (self.write_time[cells] > known)
        same_turn = (writer == warps) & (self.write_turn[cells] == self.turn[warps])
        inside = same_turn & (self.write_thread[cells] != threads)
        if (bad | inside).any():
            at = int(np.flatnonzero(bad | inside)[0])
            how = "another lane without a warp sync" if inside[at] else "another warp"
            text = f"a {verb} follows an unordered write by {how}"
            self._fail(text, int(cells[at]), int(threads[at]), int(self.write_pc[cells[at]]))

    def _fail(self, text: str, cell: int, thread: int, pc: int | None) -> None:
        m = self.machine
        other = f"; the other access: {m.program.place(pc)}" if pc is not None else ""
        where = f"shared memory race at {cell % m.memory.shared_stride:#x}: {text}{other}"
        raise m.error(SimRaceError, where, np.array([thread]))

    # Ordering

    def warp_sync(self, lanes: Lanes) -> None:
        """The lanes of each warp met."""
        self.turn[np.unique(self.machine.warp[lanes.sel])] += 1

    def snapshot(self, lanes: Lanes) -> Array:
        """What lies before now, seen from the first lane's warp; time moves on."""
        warp = int(self.machine.warp[lanes.ids[0]])
        now: Array = self.clock[warp].copy()
        self.clock[warp, self.own[warp]] += 1
        return now

    def join(self, clocks: dict[int, Array], key: int, known: Array) -> None:
        before = clocks.get(key)
        clocks[key] = known.copy() if before is None else np.maximum(before, known)

    def publish(self, clocks: dict[int, Array], lanes: Lanes, keys: Array) -> None:
        """Lanes arrive at barriers ``keys``: what they did lies before the barrier's completion."""
        warps = self.machine.warp[lanes.sel]
        for warp, key in np.unique(np.stack([warps, keys]), axis=1).T:
            self.join(clocks, int(key), self.clock[warp])
        moved = np.unique(warps)
        self.clock[moved, self.own[moved]] += 1

    def acquire(self, clocks: dict[int, Array], ids: Array, keys: Array, closed: Array | None = None) -> None:
        """Threads ``ids`` come through barriers ``keys``; barriers ``closed`` start anew."""
        warps = self.machine.warp[ids]
        for warp, key in np.unique(np.stack([warps, keys]), axis=1).T:
            if int(key) in clocks:
                self.clock[warp] = np.maximum(self.clock[warp], clocks[int(key)])
        self.turn[np.unique(warps)] += 1
        for key in closed if closed is not None else ():
            clocks.pop(int(key), None)
