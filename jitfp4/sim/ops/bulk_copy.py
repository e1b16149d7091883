"""cp.async.bulk, cp.async.bulk.tensor, their reductions and groups, and the stores that signal an mbarrier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from jitfp4.errors import SimMemoryError
from jitfp4.sim.async_copies import BulkCopies, Delivery, Merge, Signal, initialised, plan, span
from jitfp4.sim.decode import Decode, Source, Step, broadcast, step
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import Machine
from jitfp4.sim.mbarriers import MBarriers
from jitfp4.sim.ops.atomics import combine
from jitfp4.sim.ops.memory import policy
from jitfp4.sim.ptx import TYPES, Addr, Array, Imm, Operand

U16, U32, S32 = TYPES["u16"], TYPES["u32"], TYPES["s32"]
_SHARED = ("shared::cta", "shared::cluster")
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
_OTHER_MODES = ("im2col", "im2col::w", "im2col::w::128", "im2col_no_offs", "tile::gather4", "tile::scatter4")


class _Completion:
    """The completion mechanism of a copy, from its modifiers; the operands are read by ``finish``."""

    def __init__(self, d: Decode) -> None:
        self.barrier = d.flag("mbarrier::complete_tx::bytes")
        if not self.barrier:
            d.need("bulk_group")
        self.multicast = d.flag("multicast::cluster")
        self.pair = d.take("cta_group::1", "cta_group::2") == "cta_group::2"
        self.hint = d.flag("L2::cache_hint")

    def finish(self, d: Decode) -> None:
        """Consume ``[mbar]``, the CTA mask and the cache policy."""
        self.address: Source | None = d.address() if self.barrier else None
        self.mask: Source | None = d.src(U16) if self.multicast else None
        if self.hint:
            policy(d)

    def signals(self, m: Machine, lanes: Lanes) -> list[Signal]:
        """What each lane's copy signals."""
        at = np.zeros(lanes.n, np.int64) if self.address is None else self.address(m, lanes)
        masks = [None] * lanes.n if self.mask is None else broadcast(self.mask(m, lanes), lanes.n).tolist()
        return [Signal(int(a), mask, self.pair) for a, mask in zip(at, masks, strict=True)]


def _each(m: Machine, lanes: Lanes) -> list[Lanes]:
    """One set for each thread: every thread issues a copy of its own."""
    return [m.lanes(lanes.ids[i : i + 1]) for i in range(lanes.n)]


@step("cp.async.bulk", "cp.reduce.async.bulk")
def _bulk(d: Decode) -> Step:
    """A copy of contiguous bytes: 16-byte aligned, a multiple of 16."""
    to, origin = d.need("global", *_SHARED), d.need("shared::cta", "global")
    completion = _Completion(d)
    merge: Merge | None = None
    if d.instr.mods[0] == "reduce":
        op = d.need(*_REDUCTIONS)
        d.ignore("noftz")
        merge = partial(combine, op, d.type())
    dst, src, size = d.address(), d.address(), d.src(U32)
    completion.finish(d)

    def run(m: Machine, lanes: Lanes) -> None:
        targets, sources, sizes = dst(m, lanes), src(m, lanes), broadcast(size(m, lanes), lanes.n)
        rows = zip(targets.tolist(), sources.tolist(), sizes.tolist(), completion.signals(m, lanes), strict=True)
        for one, (target, source, count, signal) in zip(_each(m, lanes), rows, strict=True):
            if count % 16 or (target | source) % 16:
                raise m.error(SimMemoryError, "cp.async.bulk needs 16-byte aligned addresses and sizes", one.ids)
            if count == 0:
                continue
            read, origin_bytes = _reader(m, origin, one, source, count)
            if to == "global":
                write, target_bytes = _global_writer(m, one, target, count, merge)
                _note_group(m, one, origin_bytes, target_bytes, combined=merge is not None)
                m.unit(BulkCopies).issue(one, read, write, grouped=True)
            else:
                delivery = Delivery(to, np.arange(target, target + count), signal, merge)
                write = plan(m, one, delivery)
                _note_signalled(m, one, origin_bytes, signal)
                m.unit(BulkCopies).issue(one, read, write, grouped=False)

    return run


Bytes = tuple[str, Array, Array]
"""Space, the memory, and offsets in it."""


