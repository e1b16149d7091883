"""The arithmetic of a tensor core: one fused dot product and addition per output element.

A tensor core does not add products one by one. It takes ``chunk`` products and the accumulator, aligns them to the
largest exponent among them, cuts each (towards zero) ``fraction_bits`` below it, adds exactly, and rounds once: to
float32 towards zero, or to float16 to nearest even. The exponent of a product is the sum of its factors' exponents,
not that of the normalised product; a subnormal factor has its format's smallest exponent; zero has none. A longer dot
product is a chain of chunks. The widths come from a published bit-exact model of the hardware (MMA-Sim, checked by its
authors up to B200 and RTX Blackwell); they are constants here, so that a measurement can correct one.

Everything is exact: products and aligned terms are integers below 2**53 in units of a power of two, held in float64.
NaN results are canonical, an infinite term gives Inf or NaN as in IEEE, and a rounded sum beyond the format is Inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitfp4.sim import formats
from jitfp4.sim.formats import FloatFormat

Array = NDArray[Any]

# Below every exponent that a nonzero product can have, so that zero never decides the alignment.
_NO_EXPONENT = np.int16(-2000)
_CACHED_TERMS = 32768
"""Products computed at a time: 256 KiB of float64."""
_MIN_EXPONENT = {"f32": -126, "e8m13": -126, "f16": -14}
_E8M13 = FloatFormat(
    name="e8m13", exponent_bits=8, mantissa_bits=13, max_code=(255 << 13) - 1, nan_code=(1 << 21) - 1, has_inf=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DotUnit:
    """How wide a tensor core adds: ``chunk`` products per rounding, ``fraction_bits`` below the largest exponent.

    ``result`` is ``f32`` or ``f16``, or ``e8m13``: a float32 with 13 mantissa bits.
    """

    chunk: int
    fraction_bits: int
    result: str = "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Rows of a matrix: ``values`` float64 ``[..., rows, k]`` and the exponents that align their products."""

    values: Array
    exponents: Array

    @staticmethod
    def of(values: Array, fmt: FloatFormat) -> Operand:
        """From values that ``fmt`` represents."""
        values = np.asarray(values, np.float64)
        return Operand(values=values, exponents=_exponents(values, fmt.min_exponent))

    @staticmethod
    def of_codes(codes: Array, fmt: FloatFormat) -> Operand:
        """From element codes; tf32 codes are float32 bits whose low 13 bits do not count."""
        if fmt is formats.TF32:
            return Operand.of((codes & np.uint32(0xFFFFE000)).view(np.float32), fmt)
        return Operand.of(formats.decode(fmt, codes), fmt)

    def negated(self) -> Operand:
        return Operand(values=-self.values, exponents=self.exponents)

    def scaled(self, powers: Array) -> Operand:
        """Every element times a power of two, ``powers`` ``[..., rows, k]`` (NaN allowed)."""
        finite = np.where(np.isfinite(powers), powers, 1.0).astype(np.float64)
        shift = (np.frexp(finite)[1] - 1).astype(np.int16)
        return Operand(values=self.values * powers, exponents=self.exponents + shift)


def fused_dot_add(a: Operand, b: Operand, c: Array, unit: DotUnit) -> Array:
    """``a @ b.T + c`` as ``unit`` computes it.

    Shapes: a ``[..., m, k]``, b ``[..., n, k]``, c ``[..., m, n]`` float32 values of the accumulator type. Returns
    float32 ``[..., m, n]``, exact values of ``unit.result``.
    """
    for k in range(0, a.values.shape[-1], unit.chunk):
        step = slice(k, k + unit.chunk)
        c = _fused_step(
            Operand(values=a.values[..., step], exponents=a.exponents[..., step]),
            Operand(values=b.values[..., step], exponents=b.exponents[..., step]),
            np.asarray(c, np.float64),
            unit,
        )
    return np.asarray(c, np.float32)


def block_scaled_dot_add(
    a: Array, b: Array, sfa: Array, sfb: Array, c: Array, scale_format: FloatFormat | None
) -> Array:
    """``(a * sfa) @ (b * sfb).T + c`` of kinds mxf4 and mxf4nvf4.

    Each group of 16 products is summed exactly, then multiplied by the significands of its two scales; only the
    exponents of the scales align groups and accumulator, to 35 fractional bits; the result is float32 rounded towards
    zero. Shapes: a ``[..., m, k]`` and b ``[..., n, k]`` E2M1 values; sfa ``[..., m, k/16]``, sfb ``[..., n, k/16]``,
    repeated for blocks of 32; c ``[..., m, n]``. ``scale_format`` is E4M3 (without signs) or None for UE8M0.
    """
    min_exponent = -127 if scale_format is None else scale_format.min_exponent
    (significand_a, exponent_a), (significand_b, exponent_b) = (_significands(x, min_exponent) for x in (sfa, sfb))
    groups_a, groups_b = (_by_group(x, y) for x, y in ((a, significand_a), (b, significand_b)))
    terms = groups_a @ np.swapaxes(groups_b, -1, -2)  # below 2**12 in units of 2**-8 (2**-14 with subnormals): exact
    exponents = exponent_a[..., :, None] + exponent_b[..., None, :]
    np.copyto(exponents, _NO_EXPONENT, where=terms == 0)
    c = np.asarray(c, np.float32)
    finite = np.isfinite(c)
    plain = finite.all() and not (np.isnan(sfa).any() or np.isnan(sfb).any())
    wide = np.asarray(c if plain else np.where(finite, c, 0.0), np.float64)
    top = np.maximum(exponents.max(0), np.maximum(_exponents(wide, -126), np.int16(-126)))
    total = np.trunc(wide * _power(35 - top))
    for term, exponent in zip(terms, exponents, strict=True):
        total += np.trunc(term * _power(exponent + (35 - top)))
    total *= _power(top - 35)
    total += 0.0  # a sum of integers has no -0
    if not plain:
        poisoned = np.isnan(sfa.sum(-1))[..., :, None] | np.isnan(sfb.sum(-1))[..., None, :]
        total = np.where(poisoned, np.nan, np.where(finite, total, c))
    return _rounded(total, "f32")


