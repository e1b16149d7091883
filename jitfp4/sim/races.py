"""What the sanitised run looks for: data races, and accesses that a missing fence lets another proxy see too late.

Two accesses to one byte by different threads, at least one of them a write, are a race unless both are strong
(volatile, relaxed, atomic) or something orders them (PTX ISA, Memory Consistency Model, "Causality order"):
- in one warp ``bar.warp.sync``, or one of the following, between the two accesses;
- between warps a chain of CTA barriers, cluster barriers, and mbarrier arrives and waits;
- in global memory also releases and acquires (flags.py).
What the generic proxy wrote is seen by the async proxy only past a ``fence.proxy.async`` on that chain. Asynchronous
work is an agent of its own: what it wrote, or still reads, lies behind only those who waited for its completion.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from jitfp4.errors import SimRaceError
from jitfp4.sim.clocks import ASYNC_GLOBAL, ASYNC_SHARED, MAPS, ORDERED, PREVIOUS, TENSOR, Clocks, Release
from jitfp4.sim.copy_races import CopyRaces
from jitfp4.sim.flags import Flags
from jitfp4.sim.history import PREVIOUS_GRID, History
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.mbarriers import MBarriers
from jitfp4.sim.memory import Part
from jitfp4.sim.ptx import Array
from jitfp4.sim.shadow import PROXY, READ_ONLY, STRONG, Cells, pack, time_of, who_of
from jitfp4.sim.tensor_races import TensorRaces

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine

_ASYNC_LAYER = {"shared": ASYNC_SHARED, "global": ASYNC_GLOBAL}


class _Place:
    """One access: cells, and for each the id, row and record of who accesses. ``base`` is that of the cells' ids."""

    __slots__ = ("base", "cell", "cells", "how", "ids", "layer", "record", "rows", "space")

    def __init__(
        self, space: str, cells: Cells, base: int, cell: Array, ids: Array, rows: Array, record: Array, how: int
    ) -> None:
        self.space, self.cells, self.base, self.cell = space, cells, base, cell
        self.ids, self.rows, self.record, self.how = ids, rows, record, how


