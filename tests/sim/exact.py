"""Rational arithmetic rounded once: the definition that float instructions are tested against."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import inf


@dataclass(frozen=True)
class Format:
    """A binary float: bits of the significand with the leading one, smallest normal and largest exponent."""

    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def largest(self) -> Fraction:
        return Fraction(2) ** (self.max_exponent + 1) - Fraction(2) ** (self.max_exponent + 1 - self.precision)


F32 = Format(24, -126, 127)
F16 = Format(11, -14, 15)
BF16 = Format(8, -126, 127)


def exponent_of(x: Fraction) -> int:
    """The power of two at or below ``x`` > 0."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def rounded(x: Fraction, mode: str, fmt: Format) -> float:
    """``x`` in ``fmt`` under rn, rz, rm or rp."""
    if x == 0:
        return 0.0
    sign, magnitude = (-1, -x) if x < 0 else (1, x)
    ulp = Fraction(2) ** (max(exponent_of(magnitude), fmt.min_exponent) - fmt.precision + 1)
    steps = magnitude / ulp
    down = steps.numerator // steps.denominator
    rest = steps - down
    away = {"rz": False, "rm": sign < 0, "rp": sign > 0}.get(mode)
    if away is None:
        away = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1)
    elif rest == 0:
        away = False
    value = (down + away) * ulp
    if value > fmt.largest:
        return sign * (inf if mode == "rn" or mode == ("rp" if sign > 0 else "rm") else float(fmt.largest))
    return sign * float(value) if value else sign * 0.0
