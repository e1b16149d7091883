"""Float arithmetic against rational arithmetic rounded once."""

from __future__ import annotations

from fractions import Fraction
from math import isfinite, isinf, isnan

import ml_dtypes
import numpy as np
import pytest

from jitfp4.errors import SimParseError
from tests.sim.exact import BF16, F16, F32, Format, rounded
from tests.sim.snippets import Array, evaluate

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

NAN_BITS = 0x7FFFFFFF
ROUNDINGS = ("rn", "rz", "rm", "rp")
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        3.4028235e38,
        -3.4028235e38,
        1e-45,
        -1e-45,
        1.1754944e-38,
        1.5,
        3.0,
    ],
    np.float32,
)


def floats(seed: int, count: int = 500) -> Array:
    """Special values and random ones, many with exponents close to each other so that sums round and cancel."""
    rng = np.random.default_rng(seed)
    part = count // 4
    near = np.ldexp(rng.integers(1 << 23, 1 << 24, 2 * part), rng.integers(-26, -20, 2 * part))
    anywhere = rng.integers(0, 1 << 32, part, dtype=np.uint64).astype(np.uint32).view(np.float32)
    tiny = np.ldexp(rng.integers(1, 1 << 24, part), rng.integers(-149, -120, part))
    signs = rng.choice([-1.0, 1.0], len(near))
    out = np.concatenate([np.tile(SPECIAL, 2), near * signs, anywhere, tiny])
    return rng.permutation(out.astype(np.float32))[:count]


def same(got: Array, want: Array) -> None:
    """Equal bits; every NaN is the canonical one."""
    bits = np.where(np.isnan(want), np.uint32(NAN_BITS), np.asarray(want, np.float32).view(np.uint32))
    bad = np.flatnonzero(got.view(np.uint32) != bits)
    assert not len(bad), f"{len(bad)} differ, first at {bad[0]}: {got[bad[0]]!r} is not {want[bad[0]]!r}"


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div.rn"])
def test_nearest_rounding_is_ieee(op: str) -> None:
    a, b = floats(1), floats(2)
    fn = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div.rn": np.divide}[op]
    same(evaluate(f"{op}.f32 %d, %a, %b;", a, b, out=np.float32), fn(a, b))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma", "div", "sqrt", "rcp"])
def test_every_rounding_of_finite_operands(op: str, rounding: str) -> None:
    a, b, c = floats(3), floats(4), floats(5)
    if op in ("sqrt", "rcp"):
        a, b = np.abs(a), np.ones_like(a)
    arity = {"sqrt": 1, "rcp": 1, "fma": 3}.get(op, 2)
    names = ", ".join(("%a", "%b", "%c")[:arity])
    got = evaluate(f"{op}.{rounding}.f32 %d, {names};", *(a, b, c)[:arity], out=np.float32)
    checked = 0
    for g, x, y, z in zip(got.tolist(), a.tolist(), b.tolist(), c.tolist(), strict=True):
        if not (isfinite(x) and isfinite(y) and isfinite(z)) or (
            op in ("div", "rcp") and (x if op == "rcp" else y) == 0
        ):
            continue
        if op == "sqrt":
            check_root(g, Fraction(x), rounding)
            continue
        p, q, r = Fraction(x), Fraction(y), Fraction(z)
        exact = {"add": p + q, "sub": p - q, "mul": p * q, "fma": p * q + r}.get(op)
        if exact is None:
            exact = p / q if op == "div" else 1 / p
        if exact != 0:
            assert g == rounded(exact, rounding, F32), (op, rounding, x, y, z)
            checked += 1
    assert op == "sqrt" or checked > 300


def check_root(root: float, x: Fraction, rounding: str) -> None:
    """The square of the result brackets ``x`` on the side that the rounding asks for."""
    below, above = (
        Fraction(float(np.nextafter(np.float32(root), np.float32(t)))) for t in (0, np.inf) if isfinite(root)
    )
    r = Fraction(root)
    if rounding in ("rz", "rm"):
        assert r * r <= x < above * above
    elif rounding == "rp":
        assert (x == 0 and r == 0) or below * below < x <= r * r
    else:
        assert x == 0 or ((r + below) / 2) ** 2 <= x <= ((r + above) / 2) ** 2


