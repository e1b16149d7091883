"""Arithmetic with exactly one rounding.

An operation on floats of up to 24 significant bits is carried out in float64. Where float64 itself has to round, it
rounds to odd: the last bit of an inexact result is set, so that the final rounding to the narrow format, in any
direction, sees on which side of a tie the exact value lies (Boldo and Melquiond, "Emulation of a FMA and correctly
rounded sums").
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import copysign, inf, isfinite
from typing import Any

import numpy as np

from jitfp4.sim.formats import F32, encode
from jitfp4.sim.ptx import Array

F32_NAN = np.uint32(0x7FFFFFFF)
F64_NAN = np.uint64(0xFFF8000000000000)
F64_QUIET = np.uint64(1 << 51)


def to_odd(rounded: Array, error: Array) -> Array:
    """float64 results rounded to odd, from nearest-rounded results and their errors (exact minus rounded)."""
    bits = np.ascontiguousarray(rounded).view(np.int64)
    fix = (error != 0) & (bits & 1 == 0) & np.isfinite(error) & (rounded != 0)
    if not fix.any():
        return rounded
    away = (error > 0) == (rounded > 0)
    out: Array = (bits + np.where(fix, np.where(away, 1, -1), 0)).view(np.float64)
    return out


def sum_odd(a: Array, b: Array) -> Array:
    """float64 ``a + b`` rounded to odd."""
    total = a + b
    part = total - a
    return to_odd(total, (a - (total - part)) + (b - part))


def fma_odd(a: Any, b: Any, c: Any) -> Array:
    """``a * b + c`` of narrow floats as float64, rounded to odd. The product of two 24-bit significands is exact."""
    return sum_odd(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))


def fma_f32(a: Any, b: Any, c: Any) -> Array:
    """float32 ``a * b + c`` with one rounding to nearest even."""
    return fma_odd(a, b, c).astype(np.float32)


def _product_error(x: Array, y: Array) -> tuple[Array, Array]:
    """float64 ``x * y`` and what it lacks of the exact product (Veltkamp and Dekker)."""
    product = x * y
    (xh, xl), (yh, yl) = _halves(x), _halves(y)
    return product, ((xh * yh - product) + xh * yl + xl * yh) + xl * yl


def _halves(x: Array) -> tuple[Array, Array]:
    """``x`` as a sum of two values of at most 26 significant bits."""
    scaled = 134217729.0 * x
    high = scaled - (scaled - x)
    return high, x - high


def quotient_odd(a: Array, b: Array) -> Array:
    """float64 ``a / b`` of float32 values, rounded to odd."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    quotient = x / y
    product, error = _product_error(quotient, y)
    return to_odd(quotient, ((x - product) - error) * np.sign(y))


def root_odd(a: Array) -> Array:
    """float64 square root of float32 values, rounded to odd."""
    x = a.astype(np.float64)
    root = np.sqrt(x)
    square, error = _product_error(root, root)
    return to_odd(root, (x - square) - error)


def directed_f32(op: str, rounding: str, a: Array, b: Array, c: Array) -> Array:
    """float32 ``op`` rounded toward zero (rz), down (rm) or up (rp)."""
    match op:
        case "add" | "sub" | "mul" | "fma":
            one, zero = np.float64(1), np.float64(-0.0)
            terms = {"add": (a, one, b), "sub": (a, one, -b), "mul": (a, b, zero), "fma": (a, b, c)}
            x, y, z = (np.asarray(t) for t in terms[op])
            wide = fma_odd(x, y, z) if op != "mul" else a.astype(np.float64) * b.astype(np.float64)
            if op != "mul" and rounding == "rm":
                wide = _negative_zero_sums(wide, x, y, z)
        case "div":
            wide = quotient_odd(a, b)
        case "rcp":
            wide = quotient_odd(np.ones_like(a), a)
        case "sqrt":
            wide = root_odd(a)
        case _:
            raise AssertionError(op)
    return encode(F32, wide, rounding).view(np.float32)


def _negative_zero_sums(total: Array, a: Array, b: Array, c: Array) -> Array:
    """Rounding down, an exact cancellation gives -0 instead of +0."""
    product = a.astype(np.float64) * b.astype(np.float64)
    cancels = (total == 0) & ~((product == 0) & (c == 0) & ~np.signbit(product) & ~np.signbit(c))
    return np.where(cancels, -0.0, total)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """float64 ``a * b + c`` with one rounding, one element at a time in rational arithmetic."""
    return np.array([_fma_one(*map(float, t)) for t in zip(*np.broadcast_arrays(a, b, c), strict=True)], np.float64)


def _fma_one(a: float, b: float, c: float) -> float:
    if isfinite(a) and isfinite(b) and not isfinite(c):
        return c
    if not (isfinite(a) and isfinite(b)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        product = copysign(0.0, a) * copysign(1.0, b) if a == 0 or b == 0 else -c
        return product + c
    try:
        return float(exact)
    except OverflowError:
        return inf if exact > 0 else -inf


def flush_f32(x: Any) -> Array:
    """``.ftz``: subnormals become zeros of the same sign."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return np.where(bits & 0x7F800000 == 0, bits & np.uint32(0x80000000), bits).view(np.float32)


def canonical(x: Array, operands: Sequence[Any] = ()) -> Array:
    """NaN results as the GPU writes them: one pattern for float32; for float64 the first NaN operand, made quiet."""
    bad = x != x
    if not bad.any():
        return x
    if x.dtype == np.float32:
        return np.asarray(np.where(bad, F32_NAN, x.view(np.uint32)).view(np.float32))
    nan = np.full(x.shape, F64_NAN)
    for operand in reversed(operands):
        nan = np.where(operand != operand, np.asarray(operand).view(np.uint64) | F64_QUIET, nan)
    return np.asarray(np.where(bad, nan, x.view(np.uint64)).view(np.float64))


def saturate(x: Array) -> Array:
    """``.sat``: clamp to [0, 1]; NaN becomes +0."""
    return np.asarray(np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0)))
