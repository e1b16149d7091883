"""Shared-memory swizzles of TMA and of the matrix descriptors.

A swizzle exchanges address bits: chunks of 16, 32 or 64 bytes inside a span of 32, 64 or 128 bytes are XORed with the
number of the row that the address lies in. It acts on absolute shared addresses, so a tile that does not start on its
pattern's boundary is permuted by where it lies. The same function reads and writes: it is its own inverse.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Swizzle(IntEnum):
    """Modes, under the values of CUtensorMapSwizzle."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6

    @property
    def span(self) -> int:
        """Bytes of a row that chunks move within; 16 without swizzle, where a chunk stays."""
        return {Swizzle.NONE: 16, Swizzle.B32: 32, Swizzle.B64: 64}.get(self, 128)

    @property
    def pattern(self) -> int:
        """Bytes after which the permutation repeats."""
        patterns = {
            Swizzle.NONE: 16,
            Swizzle.B32: 256,
            Swizzle.B64: 512,
            Swizzle.B128: 1024,
            Swizzle.B128_ATOM_64B: 256,
        }
        return patterns.get(self, 512)


_CHUNK_BITS = {
    # mode: (mask of the chunk number in the address, distance of the row number above it)
    Swizzle.NONE: (0x00, 3),
    Swizzle.B32: (0x10, 3),
    Swizzle.B64: (0x30, 3),
    Swizzle.B128: (0x70, 3),
    Swizzle.B128_ATOM_32B: (0x60, 2),
    Swizzle.B128_ATOM_32B_FLIP_8B: (0x60, 2),
    Swizzle.B128_ATOM_64B: (0x40, 1),
}


def swizzled(address: NDArray[Any], mode: Swizzle) -> NDArray[Any]:
    """Physical shared addresses of logical ``address`` (integers, any shape).

    The modes with 16-byte atoms are what wgmma and tcgen05 kernels use; the wider atoms follow their description in
    the driver API, where FLIP_8B also exchanges the halves of each 16 bytes in every other 128-byte row.
    """
    mask, distance = _CHUNK_BITS[mode]
    physical = address ^ ((address >> distance) & mask)
    if mode is Swizzle.B128_ATOM_32B_FLIP_8B:
        physical = physical ^ ((address >> 4) & 0x08)
    return np.asarray(physical)