def test_fma_rounds_once_where_two_roundings_differ() -> None:
    a, b = np.array([1 + 2**-23], np.float32), np.array([1 - 2**-23], np.float32)
    c = np.array([-1.0], np.float32)
    assert evaluate("fma.rn.f32 %d, %a, %b, %c;", a, b, c, out=np.float32)[0] == -(2.0**-46)
    assert evaluate(".reg .f32 %t; mul.rn.f32 %t, %a, %b; add.rn.f32 %d, %t, %c;", a, b, c, out=np.float32)[0] == 0


def test_fma_of_doubles_rounds_once() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal(300), rng.standard_normal(300)
    c = -(a * b)
    got = evaluate("fma.rn.f64 %d, %a, %b, %c;", a, b, c, out=np.float64)
    want = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_exact_zero_sums_have_the_sign_of_the_rounding(rounding: str) -> None:
    a, b = np.array([1.5, 0.0, -0.0, 0.0], np.float32), np.array([-1.5, -0.0, -0.0, 0.0], np.float32)
    got = evaluate(f"add.{rounding}.f32 %d, %a, %b;", a, b, out=np.float32)
    assert (got == 0).all()
    assert np.signbit(got).tolist() == [rounding == "rm", rounding == "rm", True, False]


def test_ftz_flushes_inputs_and_results() -> None:
    a = np.array([1e-39, -1e-39, 1.2e-38, 1.0], np.float32)
    b = np.array([1.0, 1.0, 0.5, 1e-39], np.float32)
    got = evaluate("mul.ftz.f32 %d, %a, %b;", a, b, out=np.float32)
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert np.signbit(got).tolist() == [False, True, False, False]
    assert evaluate("mul.f32 %d, %a, %b;", a, b, out=np.float32)[0] == a[0]


def test_sat_clamps_to_the_unit_interval() -> None:
    a = np.array([-2.0, 0.25, 7.0, np.nan, -0.0], np.float32)
    got = evaluate("add.sat.f32 %d, %a, 0f00000000;", a, out=np.float32)
    assert got.tolist() == [0.0, 0.25, 1.0, 0.0, 0.0]


NAN = np.float32(np.nan)


@pytest.mark.parametrize(
    ("op", "a", "b", "want"),
    [
        ("min", 1.0, NAN, 1.0),
        ("max", NAN, 2.0, 2.0),
        ("min.NaN", 1.0, NAN, NAN),
        ("max.NaN", NAN, 2.0, NAN),
        ("min", NAN, NAN, NAN),
        ("min", 0.0, -0.0, -0.0),
        ("max", -0.0, 0.0, 0.0),
        ("min.xorsign.abs", -3.0, 2.0, -2.0),
        ("max.xorsign.abs", -3.0, -4.0, 4.0),
    ],
)
def test_minimum_and_maximum(op: str, a: float, b: float, want: float) -> None:
    x, y = np.array([a], np.float32), np.array([b], np.float32)
    got = evaluate(f"{op}.f32 %d, %a, %b;", x, y, out=np.float32)
    same(got, np.array([want], np.float32))


def test_three_operand_maximum() -> None:
    a, b, c = floats(7), floats(8), floats(9)
    got = evaluate("max.f32 %d, %a, %b, %c;", a, b, c, out=np.float32)
    want = np.fmax(np.fmax(a, b), c)
    keep = want != 0
    same(got[keep], want[keep])


def test_absolute_value_and_negation_touch_the_sign_and_make_nan_canonical() -> None:
    bits = np.array([0xFF812345, 0x80000001, 0x3F800000], np.uint32)
    assert evaluate("abs.f32 %d, %a;", bits, out=np.uint32).tolist() == [NAN_BITS, 1, 0x3F800000]
    assert evaluate("neg.f32 %d, %a;", bits, out=np.uint32).tolist() == [NAN_BITS, 1, 0xBF800000]
    halves = np.array([0xFE018001, 0x3C00FC00], np.uint32)
    assert evaluate("abs.f16x2 %d, %a;", halves, out=np.uint32).tolist() == [0x7FFF0001, 0x3C007C00]
    assert evaluate("neg.ftz.f16x2 %d, %a;", halves, out=np.uint32).tolist() == [0x7FFF0000, 0xBC007C00]


