"""Integer arithmetic of 16, 32 and 64 bits, with carry chains, and the dot products of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jitfp4.sim.decode import Decode, Step, broadcast, step
from jitfp4.sim.ptx import TYPES, Array, Type

if TYPE_CHECKING:
    from jitfp4.sim.lanes import Lanes
    from jitfp4.sim.machine import Machine


class Carry:
    """The condition-code register CC.CF of every thread."""

    def __init__(self, machine: Machine) -> None:
        self.flag = np.zeros(machine.total, bool)


def high_product(a: Array, b: Array, kind: Type) -> Array:
    """The upper half of the full product."""
    if kind.bits < 64:
        wide = np.dtype(f"{kind.dtype.kind}{2 * kind.bytes}")
        return np.asarray((a.astype(wide) * b.astype(wide) >> kind.bits).astype(kind.dtype))
    low, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    x0, x1, y0, y1 = x & mask, x >> low, y & mask, y >> low
    middle = x1 * y0 + (x0 * y0 >> low)
    middle2 = x0 * y1 + (middle & mask)
    high = x1 * y1 + (middle >> low) + (middle2 >> low)
    if kind.is_signed:
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return np.asarray(high.astype(kind.dtype))


def quotient(a: Array, b: Array) -> Array:
    """Truncating division. Division by zero sets every bit, as the GPU's code sequence does."""
    ones = np.array(-1).astype(a.dtype) if a.dtype.kind == "i" else np.iinfo(a.dtype).max
    safe = np.where(b == 0, a.dtype.type(1), b)
    if a.dtype.kind == "i":
        raw = np.dtype(f"u{a.dtype.itemsize}")
        magnitude = np.abs(a).view(raw) // np.abs(safe).view(raw)
        out = np.where((a < 0) ^ (safe < 0), -magnitude.view(a.dtype), magnitude.view(a.dtype))
    else:
        out = a // safe
    return np.where(b == 0, ones, out)


def remainder(a: Array, b: Array) -> Array:
    """The remainder with the dividend's sign; of a division by zero, every bit, as for the quotient."""
    return np.where(b == 0, quotient(a, b), a - quotient(a, b) * b)


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "div": quotient,
    "rem": remainder,
}


def build(d: Decode, op: str, kind: Type) -> Step:
    """add, sub, mul, mad, div, rem, min, max, abs, neg, sad."""
    if op in ("mul", "mad"):
        return _multiply(d, op, kind)
    if op in ("add", "sub") and d.flag("cc"):
        return _carry(d, op, kind, carry_in=False, carry_out=True)
    sat, relu = d.flag("sat"), d.flag("relu")
    dst = d.dst(kind)
    if op in ("abs", "neg"):
        read = d.src(kind)
        unary = np.abs if op == "abs" else np.negative
        return lambda m, lanes: dst(m, lanes, unary(read(m, lanes)))
    a, b = d.src(kind), d.src(kind)
    if sat:
        return _saturating(op, kind, dst, a, b)
    fn = _BINARY[op]
    zero = kind.dtype.type(0)
    if relu:
        return lambda m, lanes: dst(m, lanes, np.maximum(fn(a(m, lanes), b(m, lanes)), zero))
    return lambda m, lanes: dst(m, lanes, fn(a(m, lanes), b(m, lanes)))


def _saturating(op: str, kind: Type, dst: Any, a: Any, b: Any) -> Step:
    """add.sat and sub.sat of s32: clamp instead of wrapping."""
    limits = np.iinfo(kind.dtype)

    def run(m: Machine, lanes: Lanes) -> None:
        wide = _BINARY[op](a(m, lanes).astype(np.int64), b(m, lanes).astype(np.int64))
        dst(m, lanes, np.clip(wide, limits.min, limits.max).astype(kind.dtype))

    return run


def _multiply(d: Decode, op: str, kind: Type) -> Step:
    part, sat = d.take("lo", "hi", "wide") or "lo", d.flag("sat")
    carry_out = d.flag("cc")
    out = TYPES[f"{kind.name[0]}{2 * kind.bits}"] if part == "wide" else kind
    dst, a, b = d.dst(out), d.src(kind), d.src(kind)

    def product(m: Machine, lanes: Lanes) -> Any:
        x, y = a(m, lanes), b(m, lanes)
        if part == "hi":
            return high_product(x, y, kind)
        return x.astype(out.dtype) * y.astype(out.dtype) if part == "wide" else x * y

    if op == "mul":
        return lambda m, lanes: dst(m, lanes, product(m, lanes))
    c = d.src(out)
    if carry_out:
        return _add_with_carry(dst, product, c, out, carry_in=False, carry_out=True)
    if sat:
        limits = np.iinfo(kind.dtype)
        return lambda m, lanes: dst(
            m,
            lanes,
            np.clip(product(m, lanes).astype(np.int64) + c(m, lanes), limits.min, limits.max).astype(kind.dtype),
        )
    return lambda m, lanes: dst(m, lanes, product(m, lanes) + c(m, lanes))


