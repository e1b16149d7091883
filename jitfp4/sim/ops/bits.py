"""Logic, shifts, bit fields and byte permutation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jitfp4.sim.decode import Decode, Source, Step, broadcast, step
from jitfp4.sim.ptx import TYPES, Array, Imm

U32, S32, B32 = TYPES["u32"], TYPES["s32"], TYPES["b32"]
_LOGIC: dict[str, Callable[..., Any]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@step("and", "or", "xor")
def _logic(d: Decode) -> Step:
    fn, kind = _LOGIC[d.instr.name], d.type()
    dst, a, b = d.dst(kind), d.src(kind), d.src(kind)
    return lambda m, lanes: dst(m, lanes, fn(a(m, lanes), b(m, lanes)))


@step("not")
def _not(d: Decode) -> Step:
    kind = d.type()
    dst, a = d.dst(kind), d.src(kind)
    return lambda m, lanes: dst(m, lanes, ~a(m, lanes))


@step("cnot")
def _cnot(d: Decode) -> Step:
    kind = d.type()
    dst, a = d.dst(kind), d.src(kind)
    return lambda m, lanes: dst(m, lanes, (np.asarray(a(m, lanes)) == 0).astype(kind.dtype))


@step("lop3")
def _lop3(d: Decode) -> Step:
    """Any function of three bits; the truth table's index is a*4 + b*2 + c."""
    if d.take("or", "and"):
        raise d.error("lop3 with a predicate result is not modelled")
    kind = d.type()
    dst, a, b, c, table = d.dst(kind), d.src(kind), d.src(kind), d.src(kind), d.next()
    if not isinstance(table, Imm):
        raise d.error("lop3 needs an immediate table")
    minterms = [i for i in range(8) if int(table.value) >> i & 1]

    def run(m: Any, lanes: Any) -> None:
        x = [np.asarray(s(m, lanes)) for s in (a, b, c)]
        out = np.zeros(lanes.n, kind.dtype)
        for i in minterms:
            p, q, r = (v if i >> (2 - j) & 1 else ~v for j, v in enumerate(x))
            out |= p & q & r
        dst(m, lanes, out)

    return run


@step("shl", "shr")
def _shift(d: Decode) -> Step:
    """Amounts beyond the width shift every bit out; a signed right shift then leaves the sign."""
    left, kind = d.instr.name == "shl", d.type()
    dst, a = d.dst(kind), d.src(kind)
    amount = d.operands[0]
    if isinstance(amount, Imm) and 0 <= int(amount.value) < kind.bits:
        d.next()
        by = kind.dtype.type(int(amount.value))
        fn = np.left_shift if left else np.right_shift
        return lambda m, lanes: dst(m, lanes, fn(a(m, lanes), by))
    read = d.src(U32)
    top = kind.bits - 1

    def run(m: Any, lanes: Any) -> None:
        value, by = a(m, lanes), np.asarray(read(m, lanes))
        over, small = by > top, np.minimum(by, top).astype(kind.dtype)
        if left:
            dst(m, lanes, np.where(over, kind.dtype.type(0), value << small))
        elif kind.is_signed:
            dst(m, lanes, value >> small)
        else:
            dst(m, lanes, np.where(over, kind.dtype.type(0), value >> small))

    return run


@step("shf")
def _funnel(d: Decode) -> Step:
    """Shift of the 64-bit pair b:a; ``l`` returns the upper word, ``r`` the lower."""
    left = d.need("l", "r") == "l"
    wrap = d.need("clamp", "wrap") == "wrap"
    kind = d.type()
    dst, a, b, c = d.dst(kind), d.src(U32), d.src(U32), d.src(U32)

    def run(m: Any, lanes: Any) -> None:
        by = np.asarray(c(m, lanes)).astype(np.uint64)
        by = by & np.uint64(31) if wrap else np.minimum(by, np.uint64(32))
        pair = np.asarray(b(m, lanes)).astype(np.uint64) << np.uint64(32) | np.asarray(a(m, lanes)).astype(np.uint64)
        out = pair >> (np.uint64(32) - by) if left else pair >> by
        dst(m, lanes, out.astype(np.uint32))

    return run


def _field(read: Source, limit: int) -> Source:
    """The low byte of a position or length operand, at most ``limit``."""
    return lambda m, lanes: np.minimum(np.asarray(read(m, lanes)) & np.uint32(0xFF), np.uint32(limit))


