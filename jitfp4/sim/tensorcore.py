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
_NO_EXPONENT = -2000
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
    factors = []
    for scale in (sfa, sfb):
        value = np.where(np.isnan(scale), 0.0, scale).astype(np.float64)
        exponent = _exponents(value, min_exponent)
        factors.append((np.moveaxis(np.ldexp(value, -exponent), -1, 0), np.moveaxis(exponent, -1, 0)))
    (significand_a, exponent_a), (significand_b, exponent_b) = factors
    groups_a, groups_b = (np.moveaxis(x.reshape(*x.shape[:-1], -1, 16), -2, 0).astype(np.float64) for x in (a, b))
    sums = groups_a @ np.swapaxes(groups_b, -1, -2)
    terms = sums * (significand_a[..., :, None] * significand_b[..., None, :])
    exponents = np.where(terms == 0, _NO_EXPONENT, exponent_a[..., :, None] + exponent_b[..., None, :])
    finite = np.where(np.isfinite(c), c, 0.0).astype(np.float64)
    aligned = _aligned_sum(terms, exponents, finite, 35, "f32")
    poisoned = np.isnan(sfa.sum(-1))[..., :, None] | np.isnan(sfb.sum(-1))[..., None, :]
    return _rounded(np.where(poisoned, np.nan, np.where(np.isfinite(c), aligned, c)), "f32")


def _fused_step(a: Operand, b: Operand, c: Array, unit: DotUnit) -> Array:
    """One chunk: align, cut, add, round."""
    special = [x for x in (a.values, b.values, c) if not np.isfinite(x).all()]
    finite_a, finite_b, finite_c = (np.where(np.isfinite(x), x, 0.0) if special else x for x in (a.values, b.values, c))
    terms = _outer(np.multiply, finite_a, finite_b)
    exponents = _outer(np.add, a.exponents, b.exponents)
    total = _aligned_sum(terms, exponents, finite_c, unit.fraction_bits, unit.result, scaled_terms=False)
    if special:
        with np.errstate(invalid="ignore"):
            plain = a.values @ np.swapaxes(b.values, -1, -2) + c
        total = np.where(np.isfinite(plain), total, plain)
    return _rounded(total, unit.result)


def _outer(function: np.ufunc, a: Array, b: Array) -> Array:
    """``function`` of every row of a and row of b, with k first: ``[k, ..., m, n]``."""
    return np.asarray(function(np.moveaxis(a, -1, 0)[..., :, None], np.moveaxis(b, -1, 0)[..., None, :]))


def _aligned_sum(
    terms: Array, exponents: Array, c: Array, fraction_bits: int, result: str, *, scaled_terms: bool = True
) -> Array:
    """Exact sum over the first axis of ``terms`` and ``c``, each cut ``fraction_bits`` below the largest exponent.

    With ``scaled_terms`` a term still lacks its ``2**exponent``; otherwise it is the full product.
    """
    top = np.maximum(exponents.max(0), _exponents(c, _MIN_EXPONENT[result], zero=_MIN_EXPONENT["f32"]))
    unit = np.ldexp(1.0, fraction_bits - top)
    shift = np.ldexp(1.0, exponents + (fraction_bits - top)) if scaled_terms else unit
    total: Array = np.trunc(terms * shift).sum(0) + np.trunc(c * unit)
    return np.asarray(total * np.ldexp(1.0, top - fraction_bits) + 0.0)  # a sum of integers has no -0


def _exponents(values: Array, min_exponent: int, zero: int = _NO_EXPONENT) -> Array:
    """Exponents of finite values: that of the leading bit, ``min_exponent`` for subnormals, ``zero`` for zero."""
    exponent = np.maximum(np.frexp(values)[1] - 1, min_exponent)
    return np.where(values == 0, zero, exponent).astype(np.int16)


def _rounded(total: Array, result: str) -> Array:
    """float32 values of ``result``: float16 to nearest even, otherwise towards zero with overflow to infinity."""
    if result == "f16":
        return formats.f16_to_f32(formats.f32_to_f16(total))
    with np.errstate(invalid="ignore"):
        total = np.where(np.abs(total) >= 2.0**128, np.copysign(np.inf, total), total)
    bits = formats.encode(formats.F32 if result == "f32" else _E8M13, total, "rz")
    if result == "e8m13":
        bits = np.where(np.isnan(total), formats.F32_NAN, bits << np.uint32(10)).astype(np.uint32)
    return np.asarray(bits.view(np.float32))
