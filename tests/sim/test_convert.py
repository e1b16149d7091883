"""cvt between integers and floats, and the packed narrow formats."""

from __future__ import annotations

from math import isfinite

import ml_dtypes
import numpy as np
import pytest

from jitfp4.errors import SimParseError
from tests.sim.exact import BF16, F16, F32, rounded
from tests.sim.snippets import Array, evaluate
from tests.sim.test_floating import Fraction, floats, halves, same
from tests.sim.test_integer import number, values

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("target", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("sat", ["", ".sat"])
def test_integers_extend_truncate_and_saturate(source: str, target: str, sat: str) -> None:
    wide, bits = int(source[1:]), int(target[1:])
    a = values(wide, 1)
    out = np.dtype(f"u{max(16, bits) // 8}")
    got = evaluate(f"cvt{sat}.{target}.{source} %d, %a;", a, out=out)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if target[0] == "s" else (0, (1 << bits) - 1)
    for g, x in zip(got.tolist(), a.tolist(), strict=True):
        value = number(x, source)
        value = min(max(value, low), high) if sat else number(value % (1 << bits), target)
        assert g == value % (1 << 8 * out.itemsize)


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("target", ["s32", "u32", "s64", "u8", "s16"])
def test_floats_become_integers_and_clamp(mode: str, target: str) -> None:
    a = np.concatenate(
        [floats(1), np.arange(-8, 8, dtype=np.float32) / 2, np.array([2.0**31, -(2.0**31), 300], np.float32)]
    )
    bits = int(target[1:])
    out = np.dtype(f"u{max(16, bits) // 8}")
    got = evaluate(f"cvt.{mode}.{target}.f32 %d, %a;", a, out=out)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if target[0] == "s" else (0, (1 << bits) - 1)
    fn = {"rni": round, "rzi": int, "rmi": lambda x: x.__floor__(), "rpi": lambda x: x.__ceil__()}[mode]
    for g, x in zip(got.tolist(), a.tolist(), strict=True):
        if np.isnan(x):
            want = 1 << 63 if bits == 64 else 0
        elif isfinite(x):
            want = min(max(fn(x), low), high)
        else:
            want = high if x > 0 else low
        assert g == want % (1 << 8 * out.itemsize), x


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s32", "u32"])
def test_integers_become_floats(mode: str, source: str) -> None:
    a = values(32, 2)
    got = evaluate(f"cvt.{mode}.f32.{source} %d, %a;", a, out=np.float32)
    assert got.tolist() == [rounded(Fraction(number(x, source)), mode, F32) for x in a.tolist()]


def test_64_bit_integers_become_floats() -> None:
    a = values(64, 3)
    assert evaluate("cvt.rn.f32.u64 %d, %a;", a, out=np.float32).tolist() == [
        rounded(Fraction(x), "rn", F32) for x in a.tolist()
    ]
    signed = [float(number(x, "s64")) for x in a.tolist()]
    assert evaluate("cvt.rn.f64.s64 %d, %a;", a, out=np.float64).tolist() == signed


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_double_to_single(mode: str) -> None:
    rng = np.random.default_rng(4)
    a = np.ldexp(rng.uniform(-1, 1, 500), rng.integers(-160, 135, 500))
    got = evaluate(f"cvt.{mode}.f32.f64 %d, %a;", a, out=np.float32)
    assert got.tolist() == [rounded(Fraction(x), mode, F32) for x in a.tolist()]
    widened = evaluate("cvt.f64.f32 %d, %a;", got, out=np.float64)
    assert (widened == got.astype(np.float64)).all()


@pytest.mark.parametrize(("kind", "fmt", "dtype"), [("f16", F16, np.float16), ("bf16", BF16, ml_dtypes.bfloat16)])
def test_halves_to_and_from_floats(kind: str, fmt: object, dtype: type) -> None:
    a = floats(5)
    for mode in ("rn", "rz"):
        got = evaluate(f"cvt.{mode}.{kind}.f32 %d, %a;", a, out=np.uint16)
        value = got.view(dtype).astype(np.float64)
        finite = np.isfinite(a)
        want = [rounded(Fraction(x), mode, fmt) for x in a[finite].tolist()]
        assert value[finite].tolist() == want
        assert (got[np.isnan(a)] == 0x7FFF).all()
    bits = halves(kind, 6)
    same_value = evaluate(f"cvt.f32.{kind} %d, %a;", bits, out=np.float32)
    want32 = bits.view(dtype).astype(np.float32)
    assert ((same_value == want32) | (np.isnan(same_value) & np.isnan(want32))).all()


def test_packed_halves_put_the_first_source_on_top() -> None:
    a, b = floats(7), floats(8)
    got = evaluate("cvt.rn.f16x2.f32 %d, %a, %b;", a, b, out=np.uint32)
    assert (got >> 16 == evaluate("cvt.rn.f16.f32 %d, %a;", a, out=np.uint16)).all()
    assert (got & 0xFFFF == evaluate("cvt.rn.f16.f32 %d, %a;", b, out=np.uint16)).all()
    got = evaluate("cvt.rn.relu.bf16x2.f32 %d, %a, %b;", a, b, out=np.uint32)
    high = (got >> 16).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    assert (
        high[np.isfinite(a)] == np.maximum(a, 0)[np.isfinite(a)].astype(ml_dtypes.bfloat16).astype(np.float32)
    ).all()


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)])
def test_fp8_pairs(kind: str, dtype: type) -> None:
    a, b = scaled(9), scaled(10)
    got = evaluate(f"cvt.rn.satfinite.{kind}.f32 %d, %a, %b;", a, b, out=np.uint16)
    top = float(ml_dtypes.finfo(dtype).max)
    for x, byte in ((a, got >> 8), (b, got & 0xFF)):
        want = np.clip(x, -top, top).astype(dtype).view(np.uint8)
        assert (np.where(np.isnan(x), 0x7F, want) == byte).all()
    codes = np.arange(1 << 16, dtype=np.uint16)
    pair = evaluate(f"cvt.rn.f16x2.{kind} %d, %a;", codes, out=np.uint32)
    low = (codes & 0xFF).astype(np.uint8).view(dtype).astype(np.float16)
    value = (pair & 0xFFFF).astype(np.uint16).view(np.float16)
    assert ((value == low) | (np.isnan(value) & np.isnan(low))).all()


