"""cp.async, cp.async.bulk, cp.async.bulk.tensor, their groups, and the stores that signal an mbarrier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.async_copies import AsyncCopies, BulkCopies, claim, deliver, initialised, rank_base, signal_ranks
from jitfp4.sim.decode import Decode, Source, Step, broadcast, step
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import Machine
from jitfp4.sim.mbarriers import MBarriers
from jitfp4.sim.memory import IN_FLIGHT
from jitfp4.sim.ops.atomics import combine
from jitfp4.sim.ops.memory import CACHE, policy
from jitfp4.sim.ptx import TYPES, Addr, Array, Imm, Operand, Reg, Type

U16, U32, S32 = TYPES["u16"], TYPES["u32"], TYPES["s32"]
_SHARED = ("shared::cta", "shared::cluster")
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


# cp.async


@step("cp.async")
def _cp_async(d: Decode) -> Step:
    """Copy 4, 8 or 16 bytes; beyond ``src-size`` the destination is filled with zeros."""
    cache = d.need("ca", "cg")
    d.need("shared", "shared::cta")
    d.need("global")
    hint = d.flag("L2::cache_hint")
    d.ignore(*CACHE)
    dst, src, size = d.address(), d.address(), d.next()
    if not isinstance(size, Imm) or size.value not in (4, 8, 16) or (cache == "cg" and size.value != 16):
        raise d.error("cp.async copies 4, 8 or 16 bytes, .cg 16")
    total = int(size.value)
    if hint:
        d.operands.pop()
    ignore = None
    valid: Source | None = None
    if d.operands:
        operand = d.operands[0]
        if isinstance(operand, Reg) and operand.type.bits == 1:
            ignore = d.src(TYPES["pred"])
        else:
            valid = d.src(U32)

    def run(m: Machine, lanes: Lanes) -> None:
        (part,) = m.memory.locate("shared", lanes.ids, dst(m, lanes), total)
        count = np.full(lanes.n, total) if valid is None else broadcast(valid(m, lanes), lanes.n).astype(np.int64)
        if ignore is not None:
            count = np.where(ignore(m, lanes), 0, count)
        if (count > total).any():
            raise m.error(SimError, "cp.async src-size exceeds cp-size", lanes.ids[count > total])
        data = _fetch(m, lanes, src(m, lanes), count, total)
        m.memory.check_write(part, lanes.ids, total)
        m.memory.state.data[part.offset[:, None] + np.arange(total)] = IN_FLIGHT
        m.unit(AsyncCopies).issue(lanes, part, data)

    return run


def _fetch(m: Machine, lanes: Lanes, address: Array, count: Array, total: int) -> Array:
    """uint8 [lanes, total]: ``count`` bytes of global memory, then zeros. Bytes not read may be out of bounds."""
    data = np.zeros((lanes.n, total), np.uint8)
    if (address & (total - 1)).any():
        raise m.error(SimMemoryError, f"cp.async source is not aligned to {total} bytes", lanes.ids[address % total != 0])
    for size in np.unique(count[count > 0]):
        rows = np.flatnonzero(count == size)
        for part in m.memory.locate("global", lanes.ids[rows], address[rows], 1):
            m.memory.bound(part.of(lanes.ids[rows]), part.offset, 0, len(part.region.data), int(size), part.region.name)
            picked = rows if part.pick is None else rows[part.pick]
            data[picked, :size] = part.region.data[part.offset[:, None] + np.arange(size)]
    return data


@step("cp.async.commit_group")
def _commit(d: Decode) -> Step:
    del d

    def run(m: Machine, lanes: Lanes) -> None:
        m.unit(AsyncCopies).committed[lanes.sel] += 1

    return run


@step("cp.async.wait_group", "cp.async.wait_all")
def _wait(d: Decode) -> Step:
    allowed = None if d.instr.mods[-1] == "wait_all" else int(d.literal(_immediate(d), U32))
    return lambda m, lanes: m.unit(AsyncCopies).wait(lanes.ids, allowed)


def _immediate(d: Decode) -> Imm:
    operand = d.next()
    if not isinstance(operand, Imm):
        raise d.error("expected an immediate")
    return operand


@step("cp.async.mbarrier.arrive")
def _cp_async_arrive(d: Decode) -> Step:
    """Arrive when the thread's earlier cp.async are complete; without ``.noinc`` the count is raised first."""
    counted = d.flag("noinc")
    d.ignore("shared", "shared::cta")
    d.need("b64")
    address = d.address()

    def run(m: Machine, lanes: Lanes) -> None:
        barriers = m.unit(MBarriers)
        keys = barriers.keys("shared", lanes.ids, address(m, lanes))
        if not counted:
            for key in keys:
                barriers.get(int(key), lanes.ids).pending += 1
        m.unit(AsyncCopies).arrive_later(lanes, keys)

    return run


