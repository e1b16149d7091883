"""A set of threads that execute one instruction together."""

from __future__ import annotations

import numpy as np

from jitfp4.sim.ptx import Array

Selector = slice | Array


class Lanes:
    """Ascending thread numbers of a batch, with the cheapest selector for register arrays.

    ``sel`` is a slice when the numbers are contiguous, so that registers are read as views; ``full`` means every thread
    of the batch, in which case a result may replace a register's array instead of being copied into it.
    """

    __slots__ = ("full", "ids", "n", "sel")

    def __init__(self, ids: Array, total: int) -> None:
        self.ids = ids
        self.n = len(ids)
        self.full = self.n == total
        first = int(ids[0])
        self.sel: Selector = slice(first, first + self.n) if int(ids[-1]) - first + 1 == self.n else ids

    @staticmethod
    def merge(parts: list[Lanes], total: int) -> Lanes:
        """The union of disjoint sets."""
        if len(parts) == 1:
            return parts[0]
        ids = np.concatenate([part.ids for part in parts])
        ids.sort()
        return Lanes(ids, total)
