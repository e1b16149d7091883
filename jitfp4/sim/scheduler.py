"""Which threads run next, and what to do when none can."""

from __future__ import annotations

from jitfp4.sim.lanes import Lanes

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
