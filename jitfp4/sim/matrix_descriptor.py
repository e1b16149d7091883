"""Shared-memory matrix descriptors of wgmma and tcgen05, and the operand bytes that they name.

An operand is ``[rows, k]`` elements, rows along M or N. A descriptor gives a start address, two strides and a swizzle:
  K-major:   16 bytes along k are contiguous. Eight rows follow each other at the swizzle span (16 bytes without one);
             the next eight rows are SBO away. Without swizzle the next 16 bytes of k are LBO away.
  MN-major:  one span along the rows is contiguous, eight k follow each other at the span. With a swizzle the next span
             of rows is LBO away and the next eight k SBO; without, LBO and SBO change places.
Swizzling acts on the absolute address, as TMA wrote it. ``addresses`` names every byte, so that a machine can check
them before ``read`` takes them from a CTA's shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.swizzle import Swizzle, swizzled

Array = NDArray[Any]

_WGMMA_SWIZZLE = {0: Swizzle.NONE, 1: Swizzle.B128, 2: Swizzle.B64, 3: Swizzle.B32}
_TCGEN05_SWIZZLE = {0: Swizzle.NONE, 2: Swizzle.B128, 4: Swizzle.B64, 6: Swizzle.B32}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixDescriptor:
    """Decoded fields, in bytes. ``lbo_is_address`` is sm_103a's mode: past the span, k goes on at address ``lbo``."""

    start: int
    lbo: int
    sbo: int
    swizzle: Swizzle
    lbo_is_address: bool = False

    @staticmethod
    def of_wgmma(bits: int) -> MatrixDescriptor:
        """Decode the 64-bit descriptor of sm_90a."""
        if base_offset := bits >> 49 & 7:
            raise SimError(f"wgmma descriptor {bits:#018x}: base offset {base_offset} is not modelled")
        return _decoded(bits, _WGMMA_SWIZZLE[bits >> 62])

    @staticmethod
    def of_tcgen05(bits: int) -> MatrixDescriptor:
        """Decode the 64-bit descriptor of the sm_100 family, whose bits 46-48 are the constant 1."""
        if bits >> 46 & 7 != 1 or bits >> 53 & 0xFF:
            raise SimError(f"tcgen05 descriptor {bits:#018x}: bits 46-48 must be 0b001 and bits 53-60 zero")
        if base_offset := bits >> 49 & 7:
            raise SimError(f"tcgen05 descriptor {bits:#018x}: base offset {base_offset} is not modelled")
        if (layout := bits >> 61) not in _TCGEN05_SWIZZLE:
            raise SimError(f"tcgen05 descriptor {bits:#018x}: layout type {layout} is not modelled")
        return _decoded(bits, _TCGEN05_SWIZZLE[layout], lbo_is_address=bool(bits >> 52 & 1))

    def addresses(self, rows: int, k_bytes: int, *, element_bytes: int = 1, mn_major: bool = False) -> Array:
        """Physical shared address of each byte: int64 ``[rows, k_bytes]``, k in order.

        ``k_bytes`` counts the bytes of k in one row of the operand; ``element_bytes`` matters for MN-major operands.
        """
        return _addresses(self, rows, k_bytes, element_bytes, mn_major)

    def read(
        self, shared: NDArray[np.uint8], rows: int, k_bytes: int, *, element_bytes: int = 1, mn_major: bool = False
    ) -> Array:
        """Little-endian element codes ``[rows, k_bytes / element_bytes]`` (uint8, uint16 or uint32) of ``shared``."""
        at = self.addresses(rows, k_bytes, element_bytes=element_bytes, mn_major=mn_major)
        if at.min() < 0 or at.max() >= shared.size:
            raise SimMemoryError(f"matrix descriptor reads {at.max():#x} of {shared.size:#x} bytes of shared memory")
        return np.asarray(np.ascontiguousarray(shared[at]).view(f"<u{element_bytes}"))

    def _k_major(self, row: Array, byte: Array) -> Array:
        group, within = row // 8 * self.sbo, row % 8
        if self.swizzle is Swizzle.NONE:
            return np.asarray(self.start + group + within * 16 + byte // 16 * self.lbo + byte % 16)
        span = self.swizzle.span
        over = self.start % span + byte - span
        logical = np.asarray(self.start + group + within * span + byte)
        if (over < 0).all():
            return logical
        if not self.lbo_is_address:
            raise SimError(f"matrix descriptor: k runs over the {span}-byte row from address {self.start:#x}")
        return np.where(over < 0, logical, self.lbo + group + within * span + over)

    def _mn_major(self, row: Array, byte: Array, element_bytes: int) -> Array:
        k, part = byte // element_bytes, byte % element_bytes
        span = self.swizzle.span
        along = row * element_bytes + part
        next_span, next_eight = (self.sbo, self.lbo) if self.swizzle is Swizzle.NONE else (self.lbo, self.sbo)
        inside = along % span + k % 8 * span
        return np.asarray(self.start + along // span * next_span + k // 8 * next_eight + inside)


@lru_cache(maxsize=256)
def _addresses(descriptor: MatrixDescriptor, rows: int, k_bytes: int, element_bytes: int, mn_major: bool) -> Array:
    """Kept because a loop over k comes back to the same stages, and an instruction looks twice. Not to be written."""
    row = np.arange(rows, dtype=np.int64)[:, None]
    byte = np.arange(k_bytes, dtype=np.int64)[None, :]
    logical = descriptor._mn_major(row, byte, element_bytes) if mn_major else descriptor._k_major(row, byte)
    out = swizzled(logical, descriptor.swizzle)
    out.flags.writeable = False
    return out


def _decoded(bits: int, swizzle: Swizzle, *, lbo_is_address: bool = False) -> MatrixDescriptor:
    field = [(bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32)]
    return MatrixDescriptor(start=field[0], lbo=field[1], sbo=field[2], swizzle=swizzle, lbo_is_address=lbo_is_address)