# cp.async.bulk


@dataclass(slots=True)
class _Signal:
    """How a copy into shared memory reports completion, and to which CTAs it goes."""

    barrier: Source | None
    mask: Source | None
    pair: bool


def _completion(d: Decode) -> tuple[bool, bool, bool, bool]:
    """Consume the completion mechanism: whether it is an mbarrier, multicast, cta_group::2, a cache hint."""
    barrier = d.flag("mbarrier::complete_tx::bytes")
    if not barrier:
        d.need("bulk_group")
    multicast, pair = d.flag("multicast::cluster"), d.take("cta_group::1", "cta_group::2") == "cta_group::2"
    return barrier, multicast, pair, d.flag("L2::cache_hint")


@step("cp.async.bulk", "cp.reduce.async.bulk")
def _bulk(d: Decode) -> Step:
    """A copy of contiguous bytes: 16-byte aligned, a multiple of 16."""
    to = d.need("global", *_SHARED)
    origin = d.need("shared::cta", "global")
    barrier, multicast, pair, hint = _completion(d)
    op, kind = None, None
    if d.instr.name == "cp" and d.flag("cp_mask"):
        raise d.error("cp.async.bulk with .cp_mask is not modelled")
    if d.instr.mods[0] == "reduce":
        op = d.need(*_REDUCTIONS)
        d.ignore("noftz")
        kind = d.type()
    dst, src, size = d.address(), d.address(), d.src(U32)
    signal = _Signal(d.address() if barrier else None, d.src(U16) if multicast else None, pair)
    if hint:
        policy(d)

    def run(m: Machine, lanes: Lanes) -> None:
        to_at, from_at, sizes = dst(m, lanes), src(m, lanes), broadcast(size(m, lanes), lanes.n)
        for position, thread in enumerate(lanes.ids.tolist()):
            one = m.lanes(lanes.ids[position : position + 1])
            count = int(sizes[position])
            if count % 16 or (int(to_at[position]) | int(from_at[position])) % 16:
                raise m.error(SimMemoryError, "cp.async.bulk needs 16-byte aligned addresses and sizes", one.ids)
            if count == 0:
                continue
            read = _reader(m, origin, one, int(from_at[position]), count)
            if to == "global":
                write = _global_writer(m, one, int(to_at[position]), count, op, kind)
                m.unit(BulkCopies).issue(thread, read, write, grouped=True)
            else:
                cells = np.arange(int(to_at[position]), int(to_at[position]) + count)
                write = _shared_writer(m, one, cells, to, signal, position, lanes, op, kind)
                m.unit(BulkCopies).issue(thread, read, write, grouped=False)

    return run


def _reader(m: Machine, space: str, one: Lanes, address: int, size: int) -> Callable[[], Array]:
    """Bounds are checked now, bytes are taken later."""
    (part,) = m.memory.locate(space, one.ids, np.array([address]), 16)
    start, thread = int(part.offset[0]), int(one.ids[0])
    if space != "global":
        m.memory.bound(one.ids, part.offset % m.memory.shared_stride, 0, m.memory.shared_end, size, "bulk copy source")
        return lambda: initialised(m, start, size, thread).copy()
    m.memory.bound(one.ids, part.offset, 0, len(part.region.data), size, part.region.name)
    return lambda: part.region.data[start : start + size].copy()


def _global_writer(
    m: Machine, one: Lanes, address: int, size: int, op: str | None, kind: Type | None
) -> Callable[[Array], None]:
    (part,) = m.memory.locate("global", one.ids, np.array([address]), 16)
    m.memory.bound(one.ids, part.offset, 0, len(part.region.data), size, part.region.name)
    target = part.region.data[int(part.offset[0]) : int(part.offset[0]) + size]

    def write(data: Array) -> None:
        target[:] = data if op is None or kind is None else combine(op, kind, target.copy(), data)

    return write