def _note_group(m: Machine, one: Lanes, source: Bytes, target: Bytes, *, combined: bool) -> None:
    """Tell the race detector of a copy to global memory."""
    if m.races is not None:
        group = int(m.unit(BulkCopies).committed[one.ids[0]])
        m.races.copies.move(one, group, source, target[1:], combined=combined)


def _note_signalled(m: Machine, one: Lanes, source: Bytes, signal: Signal) -> None:
    """Tell it what a copy to shared memory reads until its mbarrier's phase ends."""
    if m.races is not None:
        key = int(m.unit(MBarriers).keys("shared::cluster", one.ids, np.array([signal.address]))[0])
        m.races.copies.take(one, source, key)


def _reader(m: Machine, space: str, one: Lanes, address: int, size: int) -> tuple[Callable[[], Array], Bytes]:
    """Bounds are checked now, bytes are taken later."""
    (part,) = m.memory.locate(space, one.ids, np.array([address]), 16)
    start, region = int(part.offset[0]), part.region
    if space != "global":
        m.memory.bound_shared(one.ids, part.offset, size, "bulk copy source")
        where = np.arange(start, start + size)
        return lambda: initialised(m, where, one), ("shared", region.data, where)
    m.memory.bound(one.ids, part.offset, 0, len(region.data), size, region.name)
    whole = ("global", region.data, np.arange(start, start + size))
    return lambda: region.data[start : start + size].copy(), whole


def _global_writer(
    m: Machine, one: Lanes, address: int, size: int, merge: Merge | None
) -> tuple[Callable[[Array], None], Bytes]:
    (part,) = m.memory.locate("global", one.ids, np.array([address]), 16)
    m.memory.bound(one.ids, part.offset, 0, len(part.region.data), size, part.region.name)
    start = int(part.offset[0])
    target = part.region.data[start : start + size]

    def write(data: Array) -> None:
        target[:] = data if merge is None else merge(target.copy(), data)

    return write, ("global", part.region.data, np.arange(start, start + size))


# Tensor copies


def _coordinates(d: Decode, operand: Operand) -> tuple[Source, list[Source]]:
    """The map's address and the tensor coordinates of ``[map, {x, y, ...}]``."""
    if not isinstance(operand, Addr) or len(operand.rest) != 1:
        raise d.error("expected [map, {coordinates}]")
    return d.base(operand), [d.src(S32, item) for item in d.vector(operand.rest[0])]


