"""What one launch, and the launches before it, did to global memory: kept over the batches of a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.sim.clocks import Clocks, Release
from jitfp4.sim.ptx import Array
from jitfp4.sim.shadow import PROXY, Cells, pack

if TYPE_CHECKING:
    from jitfp4.sim.memory import Region

PREVIOUS_GRID = 1
"""The id of every access that a launch before this one made, as long as it may still run."""
_FIRST_BATCH = 2


@dataclass(frozen=True, slots=True)
class _Batch:
    """Whose the ids from ``base`` on were: cluster and columns of each."""

    base: int
    first_cluster: int
    cluster: Array
    column: Array
    alone: Array


class History:
    """Records of global memory, by address in the host's memory, so that arguments that overlap share them."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, Cells]] = []
        self.places: dict[int, tuple[Cells, int]] = {}
        self.flags: dict[tuple[int, int], dict[tuple[int, int], Release]] = {}
        self.waited: set[int] = set()  # CTAs of this grid in which a thread has waited for the grid before
        self.early: set[int] = set()  # those that let the next one begin from a thread that is not behind a wait
        self.base = _FIRST_BATCH
        self.batches: list[_Batch] = []
        self.regions: list[Region] = []  # kept, so that neither their ids nor their memory come again

    def cover(self, arrays: list[Array]) -> None:
        """Make room for the records of these byte arrays."""
        for data in arrays:
            if not data.size:
                continue
            low = data.__array_interface__["data"][0]
            high = low + data.nbytes
            if any(a <= low and high <= b for a, b, _ in self.ranges):
                continue
            touching = [r for r in self.ranges if r[0] < high and low < r[1]]
            start, end = min([low, *(r[0] for r in touching)]), max([high, *(r[1] for r in touching)])
            cells = Cells(end - start, start)
            for a, _, old in touching:
                cells.take(old, a - start)
            self.ranges = [r for r in self.ranges if r not in touching] + [(start, end, cells)]
        self.places.clear()

    def of(self, region: Region) -> tuple[Cells, int]:
        """The records of a buffer, and the offset of its first byte in them."""
        found = self.places.get(id(region))
        if found is None:
            self.regions.append(region)
            found = self.places[id(region)] = self.of_data(region.data)
        return found

    def of_data(self, data: Array) -> tuple[Cells, int]:
        low = data.__array_interface__["data"][0]
        for start, end, cells in self.ranges:
            if start <= low < end:
                return cells, low - start
        self.cover([data])
        return self.of_data(data)

    def finish_batch(self, clocks: Clocks) -> None:
        """The next batch gets new ids; what somebody published may still name the old ones."""
        used = clocks.machine.total + len(clocks.agents)
        tables = (clocks.cluster[:used], clocks.column[:used].astype(np.int32), clocks.alone[:used].astype(np.int32))
        self.batches.append(_Batch(self.base, clocks.first_cluster, *tables))
        self.base += len(clocks.column)

    def owner(self, who: int) -> tuple[int, tuple[int, int]] | None:
        """Cluster and columns of an id of an earlier batch."""
        for batch in reversed(self.batches):
            if batch.base <= who < batch.base + len(batch.cluster):
                at = who - batch.base
                return batch.first_cluster + int(batch.cluster[at]), (int(batch.column[at]), int(batch.alone[at]))
        return None

    def next_grid(self) -> None:
        """Begin a dependent launch: all accesses so far are those of the grid before it.

        If a CTA of that grid waited before it let this one begin, what lay before it is complete.
        """
        for _, _, cells in self.ranges:
            cells.belong_to(PREVIOUS_GRID, keep=not self.waited - self.early)
        self.waited.clear()
        self.early.clear()
        self.flags.clear()
        self.batches.clear()
        self.base = _FIRST_BATCH
        self.places.clear()

    def touched_before(self, data: Array) -> None:
        """Declare that the grid before this one reads and writes an array."""
        if not data.size:
            return
        self.cover([data])
        cells, first = self.of_data(data)
        where = cells.of_range(first, data.nbytes)
        cells.used = True
        cells.wrote[where] = pack(PREVIOUS_GRID, 1, PROXY)
        cells.read[where] = pack(PREVIOUS_GRID, 1, PROXY)

    def forget(self, data: Array) -> None:
        """Declare that an array is constant: no earlier grid writes it."""
        if not data.size:
            return
        self.cover([data])
        cells, first = self.of_data(data)
        cells.clear(cells.of_range(first, data.nbytes))