@step("bfe")
def _extract(d: Decode) -> Step:
    kind = d.type()
    bits = kind.bits
    raw = TYPES[f"u{bits}"]
    dst, a, position, length = d.dst(raw), d.src(raw), _field(d.src(U32), 255), _field(d.src(U32), 255)

    def run(m: Any, lanes: Any) -> None:
        value = np.asarray(a(m, lanes)).astype(np.uint64)
        pos, size = position(m, lanes).astype(np.uint64), length(m, lanes).astype(np.uint64)
        inside = pos < bits
        out = np.where(inside, value >> np.minimum(pos, bits - 1), np.uint64(0))
        mask = np.where(size < 64, (np.uint64(1) << np.minimum(size, 63)) - np.uint64(1), ~np.uint64(0))
        out = out & mask
        if kind.is_signed:
            top = np.minimum(pos + np.maximum(size, 1) - np.uint64(1), bits - 1)
            sign = (value >> top & np.uint64(1) != 0) & (size > 0)
            kept = np.minimum(size, np.where(inside, bits - np.minimum(pos, bits), 0).astype(np.uint64))
            fill = np.where(kept < 64, ~((np.uint64(1) << np.minimum(kept, 63)) - np.uint64(1)), np.uint64(0))
            out = np.where(sign, out | fill, out)
        dst(m, lanes, out.astype(raw.dtype))

    return run


@step("bfi")
def _insert(d: Decode) -> Step:
    kind = d.type()
    bits = kind.bits
    dst, a, b, position, length = (
        d.dst(kind),
        d.src(kind),
        d.src(kind),
        _field(d.src(U32), 255),
        _field(d.src(U32), 255),
    )

    def run(m: Any, lanes: Any) -> None:
        pos, size = position(m, lanes).astype(np.uint64), length(m, lanes).astype(np.uint64)
        ones = np.where(size < 64, (np.uint64(1) << np.minimum(size, 63)) - np.uint64(1), ~np.uint64(0))
        at = np.minimum(pos, 63)
        mask = np.where(pos < bits, ones << at, np.uint64(0))
        value = np.asarray(a(m, lanes)).astype(np.uint64) << at & mask
        out = np.asarray(b(m, lanes)).astype(np.uint64) & ~mask | value
        dst(m, lanes, np.asarray(broadcast(out, lanes.n)).astype(kind.dtype))

    return run


@step("bmsk")
def _mask(d: Decode) -> Step:
    """``b`` ones starting at bit ``a``."""
    wrap = d.need("clamp", "wrap") == "wrap"
    d.need("b32")
    dst, a, b = d.dst(B32), d.src(U32), d.src(U32)

    def run(m: Any, lanes: Any) -> None:
        pos, size = np.asarray(a(m, lanes)).astype(np.uint64), np.asarray(b(m, lanes)).astype(np.uint64)
        limit = np.uint64(31 if wrap else 32)
        pos, size = (v & limit if wrap else np.minimum(v, limit) for v in (pos, size))
        ones = (np.uint64(1) << size) - np.uint64(1)
        dst(m, lanes, (ones << pos).astype(np.uint32))

    return run


@step("szext")
def _extend(d: Decode) -> Step:
    """Sign- or zero-extend the low ``b`` bits of ``a``."""
    wrap, kind = d.need("clamp", "wrap") == "wrap", d.type()
    dst, a, b = d.dst(kind), d.src(kind), d.src(U32)

    def run(m: Any, lanes: Any) -> None:
        size = np.asarray(b(m, lanes)).astype(np.int64)
        size = size & 31 if wrap else np.minimum(size, 32)
        value = np.asarray(a(m, lanes)).astype(np.int64) & ((np.int64(1) << size) - 1)
        if kind.is_signed:
            sign = (value >> np.maximum(size - 1, 0) & 1 != 0) & (size > 0)
            value = np.where(sign, value - (np.int64(1) << size), value)
        dst(m, lanes, np.asarray(value).astype(kind.dtype))

    return run


@step("popc")
def _popc(d: Decode) -> Step:
    kind = d.type()
    dst, a = d.dst(U32), d.src(kind)
    return lambda m, lanes: dst(m, lanes, np.bitwise_count(np.asarray(a(m, lanes))).astype(np.uint32))


def highest_bit(x: Array) -> Array:
    """Position of the highest set bit of uint64 values; -1 for zero."""
    out = np.full(np.shape(x), -1, np.int64)
    for shift in (32, 16, 8, 4, 2, 1):
        high = x >> np.uint64(shift)
        moved = high != 0
        out = out + np.where(moved, shift, 0)
        x = np.where(moved, high, x)
    return np.where(x != 0, out + 1, -1)