@step("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def _bulk_tensor(d: Decode) -> Step:
    """A box of a tensor, by its map, to or from swizzled shared memory."""
    rank = int(d.need(*_DIMENSIONS)[0])
    to = d.need("global", *_SHARED)
    d.need("shared::cta", "global")
    load = to != "global"
    if d.take(*_OTHER_MODES):
        raise d.error("only tile mode is modelled")
    d.flag("tile")
    completion = _Completion(d)
    op = d.need(*_REDUCTIONS) if d.instr.mods[0] == "reduce" else None
    first, second = d.next(), d.next()
    tensor, coordinates = _coordinates(d, second if load else first)
    shared = d.address(first if load else second)
    if len(coordinates) != rank:
        raise d.error(f"{len(coordinates)} coordinates for {rank} dimensions")
    completion.finish(d)

    def run(m: Machine, lanes: Lanes) -> None:
        maps, places = broadcast(tensor(m, lanes), lanes.n).tolist(), shared(m, lanes).tolist()
        points = zip(*(broadcast(c(m, lanes), lanes.n).tolist() for c in coordinates), strict=True)
        rows = zip(maps, places, points, completion.signals(m, lanes), strict=True)
        for one, (address, place, at, signal) in zip(_each(m, lanes), rows, strict=True):
            tensor_map = m.tensor_map("generic", address, one)
            cells = tensor_map.shared_addresses(place)
            if load:
                write = plan(m, one, Delivery(to, cells, signal, None))
                if m.races is not None:
                    _note_signalled(m, one, ("global", tensor_map.base, tensor_map.touched(at)), signal)
                m.unit(BulkCopies).issue(one, partial(tensor_map.load, at), write, grouped=False)
                continue
            store = partial(tensor_map.store, at) if op is None else partial(tensor_map.reduce, op, at)
            read, where = _box_reader(m, one, cells)
            if m.races is not None:
                target = ("global", tensor_map.base, tensor_map.touched(at))
                _note_group(m, one, ("shared", m.memory.shared.data, where), target, combined=op is not None)
            m.unit(BulkCopies).issue(one, read, store, grouped=True)

    return run


def _box_reader(m: Machine, one: Lanes, cells: Array) -> tuple[Callable[[], Array], Array]:
    (part,) = m.memory.locate("shared::cta", one.ids, np.array([int(cells.min())]), 16)
    m.memory.bound_shared(one.ids, part.offset, span(cells), "tensor copy source")
    where = int(part.offset[0]) + (cells - cells.min()).astype(np.int64)
    return lambda: initialised(m, where, one), where


@step("cp.async.bulk.prefetch", "cp.async.bulk.prefetch.tensor")
def _prefetch(d: Decode) -> Step:
    """No effect, except that a tensor map must be one."""
    tensor = "tensor" in d.instr.mods
    d.ignore(*_DIMENSIONS, "tile")
    d.need("L2")
    d.need("global")
    hint = d.flag("L2::cache_hint")
    operand = d.next()
    if tensor:
        address, _ = _coordinates(d, operand)
    else:
        address = d.address(operand)
        d.src(U32)
    if hint:
        policy(d)

    def run(m: Machine, lanes: Lanes) -> None:
        if tensor:
            for at in np.unique(broadcast(address(m, lanes), lanes.n)):
                m.tensor_map("generic", int(at), lanes)

    return run


# Groups


@step("cp.async.bulk.commit_group")
def _commit(d: Decode) -> Step:
    del d

    def run(m: Machine, lanes: Lanes) -> None:
        m.unit(BulkCopies).committed[lanes.sel] += 1

    return run


@step("cp.async.bulk.wait_group")
def _wait(d: Decode) -> Step:
    read_only, allowed = d.flag("read"), d.immediate()
    return lambda m, lanes: m.unit(BulkCopies).wait(lanes, allowed, read_only=read_only)


# Stores that signal


@step("st.async", "red.async")
def _signalling_store(d: Decode) -> Step:
    """Store to (or reduce into) another CTA's shared memory and complete transaction bytes there."""
    d.ignore("weak", "relaxed", "cluster", "shared::cluster")
    completion = _Completion(d)
    op = d.take(*_REDUCTIONS)
    count = int((d.take("v2", "v4") or "v1")[1:])
    kind = d.type()
    merge = None if op is None else partial(combine, op, kind)
    dst = d.address()
    values = [d.src(kind, item) for item in d.vector()]
    if len(values) != count:
        raise d.error(f"{count} elements from {len(values)} registers")
    completion.finish(d)

    def run(m: Machine, lanes: Lanes) -> None:
        targets = dst(m, lanes).tolist()
        data = np.stack([broadcast(v(m, lanes), lanes.n) for v in values], axis=1).view(np.uint8)
        rows = zip(targets, data, completion.signals(m, lanes), strict=True)
        for one, (target, row, signal) in zip(_each(m, lanes), rows, strict=True):
            cells = np.arange(target, target + len(row))
            write = plan(m, one, Delivery("shared::cluster", cells, signal, merge))
            m.unit(BulkCopies).issue(one, row.copy, write, grouped=False)

    return run


@step("st.bulk")
def _zero_fill(d: Decode) -> Step:
    """Fill shared memory with zeros."""
    d.ignore("weak")
    d.take("shared::cta")
    address, size, value = d.address(), d.src(TYPES["u64"], wide=True), d.next()
    if not isinstance(value, Imm) or value.value != 0:
        raise d.error("st.bulk stores zero only")

    def run(m: Machine, lanes: Lanes) -> None:
        at, sizes = address(m, lanes), broadcast(size(m, lanes), lanes.n).tolist()
        for position, one in enumerate(_each(m, lanes)):
            if sizes[position] % 8:
                raise m.error(SimMemoryError, "st.bulk takes a multiple of 8 bytes", one.ids)
            for offset in range(0, sizes[position], 8):
                m.memory.store("shared", one.ids, at[position : position + 1] + offset, [np.zeros(1, np.uint64)])

    return run
