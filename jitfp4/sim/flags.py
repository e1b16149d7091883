"""Releases and acquires through memory: what orders threads of different CTAs.

A release pattern (PTX ISA, "Release and acquire patterns") is a ``.release`` operation, or a fence followed by a
strong write of the same thread: the value it leaves carries all that lay behind the release, or behind the fence. An
acquire pattern is an ``.acquire`` operation that reads it, or a strong read followed by a fence. Atomics continue what
a release began; another store ends it. A scope that does not include the other thread gives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.sim.clocks import ORDERED, TRAVELS, Clocks, Release
from jitfp4.sim.ptx import Array
from jitfp4.sim.shadow import READ_ONLY, STRONG

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine
    from jitfp4.sim.memory import Part
    from jitfp4.sim.races import Races

SCOPES = {"cta": 1, "cluster": 2, "gpu": 3, "gl": 3, "sys": 4}


@dataclass(frozen=True, slots=True)
class Access:
    """How an instruction takes part: its semantics and scope. ``strong`` without either is relaxed or volatile."""

    strong: bool = False
    acquire: bool = False
    release: bool = False
    read_only: bool = False
    scope: int = 3

    @property
    def how(self) -> int:
        """The bits of a record (shadow.py)."""
        return STRONG * self.strong | READ_ONLY * self.read_only


WEAK = Access()
ATOMIC = Access(strong=True)


@dataclass(frozen=True, slots=True)
class _Fence:
    """What lay behind a fence: clocks of every row then, and the rows and times of its threads."""

    scope: int
    known: Array
    rows: Array
    now: Array
    far: dict[int, dict[int, Array]]

    def of(self, clocks: Clocks, thread: int) -> Release:
        warp, row = int(clocks.machine.warp[thread]), int(self.rows[thread])
        column = clocks.release_column(thread)
        known = np.zeros((TRAVELS, clocks.known.shape[2]), np.int32)
        known[:, : self.known.shape[2]] = self.known[:TRAVELS, row]
        known[ORDERED, column] = self.now[warp]
        return Release(clocks.first_cluster + int(clocks.cluster[thread]), known, self.far.get(row, {}))


class Flags:
    """What the bytes of memory that strong accesses meet at carry, and what each thread has fenced or yet to fence."""

    def __init__(self, machine: Machine, races: Races) -> None:
        self.machine, self.clocks = machine, races.clocks
        # by memory and byte offset, then by scope and publishing CTA
        self.carried: dict[tuple[int, int], dict[tuple[int, int], Release]] = races.history.flags
        self.local: dict[tuple[int, int], dict[tuple[int, int], Release]] = {}
        self.fenced = np.full(machine.total, None, object)
        self.any_fence = False
        self.owed: dict[int, list[tuple[int, int, Release]]] = {}  # strong reads before an acquiring fence

    def fence(self, ids: Array, scope: int, *, acquire: bool = True, release: bool = True) -> None:
        """fence.acq_rel, fence.sc, membar."""
        if acquire:
            for thread in ids.tolist() if self.owed else ():
                for wrote_scope, cta, one in self.owed.pop(thread, ()):
                    self._acquire(thread, wrote_scope, cta, scope, one)
        if not release:
            return
        clocks = self.clocks
        clocks.now[np.unique(self.machine.warp[ids])] += 1
        far = dict(clocks.far)
        self.fenced[ids] = _Fence(scope, clocks.known.copy(), clocks.row.copy(), clocks.now.copy(), far)
        self.any_fence = True

    def written(self, part: Part, ids: Array, access: Access, *, atomic: bool) -> None:
        """Threads wrote at the offsets of ``part``; ``atomic`` keeps what others left there."""
        table = self._table(part)
        if not (access.release or (access.strong and self.any_fence) or (table and not atomic)):
            return
        memory = self._memory(part)
        for thread, offset in zip(ids.tolist(), part.offset.tolist(), strict=True):
            key = (memory, offset)
            if not atomic:
                table.pop(key, None)
            for scope, release in self._published(thread, access):
                entry = table.setdefault(key, {})
                where = (scope, self._cta(thread))
                entry[where] = entry[where].join(release) if where in entry else release

    def exchanged(self, part: Part, ids: Array, access: Access, turns: Array) -> None:
        """Threads executed an atomic, one after the other in the order of ``turns``."""
        if not (access.release or self.any_fence or self._table(part)):
            return
        for at in turns.tolist():
            one = replace(part, pick=None, offset=part.offset[at : at + 1])
            self.reading(one, ids[at : at + 1], access)
            self.written(one, ids[at : at + 1], access, atomic=True)

    def _published(self, thread: int, access: Access) -> list[tuple[int, Release]]:
        out = []
        if access.release:
            out.append((access.scope, self.clocks.release(np.array([thread]))))
        fence = self.fenced[thread] if access.strong else None
        if fence is not None:
            out.append((min(fence.scope, access.scope), fence.of(self.clocks, thread)))
        return out

    def reading(self, part: Part, ids: Array, access: Access) -> None:
        """Threads read there with a strong operation."""
        table = self._table(part)
        if not table or not access.strong:
            return
        memory = self._memory(part)
        for thread, offset in zip(ids.tolist(), part.offset.tolist(), strict=True):
            for (scope, cta), release in table.get((memory, offset), {}).items():
                if access.acquire:
                    self._acquire(thread, scope, cta, access.scope, release)
                else:
                    self.owed.setdefault(thread, []).append((min(scope, access.scope), cta, release))

    def _acquire(self, thread: int, wrote_scope: int, cta: int, scope: int, release: Release) -> None:
        mine, size = self._cta(thread), self.machine.cluster_size
        needed = 1 if mine == cta else 2 if mine // size == cta // size else 3
        if min(scope, wrote_scope) >= needed:
            self.clocks.acquire(np.array([thread]), release)

    def _cta(self, thread: int) -> int:
        return self.machine.first + int(self.machine.cta[thread])

    def _table(self, part: Part) -> dict[tuple[int, int], dict[tuple[int, int], Release]]:
        return self.local if part.space == "shared" else self.carried

    def _memory(self, part: Part) -> int:
        return 0 if part.space == "shared" else part.region.base
