"""Tensor memory of the sm_100 family: allocation, ``tcgen05.ld``, ``.st`` and ``.cp``.

One CTA's tensor memory is a uint32 array ``[128 lanes, 512 columns]``. An address has the lane in bits 16 up, the
column in bits 0-15. A machine keeps the array and an ``Allocations`` value per CTA; ``cells`` names what a load or
store touches, so that it can look for cells that nothing wrote; ``Allocations.require`` refuses columns that nobody
holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.matrix_descriptor import MatrixDescriptor

Array = NDArray[Any]

LANES, COLUMNS = 128, 512

_THREAD = np.arange(32)
# Registers per thread of .x1, and the most repetitions.
_SHAPES = {"32x32b": (1, 128), "16x64b": (1, 128), "16x32bx2": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32)}
# cp: rows and bytes per row in shared memory, then the lane of each copy of row r.
_CP_SHAPES = {
    "128x256b": (128, 32),
    "4x256b": (4, 32),
    "128x128b": (128, 16),
    "64x128b.warpx2::02_13": (64, 16),
    "64x128b.warpx2::01_23": (64, 16),
    "32x128b.warpx4": (32, 16),
}


@dataclass(frozen=True, slots=True)
class Allocations:
    """The columns that one CTA holds: ``blocks`` are (first column, columns), ``last`` the size of the newest."""

    blocks: tuple[tuple[int, int], ...] = ()
    last: int = COLUMNS
    relinquished: bool = False

    def alloc(self, columns: int) -> tuple[Allocations, int] | None:
        """``tcgen05.alloc``: the new state and the address, or None while it must wait for room."""
        if columns not in (32, 64, 128, 256, 512):
            raise SimError(f"tcgen05.alloc of {columns} columns: not a power of two in 32..512")
        if self.relinquished:
            raise SimError("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        if columns > self.last:
            raise SimError(f"tcgen05.alloc of {columns} columns after one of {self.last}: sizes must not increase")
        for first in range(0, COLUMNS - columns + 1, 32):
            if all(first + columns <= start or start + count <= first for start, count in self.blocks):
                return replace(self, blocks=(*self.blocks, (first, columns)), last=columns), first
        return None

    def dealloc(self, address: int, columns: int) -> Allocations:
        """``tcgen05.dealloc``: must name what one alloc returned."""
        if (address, columns) not in self.blocks:
            raise SimError(f"tcgen05.dealloc of {columns} columns at {address:#x}: allocated are {self.blocks}")
        return replace(self, blocks=tuple(b for b in self.blocks if b != (address, columns)))

    def relinquish(self) -> Allocations:
        """``tcgen05.relinquish_alloc_permit``."""
        return replace(self, relinquished=True)

    def require(self, first: int, columns: int) -> None:
        """Raise SimMemoryError unless columns ``first`` to ``first + columns - 1`` are allocated."""
        held = {c for start, count in self.blocks for c in range(start, start + count)}
        if not held.issuperset(range(first, first + columns)):
            raise SimMemoryError(f"tensor memory columns {first}..{first + columns - 1}: allocated are {self.blocks}")


def cells(shape: str, num: int, address: int, warp: int, *, half_split: int = 0, packed: bool = False) -> Array:
    """Cells of ``tcgen05.ld/st.<shape>.x<num>``: int64 ``[2, 32, registers, 1 or 2]`` of lanes and columns.

    ``warp`` is the warp's number in its CTA: it reaches the lanes from ``32 * (warp % 4)`` only. With ``packed``
    (.pack::16b, .unpack::16b) the last axis holds the columns of a register's low and high half. ``half_split`` is the
    immediate of 16x32bx2, in columns.
    """
    if shape not in _SHAPES or num not in (1, 2, 4, 8, 16, 32, 64, 128) or num > _SHAPES[shape][1]:
        raise SimError(f"tcgen05.ld/st.{shape}.x{num} is not a PTX form")
    lane, word = _pattern(shape, _SHAPES[shape][0] * num)
    first_lane, first_column = address >> 16, address & 0xFFFF
    allowed = (0,) if shape == "32x32b" else (0, 16)
    if first_lane - 32 * (warp % 4) not in allowed:
        raise SimMemoryError(
            f"tcgen05.ld/st.{shape} at lane {first_lane}: warp {warp} reaches lanes {32 * (warp % 4)}.."
        )
    step = 2 if packed else 1
    column = first_column + step * word[..., None] + np.arange(step)
    if shape == "16x32bx2":
        column = column + np.where(_THREAD < 16, 0, half_split)[:, None, None]
    if column.max() >= COLUMNS:
        raise SimMemoryError(f"tcgen05.ld/st.{shape}.x{num} reaches column {column.max()} of {COLUMNS}")
    lanes = np.broadcast_to((first_lane + lane)[..., None], column.shape)
    return np.stack((lanes, column))


def _pattern(shape: str, registers: int) -> tuple[Array, Array]:
    """Lane and word column relative to the address, ``[32, registers]``, of each thread's registers."""
    t, r = _THREAD[:, None], np.arange(registers)[None, :]
    match shape:
        case "32x32b":
            pattern = t, r
        case "16x32bx2":
            pattern = t % 16, r
        case "16x64b":
            pattern = t // 4 + 8 * (t & 1), 2 * r + (t >> 1 & 1)
        case "16x128b":
            pattern = t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4
        case _:
            pattern = t // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2
    lane, word = np.broadcast_arrays(*pattern)
    return lane, word


