"""The last accesses to every cell of a memory: who wrote it, one more who did by a strong write that is not ordered
with the last, and up to two of those who read it since.

A record is one integer: the accessor's id above 32 bits, its time above two bits of how it accessed. Ids of one batch
of CTAs are those of its threads, then those of its agents (clocks.py), above ``base``; zero is nobody.

Cells are as wide as the narrowest access so far (at most 16 bytes), so that arrays of floats cost a quarter of bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

STRONG, READ_ONLY, PROXY = 1, 2, 4
"""How: volatile, relaxed or atomic; through the non-coherent path; through the async proxy."""
_HOW = 3
WIDEST = 16
_RECORDS = ("wrote", "wrote_before", "read", "read_before")
_BESIDE = ("wrote_before", "wrote_before_at")
_ARRAYS = (*_RECORDS, "wrote_at", "wrote_before_at", "read_at")
_TIME = (1 << 29) - 1


def pack(who: Any, time: Any, how: int = 0) -> Any:
    """Records of accesses."""
    return who << 32 | time << _HOW | how


def who_of(record: Array) -> Array:
    return record >> 32


def time_of(record: Array) -> Array:
    return record >> _HOW & _TIME


class Cells:
    """Records of one range of memory; ``phase`` is the alignment of its first byte."""

    def __init__(self, size: int, phase: int = 0) -> None:
        self.phase = phase % WIDEST
        self.width = WIDEST
        count = -(-(size + self.phase) // WIDEST)
        self.wrote, self.wrote_before, self.read, self.read_before = (np.zeros(count, np.int64) for _ in range(4))
        self.wrote_at, self.wrote_before_at, self.read_at = (np.zeros(count, np.int32) for _ in range(3))
        self.used = False  # some record has been made
        self.twice = False  # and some of a strong write beside another: until then those arrays take no memory

    def refine(self, size: int) -> None:
        """Make cells at most ``size`` bytes wide."""
        while self.width > size:
            for name in _ARRAYS:
                records = getattr(self, name)
                # Zeros of a new array take no memory before they are written: buffers may be large.
                kept = self.twice if name in _BESIDE else self.used
                fine = np.repeat(records, 2) if kept else np.zeros(2 * len(records), records.dtype)
                setattr(self, name, fine)
            self.width //= 2

    def index(self, offset: Array, size: int) -> Array:
        """Cells of aligned accesses of ``size`` bytes: ``[n]``, or ``[n, cells]``."""
        self.refine(size)
        first = (offset + self.phase) // self.width
        count = size // self.width
        return first if count == 1 else first[:, None] + np.arange(count)

    def of_bytes(self, where: Array) -> Array:
        """Cells that a set of byte offsets touches, as wide as its runs allow."""
        if not where.size:
            return np.zeros(0, np.int64)
        at = np.sort(where.reshape(-1) + self.phase)
        ends = np.flatnonzero(np.diff(at) > 1)
        edges = int(np.bitwise_or.reduce(np.r_[at[0], at[ends + 1], at[ends] + 1, at[-1] + 1]))
        self.refine(min(edges & -edges, WIDEST))
        mark = np.zeros(len(self.wrote), bool)
        mark[(where.reshape(-1) + self.phase) // self.width] = True
        return np.flatnonzero(mark)

    def of_range(self, first: int, size: int) -> slice:
        """Cells of ``size`` bytes from ``first``."""
        return slice((first + self.phase) // self.width, -(-(first + size + self.phase) // self.width))

    def bytes_of(self, cell: int) -> int:
        """Offset of a cell's first byte."""
        return max(cell * self.width - self.phase, 0)

    def note_read(self, cell: Array, record: Array, pc: int, unordered: Array | None) -> None:
        """Remember reads; ``unordered`` marks those whose predecessor in the cell is not behind them."""
        self.used = True
        if unordered is not None:
            at = cell[unordered]
            self.read_before[at] = self.read[at]
        self.read[cell] = record
        lost = self.read[cell] != record  # several lanes read one cell: keep two of them
        if lost.any():
            self.read_before[cell[lost]] = record[lost]
        self.read_at[cell] = pc

    def note_write(self, cell: Array, record: Array, pc: int, unordered: Array | None = None) -> Array:
        """Remember writes. Returns which lanes wrote a cell that another lane wrote in the same instruction.

        ``unordered``, of strong writes, marks those whose predecessor in the cell is not behind them.
        """
        self.used = True
        if unordered is None:
            if self.twice:
                self.wrote_before[cell] = 0
        elif unordered.any():
            at, self.twice = cell[unordered], True
            self.wrote_before[at] = self.wrote[at]
            self.wrote_before_at[at] = self.wrote_at[at]
        self.wrote[cell] = record
        self.wrote_at[cell] = pc
        self.read[cell] = 0
        self.read_before[cell] = 0
        lost = np.asarray(self.wrote[cell] != record)
        if unordered is not None and lost.any():
            self.twice = True
            self.wrote_before[cell[lost]] = record[lost]
            self.wrote_before_at[cell[lost]] = pc
        return lost

    def _records(self) -> list[Array]:
        return [getattr(self, name) for name in _RECORDS if self.twice or name not in _BESIDE]

    def clear(self, cell: Array | slice) -> None:
        for records in self._records():
            records[cell] = 0

    def take(self, other: Cells, first: int) -> None:
        """Take over the records of a range that begins ``first`` bytes into this one."""
        width = min(self.width, other.width)
        self.used |= other.used
        self.twice |= other.twice
        self.refine(width)
        other.refine(width)
        start = (first + self.phase) // width
        for name in _ARRAYS if other.twice else (name for name in _ARRAYS if name not in _BESIDE):
            records = getattr(other, name)
            getattr(self, name)[start : start + len(records)] = records

    def belong_to(self, who: int, *, keep: bool) -> None:
        """Ascribe every access to ``who``; without ``keep`` those that already are its own are forgotten."""
        for records in self._records():
            mine = who_of(records) == who
            if not keep:
                records[mine] = 0
            records[(records != 0) & ~mine] = pack(who, 1, PROXY)