@step("clz")
def _clz(d: Decode) -> Step:
    kind = d.type()
    dst, a = d.dst(U32), d.src(kind)

    def run(m: Any, lanes: Any) -> None:
        top = highest_bit(np.asarray(a(m, lanes)).astype(np.uint64))
        dst(m, lanes, (kind.bits - 1 - top).astype(np.uint32))

    return run


@step("bfind")
def _bfind(d: Decode) -> Step:
    """Highest bit that differs from the sign (signed) or is set; all ones when there is none."""
    amount, kind = d.flag("shiftamt"), d.type()
    dst, a = d.dst(U32), d.src(kind)

    def run(m: Any, lanes: Any) -> None:
        value = np.asarray(a(m, lanes))
        value = np.where(value < 0, ~value, value)
        top = highest_bit(value.astype(np.uint64))
        found = np.where(top < 0, -1, kind.bits - 1 - top) if amount else top
        dst(m, lanes, found.astype(np.uint32))

    return run


@step("brev")
def _brev(d: Decode) -> Step:
    kind = d.type()
    dst, a = d.dst(kind), d.src(kind)

    def run(m: Any, lanes: Any) -> None:
        data = np.ascontiguousarray(broadcast(a(m, lanes), lanes.n)).view(np.uint8).reshape(lanes.n, -1)
        swapped = np.packbits(np.unpackbits(data, axis=1)[:, ::-1], axis=1)
        dst(m, lanes, np.ascontiguousarray(swapped).view(kind.dtype).reshape(lanes.n))

    return run


@step("fns")
def _nth_set(d: Decode) -> Step:
    """The ``offset``-th set bit of ``mask`` from ``base``, upwards or (negative) downwards; all ones when absent."""
    d.need("b32")
    dst, mask, base, offset = d.dst(B32), d.src(U32), d.src(U32), d.src(S32)

    def one(bits: int, start: int, nth: int) -> int:
        if nth == 0:
            return start if bits >> start & 1 else 0xFFFFFFFF
        order = range(start, 32) if nth > 0 else range(start, -1, -1)
        found = [i for i in order if bits >> i & 1]
        return found[abs(nth) - 1] if len(found) >= abs(nth) else 0xFFFFFFFF

    def run(m: Any, lanes: Any) -> None:
        rows = zip(*(broadcast(s(m, lanes), lanes.n).tolist() for s in (mask, base, offset)), strict=True)
        dst(m, lanes, np.array([one(*row) for row in rows], np.uint32))

    return run


_PRMT_MODES = {  # bytes picked for each value of the selector's low two bits
    "f4e": ((3, 2, 1, 0), (4, 3, 2, 1), (5, 4, 3, 2), (6, 5, 4, 3)),
    "b4e": ((5, 6, 7, 0), (6, 7, 0, 1), (7, 0, 1, 2), (0, 1, 2, 3)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((3, 2, 1, 0), (3, 2, 1, 1), (3, 2, 2, 2), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 1, 0), (3, 2, 1, 0)),
    "rc16": ((1, 0, 1, 0), (3, 2, 3, 2), (1, 0, 1, 0), (3, 2, 3, 2)),
}


@step("prmt")
def _permute(d: Decode) -> Step:
    """Pick four of the eight bytes of b:a; a selector's bit 3 replicates the byte's sign instead."""
    d.need("b32")
    mode = d.take(*_PRMT_MODES)
    dst, a, b, selector = d.dst(B32), d.src(U32), d.src(U32), d.src(U32)

    def run(m: Any, lanes: Any) -> None:
        pair = np.asarray(b(m, lanes)).astype(np.uint64) << np.uint64(32) | np.asarray(a(m, lanes)).astype(np.uint64)
        select = np.asarray(selector(m, lanes))
        out = np.zeros(lanes.n, np.uint32)
        for j in range(4):
            if mode:
                # the tables list the most significant byte first, as the manual does
                pick = np.array([row[3 - j] for row in _PRMT_MODES[mode]], np.uint64)[select & np.uint32(3)]
                replicate = np.bool_(False)
            else:
                nibble = select >> np.uint32(4 * j)
                pick, replicate = (nibble & np.uint32(7)).astype(np.uint64), nibble & np.uint32(8) != 0
            byte = (pair >> (pick * np.uint64(8))).astype(np.uint32) & np.uint32(0xFF)
            byte = np.where(replicate, (byte >> np.uint32(7)) * np.uint32(0xFF), byte)
            out |= byte << np.uint32(8 * j)
        dst(m, lanes, out)

    return run
