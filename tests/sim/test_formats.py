"""Conversions of the simulator against ml_dtypes, NumPy and a definition by thresholds between neighbours."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jitfp4.errors import SimError
from jitfp4.sim import formats

SMALL = {
    "e4m3": (formats.f32_to_e4m3, formats.e4m3_to_f32, ml_dtypes.float8_e4m3fn, 256),
    "e5m2": (formats.f32_to_e5m2, formats.e5m2_to_f32, ml_dtypes.float8_e5m2, 256),
    "e3m2": (formats.f32_to_e3m2, formats.e3m2_to_f32, ml_dtypes.float6_e3m2fn, 64),
    "e2m3": (formats.f32_to_e2m3, formats.e2m3_to_f32, ml_dtypes.float6_e2m3fn, 64),
    "e2m1": (formats.f32_to_e2m1, formats.e2m1_to_f32, ml_dtypes.float4_e2m1fn, 16),
}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x7}

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # signalling NaN inputs

ALL_F16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
ALL_BF16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def random_f32(count: int) -> np.ndarray:
    """Uniform bit patterns: every exponent, both signs, NaN and Inf."""
    return np.random.default_rng(7).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)


def magnitudes(name: str) -> np.ndarray:
    """The finite magnitudes of a small format in code order, from ml_dtypes."""
    _, _, reference, count = SMALL[name]
    values = np.arange(count // 2, dtype=np.uint8).view(reference).astype(np.float64)
    return values[np.isfinite(values)]


def by_thresholds(x: np.ndarray, values: np.ndarray, sign_bit: int, nan: int) -> np.ndarray:
    """Round to nearest even by comparing with the midpoints of neighbours; ties go to the even code."""
    middle = (values[1:] + values[:-1]) / 2
    a = np.abs(x.astype(np.float64))
    below, above = np.searchsorted(middle, a, "left"), np.searchsorted(middle, a, "right")
    code = np.where(below % 2 == 0, below, above)
    code = np.where(np.isnan(x), nan, np.where(np.signbit(x), code | sign_bit, code))
    return code.astype(np.uint8)


def neighbourhood(values: np.ndarray) -> np.ndarray:
    """All values and midpoints, the float32 on either side of each, and both signs."""
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[-1] * 1.25, 3e38, np.inf, np.nan]])
    points = points.astype(np.float32)
    near = [points, np.nextafter(points, np.float32(-1)), np.nextafter(points, np.float32(np.inf))]
    return np.concatenate([*near, *(-p for p in near)])


@pytest.mark.parametrize("name", SMALL)
def test_decode_equals_ml_dtypes_for_every_code(name: str) -> None:
    _, decode, reference, count = SMALL[name]
    codes = np.arange(count, dtype=np.uint8)
    np.testing.assert_array_equal(decode(codes), codes.view(reference).astype(np.float32))
    assert np.signbit(decode(codes[count // 2 : count // 2 + 1]))[0]


@pytest.mark.parametrize("name", SMALL)
def test_every_number_encodes_to_its_own_code(name: str) -> None:
    encode, decode, _, count = SMALL[name]
    codes = np.arange(count, dtype=np.uint8)
    numbers = np.isfinite(decode(codes))
    np.testing.assert_array_equal(encode(decode(codes))[numbers], codes[numbers])


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("source", ["f16", "bf16", "random", "midpoints"])
def test_encode_equals_the_threshold_definition(name: str, source: str) -> None:
    encode, _, _, count = SMALL[name]
    values = magnitudes(name)
    x = {"f16": ALL_F16, "bf16": ALL_BF16, "random": random_f32(200_000), "midpoints": neighbourhood(values)}[source]
    np.testing.assert_array_equal(encode(x), by_thresholds(x, values, count // 2, NAN_CODE[name]))


@pytest.mark.parametrize("name", SMALL)
def test_encode_equals_ml_dtypes_inside_the_range(name: str) -> None:
    encode, _, reference, _ = SMALL[name]
    for x in (ALL_F16, ALL_BF16):
        inside = np.abs(x) <= magnitudes(name)[-1]
        np.testing.assert_array_equal(encode(x[inside]), x[inside].astype(reference).view(np.uint8))


def test_threshold_definition_can_fail() -> None:
    x = neighbourhood(magnitudes("e2m1"))
    ties_away = formats.encode(formats.E2M1, x, "rna", satfinite=True)
    assert (ties_away != by_thresholds(x, magnitudes("e2m1"), 8, 7)).sum() >= 4


def test_saturation_zero_sign_and_nan_rules() -> None:
    x = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e30, -1e30])
    assert formats.f32_to_e4m3(x).tolist() == [0, 0x80, 0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0xFE]
    assert formats.f32_to_e5m2(x).tolist() == [0, 0x80, 0x7B, 0xFB, 0x7F, 0x7F, 0x7B, 0xFB]
    assert formats.f32_to_e2m1(x).tolist() == [0, 8, 7, 15, 7, 7, 7, 15]
    assert formats.f32_to_f16(x).tolist() == [0, 0x8000, 0x7C00, 0xFC00, 0x7FFF, 0x7FFF, 0x7C00, 0xFC00]
    assert formats.f32_to_f16(x, satfinite=True).tolist() == [0, 0x8000, 0x7BFF, 0xFBFF, 0x7FFF, 0x7FFF, 0x7BFF, 0xFBFF]
    assert formats.f32_to_bf16(x[:6]).tolist() == [0, 0x8000, 0x7F80, 0xFF80, 0x7FFF, 0x7FFF]


def test_relu_clears_negatives_and_keeps_nan() -> None:
    x = np.float32([-3.0, -0.0, 2.0, np.nan, -np.inf])
    assert formats.f32_to_f16(x, relu=True).tolist() == [0, 0, 0x4000, 0x7FFF, 0]
    assert formats.f32_to_bf16(x, relu=True).tolist() == [0, 0, 0x4000, 0x7FFF, 0]
    assert formats.f32_to_e4m3(x, relu=True).tolist() == [0, 0, 0x40, 0x7F, 0]
    assert formats.f32_to_e2m1(x, relu=True).tolist() == [0, 0, 4, 7, 0]


def test_f16_and_bf16_nearest_equal_numpy_and_ml_dtypes() -> None:
    x = np.concatenate([random_f32(300_000), ALL_F16, ALL_BF16])
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(formats.f32_to_f16(x), x.astype(np.float16).view(np.uint16))
        np.testing.assert_array_equal(formats.f32_to_bf16(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize(("name", "convert"), [("f16", formats.f32_to_f16), ("bf16", formats.f32_to_bf16)])
def test_directed_roundings_bracket_the_value(name: str, convert) -> None:  # type: ignore[no-untyped-def]
    x = np.concatenate([random_f32(100_000), np.nextafter(ALL_F16, np.float32(0)), neighbourhood(np.array([65504.0]))])
    x = x[np.isfinite(x)]
    back = formats.f16_to_f32 if name == "f16" else formats.bf16_to_f32
    largest = back(np.array([0x7BFF if name == "f16" else 0x7F7F]))[0]
    down, up, zero = (back(convert(x, mode)) for mode in ("rm", "rp", "rz"))
    assert (down <= x).all() and (up >= x).all()
    np.testing.assert_array_equal(zero, np.where(x >= 0, np.minimum(down, largest), np.maximum(up, -largest)))
    gap = convert(x, "rp").astype(np.int64) - convert(x, "rm")
    assert set(np.abs(gap[np.abs(x) > 1e-3])) <= {0, 1}
    assert set(np.signbit(zero) ^ np.signbit(x)) == {False}


def test_directed_overflow_stops_at_the_largest_number_on_one_side() -> None:
    x = np.float32([1e30, -1e30, np.inf, -np.inf])
    assert formats.f32_to_f16(x, "rz").tolist() == [0x7BFF, 0xFBFF, 0x7C00, 0xFC00]
    assert formats.f32_to_f16(x, "rm").tolist() == [0x7BFF, 0xFC00, 0x7C00, 0xFC00]
    assert formats.f32_to_f16(x, "rp").tolist() == [0x7C00, 0xFBFF, 0x7C00, 0xFC00]


def test_tf32_nearest_away_equals_the_integer_definition() -> None:
    x = random_f32(200_000)
    x = x[np.isfinite(x)]
    bits = x.view(np.uint32)
    expected = ((bits.astype(np.int64) + 0x1000) & ~0x1FFF).astype(np.uint32)
    np.testing.assert_array_equal(formats.f32_to_tf32(x), expected)
    np.testing.assert_array_equal(formats.f32_to_tf32(x, "rz"), bits & np.uint32(0xFFFFE000))
    nan = np.array([0xFFC00001], np.uint32).view(np.float32)
    assert formats.f32_to_tf32(nan).tolist() == [0xFFC00000]
    assert formats.f32_to_tf32(nan, "rn").tolist() == [0x7FFFE000]


def test_tf32_nearest_even_differs_from_away_on_ties_only() -> None:
    x = np.array([0x3F801000, 0x3F803000, 0x3F801001], np.uint32).view(np.float32)
    assert formats.f32_to_tf32(x, "rn").tolist() == [0x3F800000, 0x3F804000, 0x3F802000]
    assert formats.f32_to_tf32(x, "rna").tolist() == [0x3F802000, 0x3F804000, 0x3F802000]


def test_f64_to_f32_rounds_once() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 1 << 64, 100_000, dtype=np.uint64).view(np.float64)
    x = np.concatenate([x[~np.isnan(x)], rng.standard_normal(50_000) * 2.0 ** rng.integers(-150, 130, 50_000)])
    with np.errstate(over="ignore"):
        nearest = x.astype(np.float32)
    np.testing.assert_array_equal(formats.f64_to_f32(x).view(np.uint32), nearest.view(np.uint32))
    finite = np.isfinite(x)
    toward_zero = np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
    np.testing.assert_array_equal(formats.f64_to_f32(x, "rz")[finite], toward_zero[finite])
    # double rounding through float32 would give the tie's even neighbour
    assert formats.f32_to_f16(np.float64([1 + 2.0**-11 + 2.0**-40])).tolist() == [0x3C01]


@pytest.mark.parametrize("rounding", ["rp", "rz"])
def test_ue8m0_brackets_every_magnitude(rounding: str) -> None:
    x = np.concatenate([ALL_F16, ALL_BF16, random_f32(200_000)])
    code = formats.f32_to_ue8m0(x, rounding).astype(np.int64)
    nan = np.isnan(x)
    assert (code[nan] == 255).all()
    a = np.abs(x[~nan].astype(np.float64))
    power = 2.0 ** (code[~nan] - 127)
    if rounding == "rp":
        assert (power >= np.minimum(a, 2.0**127)).all()
        assert ((power / 2 < a) | (code[~nan] == 0)).all()
    else:
        assert ((power <= a) | (code[~nan] == 0)).all()
        assert ((power * 2 > a) | (code[~nan] == 254)).all()


def test_ue8m0_decodes_every_code_and_round_trips() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = formats.ue8m0_to_f32(codes)
    np.testing.assert_array_equal(values, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    for rounding in ("rp", "rz"):
        np.testing.assert_array_equal(formats.f32_to_ue8m0(values, rounding), codes)
    assert formats.f32_to_ue8m0(np.float32([np.inf, 0, -4]), "rp").tolist() == [254, 0, 129]
    assert formats.f32_to_ue8m0(np.float32([np.inf, 3.3e38]), "rp", satfinite=False).tolist() == [255, 255]


def test_half_formats_widen_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    half, brain = formats.f16_to_f32(bits), formats.bf16_to_f32(bits)
    np.testing.assert_array_equal(half, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(brain, bits.view(ml_dtypes.bfloat16).astype(np.float32))
    assert set(half[np.isnan(half)].view(np.uint32)) == {0x7FFFFFFF}
    np.testing.assert_array_equal(brain.view(np.uint32) >> 16, bits)
    np.testing.assert_array_equal(formats.decode(formats.F16, bits), half)
    numbers = ~np.isnan(half)
    np.testing.assert_array_equal(formats.f32_to_f16(half)[numbers], bits[numbers])


def test_packed_nibbles_unpack_low_first() -> None:
    assert formats.unpack_e2m1x2(np.array([[0x21, 0xF3]], np.uint8)).tolist() == [[1, 2, 3, 15]]


def test_unknown_rounding_and_missing_satfinite_are_errors() -> None:
    with pytest.raises(SimError, match="rounding"):
        formats.f32_to_f16(np.float32([1]), "rx")
    with pytest.raises(SimError, match="rounding"):
        formats.f32_to_ue8m0(np.float32([1]), "rn")
    with pytest.raises(SimError, match="satfinite"):
        formats.encode(formats.E2M1, np.float32([1]))
