"""The fused dot product against exact rational arithmetic, one output element at a time."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from jitfp4.sim import formats
from jitfp4.sim.tensorcore import DotUnit, Operand, block_scaled_dot_add, fused_dot_add

RNG = np.random.default_rng(5)


def exponent_of(value: float, smallest: int) -> int:
    return max(math.frexp(value)[1] - 1, smallest)


def cut(value: Fraction, lsb: int) -> Fraction:
    """Towards zero to a multiple of ``2**lsb``."""
    unit = Fraction(2) ** lsb
    return math.trunc(value / unit) * unit


def scalar_chain(a: np.ndarray, b: np.ndarray, c: float, smallest: int, unit: DotUnit) -> float:
    """One element of ``fused_dot_add`` for finite inputs, in fractions."""
    mantissa = {"f32": 23, "e8m13": 13}[unit.result]
    for k in range(0, len(a), unit.chunk):
        pairs = [(float(x), float(y)) for x, y in zip(a[k : k + unit.chunk], b[k : k + unit.chunk], strict=True)]
        terms = [
            (Fraction(x) * Fraction(y), exponent_of(x, smallest) + exponent_of(y, smallest)) for x, y in pairs if x * y
        ]
        terms.append((Fraction(c), exponent_of(c, -126) if c else -126))
        top = max(e for _, e in terms)
        total = sum((cut(v, top - unit.fraction_bits) for v, _ in terms), Fraction(0))
        magnitude = abs(total)
        if magnitude:
            exponent = math.frexp(float(magnitude))[1] - 1
            if Fraction(2) ** exponent > magnitude:  # float() rounded up to a power of two
                exponent -= 1
            total = cut(total, max(exponent, -126) - mantissa)
        c = float(total)
    return c


def values(shape: tuple[int, ...], fmt: formats.FloatFormat, spread: float = 6.0) -> np.ndarray:
    x = RNG.standard_normal(shape) * 2.0 ** RNG.uniform(-spread, spread, shape)
    x[RNG.random(shape) < 0.1] = 0.0
    return formats.decode(fmt, formats.encode(fmt, x, satfinite=True)).astype(np.float64)


@pytest.mark.parametrize(
    ("fmt", "unit"),
    [
        (formats.BF16, DotUnit(chunk=16, fraction_bits=25)),
        (formats.F16, DotUnit(chunk=8, fraction_bits=24)),
        (formats.E4M3, DotUnit(chunk=32, fraction_bits=13, result="e8m13")),
        (formats.E5M2, DotUnit(chunk=32, fraction_bits=25)),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_fused_chain_equals_fractions(fmt: formats.FloatFormat, unit: DotUnit) -> None:
    a, b = values((6, 64), fmt), values((5, 64), fmt)
    c = (RNG.standard_normal((6, 5)) * 2.0 ** RNG.uniform(-20, 20, (6, 5))).astype(np.float32)
    d = fused_dot_add(Operand.of(a, fmt), Operand.of(b, fmt), c, unit)
    expected = [[scalar_chain(a[i], b[j], float(c[i, j]), fmt.min_exponent, unit) for j in range(5)] for i in range(6)]
    np.testing.assert_array_equal(d, np.float32(expected))


def test_one_fraction_bit_less_changes_results() -> None:
    a, b = values((16, 16), formats.BF16), values((16, 16), formats.BF16)
    c = np.zeros((16, 16), np.float32)
    left, right = Operand.of(a, formats.BF16), Operand.of(b, formats.BF16)
    wide = fused_dot_add(left, right, c, DotUnit(chunk=16, fraction_bits=25))
    narrow = fused_dot_add(left, right, c, DotUnit(chunk=16, fraction_bits=24))
    assert (wide != narrow).any()
    np.testing.assert_allclose(wide, a @ b.T, rtol=1e-4, atol=1e-3)


def test_small_terms_fall_below_the_kept_bits() -> None:
    unit = DotUnit(chunk=16, fraction_bits=25)
    a, b = np.zeros((1, 16)), np.ones((1, 16))
    a[0, 0], a[0, 1] = 1.0, 2.0**-25
    c = np.float32([[0.0]])
    assert fused_dot_add(Operand.of(a, formats.BF16), Operand.of(b, formats.BF16), c, unit)[0, 0] == 1.0
    a[0, :2] = 2.0**-25, -1.0  # kept: -1 + 2**-25 rounds towards zero, to -(1 - 2**-24)
    assert fused_dot_add(Operand.of(a, formats.BF16), Operand.of(b, formats.BF16), c, unit)[0, 0] == -(1 - 2.0**-24)
    a[0, 0] = 2.0**-26  # lost
    assert fused_dot_add(Operand.of(a, formats.BF16), Operand.of(b, formats.BF16), c, unit)[0, 0] == -1.0


def test_exponents_are_those_of_the_factors_not_of_the_product() -> None:
    # 1.75 * 1.75 = 3.06 has exponent 1, but aligns as 0: a term of 2**-25 is still kept
    unit = DotUnit(chunk=2, fraction_bits=25)
    a, b = np.array([[1.75, 2.0**-25]]), np.array([[1.75, -1.0]])
    d = fused_dot_add(Operand.of(a, formats.BF16), Operand.of(b, formats.BF16), np.float32([[0]]), unit)
    assert d[0, 0] == np.nextafter(np.float32(3.0625), np.float32(0))


def test_special_values_follow_ieee_and_give_the_canonical_nan() -> None:
    a = np.array([[np.inf, 1.0], [np.nan, 1.0], [np.inf, -np.inf], [1.0, 1.0], [0.0, 0.0]])
    b = np.array([[1.0, 1.0], [0.0, 1.0]])
    c = np.zeros((5, 2), np.float32)
    c[4] = -np.inf
    d = fused_dot_add(Operand.of(a, formats.BF16), Operand.of(b, formats.BF16), c, DotUnit(chunk=2, fraction_bits=25))
    expected = [[np.inf, np.nan], [np.nan, np.nan], [np.nan, np.nan], [2, 1], [-np.inf, -np.inf]]
    np.testing.assert_array_equal(d, np.float32(expected))
    assert set(d.view(np.uint32)[np.isnan(d)]) == {0x7FFFFFFF}


def test_overflow_is_infinite_and_a_cancelled_sum_is_positive_zero() -> None:
    unit = DotUnit(chunk=2, fraction_bits=25)
    big, one = np.array([[3e38, 3e38]]), np.array([[1.0, 1.0]])
    zero = np.float32([[0]])
    assert fused_dot_add(Operand.of(big, formats.F32), Operand.of(one, formats.F32), zero, unit)[0, 0] == np.inf
    d = fused_dot_add(Operand.of(-one, formats.BF16), Operand.of(np.array([[1.0, -1.0]]), formats.BF16), -zero, unit)
    assert d.view(np.uint32)[0, 0] == 0


def test_f16_results_round_to_nearest_even() -> None:
    unit = DotUnit(chunk=16, fraction_bits=25, result="f16")
    a, b = values((8, 16), formats.F16, 2), values((8, 16), formats.F16, 2)
    c = values((8, 8), formats.F16, 2).astype(np.float32)
    d = fused_dot_add(Operand.of(a, formats.F16), Operand.of(b, formats.F16), c, unit)
    expected = formats.f16_to_f32(formats.f32_to_f16(a @ b.T + c))
    # the kept 25 bits decide all but near ties
    assert (d == expected).mean() > 0.95 and np.abs(d - expected).max() <= np.spacing(np.float16(np.abs(d).max()))


def block_problem(block: int, ue4m3: bool) -> tuple[np.ndarray, ...]:
    a, b = (formats.e2m1_to_f32(RNG.integers(0, 16, (rows, 64))) for rows in (6, 5))
    if ue4m3:
        sfa, sfb = (formats.e4m3_to_f32(RNG.integers(0, 0x7F, (rows, 64 // block))) for rows in (6, 5))
    else:
        sfa, sfb = (formats.ue8m0_to_f32(RNG.integers(110, 140, (rows, 64 // block))) for rows in (6, 5))
    c = (RNG.standard_normal((6, 5)) * 2.0 ** RNG.uniform(-10, 10, (6, 5))).astype(np.float32)
    return a, b, np.repeat(sfa, block // 16, 1), np.repeat(sfb, block // 16, 1), c


@pytest.mark.parametrize(("block", "ue4m3"), [(16, True), (32, False), (16, False)])
def test_block_scaled_sum_equals_fractions(block: int, ue4m3: bool) -> None:
    a, b, sfa, sfb, c = block_problem(block, ue4m3)
    d = block_scaled_dot_add(a, b, sfa, sfb, c, formats.E4M3 if ue4m3 else None)
    smallest = -6 if ue4m3 else -127
    for i, j in np.ndindex(d.shape):
        terms = [(Fraction(float(c[i, j])), exponent_of(float(c[i, j]), -126))]
        for g in range(4):
            sums = sum(
                Fraction(float(x)) * Fraction(float(y))
                for x, y in zip(a[i, 16 * g :][:16], b[j, 16 * g :][:16], strict=True)
            )
            scale = Fraction(float(sfa[i, g])) * Fraction(float(sfb[j, g]))
            if sums * scale:
                exponent = exponent_of(float(sfa[i, g]), smallest) + exponent_of(float(sfb[j, g]), smallest)
                terms.append((sums * scale, exponent))
        top = max(e for _, e in terms)
        total = sum((cut(v, top - 35) for v, _ in terms), Fraction(0))
        exponent = math.frexp(float(total))[1] - 1
        if Fraction(2) ** exponent > abs(total):
            exponent -= 1
        assert d[i, j] == float(cut(total, max(exponent, -126) - 23))


def test_block_scaled_sum_is_near_the_dequantised_product_and_scales_matter() -> None:
    a, b, sfa, sfb, c = block_problem(16, True)
    d = block_scaled_dot_add(a, b, sfa, sfb, c, formats.E4M3)
    plain = (a * np.repeat(sfa, 16, 1)).astype(np.float64) @ (b * np.repeat(sfb, 16, 1)).astype(np.float64).T + c
    np.testing.assert_allclose(d, plain, rtol=3e-7, atol=3e-7 * np.abs(plain).max())
    swapped = block_scaled_dot_add(a, b, np.roll(sfa, 1, 1), sfb, c, formats.E4M3)
    assert (np.abs(swapped - plain) > 1e-3 * np.abs(plain).max()).mean() > 0.5


def test_nan_scales_poison_their_row_and_column() -> None:
    a, b, sfa, sfb, c = block_problem(16, True)
    sfa[2, 1] = sfb[3, 0] = np.nan
    d = block_scaled_dot_add(a, b, sfa, sfb, c, formats.E4M3).view(np.uint32) == 0x7FFFFFFF
    expected = np.zeros_like(d)
    expected[2, :] = expected[:, 3] = True
    np.testing.assert_array_equal(d, expected)


def test_subnormal_factors_align_as_the_smallest_normal() -> None:
    a, b = np.array([[2.0**-9, 2.0**-9]]), np.array([[1.0, 2.0**-9]])
    left, right = Operand.of(a, formats.E4M3), Operand.of(b, formats.E4M3)
    for bits, expected in ((11, 2.0**-9), (12, 2.0**-9 + 2.0**-18)):  # exponent -6, not -9
        d = fused_dot_add(left, right, np.float32([[0]]), DotUnit(chunk=2, fraction_bits=bits))
        assert d[0, 0] == expected


def test_zeros_never_decide_the_alignment() -> None:
    unit = DotUnit(chunk=4, fraction_bits=25)
    a = np.array([[0.0, 2.0**-20 * (1 + 2.0**-7), 0.0, 0.0]])
    b = np.array([[1.0, 1.0, 0.0, 2.0**60]])
    d = fused_dot_add(Operand.of(a, formats.BF16), Operand.of(b, formats.BF16), np.float32([[0]]), unit)
    assert d[0, 0] == a[0, 1]


@pytest.mark.parametrize(("shift", "kept"), [(35, True), (36, False)])
def test_block_scaled_groups_keep_thirty_five_bits(shift: int, kept: bool) -> None:
    a, b = np.zeros((1, 64)), np.ones((1, 64))
    a[0, 0], a[0, 16], a[0, 32] = 1, -1, 1
    sfa = np.float32([[1, 1, 2.0**-shift, 1]])
    d = block_scaled_dot_add(a, b, sfa, np.ones((1, 4), np.float32), np.float32([[0]]), None)
    assert d[0, 0] == (2.0**-shift if kept else 0)


@pytest.mark.parametrize("exponent", [20, -20])
def test_scaled_operands_move_exponents_with_the_values(exponent: int) -> None:
    unit = DotUnit(chunk=32, fraction_bits=25)
    a, b = values((4, 32), formats.E4M3), values((3, 32), formats.E5M2)
    power = np.full((4, 1), 2.0**exponent)
    c = np.zeros((4, 3), np.float32)
    scaled = fused_dot_add(Operand.of(a, formats.E4M3).scaled(power), Operand.of(b, formats.E5M2), c, unit)
    plain = fused_dot_add(Operand.of(a, formats.E4M3), Operand.of(b, formats.E5M2), c, unit)
    np.testing.assert_array_equal(scaled, plain * np.float32(2.0**exponent))