def scaled(seed: int) -> Array:
    """Values in the range of the narrow formats, a few beyond."""
    rng = np.random.default_rng(seed)
    out = np.ldexp(rng.uniform(-1, 1, 2000), rng.integers(-14, 10, 2000)).astype(np.float32)
    out[:4] = [np.nan, np.inf, -np.inf, -0.0]
    return out


def test_fp4_pairs() -> None:
    a, b = scaled(11), scaled(12)
    body = ".reg .b8 %t; cvt.rn.satfinite.e2m1x2.f32 %t, %a, %b; cvt.u16.u8 %d, %t;"
    got = evaluate(body, a, b, out=np.uint16)
    for x, code in ((a, got >> 4), (b, got & 15)):
        want = np.where(np.isnan(x), 7, np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15)
        assert (want == code).all()
    codes = np.arange(256, dtype=np.uint16)
    pair = evaluate(".reg .b8 %t; cvt.u8.u16 %t, %a; cvt.rn.f16x2.e2m1x2 %d, %t;", codes, out=np.uint32)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float16).view(np.uint16)
    assert (pair == table[codes & 15] + (table[codes >> 4].astype(np.uint32) << 16)).all()


def test_scale_exponents() -> None:
    a, b = np.abs(scaled(13)), np.abs(scaled(14))
    got = evaluate("cvt.rp.satfinite.ue8m0x2.f32 %d, %a, %b;", a, b, out=np.uint16)
    finite = np.isfinite(a) & (a > 0)
    assert (got[finite] >> 8 == np.ceil(np.log2(a[finite].astype(np.float64))) + 127).all()
    codes = np.arange(256, dtype=np.uint16)
    pair = evaluate("cvt.rn.bf16x2.ue8m0x2 %d, %a;", codes, out=np.uint32)
    value = (pair & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    assert (value[:255] == np.ldexp(1.0, np.arange(255) - 127)).all()


def test_tf32_keeps_ten_mantissa_bits() -> None:
    a = floats(15)
    got = evaluate("cvt.rna.tf32.f32 %d, %a;", a, out=np.uint32)
    finite = np.isfinite(a)
    bits = a.view(np.uint32)[finite].astype(np.uint64)
    assert (got[finite] == (bits + 0x1000 & 0xFFFFE000)).all()


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_rounding_to_an_integral_float(mode: str) -> None:
    a = floats(16)
    fn = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    same(evaluate(f"cvt.{mode}.f32.f32 %d, %a;", a, out=np.float32), fn(a))


def test_saturating_pack_of_integers() -> None:
    a, b = values(32, 17), values(32, 18)
    got = evaluate("cvt.pack.sat.s16.s32 %d, %a, %b;", a, b, out=np.uint32)
    clamp = [
        np.clip(x.view(np.int32), -32768, 32767).astype(np.int16).view(np.uint16).astype(np.uint32) for x in (a, b)
    ]
    assert (got == clamp[0] << 16 | clamp[1]).all()


@pytest.mark.parametrize(
    "text", ["cvt.rs.f16x2.f32 %d, %a, %a;", "cvt.s32.f32 %d, %a;", "cvt.rn.satfinite.e4m3x2.s32 %d, %a, %a;"]
)
def test_forms_that_are_not_there_are_refused(text: str) -> None:
    with pytest.raises(SimParseError):
        evaluate(text, floats(1), out=np.uint32)