def _shared_writer(
    m: Machine,
    one: Lanes,
    cells: Array,
    space: str,
    signal: _Signal,
    position: int,
    lanes: Lanes,
    op: str | None,
    kind: Type | None,
) -> Callable[[Array], None]:
    """Deliver to shared addresses ``cells`` of one CTA, or to the same offsets in every CTA of the mask."""
    assert signal.barrier is not None
    thread = int(one.ids[0])
    bar = int(signal.barrier(m, lanes)[position])
    (start,) = m.memory.locate(space, one.ids, np.array([int(cells.min())]), min(16, len(cells)))
    m.memory.bound(one.ids, start.offset % m.memory.shared_stride, 0, m.memory.shared_end, len(cells), "bulk copy")
    own = int(start.offset[0]) // m.memory.shared_stride - int(m.cta[thread]) + int(m.rank[thread])
    mask = None if signal.mask is None else int(broadcast(signal.mask(m, lanes), lanes.n)[position])
    ranks = signal_ranks(mask, own)
    local = (cells & 0xFFFFFF).astype(np.int64)
    targets = []
    for rank in ranks:
        at = bar >> 24
        if mask is not None:
            at = rank & ~1 | at & 1 if signal.pair else rank
        elif at != rank and not signal.pair and op is None:
            raise m.error(SimError, "the copy's mbarrier lies in another CTA than its destination", one.ids)
        address = np.array([at << 24 | bar & 0xFFFFFF])
        key = int(m.unit(MBarriers).keys("shared::cluster", one.ids, address)[0])
        base = rank_base(m, thread, rank)
        if op is None:
            claim(m, base + int(local.min()), len(local), thread)
        targets.append((base, key))
    issued = m.races.snapshot(one) if m.races is not None else None

    def write(data: Array) -> None:
        for base, key in targets:
            new = data
            if op is not None and kind is not None:
                new = combine(op, kind, m.memory.shared.data[base + local], data)
            deliver(m, base + local, new, thread)
            barriers = m.unit(MBarriers)
            if m.races is not None and issued is not None:
                m.races.join(barriers.clock, key, issued)
            barriers.complete_tx(key, len(data), one.ids)

    return write


# cp.async.bulk.tensor


def _coordinates(d: Decode, operand: Operand) -> tuple[Source, list[Source]]:
    """The map's address and the tensor coordinates of ``[map, {x, y, ...}]``."""
    if not isinstance(operand, Addr) or len(operand.rest) != 1:
        raise d.error("expected [map, {coordinates}]")
    return d.base(operand), [d.src(S32, item) for item in d.vector(operand.rest[0])]