def _significands(scale: Array, min_exponent: int) -> tuple[Array, Array]:
    """Significands float32 and exponents int16 of scales, blocks of k first; NaN counts as zero."""
    value = np.where(np.isnan(scale), 0.0, scale).astype(np.float64)
    exponent = _exponents(value, min_exponent)
    return np.moveaxis(np.ldexp(value, -exponent), -1, 0).astype(np.float32), np.moveaxis(exponent, -1, 0)


def _by_group(values: Array, significands: Array) -> Array:
    """Groups of 16 elements times their block's significand, groups first: float32 ``[k/16, ..., rows, 16]``."""
    groups = np.moveaxis(values.reshape(*values.shape[:-1], -1, 16), -2, 0)
    return np.asarray(groups.astype(np.float32) * significands[..., None])


def _fused_step(a: Operand, b: Operand, c: Array, unit: DotUnit) -> Array:
    """One chunk: align, cut, add, round."""
    special = [x for x in (a.values, b.values, c) if not np.isfinite(x).all()]
    finite_a, finite_b, finite_c = (np.where(np.isfinite(x), x, 0.0) if special else x for x in (a.values, b.values, c))
    total = _aligned_dot(_by_k(finite_a, finite_b), _by_k(a.exponents, b.exponents), finite_c, unit)
    if special:
        with np.errstate(invalid="ignore"):
            plain = a.values @ np.swapaxes(b.values, -1, -2) + c
        total = np.where(np.isfinite(plain), total, plain)
    return _rounded(total, unit.result)


def _by_k(a: Array, b: Array) -> tuple[Array, Array]:
    """Columns of a and rows of b that meet in an outer product, k first: ``[k, ..., m, 1]``, ``[k, ..., 1, n]``."""
    first, second = np.ascontiguousarray(np.moveaxis(a, -1, 0)), np.ascontiguousarray(np.moveaxis(b, -1, 0))
    return first[..., :, None], second[..., None, :]


def _aligned_dot(values: tuple[Array, Array], exponents: tuple[Array, Array], c: Array, unit: DotUnit) -> Array:
    """Exact sum of the products and ``c``, each cut below the largest exponent; pieces of k that stay in the cache."""
    zero = np.maximum(_exponents(c, _MIN_EXPONENT[unit.result]), _MIN_EXPONENT["f32"])
    step = max(1, _CACHED_TERMS // max(c.size, 1))
    pieces = [slice(k, k + step) for k in range(0, len(values[0]), step)]
    top = zero
    for piece in pieces:
        top = np.maximum(top, np.add(exponents[0][piece], exponents[1][piece]).max(0))
    scale = _power(unit.fraction_bits - top)
    total = np.trunc(c * scale)
    for piece in pieces:
        terms = np.multiply(values[0][piece], values[1][piece])
        terms *= scale
        total += np.trunc(terms, out=terms).sum(0)
    total *= _power(top - unit.fraction_bits)
    total += 0.0  # a sum of integers has no -0
    return np.asarray(total)


def _power(exponent: Array) -> Array:
    """``2.0**exponent`` of int16 exponents up to 1023; from -1022 down the smallest normal number."""
    return np.asarray((np.maximum(exponent, -1022).astype(np.int64) + 1023 << 52).view(np.float64))


def _exponents(values: Array, min_exponent: int) -> Array:
    """int16 exponents of finite values: that of the leading bit, ``min_exponent`` for subnormals, none for zero."""
    bits = np.ascontiguousarray(values, np.float64).view(np.int64)
    exponent = ((bits >> 52 & 0x7FF) - 1023).astype(np.int16)
    np.maximum(exponent, np.int16(min_exponent), out=exponent)
    np.copyto(exponent, _NO_EXPONENT, where=values == 0)
    return exponent


def _rounded(total: Array, result: str) -> Array:
    """float32 values of ``result``: float16 to nearest even, otherwise towards zero with overflow to infinity."""
    if result == "f16":
        return formats.f16_to_f32(formats.f32_to_f16(total))
    with np.errstate(over="ignore", invalid="ignore"):
        near = np.asarray(total, np.float32)
        # a float32 beyond 2**128 is infinite; any other that the nearest one exceeds is the next towards zero
        beyond = (np.abs(near) > np.abs(total)) & (np.abs(total) < 2.0**128)
    bits = near.view(np.uint32) - beyond
    if result == "e8m13":
        bits &= np.uint32(0xFFFFFC00)
    np.copyto(bits, formats.F32_NAN, where=np.isnan(total))
    return np.asarray(bits.astype(np.uint32, copy=False).view(np.float32))
