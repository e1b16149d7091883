"""f16, bf16 and their packed pairs, and the mixed forms that widen a half to f32."""

from __future__ import annotations

from typing import Any

import numpy as np

from jitfp4.sim import rounding as exact
from jitfp4.sim.decode import Decode, Source, Step, broadcast
from jitfp4.sim.formats import BF16, F16, bf16_to_f32, encode, f16_to_f32
from jitfp4.sim.ops.floating import ARITY, ROUNDINGS, extremum, finish, flushed, function
from jitfp4.sim.ptx import TYPES, Array, Type

_MAGNITUDE = np.uint16(0x7FFF)  # all but the sign; also the canonical NaN


def widen(kind: str, bits: Array) -> Array:
    """float32 values of f16 or bf16 bits."""
    return bf16_to_f32(bits) if kind.startswith("bf16") else f16_to_f32(bits)


def narrow(kind: str, x: Array) -> Array:
    """f16 or bf16 bits of float64 values, to nearest even."""
    return encode(BF16 if kind.startswith("bf16") else F16, x)


def halves(value: Any, n: int) -> Array:
    """The 16-bit elements of ``n`` registers, neighbours for packed types."""
    return np.ascontiguousarray(broadcast(value, n)).view(np.uint16)


def build(d: Decode, op: str, kind: Type) -> Step:
    """add, sub, mul, fma, abs, neg, min, max on f16, bf16, f16x2, bf16x2."""
    ftz, sat, relu = d.flag("ftz"), d.flag("sat"), d.flag("relu")
    d.take("rn")  # the only rounding that halves have
    if op in ("abs", "neg"):
        return _sign_bit(d, op, kind, ftz)
    xorsign = d.flag("xorsign")
    if op in ("min", "max"):
        fn = _extremum(d, op, xorsign)
        arity = len(d.operands) - 1
    else:
        fn, arity = _WIDE["fma" if op == "mad" else op], ARITY[op]
    raw = TYPES[f"b{kind.bits}"]
    dst, srcs = d.dst(raw), [d.src(raw) for _ in range(arity)]
    name = kind.name

    def run(m: Any, lanes: Any) -> None:
        given = [halves(s(m, lanes), lanes.n) for s in srcs]
        wide = [widen(name, bits) for bits in given]
        if ftz:
            wide = [flush_half(name, x) for x in wide]
        out = fn(*wide)
        if sat:
            out = exact.saturate(out)
        if relu:
            out = np.where(out > 0, out, np.where(out != out, out, 0.0))
        bits = narrow(name, out)
        if xorsign:  # of the operands as they are: widening forgets the sign of a NaN
            bits = np.where(out != out, bits, bits & _MAGNITUDE | (given[0] ^ given[1]) & ~_MAGNITUDE)
        dst(m, lanes, (flush_bits(name, bits) if ftz else bits).view(raw.dtype))

    return run


_WIDE = {
    "add": lambda a, b: exact.sum_odd(a.astype(np.float64), b.astype(np.float64)),
    "sub": lambda a, b: exact.sum_odd(a.astype(np.float64), -b.astype(np.float64)),
    "mul": lambda a, b: a.astype(np.float64) * b.astype(np.float64),
    "fma": exact.fma_odd,
}


def flush_half(kind: str, x: Array) -> Array:
    """Zero float32 values that are subnormal in f16; bf16 shares float32's range."""
    if kind.startswith("bf16"):
        return exact.flush_f32(x)
    return np.where(np.abs(x) < np.float32(2.0**-14), np.copysign(np.float32(0), x), x)


def flush_bits(kind: str, bits: Array) -> Array:
    return np.where(bits & _exponent(kind) == 0, bits & ~_MAGNITUDE, bits)


def _exponent(kind: str) -> np.uint16:
    """The exponent field, which is also infinity."""
    return np.uint16(0x7F80 if kind.startswith("bf16") else 0x7C00)


def _sign_bit(d: Decode, op: str, kind: Type, ftz: bool) -> Step:
    """The sign bit alone, except that NaN becomes canonical."""
    raw, name = TYPES[f"b{kind.bits}"], kind.name
    dst, read = d.dst(raw), d.src(raw)
    infinity = _exponent(name)

    def run(m: Any, lanes: Any) -> None:
        bits = halves(read(m, lanes), lanes.n)
        out = bits & _MAGNITUDE if op == "abs" else bits ^ ~_MAGNITUDE
        out = flush_bits(name, out) if ftz else out
        dst(m, lanes, np.where(bits & _MAGNITUDE > infinity, _MAGNITUDE, out).view(raw.dtype))

    return run


def _extremum(d: Decode, op: str, xorsign: bool) -> Any:
    nan = d.flag("NaN")
    if xorsign and not d.flag("abs"):
        raise d.error("expected .xorsign.abs")
    pair = extremum(op, nan, xorsign)
    return lambda a, b, *c: pair(pair(a, b), c[0]) if c else pair(a, b)


def build_mixed(d: Decode, op: str, half: Type) -> Step:
    """``add.f32.bf16 d, a, c`` and ``fma.f32.f16 d, a, b, c``: the half operands are widened, c and d are f32."""
    f32, raw = TYPES["f32"], TYPES["b16"]
    ftz, sat = d.flag("ftz"), d.flag("sat")
    rounding = d.take(*ROUNDINGS) or "rn"
    dst = d.dst(f32)

    def wide() -> Source:
        read = d.src(raw)
        return lambda m, lanes: widen(half.name, np.asarray(read(m, lanes)))

    reads = [wide() for _ in range(ARITY[op] - 1)]
    reads.append(d.src(f32))
    reads = [flushed(r) for r in reads] if ftz else reads
    return finish(d, f32, function(op, rounding, f32), (dst, reads), ftz=ftz, sat=sat)