@step("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def _bulk_tensor(d: Decode) -> Step:
    """A box of a tensor, by its map, to or from swizzled shared memory."""
    rank = int(d.need("1d", "2d", "3d", "4d", "5d")[0])
    order = [d.need("global", *_SHARED), d.need("shared::cta", "global")]
    load = order[0] != "global"
    if d.take("im2col", "im2col::w", "im2col::w::128", "im2col_no_offs", "tile::gather4", "tile::scatter4"):
        raise d.error("only tile mode is modelled")
    d.flag("tile")
    barrier, multicast, pair, hint = _completion(d)
    op = d.need(*_REDUCTIONS) if d.instr.mods[0] == "reduce" else None
    first, second = d.next(), d.next()
    tensor, coordinates = _coordinates(d, second if load else first)
    shared = d.address(first if load else second)
    if len(coordinates) != rank:
        raise d.error(f"{len(coordinates)} coordinates for {rank} dimensions")
    signal = _Signal(d.address() if barrier else None, d.src(U16) if multicast else None, pair)
    if hint:
        policy(d)

    def run(m: Machine, lanes: Lanes) -> None:
        maps, places = broadcast(tensor(m, lanes), lanes.n), shared(m, lanes)
        points = np.stack([broadcast(c(m, lanes), lanes.n) for c in coordinates], axis=1)
        for position, thread in enumerate(lanes.ids.tolist()):
            one = m.lanes(lanes.ids[position : position + 1])
            tensor_map = m.tensor_map("generic", int(maps[position]), one)
            at = tuple(int(c) for c in points[position])
            cells = tensor_map.shared_addresses(int(places[position]))
            if load:
                write = _shared_writer(m, one, cells, order[0], signal, position, lanes, None, None)
                m.unit(BulkCopies).issue(thread, lambda t=tensor_map, c=at: t.load(c), write, grouped=False)
                continue
            read = _box_reader(m, one, cells)
            store = (lambda data, t=tensor_map, c=at: t.store(c, data)) if op is None else None
            store = store or (lambda data, t=tensor_map, c=at: t.reduce(str(op), c, data))
            m.unit(BulkCopies).issue(thread, read, store, grouped=True)

    return run


def _box_reader(m: Machine, one: Lanes, cells: Array) -> Callable[[], Array]:
    thread = int(one.ids[0])
    (part,) = m.memory.locate("shared::cta", one.ids, np.array([int(cells.min())]), 16)
    start = int(part.offset[0])
    m.memory.bound(one.ids, part.offset % m.memory.shared_stride, 0, m.memory.shared_end, len(cells), "tensor copy source")
    order = (cells - cells.min()).astype(np.int64)
    return lambda: initialised(m, start, len(cells), thread)[order]


@step("cp.async.bulk.prefetch", "cp.async.bulk.prefetch.tensor")
def _prefetch(d: Decode) -> Step:
    """No effect, except that a tensor map must be one."""
    tensor = "tensor" in d.instr.mods
    d.ignore("1d", "2d", "3d", "4d", "5d", "tile")
    d.need("L2")
    d.need("global")
    hint = d.flag("L2::cache_hint")
    operand = d.next()
    if not tensor:
        d.address(operand)
        d.src(U32)
    else:
        tensor_address, _ = _coordinates(d, operand)
    if hint:
        policy(d)

    def run(m: Machine, lanes: Lanes) -> None:
        if tensor:
            for address in np.unique(broadcast(tensor_address(m, lanes), lanes.n)):
                m.tensor_map("generic", int(address), lanes)

    return run


@step("cp.async.bulk.commit_group")
def _bulk_commit(d: Decode) -> Step:
    del d

    def run(m: Machine, lanes: Lanes) -> None:
        m.unit(BulkCopies).committed[lanes.sel] += 1

    return run


@step("cp.async.bulk.wait_group")
def _bulk_wait(d: Decode) -> Step:
    read_only = d.flag("read")
    allowed = int(d.literal(_immediate(d), U32))
    return lambda m, lanes: m.unit(BulkCopies).wait(lanes, allowed, read_only=read_only)


# Stores that signal


@step("st.async", "red.async")
def _signalling_store(d: Decode) -> Step:
    """Store to (or reduce into) another CTA's shared memory and complete transaction bytes there."""
    d.ignore("weak", "relaxed", "cluster")
    d.ignore("shared::cluster")
    d.need("mbarrier::complete_tx::bytes")
    op = d.take(*_REDUCTIONS)
    count = int((d.take("v2", "v4") or "v1")[1:])
    kind = d.type()
    dst = d.address()
    values = [d.src(kind, item) for item in d.vector()]
    if len(values) != count:
        raise d.error(f"{count} elements from {len(values)} registers")
    barrier = d.address()

    def run(m: Machine, lanes: Lanes) -> None:
        to_at = dst(m, lanes)
        data = np.stack([broadcast(v(m, lanes), lanes.n) for v in values], axis=1).view(np.uint8)
        signal = _Signal(barrier, None, pair=False)
        for position, thread in enumerate(lanes.ids.tolist()):
            one = m.lanes(lanes.ids[position : position + 1])
            cells = np.arange(int(to_at[position]), int(to_at[position]) + data.shape[1])
            write = _shared_writer(m, one, cells, "shared::cluster", signal, position, lanes, op, kind)
            m.unit(BulkCopies).issue(thread, lambda row=data[position].copy(): row, write, grouped=False)

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
        at, sizes = address(m, lanes), broadcast(size(m, lanes), lanes.n)
        for position in range(lanes.n):
            ids = lanes.ids[position : position + 1]
            if int(sizes[position]) % 8:
                raise m.error(SimMemoryError, "st.bulk takes a multiple of 8 bytes", ids)
            for offset in range(0, int(sizes[position]), 8):
                m.memory.store("shared", ids, at[position : position + 1] + offset, [np.zeros(1, np.uint64)])

    return run

