"""Bit-exact conversions between the floating-point formats of PTX ``cvt``.

Arrays in, arrays out, any shape. ``f32_to_<format>`` takes float32 values and returns the bits in the narrowest
unsigned dtype; ``<format>_to_f32`` takes such bits and returns float32. A packed conversion such as
``cvt.rn.satfinite.e4m3x2.f32`` is one call per half, packed by the caller; ``cvt.rn.f16x2.e4m3x2`` is ``e4m3_to_f32``
followed by ``f32_to_f16``, which is exact. ``.ftz`` and integer rounding belong to the caller.

Rounding is named as in PTX: ``rn`` nearest even, ``rna`` nearest with ties away from zero, ``rz``, ``rm``, ``rp``.
NaN becomes the destination's canonical NaN (positive), or its largest value where there is no NaN. ``relu`` turns
every input with a set sign, -0 included, into +0, and leaves NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitfp4.errors import SimError

Array = NDArray[Any]

F32_NAN = 0x7FFFFFFF
F16_NAN = BF16_NAN = 0x7FFF
F8_NAN = 0x7F
UE8M0_NAN = 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """A signed format with IEEE biased exponents and subnormals.

    ``max_code`` is the largest finite magnitude, ``nan_code`` what NaN becomes, ``has_inf`` whether the code after
    ``max_code`` is infinity.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max_code: int
    nan_code: int
    has_inf: bool

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number and of every subnormal."""
        return 1 - self.bias

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        return np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32


def _ieee(name: str, exponent_bits: int, mantissa_bits: int, nan_code: int) -> FloatFormat:
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    return FloatFormat(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        max_code=infinity - 1,
        nan_code=nan_code,
        has_inf=True,
    )


def _finite(name: str, exponent_bits: int, mantissa_bits: int) -> FloatFormat:
    """A format without Inf and NaN: every code is a number, and NaN converts to the largest."""
    top = (1 << (exponent_bits + mantissa_bits)) - 1
    return FloatFormat(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        max_code=top,
        nan_code=top,
        has_inf=False,
    )


F32 = _ieee("f32", 8, 23, F32_NAN)
TF32 = _ieee("tf32", 8, 10, F32_NAN >> 13)
BF16 = _ieee("bf16", 8, 7, BF16_NAN)
F16 = _ieee("f16", 5, 10, F16_NAN)
E5M2 = _ieee("e5m2", 5, 2, F8_NAN)
E4M3 = FloatFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, max_code=0x7E, nan_code=F8_NAN, has_inf=False)
E3M2 = _finite("e3m2", 3, 2)
E2M3 = _finite("e2m3", 2, 3)
E2M1 = _finite("e2m1", 2, 1)


def encode(fmt: FloatFormat, x: Array, rounding: str = "rn", *, satfinite: bool = False, relu: bool = False) -> Array:
    """Codes of float64-representable values ``x``, rounded once.

    The significand in units of its last place is exact in float64; adding the exponent field to the rounded integer
    lets a carry out of the mantissa become the next exponent.
    """
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        x = np.asarray(x, np.float64)
    negative = np.signbit(x)
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)
    exponent = np.frexp(np.maximum(finite, 2.0**fmt.min_exponent))[1] - 1
    steps = np.ldexp(finite, fmt.mantissa_bits - exponent)
    code = _rounded(steps, negative, rounding) + ((exponent - fmt.min_exponent).astype(np.int64) << fmt.mantissa_bits)
    over = code > fmt.max_code
    if satfinite:
        code = np.where(over | np.isinf(x), fmt.max_code, code)
    elif not fmt.has_inf:
        raise SimError(f"conversion to {fmt.name} without .satfinite: the format has no infinity")
    else:
        limited = over & _rounds_down(negative, rounding)
        code = np.where(over | np.isinf(x), fmt.max_code + 1 - limited, code)
    code = np.where(negative, 0 if relu else code | (1 << (fmt.bits - 1)), code)
    return np.where(np.isnan(x), fmt.nan_code, code).astype(fmt.dtype)


def decode(fmt: FloatFormat, code: Array) -> Array:
    """float32 values of ``code``; NaN codes give the canonical float32 NaN. The format is at most 16 bits wide."""
    return np.asarray(_values(fmt)[code])


@cache
def _values(fmt: FloatFormat) -> Array:
    """The value of every code."""
    code = np.arange(1 << fmt.bits)
    magnitude = code & ((1 << (fmt.bits - 1)) - 1)
    finite = np.where(magnitude > fmt.max_code, 0, magnitude)
    field = finite >> fmt.mantissa_bits
    fraction = finite & ((1 << fmt.mantissa_bits) - 1)
    significand = np.where(field > 0, fraction | (1 << fmt.mantissa_bits), fraction)
    value = np.ldexp(significand.astype(np.float32), np.maximum(field, 1) - fmt.bias - fmt.mantissa_bits)
    if fmt.has_inf:
        value = np.where(magnitude == fmt.max_code + 1, np.float32(np.inf), value)
    value = np.where(code >> (fmt.bits - 1), -value, value).view(np.uint32)
    is_nan = magnitude > fmt.max_code + fmt.has_inf
    return np.where(is_nan, np.uint32(F32_NAN), value).view(np.float32)


def _rounded(steps: Array, negative: Array, rounding: str) -> Array:
    """Magnitudes ``steps`` rounded to integers; directed modes look at the sign."""
    match rounding:
        case "rn":
            rounded = np.rint(steps)
        case "rna":
            whole = np.floor(steps)
            rounded = whole + (steps - whole >= 0.5)
        case "rz":
            rounded = np.floor(steps)
        case "rm":
            rounded = np.where(negative, np.ceil(steps), np.floor(steps))
        case "rp":
            rounded = np.where(negative, np.floor(steps), np.ceil(steps))
        case _:
            raise SimError(f"rounding .{rounding} is not one of rn, rna, rz, rm, rp")
    return rounded.astype(np.int64)


def _rounds_down(negative: Array, rounding: str) -> Array:
    """Where the magnitude is rounded towards zero, so that overflow stops at the largest finite value."""
    match rounding:
        case "rz":
            return np.ones_like(negative)
        case "rm":
            return ~negative
        case "rp":
            return negative
        case _:
            return np.zeros_like(negative)


def f32_to_e4m3(x: Array, *, relu: bool = False) -> Array:
    """uint8 codes, to nearest even, saturating at 448; NaN is 0x7F."""
    return encode(E4M3, x, satfinite=True, relu=relu)


def f32_to_e5m2(x: Array, *, relu: bool = False) -> Array:
    """uint8 codes, to nearest even, saturating at 57344, Inf too; NaN is 0x7F."""
    return encode(E5M2, x, satfinite=True, relu=relu)


def f32_to_e3m2(x: Array, *, relu: bool = False) -> Array:
    """uint8 codes below 64, to nearest even, saturating at 28; NaN is +28."""
    return encode(E3M2, x, satfinite=True, relu=relu)


def f32_to_e2m3(x: Array, *, relu: bool = False) -> Array:
    """uint8 codes below 64, to nearest even, saturating at 7.5; NaN is +7.5."""
    return encode(E2M3, x, satfinite=True, relu=relu)


def f32_to_e2m1(x: Array, *, relu: bool = False) -> Array:
    """uint8 codes below 16, to nearest even, saturating at 6; NaN is +6 (code 7)."""
    return encode(E2M1, x, satfinite=True, relu=relu)


def f32_to_f16(x: Array, rounding: str = "rn", *, relu: bool = False, satfinite: bool = False) -> Array:
    """uint16 bits; NaN is 0x7FFF. Takes float64 as well: either way there is one rounding."""
    return encode(F16, x, rounding, satfinite=satfinite, relu=relu)


def f32_to_bf16(x: Array, rounding: str = "rn", *, relu: bool = False, satfinite: bool = False) -> Array:
    """uint16 bits; NaN is 0x7FFF. Takes float64 as well: either way there is one rounding."""
    return encode(BF16, x, rounding, satfinite=satfinite, relu=relu)


def f32_to_tf32(x: Array, rounding: str = "rna", *, relu: bool = False, satfinite: bool = False) -> Array:
    """uint32 register bits whose low 13 bits are zero, of float32 NaN as well: its own with rna, else canonical
    ones.
    """
    bits = encode(TF32, x, rounding, satfinite=satfinite, relu=relu) << np.uint32(13)
    nan = np.ascontiguousarray(x, np.float32).view(np.uint32) if rounding == "rna" else np.uint32(F32_NAN)
    return np.where(np.isnan(x), nan & np.uint32(0xFFFFE000), bits)


def f64_to_f32(x: Array, rounding: str = "rn") -> Array:
    """float32 values of float64 ``x``; NaN is canonical."""
    return encode(F32, x, rounding).view(np.float32)


def f32_to_ue8m0(x: Array, rounding: str = "rp", *, satfinite: bool = True) -> Array:
    """uint8 exponents of ``abs(x)``; code ``b`` is ``2**(b - 127)``.

    ``rp`` rounds the magnitude up, ``rz`` down; magnitudes below ``2**-127``, zero too, give code 0. Overflow gives
    254 with ``satfinite`` and 255 without; NaN gives 255.
    """
    magnitude = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    code = magnitude >> np.uint32(23)
    if rounding == "rp":
        code = code + ((magnitude & 0x7FFFFF != 0) & (magnitude > 0x00400000))
    elif rounding != "rz":
        raise SimError(f"rounding .{rounding} to ue8m0 is not one of rp, rz")
    code = np.minimum(code, 254 if satfinite else 255)
    return np.where(magnitude > 0x7F800000, UE8M0_NAN, code).astype(np.uint8)


def e4m3_to_f32(b: Array) -> Array:
    """float32 values of uint8 codes."""
    return decode(E4M3, b)


def e5m2_to_f32(b: Array) -> Array:
    """float32 values of uint8 codes."""
    return decode(E5M2, b)


def e3m2_to_f32(code: Array) -> Array:
    """float32 values of codes below 64."""
    return decode(E3M2, code)


def e2m3_to_f32(code: Array) -> Array:
    """float32 values of codes below 64."""
    return decode(E2M3, code)


def e2m1_to_f32(code: Array) -> Array:
    """float32 values of codes below 16."""
    return decode(E2M1, code)


def f16_to_f32(h: Array) -> Array:
    """float32 values of uint16 bits; every NaN becomes the canonical one, as float32 has no NaN payloads in PTX."""
    return decode(F16, h)


def bf16_to_f32(h: Array) -> Array:
    """float32 values of uint16 bits: a shift, which keeps NaN bits."""
    return (np.asarray(h).astype(np.uint32) << np.uint32(16)).view(np.float32)


def ue8m0_to_f32(b: Array) -> Array:
    """float32 values of uint8 exponents; code 0 is the subnormal ``2**-127``, 255 NaN."""
    b = np.asarray(b).astype(np.uint32)
    power = np.where(b > 0, b << np.uint32(23), np.uint32(0x00400000))
    return np.where(b == UE8M0_NAN, np.uint32(F32_NAN), power).view(np.float32)


def unpack_e2m1x2(packed: Array) -> Array:
    """Codes ``[..., 2 n]`` of bytes ``[..., n]``: the low nibble is the even element."""
    packed = np.asarray(packed, np.uint8)
    return np.stack((packed & 0xF, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)
