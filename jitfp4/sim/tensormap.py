"""TMA tensor maps in tile mode: what ``cp.async.bulk.tensor`` moves and where it lands.

A machine resolves the address of a kernel parameter to a ``TensorMap``, then
  load:    ``shared[tensor_map.shared_addresses(dst)] = tensor_map.load(coords)``; ``box_bytes`` go to the mbarrier
  store:   ``tensor_map.store(coords, shared[tensor_map.shared_addresses(src)])``
  reduce:  ``tensor_map.reduce("add", coords, shared[tensor_map.shared_addresses(src)])``
``shared`` is one CTA's uint8 array and addresses are offsets in it; a multicast repeats the first line per CTA.
Dimension 0 is the contiguous one everywhere, as in ``cuTensorMapEncodeTiled`` and in the instruction's coordinates.

Where the manual is silent, this is what an H200 does: rows of a box begin at 16 bytes of memory and, under a swizzle,
lie a span apart; NaN fill is 0x7FF7 in every 16 bits; stores and reductions take no negative coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim import formats
from jitfp4.sim.swizzle import Swizzle, swizzled

Bytes = NDArray[np.uint8]
TENSOR_MAP_BYTES = 128
_MARK = b"tensor map of "


class ElementType(StrEnum):
    """Element types of a tensor map, named after CUtensorMapDataType."""

    U8 = "uint8"
    U16 = "uint16"
    U32 = "uint32"
    S32 = "int32"
    U64 = "uint64"
    S64 = "int64"
    F16 = "float16"
    F32 = "float32"
    F64 = "float64"
    BF16 = "bfloat16"
    U4_ALIGN8B = "16u4_align8b"
    U4_ALIGN16B = "16u4_align16b"
    U6_ALIGN16B = "16u6_align16b"

    @property
    def bits(self) -> int:
        """Size of one element in global memory."""
        sub_byte = {ElementType.U4_ALIGN8B: 4, ElementType.U4_ALIGN16B: 4, ElementType.U6_ALIGN16B: 6}
        return sub_byte[self] if self in sub_byte else self.storage.itemsize * 8

    @property
    def storage(self) -> np.dtype[Any]:
        """NumPy dtype of one stored element; bytes for the packed ones."""
        if self is ElementType.BF16:
            return np.dtype(np.uint16)
        return np.dtype(np.uint8 if self.value.startswith("16u") else self.value)

    @property
    def nan(self) -> bytes | None:
        """Bytes that the NaN fill writes per element; None for the integer types, which have no such fill."""
        floats = (ElementType.F16, ElementType.BF16, ElementType.F32, ElementType.F64)
        return b"\xf7\x7f" * (self.storage.itemsize // 2) if self in floats else None


# Packed 16-element groups that TMA pads to 16 bytes in shared memory: bytes of a group in global memory.
_PADDED_GROUP = {ElementType.U4_ALIGN16B: 8, ElementType.U6_ALIGN16B: 12}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorMap:
    """A tiled tensor map over ``base``.

    ``base`` is the tensor's storage as a one-dimensional uint8 array whose first byte is the map's global address;
    stores write through it. ``dims``, ``box`` and ``element_strides`` are in elements, dimension 0 first; ``strides``
    are the bytes between neighbours along dimensions 1 and up, one fewer than ``dims``. Raises SimError where
    ``cuTensorMapEncodeTiled`` would refuse, SimMemoryError where the tensor does not fit in ``base``.
    """

    base: Bytes
    dtype: ElementType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: Swizzle = Swizzle.NONE
    nan_fill: bool = False

    def __post_init__(self) -> None:
        rank = len(self.dims)
        _require(1 <= rank <= 5, f"rank {rank} is not in 1..5")
        _require(len(self.box) == rank and len(self.strides) == rank - 1, "box and strides do not fit the rank")
        _require(len(self.element_strides) in (0, rank), "element strides do not fit the rank")
        _require(all(1 <= b <= 256 for b in self.box), f"box {self.box} is not in 1..256 per dimension")
        _require(all(1 <= s <= 8 for s in self.element_strides), f"element strides {self.element_strides} not in 1..8")
        _require(all(0 < d <= 1 << 32 for d in self.dims), f"dims {self.dims} are not in 1..2**32")
        _require(all(0 <= s < 1 << 40 and s % 16 == 0 for s in self.strides), f"strides {self.strides} % 16 != 0")
        _require(self.box_shape[0] * self.dtype.bits % 128 == 0, f"box rows of {self.box[0]} are not whole 16 bytes")
        spans_row = self.swizzle is Swizzle.NONE or self.row_bytes <= self.swizzle.span
        _require(spans_row, f"box rows of {self.row_bytes} bytes exceed the span of swizzle {self.swizzle.name}")
        _require(not self.nan_fill or self.dtype.nan is not None, f"NaN fill of {self.dtype}")
        if self.dtype in _PADDED_GROUP:
            _require(
                self.dims[0] % 128 == 0 and self.box[0] == 128, f"{self.dtype}: dims[0] % 128 != 0 or box[0] != 128"
            )
        last = sum((d - 1) * s for d, s in zip(self.dims[1:], self.strides, strict=True))
        if last + self.dims[0] * self.dtype.bits // 8 > self.base.nbytes:
            raise SimMemoryError(f"tensor map: dims {self.dims}, strides {self.strides} leave {self.base.nbytes} bytes")

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Elements of the box along each dimension after element strides; dimension 0 takes no stride."""
        steps = (1, *self.element_strides[1:]) if self.element_strides else (1,) * len(self.box)
        return tuple(-(-b // s) for b, s in zip(self.box, steps, strict=True))

    @property
    def row_bytes(self) -> int:
        """Shared-memory bytes of one row of the box."""
        stored = self.box_shape[0] * self.dtype.bits // 8
        return stored // _PADDED_GROUP[self.dtype] * 16 if self.dtype in _PADDED_GROUP else stored

    @property
    def box_bytes(self) -> int:
        """Shared-memory bytes of one box: what an mbarrier counts, also for a box that is partly out of bounds."""
        return self.row_bytes * prod(self.box_shape[1:])

    @property
    def shared_bytes(self) -> int:
        """Shared memory from the first row of a box to the end of the last: under a swizzle each takes a whole span."""
        return self._row_pitch * prod(self.box_shape[1:])

    @property
    def _row_pitch(self) -> int:
        return self.row_bytes if self.swizzle is Swizzle.NONE else self.swizzle.span

    def shared_addresses(self, address: int) -> NDArray[np.int64]:
        """Address of each byte of a box at shared ``address``, in box order: ``[box_bytes]``."""
        if address % 128:
            raise SimMemoryError(f"tensor copy at shared address {address:#x}: not a multiple of 128")
        rows = np.arange(address, address + self.shared_bytes, self._row_pitch, dtype=np.int64)
        return swizzled(np.add.outer(rows, np.arange(self.row_bytes)).reshape(-1), self.swizzle)

    def load(self, coords: tuple[int, ...]) -> Bytes:
        """The box at element ``coords``, ``[box_bytes]``, rows in order, filled where it leaves the tensor."""
        offsets, inside = self._row_bytes(coords)
        rows = np.where(inside, self.base[np.where(inside, offsets, 0)], self._fill(offsets.shape[1]))
        if group := _PADDED_GROUP.get(self.dtype):
            rows = np.pad(rows.reshape(-1, group), ((0, 0), (0, 16 - group)))
        return rows.reshape(-1)

    def touched(self, coords: tuple[int, ...]) -> NDArray[np.int64]:
        """Offsets in ``base`` of the bytes of the box at element ``coords`` that lie in the tensor."""
        offsets, inside = self._row_bytes(coords)
        return np.asarray(offsets[inside])

    def store(self, coords: tuple[int, ...], data: Bytes) -> None:
        """Write box bytes ``data`` at element ``coords``; what lies outside the tensor is dropped."""
        offsets, inside = self._target(coords)
        self.base[offsets[inside]] = self._rows(data, offsets.shape)[inside]

    def reduce(self, op: str, coords: tuple[int, ...], data: Bytes) -> None:
        """Combine box bytes ``data`` into the tensor: add, min, max, inc, dec, and, or, xor of the element type."""
        offsets, inside = self._target(coords)
        size = self.dtype.storage.itemsize
        _require(self.dtype.bits >= 8 and self.dtype is not ElementType.U8, f"reduction of {self.dtype}")
        where = offsets[inside].reshape(-1, size)
        old = self.base[where].view(self.dtype.storage)
        new = np.ascontiguousarray(self._rows(data, offsets.shape)[inside]).view(self.dtype.storage)
        self.base[where] = _combine(op, old[:, 0], new, self.dtype)[:, None].view(np.uint8)

    def _rows(self, data: Bytes, shape: tuple[int, ...]) -> Bytes:
        _require(self.dtype not in _PADDED_GROUP, f"store of {self.dtype}: the type is for loads only")
        _require(data.size == self.box_bytes, f"{data.size} bytes for a box of {self.box_bytes}")
        return data.reshape(shape)

    def _fill(self, row_bytes: int) -> Bytes:
        pattern = self.dtype.nan if self.nan_fill else None
        return np.resize(np.frombuffer(pattern or b"\0", np.uint8), row_bytes)

    def _target(self, coords: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        _require(min(coords) >= 0, f"store at {coords}: below zero a GPU only loads")
        return self._row_bytes(coords)

    def _row_bytes(self, coords: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Global byte offsets of the box, ``[rows, bytes per row]``, and which of them lie inside the tensor."""
        _require(len(coords) == len(self.dims), f"{len(coords)} coordinates for a tensor of rank {len(self.dims)}")
        bits = self.dtype.bits
        whole = 8 if self.dtype.value.startswith("16u") else 128  # bits
        _require(coords[0] * bits % whole == 0, f"coordinate {coords[0]} of {self.dtype} is not at {whole // 8} bytes")
        first = coords[0] * bits // 8 + np.arange(self.box_shape[0] * bits // 8, dtype=np.int64)
        offsets, inside = first, (first >= 0) & (first < self.dims[0] * bits // 8)
        steps = self.element_strides or (1,) * len(self.dims)
        for axis in range(1, len(self.dims)):
            at = coords[axis] + steps[axis] * np.arange(self.box_shape[axis], dtype=np.int64)
            reachable = (at >= 0) & (at < self.dims[axis])
            offsets = np.add.outer(at * self.strides[axis - 1], offsets)
            inside = np.logical_and.outer(reachable, inside)
        return offsets.reshape(-1, first.size), inside.reshape(-1, first.size)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise SimError(f"tensor map: {message}")


def _combine(op: str, old: NDArray[Any], new: NDArray[Any], dtype: ElementType) -> NDArray[Any]:
    """``old op new`` in the element type; floating-point addition rounds to nearest even."""
    floating = {
        ElementType.F16: (formats.f16_to_f32, formats.f32_to_f16),
        ElementType.BF16: (formats.bf16_to_f32, formats.f32_to_bf16),
    }
    if op in ("add", "min", "max"):
        function = {"add": np.add, "min": np.fmin, "max": np.fmax}[op]
        if dtype is ElementType.F32:  # a NaN is the canonical one, as of other f32 arithmetic
            result = function(old, new)
            return np.where(np.isnan(result), np.uint32(0x7FFFFFFF).view(np.float32), result)
        if dtype not in floating:
            return np.asarray(function(old, new))
        widen, narrow = floating[dtype]
        return narrow(function(widen(old.view(np.uint16)), widen(new.view(np.uint16)))).view(old.dtype)
    _require(old.dtype.kind in "ui", f"reduction .{op} of {dtype}")
    if op in ("and", "or", "xor"):
        return np.asarray({"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, new))
    _require(op in ("inc", "dec") and dtype is ElementType.U32, f"reduction .{op} of {dtype}")
    if op == "inc":
        return np.where(old >= new, np.uint32(0), old + np.uint32(1))
    return np.where((old == 0) | (old > new), new, old - np.uint32(1))


def tensor_map_bytes(address: int) -> Bytes:
    """What stands for the map at this parameter address, so that a copy of it in memory is known again."""
    return np.frombuffer((_MARK + address.to_bytes(8, "little")).ljust(TENSOR_MAP_BYTES, b"\0"), np.uint8)


def tensor_map_in(data: Bytes) -> int:
    """The parameter address of the map of which memory holds a copy; -1 where it holds none."""
    address = int.from_bytes(data[len(_MARK) : len(_MARK) + 8].tobytes(), "little")
    return address if (data[:TENSOR_MAP_BYTES] == tensor_map_bytes(address)).all() else -1
