"""atom and red, and the reductions that bulk copies share with them.

Lanes that meet at one address take effect one after the other, in thread order unless the run has a seed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jitfp4.sim import rounding as exact
from jitfp4.sim.decode import Decode, Step, broadcast, step
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import Machine
from jitfp4.sim.memory import WRITTEN, Part
from jitfp4.sim.ops.floating import extremum
from jitfp4.sim.ops.half import narrow, widen
from jitfp4.sim.ops.memory import order_of, policy, space_of
from jitfp4.sim.ptx import TYPES, Array, Type

_OPS = ("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max")
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_LOGIC: dict[str, Callable[..., Array]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def apply(op: str, kind: Type, old: Array, b: Array, c: Array | None = None, *, flush: bool = False) -> Array:
    """New raw contents of cells that hold raw ``old``. ``flush`` zeroes subnormal f32 sums, as global memory does."""
    match op:
        case "exch":
            return b
        case "cas" if c is not None:
            return np.asarray(np.where(old == b, c, old))
        case "and" | "or" | "xor":
            return _LOGIC[op](old, b)
        case "inc":
            return np.asarray(np.where(old >= b, 0, old + 1).astype(old.dtype))
        case "dec":
            return np.asarray(np.where((old == 0) | (old > b), b, old - 1).astype(old.dtype))
    if kind.name in _HALVES:
        halves = tuple(widen(kind.name, np.ascontiguousarray(v).view(np.uint16)) for v in (old, b))
        wide = exact.sum_odd(*(h.astype(np.float64) for h in halves)) if op == "add" else _pick(op, *halves)
        return narrow(kind.name, wide).view(old.dtype)
    x, y = old.view(kind.dtype), b.view(kind.dtype)
    if op != "add":
        return _pick(op, x, y).view(old.dtype)
    if not kind.is_float:
        return np.asarray((x + y).view(old.dtype))
    flush = flush and kind.name == "f32"
    total = exact.canonical(exact.flush_f32(x) + exact.flush_f32(y) if flush else x + y, [x, y])
    return (exact.flush_f32(total) if flush else total).view(old.dtype)


def _pick(op: str, x: Array, y: Array) -> Array:
    """min or max of numbers of one type."""
    if x.dtype.kind == "f":
        return extremum(op, nan=False, xorsign=False)(x, y)
    return np.asarray(np.minimum(x, y) if op == "min" else np.maximum(x, y))


def combine(op: str, kind: Type, old: Array, new: Array) -> Array:
    """``apply`` over whole byte arrays of elements of ``kind``."""
    raw = kind.raw
    return apply(op, kind, np.ascontiguousarray(old).view(raw), np.ascontiguousarray(new).view(raw)).view(np.uint8)


@step("atom", "red")
def _atomic(d: Decode) -> Step:
    order = order_of(d, atomic=True)
    space = space_of(d)
    op = d.need(*_OPS)
    d.ignore("noftz")
    hint = d.flag("L2::cache_hint")
    count = int((d.take("v2", "v4", "v8") or "v1")[1:])
    kind = d.type()
    raw = TYPES[f"b{kind.bits}"]
    writes = [d.dst(raw, item) for item in d.vector()] if d.instr.name == "atom" else []
    address = d.address()
    reads = [d.src(raw, item) for item in d.vector()]
    if len(reads) != count or len(writes) not in (0, count):
        raise d.error(f"{d.instr.name} with {count} elements and {len(reads)} registers")
    swap = d.src(raw) if op == "cas" else None
    if hint:
        policy(d)

    def run(m: Machine, lanes: Lanes) -> None:
        b = [broadcast(r(m, lanes), lanes.n) for r in reads]
        c = None if swap is None else broadcast(swap(m, lanes), lanes.n)
        old = [np.empty(lanes.n, raw.raw) for _ in range(count)]
        for part in m.memory.locate(space, lanes.ids, address(m, lanes), kind.bytes * count):
            if part.space == "shared":
                m.memory.require_state(part, lanes.ids, kind.bytes * count, WRITTEN, "atomic")
            ids = part.of(lanes.ids)
            if m.races is not None and part.space in ("shared", "global"):
                m.races.write(part, ids, kind.bytes * count, order.how, atomic=True)
            turns = _in_order(part, op, kind, old, b, c, m.launch.order)
            if m.races is not None and part.space in ("shared", "global"):
                m.races.flags.exchanged(part, ids, order, turns)
        for write, value in zip(writes, old, strict=False):
            write(m, lanes, value)

    return run


def _in_order(
    part: Part,
    op: str,
    kind: Type,
    old: list[Array],
    b: list[Array],
    c: Array | None,
    shuffle: np.random.Generator | None,
) -> Array:
    """Apply to every cell of ``part``, lane after lane of each address, in random order with ``shuffle``.

    Returns the positions of the lanes in an order that is that of each address.
    """
    view, index = part.region.elements(part.offset, kind.bytes)
    where = np.arange(len(index)) if part.pick is None else part.pick
    order = np.argsort(index, kind="stable")
    if shuffle is not None:
        mixed = shuffle.permutation(len(index))
        order = mixed[np.argsort(index[mixed], kind="stable")]
    starts = np.flatnonzero(np.r_[True, np.diff(index[order]) != 0])
    turn = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    for now in range(int(turn.max()) + 1):
        chosen = order[turn == now]
        lanes = where[chosen]
        for j, values in enumerate(b):
            cells = index[chosen] + j
            before = view[cells]
            old[j][lanes] = before
            view[cells] = apply(
                op, kind, before, values[lanes], None if c is None else c[lanes], flush=part.space == "global"
            )
    return order