class Races:
    """The records of one batch and the clocks that judge them."""

    def __init__(self, machine: Machine, history: History) -> None:
        self.machine, self.history = machine, history
        self.clocks = Clocks(machine)
        self.shared = Cells(machine.ctas * machine.memory.shared_stride)
        self.flags = Flags(machine, self)
        self.copies = CopyRaces(machine, self)
        if machine.cluster_size > 1:
            machine.on_exit.append(self._threads_left)

    @cached_property
    def tensor(self) -> TensorRaces:
        """Records of tensor memory, made when a kernel first uses it."""
        return TensorRaces(self.machine, self)

    # Accesses of threads

    def read(self, part: Part, ids: Array, size: int, how: int = 0) -> None:
        """Threads ``ids`` read ``size`` bytes each."""
        place = self._place(part, ids, size, how)
        self._against_writes(place, "read")
        self._note_read(place)

    def write(self, part: Part, ids: Array, size: int, how: int = 0, *, atomic: bool = False) -> None:
        """Threads write. Those that meet at one byte in one instruction are in order only if ``atomic``."""
        place = self._place(part, ids, size, how)
        self._against_writes(place, "write")
        self._against_reads(place)
        twice = place.cells.note_write(place.cell, place.record, self.machine.pc, self._beside_strong(place))
        if twice.any() and not atomic and not (how & STRONG and part.space == "global"):
            self._fail(place, int(np.flatnonzero(twice)[0]), "two threads write one byte in one instruction", None)

    def require_behind(self, part: Part, ids: Array, size: int) -> None:
        """What wrote these bytes, such as mbarrier.init, must lie behind the threads."""
        self._against_writes(self._place(part, ids, size, 0), "use")

    def reads_tensor_map(self, part: Part, ids: Array, size: int) -> None:
        """A copy finds its tensor map in global memory: what wrote it must have been fenced for that proxy."""
        place = self._place(part, ids, size, 0)
        self._against_writes(place, "read of a tensor map")
        wrote = place.cells.wrote[place.cell]
        bad = (who_of(wrote) > PREVIOUS_GRID) & ~self._behind(place, wrote, MAPS)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            text = "a tensor map is used that was written without fence.proxy.tensormap, .release and .acquire, between"
            self._fail(place, at, text, int(place.cells.wrote_at[place.cell[at]]))

    def _place(self, part: Part, ids: Array, size: int, how: int) -> _Place:
        if part.space == "shared":
            cells, offset, base = self.shared, part.offset, 0
        else:
            cells, first = self.history.of(part.region)
            offset, base = part.offset + first, self.history.base
        cell = cells.index(offset, size)
        clocks = self.clocks
        rows, record = clocks.row[ids], pack(ids + base, clocks.now[self.machine.warp[ids]], how)
        if cell.ndim > 1:
            count = cell.shape[1]
            ids, rows, record = (np.repeat(x, count) for x in (ids, rows, record))
            cell = cell.reshape(-1)
        return _Place(part.space, cells, base, cell, ids, rows, record, how)

    # Accesses of agents

    def agent_reads(self, space: str, cells: Cells, cell: Array, thread: int, agent: int, time: int) -> None:
        """Work that ``thread`` issued reads cells, at once or later, through the async proxy."""
        place = self._agent_place(space, cells, cell, thread, agent, time)
        self._against_writes(place, "read beside the threads")
        self._through_proxy(place)
        self._note_read(place)

    def agent_writes(
        self, space: str, cells: Cells, cell: Array, thread: int, agent: int, time: int, how: int = 0
    ) -> None:
        place = self._agent_place(space, cells, cell, thread, agent, time, how)
        self._against_writes(place, "write beside the threads")
        self._against_reads(place)
        self._through_proxy(place)
        cells.note_write(cell, place.record, self.machine.pc, self._beside_strong(place))

    def _agent_place(
        self, space: str, cells: Cells, cell: Array, thread: int, agent: int, time: int, how: int = 0
    ) -> _Place:
        base = self.history.base if space == "global" else 0
        ids = np.full(len(cell), thread)
        record = np.full(len(cell), pack(agent + base, time, how | PROXY))
        return _Place(space, cells, base, cell, ids, self.clocks.row[ids], record, how | PROXY)

    def _through_proxy(self, place: _Place) -> None:
        """What the generic proxy wrote in these cells must have been fenced."""
        wrote = place.cells.wrote[place.cell]
        generic = (wrote != 0) & (wrote & PROXY == 0)
        if not generic.any():
            return
        bad = generic & ~self._behind(place, wrote, _ASYNC_LAYER[place.space])
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            text = (
                f"the async proxy accesses {place.space} memory that the generic proxy wrote, "
                "without fence.proxy.async between"
            )
            self._fail(place, at, text, int(place.cells.wrote_at[place.cell[at]]))

    def agent_in_tensor_memory(
        self, cells: Cells, cell: Array, thread: int, agent: int, time: int, write: bool
    ) -> None:
        """tcgen05 work that ``thread`` issued reads or writes cells of tensor memory."""
        place = self._agent_place("tensor", cells, cell, thread, agent, time)
        self._against_writes(place, "tcgen05 write" if write else "tcgen05 read")
        if write:
            self._against_reads(place)
            cells.note_write(cell, place.record, self.machine.pc)
        else:
            self._note_read(place)

    def free_tensor_memory(self, cells: Cells, cell: Array, thread: int) -> None:
        """tcgen05.dealloc: what uses the columns must lie behind the thread."""
        place = self._agent_place("freed tensor", cells, cell, thread, -1, 0)
        self._against_writes(place, "tcgen05.dealloc")
        self._against_reads(place, "tcgen05.dealloc")
        cells.clear(cell)

    # Checks

    def _behind(self, place: _Place, records: Array, layer: int | None = None) -> Array:
        """Which of the recorded accesses lie behind those who access now; no access does."""
        clocks = self.clocks
        own = layer is None
        if layer is None:
            layer = TENSOR if place.space == "tensor" else ORDERED
        who, time = who_of(records) - place.base, time_of(records)
        if not place.base:
            known = clocks.behind(layer, place.rows, who, time)
        else:
            local = (who >= 0) & (who < len(clocks.column))
            who = np.where(local, who, 0)
            local &= clocks.cluster[who] == clocks.cluster[place.ids]
            known = local & clocks.behind(layer, place.rows, who, time)
            before = who_of(records) == PREVIOUS_GRID
            known |= before & (time < clocks.known[ORDERED, place.rows, PREVIOUS])
            if clocks.far:
                self._far_behind(place, records, known)
        if own:
            known |= who_of(records) == who_of(place.record)
            known |= who_of(records) - place.base == place.ids
        return np.asarray(known | (records == 0))

    def _far_behind(self, place: _Place, records: Array, known: Array) -> None:
        """Mark accesses of other clusters that lie behind."""
        left = np.flatnonzero(~known & (records != 0))
        pairs, index = np.unique(np.stack([place.rows[left], records[left] >> 3]), axis=1, return_inverse=True)
        answers = [self._far_one(int(row), int(record)) for row, record in pairs.T]
        known[left] = np.array(answers, bool)[index.reshape(-1)] if answers else False

    def _far_one(self, row: int, record: int) -> bool:
        who, time = record >> 29, record & (1 << 29) - 1
        at, clocks = who - self.history.base, self.clocks
        if 0 <= at < len(clocks.column):
            cluster = clocks.first_cluster + int(clocks.cluster[at])
            return clocks.far_behind(row, cluster, (int(clocks.column[at]), int(clocks.alone[at])), time)
        owner = self.history.owner(who)
        return owner is not None and clocks.far_behind(row, *owner, time)

    def _beside_strong(self, place: _Place) -> Array | None:
        """Of strong writes, which follow another thread's that they are not ordered with; None of others."""
        if not place.how & STRONG:
            return None
        wrote = place.cells.wrote[place.cell]
        beside = wrote & (STRONG | PROXY) == STRONG
        return np.asarray(beside & ~self._behind(place, wrote)) if beside.any() else beside

    def _against_writes(self, place: _Place, verb: str) -> None:
        cells, cell = place.cells, place.cell
        wrote = cells.wrote[cell]
        if not wrote.any():
            return
        self._against(place, wrote, cells.wrote_at, verb)
        if cells.twice and (before := cells.wrote_before[cell]).any():
            self._against(place, before, cells.wrote_before_at, verb)
        if place.how & READ_ONLY and (wrote >> 32 > PREVIOUS_GRID).any():
            at = int(np.flatnonzero(wrote >> 32 > PREVIOUS_GRID)[0])
            pc = int(place.cells.wrote_at[place.cell[at]])
            self._fail(place, at, "ld.global.nc reads memory that this kernel writes", pc)

    def _against(self, place: _Place, wrote: Array, sites: Array, verb: str) -> None:
        bad = ~self._behind(place, wrote)
        if place.how & STRONG:
            bad &= wrote & STRONG == 0
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            whose, site = self._whose(place, at, wrote), self._site(place, at, wrote, sites)
            self._fail(place, at, f"a {verb} follows an unordered write by {whose}", site)

    def _against_reads(self, place: _Place, verb: str = "write") -> None:
        for records in (place.cells.read, place.cells.read_before):
            reads = records[place.cell]
            if not reads.any():
                continue
            bad = ~self._behind(place, reads)
            if place.how & STRONG:
                bad &= reads & STRONG == 0
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                whose = self._whose(place, at, reads)
                text = f"a {verb} follows an unordered read by {whose}"
                if whose.startswith("another lane"):
                    text = "a write follows a read by another lane without a warp sync"
                self._fail(place, at, text, self._site(place, at, reads, place.cells.read_at))
            if (reads & READ_ONLY != 0).any():
                at = int(np.flatnonzero(reads & READ_ONLY)[0])
                pc = int(place.cells.read_at[place.cell[at]])
                self._fail(place, at, "a write to memory that ld.global.nc reads in this kernel", pc)

    def _threads_left(self, ids: Array) -> None:
        """Shared memory lives as long as its CTA: what others did in it must lie behind some thread of the CTA."""
        m, clocks = self.machine, self.clocks
        for cta in np.unique(m.cta[ids]):
            if m.live_in_cta[cta]:
                continue
            mine = np.flatnonzero(m.cta == cta)
            known = clocks.known[ORDERED, np.unique(clocks.row[mine])].max(0)
            for who, time, sites in self._used_by_others(int(cta)):
                bad = np.flatnonzero((time >= known[clocks.column[who]]) & (time >= known[clocks.alone[who]]))
                if len(bad):
                    site = m.program.place(int(sites[bad[0]]))
                    text = f"a CTA ends while others of its cluster use its shared memory\n  the access: {site}"
                    raise m.error(SimRaceError, text, ids[m.cta[ids] == cta][:1])

    def _used_by_others(self, cta: int) -> Iterator[tuple[Array, Array, Array]]:
        """Accesses by threads of other CTAs to a CTA's shared memory, and to its mbarriers: who, when and where."""
        m, stride = self.machine, self.machine.memory.shared_stride
        inside = self.shared.of_range(cta * stride, stride)
        for records, sites in ((self.shared.wrote, self.shared.wrote_at), (self.shared.read, self.shared.read_at)):
            cell = np.flatnonzero(records[inside]) + inside.start
            cell = cell[who_of(records[cell]) < m.total]
            cell = cell[m.cta[who_of(records[cell])] != cta]
            yield who_of(records[cell]), time_of(records[cell]), sites[cell]
        used = m.unit(MBarriers).remote.pop(cta, {})
        if used:
            time, site = np.array(list(used.values())).T
            yield np.array(list(used)), time, site

    def _note_read(self, place: _Place) -> None:
        cells, cell = place.cells, place.cell
        before = cells.read[cell]
        unordered = None
        if ((before != 0) & (who_of(before) != who_of(place.record))).any():
            unordered = ~self._behind(place, before)
        cells.note_read(cell, place.record, self.machine.pc, unordered)

    def _whose(self, place: _Place, at: int, records: Array) -> str:
        m = self.machine
        who = int(records[at]) >> 32
        if who == PREVIOUS_GRID and place.base:
            return "the grid before this one, which griddepcontrol.wait waits for"
        who -= place.base
        if not 0 <= who < m.total:
            return "asynchronous work that was not waited for" if int(records[at]) & PROXY else "another CTA"
        thread = int(place.ids[at])
        if m.warp[who] == m.warp[thread]:
            return "another lane without a warp sync"
        return "another warp" if m.cta[who] // m.cluster_size == m.cta[thread] // m.cluster_size else "another CTA"

    def _site(self, place: _Place, at: int, records: Array, sites: Array) -> int | None:
        """Where the recorded access happened, unless that was in another launch."""
        return None if int(records[at]) >> 32 == PREVIOUS_GRID and place.base else int(sites[place.cell[at]])

    def _fail(self, place: _Place, at: int, text: str, pc: int | None) -> NoReturn:
        m = self.machine
        offset = place.cells.bytes_of(int(place.cell[at]))
        other = f"\n  the other access: {m.program.place(pc)}" if pc is not None else ""
        if place.space == "shared":
            where = f"shared memory race at {offset % m.memory.shared_stride:#x}"
        else:
            where = f"{place.space} memory race"
        raise m.error(SimRaceError, f"{where}: {text}{other}", place.ids[at : at + 1])

    # Order

    def warp_sync(self, lanes: Lanes) -> None:
        """The lanes of each warp met."""
        self.clocks.meet(lanes.ids)

    def publish(self, releases: dict[int, Release], lanes: Lanes, keys: Array, *, relaxed: bool = False) -> None:
        """Lanes arrive at barriers ``keys``: what they did lies before the barrier's completion.

        A relaxed arrival orders nothing but what tcgen05.fence has ordered.
        """
        for key, release in self.clocks.release_by(lanes.ids, keys).items():
            self.join(releases, key, release.of_tensor_memory() if relaxed else release)

    def snapshot(self, lanes: Lanes) -> Release:
        """What lies before now for lanes of one cluster; time moves on."""
        return self.clocks.release(lanes.ids)

    def join(self, releases: dict[int, Release], key: int, release: Release) -> None:
        before = releases.get(key)
        releases[key] = release if before is None else before.join(release)

    def acquire(
        self,
        releases: dict[int, Release],
        ids: Array,
        keys: Array,
        closed: Array | None = None,
        *,
        relaxed: bool = False,
    ) -> None:
        """Threads ``ids`` come through barriers ``keys``; barriers ``closed`` start anew."""
        if relaxed:
            releases = {k: r.of_tensor_memory() for k, r in releases.items() if k in set(keys.tolist())}
        self.clocks.acquire_by(ids, keys, releases)
        for key in closed if closed is not None else ():
            releases.pop(int(key), None)