def test_a_number_wins_over_a_signalling_nan_even_alone() -> None:
    a, b = np.array([0xC0200000], np.uint32), np.array([0x7F800001], np.uint32)
    assert evaluate("min.ftz.f32 %d, %a, %b;", a, b, out=np.uint32).tolist() == [0xC0200000]


def test_xorsign_takes_the_sign_of_a_nan() -> None:
    a, b = np.array([0xA1DA3B1B], np.uint32), np.array([0xFF80AEFA], np.uint32)
    assert evaluate("max.xorsign.abs.f16x2 %d, %a, %b;", a, b, out=np.uint32).tolist() == [0x21DABB1B]


def test_slct_compares_a_flushed_selector() -> None:
    a, b, c = (np.array([bits], np.uint32) for bits in (1, 2, 0x80000001))
    assert evaluate("slct.f32.f32 %d, %a, %b, %c;", a, b, c, out=np.uint32).tolist() == [2]
    assert evaluate("slct.ftz.f32.f32 %d, %a, %b, %c;", a, b, c, out=np.uint32).tolist() == [1]


def test_f64_hands_nan_operands_on() -> None:
    nan, bits = 0x7FF0000000000001, np.uint64
    a = np.array([nan, 0x7FF0000000000000, 0x3FF0000000000000], bits)
    b = np.array([0x3FF0000000000000, 0xFFF0000000000000, 0xFFF8000000000123], bits)
    want = [nan | 1 << 51, 0xFFF8000000000000, 0xFFF8000000000123]
    assert evaluate("add.f64 %d, %a, %b;", a, b, out=bits).tolist() == want
    assert evaluate("cvt.rn.f32.f64 %d, %a;", np.array(want, bits), out=np.uint32).tolist() == [
        0x7FC00000,
        0xFFC00000,
        0xFFC00000,
    ]
    narrow = np.array([0x7F800001, 0xFFC00000, 0x3F800000], np.uint32)
    widened = [0x7FF8000020000000, 0xFFF8000000000000, 0x3FF0000000000000]
    assert evaluate("cvt.f64.f32 %d, %a;", narrow, out=bits).tolist() == widened


def test_f64_fma_adds_an_infinity_to_a_product_that_would_overflow() -> None:
    a, c = np.array([1e300]), np.array([-np.inf])
    assert evaluate("fma.rn.f64 %d, %a, %b, %c;", a, a, c, out=np.float64).tolist() == [-np.inf]


def test_copysign_takes_the_sign_of_its_first_source() -> None:
    a, b = floats(20), floats(21)
    got = evaluate("copysign.f32 %d, %a, %b;", a, b, out=np.uint32)
    assert (got == np.copysign(b, a).view(np.uint32)).all()


def test_pairs_of_floats_are_independent() -> None:
    a, b, c = floats(10, 512), floats(11, 512), floats(12, 512)
    got = evaluate("fma.rn.f32x2 %d, %a, %b, %c;", *(x.view(np.uint64) for x in (a, b, c)), out=np.uint64)
    want = evaluate("fma.rn.f32 %d, %a, %b, %c;", a, b, c, out=np.uint32)
    assert (got.view(np.uint32) == want).all()
    got = evaluate("add.rn.f32x2 %d, %a, %b;", a.view(np.uint64), b.view(np.uint64), out=np.uint64)
    same(got.view(np.float32), a + b)


# Halves

HALF: dict[str, tuple[Format, type, int]] = {
    "f16": (F16, np.float16, 0x7FFF),
    "bf16": (BF16, ml_dtypes.bfloat16, 0x7FFF),
}


