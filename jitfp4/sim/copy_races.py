"""What bulk and tensor copies mean for the race detector: whose agents read and write which bytes until when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jitfp4.sim.clocks import ORDERED, TRAVELS, Release
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.mbarriers import MBarriers
from jitfp4.sim.ptx import Array
from jitfp4.sim.shadow import PROXY, STRONG, pack

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine
    from jitfp4.sim.races import Races


class CopyRaces:
    """Copies that signal an mbarrier are that mbarrier's agent, its time the phase; others the thread's bulk groups.

    A group has two agents: one reads the source, until ``wait_group.read``, one writes, until ``wait_group``.
    """

    def __init__(self, machine: Machine, races: Races) -> None:
        self.machine, self.races = machine, races

    def deliver(self, one: Lanes, where: Array, key: int, *, combined: bool) -> None:
        """A copy of one thread will write flat offsets of shared memory and signal mbarrier ``key``."""
        self.machine.unit(MBarriers).use_async(key, one.ids)
        cells, how = self.races.shared, STRONG if combined else 0
        cell = cells.of_bytes(where)
        self.races.agent_writes("shared", cells, cell, int(one.ids[0]), *self._phase(one, key), how)

    def delivered(self, one: Lanes, where: Array, key: int) -> None:
        """It has: the phase that is now open carries the bytes to those who wait for it."""
        agent, time = self._phase(one, key)
        clocks, cells = self.races.clocks, self.races.shared
        cell = cells.of_bytes(where)
        mine = cells.wrote[cell] >> 32 == agent
        cells.wrote[cell[mine]] = pack(agent, time, int(cells.wrote[cell[0]]) & STRONG | PROXY)
        known = np.zeros((TRAVELS, clocks.known.shape[2]), np.int32)
        known[ORDERED, clocks.column[agent]] = time + 1
        cluster = clocks.first_cluster + int(clocks.cluster[one.ids[0]])
        self.machine.unit(MBarriers).publish_async(key, Release(cluster, known, {}))

    def take(self, one: Lanes, source: tuple[str, Array, Array], key: int) -> None:
        """A copy that signals mbarrier ``key`` reads: space, the memory's bytes and the offsets in them."""
        self._read(one, source, *self._phase(one, key))

    def _phase(self, one: Lanes, key: int) -> tuple[int, int]:
        phase = self.machine.unit(MBarriers).get(key, one.ids).phase
        return self.races.clocks.agent(("mbarrier", key), int(one.ids[0])), phase + 1

    def move(
        self, one: Lanes, group: int, source: tuple[str, Array, Array], target: tuple[Array, Array], *, combined: bool
    ) -> None:
        """A copy of bulk group ``group`` reads ``source`` and writes offsets of a global array."""
        thread, clocks = int(one.ids[0]), self.races.clocks
        self._read(one, source, clocks.agent(("bulk read", thread), thread), group + 1)
        cells, first = self.races.history.of_data(target[0])
        cell, writer = cells.of_bytes(target[1] + first), clocks.agent(("bulk write", thread), thread)
        self.races.agent_writes("global", cells, cell, thread, writer, group + 1, STRONG if combined else 0)

    def _read(self, one: Lanes, source: tuple[str, Array, Array], agent: int, time: int) -> None:
        space, data, where = source
        cells, first = (self.races.shared, 0) if space == "shared" else self.races.history.of_data(data)
        self.races.agent_reads(space, cells, cells.of_bytes(where + first), int(one.ids[0]), agent, time)

    def waited(self, ids: Array, before: Array, *, read_only: bool) -> None:
        """cp.async.bulk.wait_group: the threads' groups below ``before`` have read, or have been written."""
        agents, clocks = self.races.clocks.agents, self.races.clocks
        for kind in ("bulk read",) if read_only else ("bulk read", "bulk write"):
            for thread, group in zip(ids.tolist(), before.tolist(), strict=True):
                agent = agents.get((kind, thread))
                if agent is not None:
                    clocks.done(np.array([thread]), agent, group + 1)
