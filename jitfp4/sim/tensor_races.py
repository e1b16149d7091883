"""Tensor memory in the race detector: who wrote and who reads each column of each quarter of the lanes.

The agents are the tcgen05 pipe of every thread that issues, whose work is done when a commit's mbarrier is waited for,
and the loads and stores of every warp, done at ``tcgen05.wait``. PTX ISA, "tcgen05 memory consistency model": between
threads the order counts only if ``tcgen05.fence::before_thread_sync`` precedes the synchronisation and
``tcgen05.fence::after_thread_sync`` follows it; a commit contains the former.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.sim.clocks import ORDERED, TENSOR, TENSOR_SENT, TRAVELS, Release
from jitfp4.sim.ptx import Array
from jitfp4.sim.shadow import Cells
from jitfp4.sim.tmem import COLUMNS, LANES

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine
    from jitfp4.sim.races import Races

_QUARTERS = 4
_CELL = 4
_PER_CTA = _QUARTERS * COLUMNS


class TensorRaces:
    """Records of the tensor memory of a batch."""

    def __init__(self, machine: Machine, races: Races) -> None:
        self.machine, self.races = machine, races
        self.cells = Cells(machine.ctas * _PER_CTA * _CELL)
        self.cells.refine(_CELL)
        self.commits: dict[int, int] = {}  # by issuing thread
        self.waits: dict[tuple[str, int], int] = {}  # by direction and warp

    # Whole columns: mma, cp, dealloc

    def pipe(
        self, thread: int, ctas: Iterable[int], reads: Iterable[tuple[int, int]], writes: Iterable[tuple[int, int]]
    ) -> None:
        """Queued work of ``thread`` reads and writes (first column, columns) of tensor memory."""
        agent, time = self._pipe(thread)
        for extents, write in ((reads, False), (writes, True)):
            for first, count in extents:
                cell = self._columns(ctas, first, count)
                self.races.agent_in_tensor_memory(self.cells, cell, thread, agent, time, write)

    def operand(self, thread: int, cta: int, addresses: Array) -> None:
        """Queued work reads shared memory."""
        agent, time = self._pipe(thread)
        cell = self.races.shared.of_bytes(cta * self.machine.memory.shared_stride + addresses)
        self.races.agent_reads("shared", self.races.shared, cell, thread, agent, time)

    def free(self, thread: int, first: int, count: int) -> None:
        """tcgen05.dealloc by the warp of ``thread``."""
        cell = self._columns((int(self.machine.cta[thread]),), first, count)
        self.races.free_tensor_memory(self.cells, cell, thread)

    def commit(self, thread: int) -> Release:
        """What a commit's mbarrier will carry: all that the thread issued before."""
        agent, time = self._pipe(thread)
        self.commits[thread] = time
        clocks = self.races.clocks
        known = np.zeros((TRAVELS, clocks.known.shape[2]), np.int32)
        known[[ORDERED, TENSOR_SENT], clocks.column[agent]] = time + 1
        return Release(clocks.first_cluster + int(clocks.cluster[thread]), known, {})

    def _pipe(self, thread: int) -> tuple[int, int]:
        return self.races.clocks.agent(("tensor", thread), thread), self.commits.get(thread, 0) + 1

    def _columns(self, ctas: Iterable[int], first: int, count: int) -> Array:
        quarters = np.arange(_QUARTERS)[:, None] * COLUMNS + np.arange(first, first + count)
        return np.concatenate([(cta * _PER_CTA + quarters).reshape(-1) for cta in ctas])

    # One warp: ld and st

    def warp(self, kind: str, ids: Array, cta: int, at: Array) -> None:
        """``tcgen05.ld`` or ``st`` (``kind``) of one warp at the cells ``at`` (lanes, columns)."""
        thread = int(ids[0])
        agent, time = self._of_warp(kind, thread)
        cell = np.unique(cta * _PER_CTA + at[0] // (LANES // _QUARTERS) * COLUMNS + at[1])
        self.races.agent_in_tensor_memory(self.cells, cell, thread, agent, time, kind == "st")

    def wait(self, kind: str, ids: Array) -> None:
        """``tcgen05.wait::ld`` or ``::st``: whole warps."""
        warps = self.machine.warp[ids]
        for warp in np.unique(warps):
            mine = ids[warps == warp]
            agent, time = self._of_warp(kind, int(mine[0]))
            self.waits[kind, int(warp)] = time
            self.races.clocks.done(mine, agent, time + 1, (ORDERED, TENSOR))

    def _of_warp(self, kind: str, thread: int) -> tuple[int, int]:
        warp = int(self.machine.warp[thread])
        return self.races.clocks.agent((kind, warp), thread), self.waits.get((kind, warp), 0) + 1

    def fence(self, ids: Array, *, before: bool) -> None:
        """tcgen05.fence::before_thread_sync or ::after_thread_sync."""
        source, target = (TENSOR, TENSOR_SENT) if before else (TENSOR_SENT, TENSOR)
        self.races.clocks.lift(ids, source, target)
