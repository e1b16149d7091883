"""Who knows what to lie behind it: vector clocks of warps, of lanes that act alone, and of asynchronous agents.

An access has a time on the clock of its warp. A row of ``known`` says, for a warp or for a lane that synchronised
without the others, up to which time it knows the accesses of each column to lie behind it. A column belongs to a warp
of the cluster, to a thread that released something alone (then only its own accesses are meant), or to an agent: work
that runs beside the threads, such as the copies that signal one mbarrier, or the wgmma groups of a warpgroup.

Layers: what is ordered (base causality order of the PTX memory model), what of it a proxy fence has made visible to
the async proxy in shared and in global memory, what tcgen05.fence lets later tcgen05 instructions rely on, and what
fence.proxy.tensormap lets copies see of tensor maps in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim.ptx import Array

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine

ORDERED, ASYNC_SHARED, ASYNC_GLOBAL, TENSOR_SENT, MAPS_SENT, TENSOR, MAPS = range(7)
LAYERS = 7
TRAVELS = 5
"""Layers that a release hands on; the last stay with who has executed tcgen05.fence::after_thread_sync, or
fence.proxy.tensormap with .acquire.
"""
AGENTS = 4096
"""Ids kept for agents of one batch, after those of its threads."""
NOBODY, PREVIOUS = 0, 1
"""Columns: one that is never known, and the grid before this one (griddepcontrol.wait)."""


@dataclass(slots=True)
class Release:
    """What somebody published: ``known`` [TRAVELS, columns] of cluster ``cluster``, ``far`` the same of others."""

    cluster: int
    known: Array
    far: dict[int, Array]

    def of_tensor_memory(self) -> Release:
        """Only what tcgen05.fence::before_thread_sync has published."""
        known = np.zeros_like(self.known)
        known[TENSOR_SENT] = self.known[TENSOR_SENT]
        return Release(self.cluster, known, {})

    def join(self, other: Release) -> Release:
        """Both, as a new value."""
        far = _joined(self.far, other.far)
        if other.cluster == self.cluster:
            return Release(self.cluster, maximum(self.known, other.known), far)
        return Release(self.cluster, self.known, _joined(far, {other.cluster: other.known}))


def maximum(a: Array, b: Array) -> Array:
    """Of clocks that may have got different numbers of columns."""
    if a.shape[-1] < b.shape[-1]:
        a, b = b, a
    out = a.copy()
    width = b.shape[-1]
    np.maximum(out[..., :width], b, out=out[..., :width])
    return out


def _joined(a: dict[int, Array], b: dict[int, Array]) -> dict[int, Array]:
    if not b or a is b:
        return a
    out = dict(a)
    for cluster, known in b.items():
        out[cluster] = maximum(out[cluster], known) if cluster in out else known
    return out


class Clocks:
    """Clocks of one batch. Clusters are numbered over the whole grid, in the order in which they run."""

    def __init__(self, machine: Machine) -> None:
        m = self.machine = machine
        self.warps = m.ctas * m.block_warps
        width = m.cluster_size * m.block_warps
        self.first_cluster = m.first // m.cluster_size
        self.cluster_of_warp = np.arange(self.warps) // width
        self.own = 2 + np.arange(self.warps) % width  # each warp's column
        clusters = m.ctas // m.cluster_size
        self.free = np.full(clusters, 2 + width)  # the next column of each cluster
        ids = m.total + AGENTS
        self.column = np.zeros(ids, np.int64)
        self.column[: m.total] = self.own[m.warp]
        self.alone = np.zeros(ids, np.int64)  # a second column of threads that released alone
        self.cluster = np.zeros(ids, np.int64)
        self.cluster[: m.total] = self.cluster_of_warp[m.warp]
        self.agents: dict[object, int] = {}
        self.row = m.warp.copy()
        self.rows_alone: dict[int, int] = {}  # threads with a row of their own
        self.free_rows: list[int] = []
        self.known = np.zeros((LAYERS, self.warps + 8, 2 + width + 30), np.int32)
        self.now = np.ones(self.warps, np.int64)
        self.known[ORDERED, np.arange(self.warps), self.own] = 1
        self.far: dict[int, dict[int, Array]] = {}  # by row
        self.live = np.bincount(m.warp, minlength=self.warps)
        m.on_exit.insert(0, self._left)

    def _left(self, ids: Array) -> None:
        self.live -= np.bincount(self.machine.warp[ids], minlength=self.warps)

    # Columns and rows

    def agent(self, key: object, thread: int) -> int:
        """The id of an agent that belongs to a thread's cluster."""
        found = self.agents.get(key)
        if found is None:
            found = self.agents[key] = self.machine.total + len(self.agents)
            if len(self.agents) > AGENTS:
                text = f"more than {AGENTS} mbarriers and threads with asynchronous work: run with a smaller batch"
                raise self.machine.error(SimError, text, np.array([thread]))
            self.cluster[found] = self.cluster[thread]
            self.column[found] = self._new_column(thread)
        return found

    def _new_column(self, thread: int) -> int:
        cluster = int(self.cluster[thread])
        column = int(self.free[cluster])
        self.free[cluster] += 1
        if column >= self.known.shape[2]:
            self.known = np.concatenate([self.known, np.zeros_like(self.known)], axis=2)
        return column

    def release_column(self, thread: int) -> int:
        """The column of what a thread did by itself."""
        if not self.alone[thread]:
            self.alone[thread] = self._new_column(thread)
        return int(self.alone[thread])

    def _row_alone(self, thread: int) -> int:
        """A row of the thread's own, until its warp meets."""
        row = self.rows_alone.get(thread)
        if row is None:
            if not self.free_rows:
                size = self.known.shape[1]
                used = self.warps + len(self.rows_alone)
                if used >= size:
                    self.known = np.concatenate([self.known, np.zeros_like(self.known)], axis=1)
                    size = self.known.shape[1]
                self.free_rows = list(range(used, size))
            row = self.rows_alone[thread] = self.free_rows.pop()
            warp = int(self.machine.warp[thread])
            self.known[:, row] = self.known[:, warp]
            if warp in self.far:
                self.far[row] = self.far[warp]
            self.row[thread] = row
        return row

    def _fold(self, warps: Array) -> None:
        """Lanes that acted alone come back to their warps."""
        if not self.rows_alone:
            return
        inside = np.zeros(self.warps, bool)
        inside[warps] = True
        for thread in [t for t in self.rows_alone if inside[self.machine.warp[t]]]:
            row, warp = self.rows_alone.pop(thread), int(self.machine.warp[thread])
            np.maximum(self.known[:, warp], self.known[:, row], out=self.known[:, warp])
            if row in self.far:
                self.far[warp] = _joined(self.far.get(warp, {}), self.far.pop(row))
            self.row[thread] = warp
            self.known[:, row] = 0
            self.free_rows.append(row)

    def whole(self, ids: Array) -> tuple[Array, Array]:
        """Warps all of whose live threads are among ``ids`` (ascending), and the threads of other warps."""
        warp = self.machine.warp[ids]
        count = np.bincount(warp, minlength=self.warps)
        full = (count == self.live) & (count > 0)
        return np.flatnonzero(full), ids[~full[warp]]

    # Order

    def meet(self, ids: Array) -> None:
        """The lanes of each warp met."""
        warps, rest = self.whole(ids)
        if len(warps):
            self._fold(warps)
            self.now[warps] += 1
            self.known[ORDERED, warps, self.own[warps]] = self.now[warps]
        for warp in np.unique(self.machine.warp[rest]):
            lanes = rest[self.machine.warp[rest] == warp]
            self.acquire(lanes, self.release(lanes))

    def release(self, ids: Array) -> Release:
        """What lies behind the threads ``ids`` of one cluster, their own accesses included; time moves on."""
        warps, rest = self.whole(ids)
        parts, far = [], {}
        if len(warps):
            self._fold(warps)
            self.now[warps] += 1
            part = self.known[:TRAVELS, warps]
            part[ORDERED, np.arange(len(warps)), self.own[warps]] = self.now[warps]
            parts.append(part.max(1))
            far = self._far_of(warps.tolist())
        for thread in rest.tolist():
            warp, row = int(self.machine.warp[thread]), int(self.row[thread])
            column = self.release_column(thread)
            self.now[warp] += 1
            one = self.known[:TRAVELS, row].copy()
            one[ORDERED, column] = self.now[warp]
            parts.append(one)
            far = _joined(far, self._far_of([row]))
        known = parts[0]
        for part in parts[1:]:
            known = maximum(known, part)
        return Release(self.first_cluster + int(self.cluster[ids[0]]), known, far)

    def release_by(self, ids: Array, keys: Array) -> dict[int, Release]:
        """One release for each key: threads ``ids`` ascending, keys of one cluster each."""
        warps, rest = self.whole(ids)
        first = np.searchsorted(ids, ids[np.r_[True, np.diff(self.machine.warp[ids]) != 0]])
        key = keys[first]
        if len(rest) or self.far or (np.repeat(key, np.diff(np.r_[first, len(ids)])) != keys).any():
            return {int(k): self.release(ids[keys == k]) for k in np.unique(keys)}
        self._fold(warps)
        self.now[warps] += 1
        part = self.known[:TRAVELS, warps]
        part[ORDERED, np.arange(len(warps)), self.own[warps]] = self.now[warps]
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(key[order]) != 0])
        joined = np.maximum.reduceat(part[:, order], starts, axis=1)
        clusters = self.first_cluster + self.cluster_of_warp[warps[order[starts]]]
        return {int(k): Release(int(clusters[g]), joined[:, g], {}) for g, k in enumerate(key[order[starts]].tolist())}

    def acquire_by(self, ids: Array, keys: Array, releases: dict[int, Release]) -> None:
        """Threads ``ids``, ascending, learn what was published under their keys."""
        if not len(ids):
            return
        warps, rest = self.whole(ids)
        first = np.flatnonzero(np.r_[True, np.diff(self.machine.warp[ids]) != 0])
        key = keys[first]
        known, index = np.unique(key, return_inverse=True)
        found = [releases.get(int(k)) for k in known]
        mixed = (np.repeat(key, np.diff(np.r_[first, len(ids)])) != keys).any()
        if len(rest) or mixed or any(f is None or f.far for f in found):
            for k in np.unique(keys).tolist():
                if k in releases:
                    self.acquire(ids[keys == k], releases[k])
            return
        width = max(f.known.shape[1] for f in found if f is not None)
        stack = np.zeros((TRAVELS, len(found), width), np.int32)
        for g, f in enumerate(found):
            if f is not None:
                stack[:, g, : f.known.shape[1]] = f.known
        self._fold(warps)
        mine = self.known[:TRAVELS, warps, :width]
        self.known[:TRAVELS, warps, :width] = np.maximum(mine, stack[:, index])

    def _far_of(self, rows: list[int]) -> dict[int, Array]:
        out: dict[int, Array] = {}
        if self.far:
            for row in rows:
                out = _joined(out, self.far.get(row, {}))
        return out

    def acquire(self, ids: Array, release: Release) -> None:
        """Threads of one cluster learn what was published."""
        warps, rest = self.whole(ids)
        rows = np.concatenate([warps, [self._row_alone(t) for t in rest.tolist()]]).astype(np.int64)
        mine = self.first_cluster + int(self.cluster[ids[0]])
        far = release.far
        if release.cluster == mine:
            self._raise(rows, slice(0, TRAVELS), release.known)
            if mine in far:
                self._raise(rows, slice(0, TRAVELS), far[mine])
        else:
            far = _joined(far, {release.cluster: release.known})
            if mine in far:
                self._raise(rows, slice(0, TRAVELS), far[mine])
        if far:
            for row in rows.tolist():
                self.far[row] = _joined(self.far.get(row, {}), far)

    def _raise(self, rows: Array, layers: slice, known: Array) -> None:
        while known.shape[1] > self.known.shape[2]:
            self.known = np.concatenate([self.known, np.zeros_like(self.known)], axis=2)
        width = known.shape[1]
        self.known[layers, rows, :width] = np.maximum(self.known[layers, rows, :width], known[:, None])

    def fence(self, ids: Array, layers: tuple[int, ...]) -> None:
        """A proxy fence: what lies behind its threads, and what they did, becomes visible to the async proxy."""
        warps, rest = self.whole(ids)
        self.now[np.unique(self.machine.warp[ids])] += 1
        for layer in layers:
            if len(warps):
                self.known[layer, warps] = np.maximum(self.known[layer, warps], self.known[ORDERED, warps])
                self.known[layer, warps, self.own[warps]] = self.now[warps]
                for thread, row in self.rows_alone.items():
                    warp = int(self.machine.warp[thread])
                    if warp in warps:
                        np.maximum(self.known[layer, row], self.known[ORDERED, row], out=self.known[layer, row])
                        self.known[layer, row, self.own[warp]] = self.now[warp]
            for thread in rest.tolist():
                column, row = self.release_column(thread), int(self.row[thread])
                np.maximum(self.known[layer, row], self.known[ORDERED, row], out=self.known[layer, row])
                self.known[layer, row, column] = self.now[self.machine.warp[thread]]

    def lift(self, ids: Array, source: int, target: int) -> None:
        """What the threads know in one layer holds in another."""
        rows = np.unique(self.row[ids])
        self.known[target, rows] = np.maximum(self.known[target, rows], self.known[source, rows])

    def done(self, ids: Array, agent: int, time: int, layers: tuple[int, ...] = (ORDERED,)) -> None:
        """Threads waited for an agent's work: what it did before ``time`` lies behind them."""
        warps, rest = self.whole(ids)
        rows = [*warps.tolist(), *(self._row_alone(t) for t in rest.tolist())]
        for layer in layers:
            cells = self.known[layer, rows, self.column[agent]]
            self.known[layer, rows, self.column[agent]] = np.maximum(cells, time)

    def previous_done(self, ids: Array) -> None:
        """griddepcontrol.wait: the grid before this one is complete and visible in every proxy."""
        warps, rest = self.whole(ids)
        rows = [*warps.tolist(), *(self._row_alone(t) for t in rest.tolist())]
        self.known[:TRAVELS, rows, PREVIOUS] = 2

    def is_previous_done(self, ids: Array) -> bool:
        """Whether all of them are behind a griddepcontrol.wait, their own or another thread's."""
        return bool((self.known[ORDERED, self.row[ids], PREVIOUS] == 2).all())

    def behind(self, layer: int, rows: Array, who: Array, time: Array) -> Array:
        """Whether accesses of this cluster, by threads or agents ``who`` at ``time``, are known in ``layer``."""
        known = self.known[layer]
        return np.asarray((time < known[rows, self.column[who]]) | (time < known[rows, self.alone[who]]))

    def far_behind(self, row: int, cluster: int, columns: tuple[int, int], time: int) -> bool:
        """The same of another cluster, by the columns of who it was."""
        known = self.far.get(row, {}).get(cluster)
        if known is None:
            return False
        return any(column < known.shape[1] and time < known[ORDERED, column] for column in columns)
