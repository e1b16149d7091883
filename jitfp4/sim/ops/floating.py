"""f32, f64 and f32x2 arithmetic. Results are rounded once; f32 NaN results are canonical, f64 hands NaN operands on.

``add``, ``sub`` and ``mul`` without a rounding modifier round to nearest and are never contracted to ``fma``: ptxas may
do that, unless the module was compiled with ``-fmad=false``, which writes ``.rn``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jitfp4.sim import rounding as exact
from jitfp4.sim.decode import Decode, Source, Step, broadcast, step
from jitfp4.sim.ptx import TYPES, Array, Type

ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "sqrt": 1, "rcp": 1}
ROUNDINGS = ("rn", "rz", "rm", "rp")

Function = Callable[..., Array]

_NEAREST: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": lambda a: a.dtype.type(1) / a,
    "sqrt": np.sqrt,
}


def function(op: str, rounding: str, kind: Type) -> Function:
    """A correctly rounded operation on arrays of ``kind``'s dtype; a directed rounding only of float32."""
    if rounding == "rn":
        if op == "fma":
            return exact.fma_f64 if kind.name == "f64" else exact.fma_f32
        return _NEAREST[op]

    def directed(*args: Array) -> Array:
        a, b, c = (*args, args[0], args[0])[:3]
        return exact.directed_f32(op, rounding, a, b, c)

    return directed


def build(d: Decode, op: str, kind: Type) -> Step:
    """add, sub, mul, fma, mad, div, sqrt, rcp, abs, neg, min, max."""
    if op in ("abs", "neg"):
        return _sign_bit(d, op, kind)
    if op in ("min", "max"):
        return _extremum(d, op, kind)
    ftz, sat = d.flag("ftz"), d.flag("sat")
    rounding = d.take(*ROUNDINGS)
    if rounding is None:
        if op in ("div", "sqrt", "rcp", "fma"):
            raise d.error(f"{op} without a rounding is not in the manual")
        rounding = "rn"
    op = "fma" if op == "mad" else op
    if kind.name == "f64" and rounding != "rn":
        raise d.error("directed rounding of f64 is not modelled")
    if kind.name == "f32x2":
        return _packed(d, function(op, rounding, TYPES["f32"]), ARITY[op], ftz)
    return finish(d, kind, function(op, rounding, kind), sources(d, kind, ARITY[op], ftz), ftz=ftz, sat=sat)


def sources(d: Decode, kind: Type, count: int, ftz: bool) -> tuple[Any, list[Source]]:
    """Destination and sources in operand order; ``.ftz`` flushes what is read."""
    dst = d.dst(kind)
    return dst, [flushed(d.src(kind)) if ftz else d.src(kind) for _ in range(count)]


def flushed(read: Source) -> Source:
    return lambda m, lanes: exact.flush_f32(read(m, lanes))


def finish(
    d: Decode, kind: Type, fn: Function, operands: tuple[Any, list[Source]], *, ftz: bool = False, sat: bool = False
) -> Step:
    """A step that applies ``fn`` and then flushes, clamps and canonicalises."""
    del d, kind
    dst, srcs = operands

    def run(m: Any, lanes: Any) -> None:
        values = [s(m, lanes) for s in srcs]
        value = exact.canonical(np.asarray(fn(*values)), values)
        if ftz:
            value = exact.flush_f32(value)
        if sat:
            value = exact.saturate(value)
        dst(m, lanes, value)

    return run


def _sign_bit(d: Decode, op: str, kind: Type) -> Step:
    """abs and neg touch the sign bit alone, but a NaN is a NaN result as of any arithmetic."""
    ftz = d.flag("ftz")
    raw = TYPES[f"u{kind.bits}"]
    sign = raw.dtype.type(1 << (kind.bits - 1))
    dst, read = d.dst(kind), d.src(kind)
    read = flushed(read) if ftz else read
    mask = ~sign

    def run(m: Any, lanes: Any) -> None:
        x = np.asarray(read(m, lanes))
        bits = x.view(raw.dtype)
        dst(m, lanes, exact.canonical((bits & mask if op == "abs" else bits ^ sign).view(x.dtype), [x]))

    return run


def extremum(op: str, nan: bool, xorsign: bool) -> Function:
    """min or max by PTX's rules: -0 < +0, NaN loses unless ``.NaN``, ``.xorsign.abs`` compares magnitudes."""
    pick = np.minimum if op == "min" else np.maximum

    def run(a: Array, b: Array) -> Array:
        raw = np.dtype(f"u{a.dtype.itemsize}")
        sign = raw.type(1 << (8 * raw.itemsize - 1))
        flip = (a.view(raw) ^ b.view(raw)) & sign
        if xorsign:
            a, b = np.abs(a), np.abs(b)
        out = np.where(a != a, b, np.where(b != b, a, pick(a, b)))
        zeros = (a.view(raw) | b.view(raw)) if op == "min" else (a.view(raw) & b.view(raw))
        out = np.where(a == b, zeros.view(a.dtype), out)
        if xorsign:
            out = (out.view(raw) | flip).view(a.dtype)
        if nan:
            out = np.where((a != a) | (b != b), a.dtype.type(np.nan), out)
        return out

    return run


def _extremum(d: Decode, op: str, kind: Type) -> Step:
    ftz, nan, xorsign = d.flag("ftz"), d.flag("NaN"), d.flag("xorsign")
    if xorsign and not d.flag("abs"):
        raise d.error("expected .xorsign.abs")
    magnitude = not xorsign and d.flag("abs")
    pair = extremum(op, nan, xorsign)
    three = len(d.operands) == 4

    def fn(a: Any, b: Any, *c: Any) -> Array:
        terms = np.broadcast_arrays(a, b, *c)
        if magnitude:
            terms = tuple(np.abs(t) for t in terms)
        out = pair(np.ascontiguousarray(terms[0]), np.ascontiguousarray(terms[1]))
        return pair(out, np.ascontiguousarray(terms[2])) if three else out

    return finish(d, kind, fn, sources(d, kind, 3 if three else 2, ftz), ftz=ftz)


def _packed(d: Decode, fn: Function, arity: int, ftz: bool) -> Step:
    """f32x2: two independent float32 lanes in a 64-bit register."""
    kind = TYPES["b64"]
    dst, srcs = d.dst(kind), [d.src(kind) for _ in range(arity)]

    def run(m: Any, lanes: Any) -> None:
        values = [np.ascontiguousarray(broadcast(s(m, lanes), lanes.n)).view(np.float32) for s in srcs]
        if ftz:
            values = [exact.flush_f32(v) for v in values]
        out = exact.canonical(fn(*values))
        dst(m, lanes, (exact.flush_f32(out) if ftz else out).view(np.uint64))

    return run


@step("copysign")
def _copysign(d: Decode) -> Step:
    """The magnitude of b with the sign of a."""
    kind = d.type()
    raw = TYPES[f"u{kind.bits}"]
    sign = raw.dtype.type(1 << (kind.bits - 1))
    dst, a, b = d.dst(raw), d.src(raw), d.src(raw)
    return lambda m, lanes: dst(m, lanes, (a(m, lanes) & sign) | (b(m, lanes) & ~sign))
