"""Address spaces: who owns which bytes, and every check of an access.

Addresses
- global: every buffer has its own window of 2**36 bytes, so an access that leaves a buffer never meets another one.
  Generic and global addresses are equal.
- shared: byte offset in the CTA from SHARED_START, with the CTA's rank in its cluster in bits 24 and up. A CTA's own
  addresses carry its own rank, so ``.shared`` and ``.shared::cluster`` addresses are the same numbers, as on the GPU.
- local, param, const: small offsets. In generic form each of these spaces and shared has its own window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from jitfp4.errors import SimMemoryError
from jitfp4.sim.flags import WEAK, Access
from jitfp4.sim.ptx import RAW_DTYPES, Array

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine

SLOT_BITS = 36
SHARED_START = 1024
"""The first kilobyte of shared memory belongs to the system from sm_80 on."""
RANK_BITS = 24
PARAM_START = 0x210
WINDOWS = {"shared": 0x7E0000000000, "local": 0x7D0000000000, "param": 0x7C0000000000, "const": 0x7B0000000000}
WINDOW_BITS = 40

UNWRITTEN, WRITTEN, MBARRIER, IN_FLIGHT = range(4)
_STATE_TEXT = {
    UNWRITTEN: "which nothing wrote",
    MBARRIER: "which holds an mbarrier",
    IN_FLIGHT: "which an asynchronous copy is still writing",
}
POISON = 0xCD


class Region:
    """A byte array and its typed views. ``phase`` is the address of byte 0 modulo 256."""

    __slots__ = ("_views", "base", "data", "name", "phase")

    def __init__(self, name: str, data: Array, base: int = 0) -> None:
        self.name, self.data, self.base, self.phase = name, data, base, base % 256
        self._views: dict[int, Array] = {}

    def elements(self, offset: Array, size: int) -> tuple[Array, Array]:
        """The array of ``size``-byte elements, and the index in it of each byte offset of an aligned access."""
        skip = -self.phase % size
        view = self._views.get(size)
        if view is None:
            whole = (len(self.data) - skip) // size * size
            view = self._views[size] = self.data[skip : skip + whole].view(RAW_DTYPES[8 * size])
        return view, (offset - skip) // size if size > 1 else offset


@dataclass(slots=True)
class Part:
    """The share of an access that falls into one region. ``pick`` selects its lanes; None is all of them."""

    region: Region
    pick: Array | None
    offset: Array
    space: str

    def of(self, values: Array) -> Array:
        return values if self.pick is None else values[self.pick]


class GlobalMemory:
    """Buffers of one launch, shared by all its CTAs."""

    def __init__(self) -> None:
        self.slots: dict[int, Region] = {}

    def add(self, name: str, data: Array, phase: int = 0) -> int:
        """Give ``data`` (uint8, mutated in place) an address. Returns it."""
        slot = len(self.slots) + 1
        base = (slot << SLOT_BITS) + phase % 256
        self.slots[slot] = Region(name, data, base)
        return base


class Memory:
    """All memory that one batch of CTAs sees, and its access checks."""

    def __init__(self, machine: Machine, globals_: GlobalMemory, params: Array, const: Array) -> None:
        self.machine, self.globals = machine, globals_
        program, launch = machine.program, machine.launch
        self.shared_end = SHARED_START + program.shared_static + launch.geometry.shared_bytes
        if program.shared_dynamic is not None:
            self.shared_end = program.shared_dynamic + launch.geometry.shared_bytes
        self.shared_stride = -(-self.shared_end // 256) * 256
        self.shared = Region("shared", np.full(machine.ctas * self.shared_stride, POISON, np.uint8))
        self.state = Region("state", np.zeros(machine.ctas * self.shared_stride, np.uint8))
        self.local_stride = -(-program.local_bytes // 256) * 256
        self.local = Region("local", np.full(machine.total * self.local_stride, POISON, np.uint8))
        self.params = Region("param", params, PARAM_START)
        self.const = Region("const", const)

    # Address resolution

    def locate(self, space: str, lanes: Array, address: Array, size: int) -> list[Part]:
        """Where each lane's access of ``size`` bytes lands, after alignment and bounds checks.

        ``lanes`` holds thread numbers, ``address`` one address of the space for each.
        """
        address = address.astype(np.int64)
        if size > 1:
            bad = address & (size - 1)
            if bad.any():
                self.fault(lanes, bad != 0, address, f"{space} access of {size} bytes is not aligned")
        if space == "generic":
            return self._generic(lanes, address, size)
        if space == "global":
            return self._global(lanes, address, size)
        if space.startswith("shared"):
            return [self._shared(space, lanes, address, size)]
        if space == "local":
            self.bound(lanes, address, 0, self.machine.program.local_bytes, size, "local")
            return [Part(self.local, None, lanes * self.local_stride + address, "local")]
        region = self.params if space == "param" else self.const
        offset = address - region.base
        self.bound(lanes, offset, 0, len(region.data), size, space)
        return [Part(region, None, offset, space)]

    def _global(self, lanes: Array, address: Array, size: int) -> list[Part]:
        slots = address >> SLOT_BITS
        if slots[0] == slots[-1] and (slots == slots[0]).all():
            return [self._buffer(int(slots[0]), lanes, None, address, size)]
        picks = [(int(slot), np.flatnonzero(slots == slot)) for slot in np.unique(slots)]
        return [self._buffer(slot, lanes[pick], pick, address[pick], size) for slot, pick in picks]

    def _buffer(self, slot: int, lanes: Array, pick: Array | None, address: Array, size: int) -> Part:
        region = self.globals.slots.get(slot)
        if region is None:
            self.fault(lanes, np.ones(len(lanes), bool), address, f"global access of {size} bytes is in no buffer")
        offset = address - region.base
        self.bound(lanes, offset, 0, len(region.data), size, f"global buffer {region.name}")
        return Part(region, pick, offset, "global")

    def in_a_buffer(self, address: int) -> bool:
        """Whether a global address is that of an argument or a module variable."""
        return address >> SLOT_BITS in self.globals.slots

    def _shared(self, space: str, lanes: Array, address: Array, size: int) -> Part:
        machine = self.machine
        own, cta, rank = machine.rank[lanes], machine.cta[lanes], address >> RANK_BITS
        if space == "shared::cluster":
            outside = (rank < 0) | (rank >= machine.cluster_size)
            if outside.any():
                self.fault(lanes, outside, address, "shared::cluster address names no CTA of the cluster")
            cta = cta - own + rank
            gone = machine.live_in_cta[cta] == 0
            if gone.any():
                self.fault(lanes, gone, address, "shared::cluster access to a CTA that has exited")
        elif (rank != own).any():
            self.fault(lanes, rank != own, address, "shared::cta access to an address outside the CTA's own window")
        offset = address & ((1 << RANK_BITS) - 1)
        self.bound(lanes, offset, SHARED_START, self.shared_end, size, "shared")
        return Part(self.shared, None, cta * self.shared_stride + offset, "shared")

    def _generic(self, lanes: Array, address: Array, size: int) -> list[Part]:
        window = address >> WINDOW_BITS
        parts: list[Part] = []
        for key in np.unique(window):
            pick = np.flatnonzero(window == key)
            space = next((name for name, base in WINDOWS.items() if base >> WINDOW_BITS == key), "global")
            inner = address[pick] - WINDOWS.get(space, 0)
            for part in self.locate("shared::cluster" if space == "shared" else space, lanes[pick], inner, size):
                part.pick = pick if part.pick is None else pick[part.pick]
                parts.append(part)
        return parts

    def bound(self, lanes: Array, offset: Array, low: int, high: int, size: int, what: str) -> None:
        if offset.min() < low or offset.max() + size > high:
            bad = (offset < low) | (offset + size > high)
            self.fault(lanes, bad, offset, f"{what} access of {size} bytes is outside [{low}, {high})")

    def bound_shared(self, lanes: Array, offset: Array, size: int, what: str) -> None:
        """The same for flat shared offsets, such as the start of a long copy."""
        self.bound(lanes, offset % self.shared_stride, SHARED_START, self.shared_end, size, what)

    def fault(self, lanes: Array, bad: Array, address: Array, message: str) -> NoReturn:
        """Raise SimMemoryError for the lanes in ``bad``."""
        at = int(np.flatnonzero(bad)[0])
        raise self.machine.error(SimMemoryError, f"{message}: at {int(address[at]):#x}", lanes[bad])

    # Access

    def load(
        self, space: str, lanes: Array, address: Array, size: int, count: int = 1, access: Access = WEAK
    ) -> list[Array]:
        """``count`` neighbouring elements of ``size`` bytes for each lane, as raw bits."""
        out: list[Array] = []
        parts = self.locate(space, lanes, address, size * count)
        for part in parts:
            self.check_read(part, lanes, size * count, access)
            view, index = part.region.elements(part.offset, size)
            if part.pick is None:
                return [view[index + j] if j else view[index] for j in range(count)]
            out = out or [np.empty(len(lanes), view.dtype) for _ in range(count)]
            for j in range(count):
                out[j][part.pick] = view[index + j]
        return out

    def store(self, space: str, lanes: Array, address: Array, values: list[Array], access: Access = WEAK) -> None:
        """Write neighbouring elements; ``values`` are arrays of raw bits or scalars, all of one width."""
        size = values[0].dtype.itemsize
        for part in self.locate(space, lanes, address, size * len(values)):
            self.check_write(part, lanes, size * len(values), access)
            view, index = part.region.elements(part.offset, size)
            for j, value in enumerate(values):
                view[index + j if j else index] = value if value.ndim == 0 else part.of(value)

    def check_read(self, part: Part, lanes: Array, size: int, access: Access = WEAK) -> None:
        """Shared bytes must have been written; races are looked for when asked."""
        if part.space == "shared":
            self.require_state(part, lanes, size, WRITTEN, "read")
        elif part.space != "global":
            return
        races = self.machine.races
        if races is not None:
            races.read(part, part.of(lanes), size, access.how)
            races.flags.reading(part, part.of(lanes), access)

    def check_write(self, part: Part, lanes: Array, size: int, access: Access = WEAK) -> None:
        """Shared bytes become written, unless an mbarrier or a copy in flight owns them."""
        if part.space in ("const", "param"):
            raise self.machine.error(SimMemoryError, f"store to {part.space} memory", part.of(lanes))
        if part.space == "shared":
            for view, index in self.state_elements(part.offset, size):
                state = view[index]
                if (state > int.from_bytes(bytes([WRITTEN] * view.itemsize), "little")).any():
                    self._forbid_owned(part, lanes, size)
                view[index] = int.from_bytes(bytes([WRITTEN] * view.itemsize), "little")
        elif part.space != "global":
            return
        races = self.machine.races
        if races is not None:
            races.write(part, part.of(lanes), size, access.how)
            races.flags.written(part, part.of(lanes), access, atomic=False)

    def require_state(self, part: Part, lanes: Array, size: int, wanted: int, verb: str) -> None:
        for view, index in self.state_elements(part.offset, size):
            pattern = int.from_bytes(bytes([wanted] * view.itemsize), "little")
            bad: Array = view[index] != pattern
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                states = self.state.data[int(part.offset[at]) : int(part.offset[at]) + size]
                text = _STATE_TEXT.get(int(states[states != wanted][0]), "which is ordinary memory")
                text = f"{verb} of shared memory {text}"
                self.fault(part.of(lanes), bad, part.offset % self.shared_stride, text)

    def _forbid_owned(self, part: Part, lanes: Array, size: int) -> None:
        states = self.state.data[part.offset[:, None] + np.arange(size)]
        bad = np.asarray((states >= MBARRIER).any(axis=1))
        if bad.any():
            text = _STATE_TEXT[int(states[bad].max())]
            self.fault(part.of(lanes), bad, part.offset % self.shared_stride, f"store to shared memory {text}")

    def state_elements(self, offset: Array, size: int) -> Iterator[tuple[Array, Array]]:
        """State bytes of accesses of ``size`` bytes, in the widest whole pieces."""
        piece = min(size, 8)
        for start in range(0, size, piece):
            yield self.state.elements(offset + start if start else offset, piece)

    def mark(self, start: int, size: int, state: int) -> None:
        """Set the state of a flat range of shared memory."""
        self.state.data[start : start + size] = state

    def check_operand(self, cta: int, addresses: Array, thread: int) -> None:
        """Shared bytes that a matrix descriptor names must have been written when the instruction is issued."""
        fault = self.machine.error
        if addresses.min() < SHARED_START or addresses.max() >= self.shared_end:
            raise fault(SimMemoryError, "a matrix descriptor leaves shared memory", np.array([thread]))
        state = self.state.data[cta * self.shared_stride + addresses]
        if (state != WRITTEN).any():
            at = int(addresses.reshape(-1)[np.flatnonzero(state.reshape(-1) != WRITTEN)[0]])
            text = f"an operand in shared memory at {at:#x} was not written or is still being copied"
            raise fault(SimMemoryError, text, np.array([thread]))

    def of_cta(self, cta: int) -> Array:
        """The shared memory of one CTA, indexed by address."""
        return self.shared.data[cta * self.shared_stride : (cta + 1) * self.shared_stride]

    def copy_local(self, lanes: Array, source: int, target: int, size: int) -> None:
        """Copy a variable to another one within the local memory of each lane."""
        cells = self.local.data.reshape(-1, self.local_stride)
        cells[lanes, target : target + size] = cells[lanes, source : source + size]