def load(tmem: Array, at: Array) -> Array:
    """Registers uint32 ``[32, registers]`` from the ``cells`` of a ``tcgen05.ld``."""
    values = tmem[at[0], at[1]]
    if values.shape[-1] == 1:
        return np.asarray(values[..., 0])
    return np.asarray(values[..., 0] & np.uint32(0xFFFF) | values[..., 1] << np.uint32(16))


def store(tmem: Array, at: Array, registers: Array) -> None:
    """Write ``registers`` ``[32, registers]`` to the ``cells`` of a ``tcgen05.st``, zero-extending unpacked halves."""
    if at.shape[-1] == 1:
        tmem[at[0], at[1]] = registers[..., None]
    else:
        tmem[at[0], at[1]] = np.stack((registers & np.uint32(0xFFFF), registers >> np.uint32(16)), -1)


def copy(tmem: Array, address: int, descriptor: int, shared: NDArray[np.uint8], shape: str) -> None:
    """``tcgen05.cp.<shape>`` of one CTA: rows of 16 or 32 bytes from ``shared``, one row per lane.

    The machine calls it for both CTAs of a pair with cta_group::2, each with its own memories. ``copy_extent`` has the
    columns it fills.
    """
    rows, columns = copy_extent(shape)
    first = address & 0xFFFF
    if address >> 16 and shape != "4x256b":
        raise SimMemoryError(f"tcgen05.cp.{shape} at lane {address >> 16}: it starts at lane 0")
    if first + columns > COLUMNS:
        raise SimMemoryError(f"tcgen05.cp.{shape} reaches column {first + columns - 1} of {COLUMNS}")
    words = MatrixDescriptor.of_tcgen05(descriptor).read(shared, rows, 4 * columns, element_bytes=4)
    for lanes, part in _copies(shape, address >> 16, words):
        tmem[lanes, first : first + columns] = part


def copy_extent(shape: str) -> tuple[int, int]:
    """Rows read from shared memory and tensor-memory columns filled by ``tcgen05.cp.<shape>``."""
    if shape not in _CP_SHAPES:
        raise SimError(f"tcgen05.cp.{shape} is not modelled")
    rows, row_bytes = _CP_SHAPES[shape]
    return rows, row_bytes // 4


def _copies(shape: str, lane: int, words: Array) -> list[tuple[Array, Array]]:
    """The lanes that receive each part of the rows."""
    low, high = np.arange(32), np.arange(32, 64)
    match shape:
        case "32x128b.warpx4":
            return [(low + 32 * q, words) for q in range(4)]
        case "64x128b.warpx2::02_13":
            return [(np.arange(64) + 64 * half, words) for half in range(2)]
        case "64x128b.warpx2::01_23":
            return [(low + 64 * half + 32 * q, words[(low, high)[half]]) for half in range(2) for q in range(2)]
        case "4x256b":
            return [(lane + 32 * np.arange(4), words)]
        case _:
            return [(np.arange(128), words)]
