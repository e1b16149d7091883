"""Which threads run next, and what to do when none can."""

from __future__ import annotations

import numpy as np

from jitfp4.sim.lanes import Lanes
from jitfp4.sim.ptx import Array

FAIR_TURN = 256
"""Every so many basic blocks the group that has waited longest runs, so that a spinning group cannot starve others."""


class Ready:
    """Runnable threads by program counter.

    The lowest program counter runs first: threads that left a loop or took the far side of a branch wait for those that
    have not, and both meet again at the next common instruction.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.groups: dict[int, list[Lanes]] = {}
        self.turn = 0

    def push(self, pc: int, lanes: Lanes) -> None:
        self.groups.setdefault(pc, []).append(lanes)

    def pop(self) -> tuple[int, Lanes]:
        self.turn += 1
        fair = self.turn % FAIR_TURN == 0
        pc = next(iter(self.groups)) if fair else min(self.groups)
        return pc, Lanes.merge(self.groups.pop(pc), self.total)


class RandomReady(Ready):
    """The same for random warps: each turn some of them run, from the lowest program counter among them on."""

    def __init__(self, warp: Array, order: np.random.Generator) -> None:
        super().__init__(len(warp))
        self.warp, self.order = warp, order

    def pop(self) -> tuple[int, Lanes]:
        self.turn += 1
        chosen = self.order.random(int(self.warp[-1]) + 1) < 0.5
        pcs = [pc for pc, parts in self.groups.items() if any(chosen[self.warp[part.sel]].any() for part in parts)]
        if not pcs:
            return self._take(min(self.groups))
        pc, lanes = self._take(min(pcs))
        mine = chosen[self.warp[lanes.sel]]
        if not mine.all():
            self.push(pc, Lanes(lanes.ids[~mine], self.total))
            lanes = Lanes(lanes.ids[mine], self.total)
        return pc, lanes

    def _take(self, pc: int) -> tuple[int, Lanes]:
        return pc, Lanes.merge(self.groups.pop(pc), self.total)
