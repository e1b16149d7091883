"""Meeting of the threads of a warp: what ``.sync`` instructions wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.ptx import Array

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine

FULL = 0xFFFFFFFF


class WarpSync:
    """Threads that wait at an instruction for the rest of their member mask.

    A thread goes on when every live thread of its mask has arrived at the same instruction. Threads that exit no longer
    count. ``group`` warps meet as one: 4 for a warpgroup.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.member = np.zeros(machine.total, np.uint64)
        self.groups: dict[int, int] = {}  # warps that meet together, by program counter of waiting threads
        machine.on_exit.append(self.threads_left)

    def arrive(self, lanes: Lanes, mask: Array | None = None, group: int = 1) -> Lanes | None:
        """Register ``lanes`` at the current instruction. Returns the threads that may go on now.

        ``mask`` holds each thread's member mask; None is every live thread of the warp, or of ``group`` warps.
        """
        m = self.machine
        if mask is None and lanes.n == m.total:
            return lanes
        self.member[lanes.sel] = FULL if mask is None else mask
        named = self.member[lanes.sel] >> m.lane[lanes.sel].astype(np.uint64) & np.uint64(1)
        if not named.all():
            raise m.error(SimError, "a thread is not in its own member mask", lanes.ids)
        m.suspend(lanes)
        self.groups[m.pc] = group
        return self.complete(m.pc)

    def complete(self, pc: int) -> Lanes | None:
        """Take the threads whose masks have arrived at ``pc`` out of the waiting."""
        m = self.machine
        waiting = np.flatnonzero(m.waiting == pc)
        if not len(waiting):
            return None
        if self.groups[pc] > 1:
            done = self._groups_complete(waiting, self.groups[pc])
        else:
            arrived = self._bits(waiting)
            missing = self.member[waiting] & self._bits(np.flatnonzero(m.live))[m.warp[waiting]]
            done = missing & ~arrived[m.warp[waiting]] == 0
        if not done.any():
            return None
        m.waiting[waiting[done]] = -1
        return m.lanes(waiting[done])

    def _bits(self, ids: Array) -> Array:
        """The lanes among ``ids`` of each warp, as bit masks."""
        m = self.machine
        weights = np.ldexp(1.0, m.lane[ids])
        return np.asarray(np.bincount(m.warp[ids], weights, m.ctas * m.block_warps).astype(np.uint64))

    def _groups_complete(self, waiting: Array, group: int) -> Array:
        m = self.machine
        number = m.cta * m.block_warps + m.tid // (32 * group)
        here = np.bincount(number[waiting], minlength=number[-1] + 1)
        there = np.bincount(number[m.live], minlength=number[-1] + 1)
        return np.asarray((here == there)[number[waiting]])

    def threads_left(self, ids: Array) -> None:
        """Exited threads may have been the last ones that others waited for."""
        m = self.machine
        warps = np.unique(m.warp[ids])
        for pc in np.unique(m.waiting[np.isin(m.warp, warps) & m.live]):
            if pc in self.groups:
                done = self.complete(int(pc))
                if done is not None:
                    m.ready.push(int(pc), done)  # arrives again, now with everyone


def warp_rows(m: Machine, lanes: Lanes) -> tuple[Array, Array]:
    """Positions of ``lanes`` in a [warps, 32] table of only the warps that take part: row and column of each."""
    warp = m.warp[lanes.sel]
    row = np.searchsorted(np.unique(warp), warp) if lanes.n < m.total else warp
    return row, m.lane[lanes.sel]