def halves(kind: str, seed: int) -> Array:
    """Bit patterns of every exponent."""
    return np.random.default_rng(seed).integers(0, 1 << 16, 600, dtype=np.uint16)


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma.rn"])
def test_halves_round_once(kind: str, op: str) -> None:
    fmt, dtype, nan = HALF[kind]
    arity = 3 if op == "fma.rn" else 2
    operands = [halves(kind, seed) for seed in range(arity)]
    names = ", ".join(("%a", "%b", "%c")[:arity])
    got = evaluate(f"{op}.{kind} %d, {names};", *operands, out=np.uint16)
    values = [x.view(dtype).astype(np.float64).tolist() for x in operands]
    for bits, *terms in zip(got.tolist(), *values, strict=True):
        if not all(map(isfinite, terms)):
            assert bits == nan or not any(map(isnan, terms))
            continue
        p = [Fraction(t) for t in terms]
        exact = {"add": p[0] + p[1], "sub": p[0] - p[1], "mul": p[0] * p[1]}.get(op)
        exact = p[0] * p[1] + p[2] if exact is None else exact
        value = float(np.array([bits], np.uint16).view(dtype).astype(np.float64)[0])
        want = rounded(exact, "rn", fmt)
        assert value == want or (isinf(value) and isinf(want)), (op, terms)


@pytest.mark.parametrize("kind", HALF)
def test_packed_halves_equal_single_ones(kind: str) -> None:
    a, b = halves(kind, 3), halves(kind, 4)
    for op in ("add", "mul", "min", "max", "min.NaN", "max.xorsign.abs"):
        got = evaluate(f"{op}.{kind}x2 %d, %a, %b;", a.view(np.uint32), b.view(np.uint32), out=np.uint32)
        assert (got.view(np.uint16) == evaluate(f"{op}.{kind} %d, %a, %b;", a, b, out=np.uint16)).all(), op


def test_relu_clears_negative_results_only() -> None:
    a = np.array([0x3C00, 0xBC00, 0x7E00, 0x8000], np.uint16)
    one = np.full(4, 0x3C00, np.uint16)
    zero = np.zeros(4, np.uint16)
    got = evaluate("fma.rn.relu.f16 %d, %a, %b, %c;", a, one, zero, out=np.uint16)
    assert got.tolist() == [0x3C00, 0, 0x7FFF, 0]


def test_mixed_precision_sums_widen_the_half() -> None:
    a, c = halves("bf16", 5), floats(13, 600)
    got = evaluate("add.rn.f32.bf16 %d, %a, %b;", a, c, out=np.float32)
    same(got, a.view(ml_dtypes.bfloat16).astype(np.float32) + c)


# Approximations


@pytest.mark.parametrize(
    ("op", "fn"),
    [
        ("rcp.approx", lambda x: 1 / x),
        ("sqrt.approx", np.sqrt),
        ("rsqrt.approx", lambda x: 1 / np.sqrt(x)),
        ("ex2.approx", np.exp2),
        ("lg2.approx", np.log2),
        ("sin.approx", np.sin),
        ("cos.approx", np.cos),
        ("tanh.approx", np.tanh),
    ],
)
def test_approximations_are_the_rounded_function(op: str, fn: np.ufunc) -> None:
    a = np.abs(floats(14))
    a = np.where(np.isfinite(a), np.minimum(a, 100), 2).astype(np.float32)
    same(evaluate(f"{op}.f32 %d, %a;", a, out=np.float32), fn(a.astype(np.float64)).astype(np.float32))


def test_approximate_division_underflows_for_huge_divisors() -> None:
    a, b = np.array([1.0, 6.0, np.inf], np.float32), np.array([2.0**127, 3.0, 2.0**127], np.float32)
    got = evaluate("div.approx.f32 %d, %a, %b;", a, b, out=np.float32)
    same(got, np.array([0.0, 2.0, np.nan], np.float32))
    got = evaluate("div.full.f32 %d, %a, %b;", a, b, out=np.float32)
    same(got, np.array([2.0**-127, 2.0, np.inf], np.float32))


def test_special_values_of_approximations() -> None:
    a = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    same(evaluate("rcp.approx.ftz.f32 %d, %a;", a, out=np.float32), np.array([np.inf, -np.inf, 0.0, -0.0, np.nan]))
    same(evaluate("lg2.approx.f32 %d, %a;", a, out=np.float32), np.array([-np.inf, -np.inf, np.inf, np.nan, np.nan]))
    same(evaluate("ex2.approx.f32 %d, %a;", a, out=np.float32), np.array([1.0, 1.0, np.inf, 0.0, np.nan]))


def test_division_without_a_rounding_is_refused() -> None:
    with pytest.raises(SimParseError, match="without a rounding"):
        evaluate("div.f32 %d, %a, %b;", floats(1), floats(2), out=np.float32)