def _carry(d: Decode, op: str, kind: Type, *, carry_in: bool, carry_out: bool) -> Step:
    dst, a, b = d.dst(kind), d.src(kind), d.src(kind)
    if op == "add":
        return _add_with_carry(dst, a, b, kind, carry_in=carry_in, carry_out=carry_out)
    return _subtract_with_borrow(dst, a, b, kind, carry_in=carry_in, carry_out=carry_out)


def _add_with_carry(dst: Any, a: Any, b: Any, kind: Type, *, carry_in: bool, carry_out: bool) -> Step:
    raw = kind.raw

    def run(m: Machine, lanes: Lanes) -> None:
        flag = m.unit(Carry).flag
        x, y = (broadcast(v, lanes.n).view(raw) for v in (a(m, lanes), b(m, lanes)))
        total = x + y
        over = total < x
        if carry_in:
            total = total + flag[lanes.sel]
            over |= (total == 0) & flag[lanes.sel]
        if carry_out:
            flag[lanes.sel] = over
        dst(m, lanes, total)

    return run


def _subtract_with_borrow(dst: Any, a: Any, b: Any, kind: Type, *, carry_in: bool, carry_out: bool) -> Step:
    raw = kind.raw

    def run(m: Machine, lanes: Lanes) -> None:
        flag = m.unit(Carry).flag
        x, y = (broadcast(v, lanes.n).view(raw) for v in (a(m, lanes), b(m, lanes)))
        borrow = flag[lanes.sel] if carry_in else np.zeros(lanes.n, bool)
        dst_value = x - y - borrow
        if carry_out:
            flag[lanes.sel] = (x < y) | ((x == y) & borrow)
        dst(m, lanes, dst_value)

    return run


@step("addc", "subc")
def _with_carry(d: Decode) -> Step:
    carry_out = d.flag("cc")
    return _carry(d, d.instr.name[:3], d.type(), carry_in=True, carry_out=carry_out)


@step("madc")
def _multiply_with_carry(d: Decode) -> Step:
    part, carry_out = d.need("lo", "hi"), d.flag("cc")
    kind = d.type()
    dst, a, b, c = d.dst(kind), d.src(kind), d.src(kind), d.src(kind)

    def product(m: Machine, lanes: Lanes) -> Array:
        x, y = a(m, lanes), b(m, lanes)
        return high_product(x, y, kind) if part == "hi" else x * y

    return _add_with_carry(dst, product, c, kind, carry_in=True, carry_out=carry_out)


@step("mul24", "mad24")
def _multiply24(d: Decode) -> Step:
    """Products of the low 24 bits: ``lo`` is bits 31-0, ``hi`` bits 47-16."""
    part, kind = d.need("lo", "hi"), d.type()
    dst, a, b = d.dst(kind), d.src(kind), d.src(kind)
    c = d.src(kind) if d.instr.name == "mad24" else None
    shift = 16 if part == "hi" else 0

    def low24(x: Any) -> Any:
        wide = x.astype(np.int64)
        return (wide << 40) >> 40 if kind.is_signed else wide & 0xFFFFFF

    def run(m: Machine, lanes: Lanes) -> None:
        value = (low24(a(m, lanes)) * low24(b(m, lanes)) >> shift).astype(kind.dtype)
        dst(m, lanes, value if c is None else value + c(m, lanes))

    return run


@step("sad")
def _sad(d: Decode) -> Step:
    """Sum of absolute difference."""
    kind = d.type()
    dst, a, b, c = d.dst(kind), d.src(kind), d.src(kind), d.src(kind)

    def run(m: Machine, lanes: Lanes) -> None:
        x, y = a(m, lanes), b(m, lanes)
        dst(m, lanes, c(m, lanes) + np.where(x < y, y - x, x - y))

    return run


@step("dp4a", "dp2a")
def _dot(d: Decode) -> Step:
    """Dot product of four bytes with four bytes, or of two halves with two of four bytes, plus c."""
    two = d.instr.name == "dp2a"
    offset = 2 if two and d.need("lo", "hi") == "hi" else 0
    a_type, b_type = d.type(), d.type()
    word = TYPES["b32"]
    out = TYPES["s32" if a_type.is_signed or b_type.is_signed else "u32"]
    dst, a, b, c = d.dst(out), d.src(word), d.src(word), d.src(out)
    a_dtype = np.dtype(f"{a_type.dtype.kind}{2 if two else 1}")
    b_dtype = np.dtype(f"{b_type.dtype.kind}1")

    def run(m: Machine, lanes: Lanes) -> None:
        x = np.ascontiguousarray(broadcast(a(m, lanes), lanes.n)).view(a_dtype).reshape(lanes.n, -1)
        y = np.ascontiguousarray(broadcast(b(m, lanes), lanes.n)).view(b_dtype).reshape(lanes.n, 4)
        y = y[:, offset : offset + x.shape[1]]
        dot = (x.astype(np.int64) * y.astype(np.int64)).sum(axis=1)
        dst(m, lanes, (dot + c(m, lanes).astype(np.int64)).astype(np.uint32))

    return run
