"""wgmma on tiles that TMA wrote, against matrix products and the register tables."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.swizzle import Swizzle
from jitfp4.sim.tensormap import ElementType, TensorMap
from jitfp4.sim.wgmma import Modifiers, operand_addresses, wgmma

RNG = np.random.default_rng(23)
NUMPY = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}
CODE = {Swizzle.NONE: 0, Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}
B_TILE = 65536


def descriptor(address: int, *, sbo: int, lbo: int = 16, swizzle: Swizzle = Swizzle.NONE) -> int:
    return address >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | CODE[swizzle] << 62


def matrix(name: str, rows: int, k: int) -> np.ndarray:
    low, high = (0, 4) if name == "u8" else (-3, 4)
    return RNG.integers(low, high, (rows, k)).astype(NUMPY[name])


def place_k_major(shared: np.ndarray, base: int, tile: np.ndarray, swizzle: Swizzle) -> int:
    """A K-major tile as TMA writes it, or core matrices of 8 x 16 bytes; returns the descriptor of its first k step."""
    rows, row_bytes = tile.shape[0], tile.view(np.uint8).shape[1]
    raw = np.ascontiguousarray(tile).view(np.uint8)
    if swizzle is Swizzle.NONE:  # k groups of 16 bytes outermost: LBO = rows * 16, SBO = 128
        cores = raw.reshape(rows, row_bytes // 16, 16).swapaxes(0, 1)
        shared[base : base + raw.size] = cores.reshape(-1)
        return descriptor(base, sbo=128, lbo=rows * 16)
    tma_write(shared, base, raw, swizzle)
    return descriptor(base, sbo=8 * swizzle.span, swizzle=swizzle)


def place_mn_major(shared: np.ndarray, base: int, tile: np.ndarray, swizzle: Swizzle) -> int:
    """The transposed tile ``[k, rows]``, one TMA box per span of rows."""
    raw = np.ascontiguousarray(tile.T).view(np.uint8)
    k, span = raw.shape[0], swizzle.span
    for i in range(raw.shape[1] // span):
        tma_write(shared, base + i * k * span, np.ascontiguousarray(raw[:, i * span : (i + 1) * span]), swizzle)
    if swizzle is Swizzle.NONE:
        return descriptor(base, sbo=k * 16, lbo=128)
    return descriptor(base, sbo=8 * span, lbo=k * span, swizzle=swizzle)


def tma_write(shared: np.ndarray, base: int, raw: np.ndarray, swizzle: Swizzle) -> None:
    rows, row_bytes = raw.shape
    tiled = TensorMap(
        base=raw.reshape(-1), dtype=ElementType.U8, dims=(row_bytes, rows), strides=(row_bytes,),
        box=(row_bytes, rows), swizzle=swizzle,
    )  # fmt: skip
    shared[tiled.shared_addresses(base)] = tiled.load((0, 0))


def d_matrix(registers: np.ndarray, n: int) -> np.ndarray:
    """Element v of thread t: row 16 w + g + 8 ((v >> 1) & 1), column 8 (v >> 2) + 2 c + (v & 1)."""
    out = np.zeros((64, n), registers.dtype)
    for t, v in np.ndindex(128, n // 2):
        w, g, c = t // 32, t % 32 // 4, t % 4
        out[16 * w + g + 8 * (v >> 1 & 1), 8 * (v >> 2) + 2 * c + (v & 1)] = registers[w, t % 32, v]
    return out


def a_registers(a: np.ndarray) -> np.ndarray:
    """The register tables of wgmma's A: bf16 k16 and e4m3 k32, element v of thread t."""
    size = a.dtype.itemsize
    codes = a.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size]).astype(np.uint32)
    per = 4 // size
    out = np.zeros((4, 32, 4), np.uint32)
    for t, v in np.ndindex(128, 4 * per):
        w, g, c = t // 32, t % 32 // 4, t % 4
        half = {1: v >> 2 & 1, 2: v >> 1 & 1, 4: v & 1}[size]
        column = {1: 4 * c + (v & 3) + 16 * (v >> 3), 2: 2 * c + (v & 1) + 8 * (v >> 2), 4: c + 4 * (v >> 1)}[size]
        out[w, t % 32, v // per] |= codes[16 * w + g + 8 * half, column] << np.uint32(8 * size * (v % per))
    return out


def zeros(n: int) -> np.ndarray:
    return np.zeros((4, 32, n // 2), np.uint32)


@pytest.mark.parametrize("swizzle", list(CODE))
@pytest.mark.parametrize(("name", "other"), [("bf16", "bf16"), ("f16", "f16"), ("tf32", "tf32"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("n", [8, 64, 256])
def test_k_major_operands_from_shared_memory(swizzle: Swizzle, name: str, other: str, n: int) -> None:
    k = swizzle.span // np.dtype(NUMPY[name]).itemsize if swizzle is not Swizzle.NONE else 64
    step = 32 // np.dtype(NUMPY[name]).itemsize
    a, b = matrix(name, 64, k), matrix(other, n, k)
    shared = np.zeros(1 << 18, np.uint8)
    desc_a, desc_b = place_k_major(shared, 1024, a, swizzle), place_k_major(shared, B_TILE, b, swizzle)
    d = RNG.integers(0, 1 << 32, (4, 32, n // 2), dtype=np.uint32)  # not read by the first step
    for i in range(k // step):
        along = (2 * i) * (64 if swizzle is Swizzle.NONE else 1)  # two 16-byte columns, in units of 16 bytes
        along_b = (2 * i) * (n if swizzle is Swizzle.NONE else 1)
        d = wgmma(
            n, f"f32.{name}.{other}", desc_a + along, desc_b + along_b, d, shared, scale_d=i > 0, mods=Modifiers()
        )
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(d_matrix(d.view(np.float32), n), expected)


@pytest.mark.parametrize("swizzle", list(CODE))
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_mn_major_operands_are_read_transposed(swizzle: Swizzle, name: str) -> None:
    a, b = matrix(name, 64, 16), matrix(name, 128, 16)
    shared = np.zeros(1 << 18, np.uint8)
    desc_a, desc_b = place_mn_major(shared, 1024, a, swizzle), place_mn_major(shared, B_TILE, b, swizzle)
    mods = Modifiers(trans_a=True, trans_b=True)
    d = wgmma(128, f"f32.{name}.{name}", desc_a, desc_b, zeros(128), shared, scale_d=False, mods=mods)
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(d_matrix(d.view(np.float32), 128), expected)


@pytest.mark.parametrize("name", ["bf16", "f16", "tf32", "e4m3", "e5m2"])
def test_a_from_registers(name: str) -> None:
    k = 32 // np.dtype(NUMPY[name]).itemsize
    a, b = matrix(name, 64, k), matrix(name, 32, k)
    shared = np.zeros(1 << 18, np.uint8)
    desc_b = place_k_major(shared, 0, b, Swizzle.NONE)
    d = wgmma(32, f"f32.{name}.{name}", a_registers(a), desc_b, zeros(32), shared, scale_d=False, mods=Modifiers())
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(d_matrix(d.view(np.float32), 32), expected)


@pytest.mark.parametrize(("negate_a", "negate_b", "sign"), [(True, False, -1), (False, True, -1), (True, True, 1)])
def test_negation_and_accumulation(negate_a: bool, negate_b: bool, sign: int) -> None:
    a, b = matrix("bf16", 64, 16), matrix("bf16", 16, 16)
    shared = np.zeros(1 << 17, np.uint8)
    desc_b = place_k_major(shared, 0, b, Swizzle.NONE)
    c = RNG.integers(-5, 6, (4, 32, 8)).astype(np.float32)
    mods = Modifiers(negate_a=negate_a, negate_b=negate_b)
    d = wgmma(16, "f32.bf16.bf16", a_registers(a), desc_b, c.view(np.uint32), shared, scale_d=True, mods=mods)
    expected = sign * (a.astype(np.float32) @ b.astype(np.float32).T) + d_matrix(c, 16)
    np.testing.assert_array_equal(d_matrix(d.view(np.float32), 16), expected)


def test_f16_accumulators_are_packed() -> None:
    a, b = matrix("f16", 64, 16), matrix("f16", 16, 16)
    shared = np.zeros(1 << 17, np.uint8)
    desc_b = place_k_major(shared, 0, b, Swizzle.NONE)
    c = RNG.integers(-5, 6, (4, 32, 8)).astype(np.float16)
    packed = np.ascontiguousarray(c).view(np.uint32)
    d = wgmma(16, "f16.f16.f16", a_registers(a), desc_b, packed, shared, scale_d=True, mods=Modifiers())
    expected = a.astype(np.float32) @ b.astype(np.float32).T + d_matrix(c, 16).astype(np.float32)
    np.testing.assert_array_equal(d_matrix(d.view(np.float16), 16).astype(np.float32), expected)


def test_integers_wrap_or_saturate() -> None:
    a, b = np.full((64, 32), 127, np.int8), np.full((8, 32), 255, np.uint8)
    shared = np.zeros(1 << 17, np.uint8)
    desc_a, desc_b = place_k_major(shared, 0, a, Swizzle.B32), place_k_major(shared, 8192, b, Swizzle.B32)
    c = np.full((4, 32, 4), (1 << 31) - 5, np.uint32)
    plain = wgmma(8, "s32.s8.u8", desc_a, desc_b, c, shared, scale_d=True, mods=Modifiers())
    clamped = wgmma(8, "s32.s8.u8", desc_a, desc_b, c, shared, scale_d=True, mods=Modifiers(satfinite=True))
    total = 127 * 255 * 32 + (1 << 31) - 5
    assert set(plain.view(np.int32).ravel()) == {total - (1 << 32)}
    assert set(clamped.view(np.int32).ravel()) == {(1 << 31) - 1}


@pytest.mark.parametrize("fault", ["swizzle", "sbo", "start", "trans"])
def test_a_wrong_descriptor_changes_the_result(fault: str) -> None:
    a, b = matrix("bf16", 64, 64), matrix("bf16", 64, 64)
    shared = np.zeros(1 << 18, np.uint8)
    place_k_major(shared, 1024, a, Swizzle.B128)
    desc_b = place_k_major(shared, B_TILE, b, Swizzle.B128)
    right = descriptor(1024, sbo=1024, swizzle=Swizzle.B128)
    wrong = {
        "swizzle": descriptor(1024, sbo=1024, swizzle=Swizzle.NONE),
        "sbo": descriptor(1024, sbo=512, swizzle=Swizzle.B128),
        "start": right + 8,
        "trans": right,
    }[fault]
    mods = Modifiers(trans_a=fault == "trans")
    good = wgmma(64, "f32.bf16.bf16", right, desc_b, zeros(64), shared, scale_d=False, mods=Modifiers())
    bad = wgmma(64, "f32.bf16.bf16", wrong, desc_b, zeros(64), shared, scale_d=False, mods=mods)
    assert (good != bad).any()


def test_operand_addresses_cover_each_byte_once() -> None:
    at = operand_addresses(descriptor(2048, sbo=1024, swizzle=Swizzle.B128) + 2, 64, "bf16", mn_major=False)
    assert at.shape == (64, 32) and len(set(at.ravel())) == 2048
    assert at.min() >= 2048 and at.max() < 2048 + 8192
    assert at[1, 0] == 2048 + 128 + (2 ^ 1) * 16


@pytest.mark.parametrize("transposed", ["a", "b"])
def test_operands_are_transposed_one_by_one(transposed: str) -> None:
    a, b = matrix("f16", 64, 16), matrix("f16", 64, 16)
    shared = np.zeros(1 << 17, np.uint8)
    places = {"a": place_k_major, "b": place_k_major, transposed: place_mn_major}
    desc_a = places["a"](shared, 0, a, Swizzle.B32)
    desc_b = places["b"](shared, B_TILE, b, Swizzle.B32)
    mods = Modifiers(trans_a=transposed == "a", trans_b=transposed == "b")
    d = wgmma(64, "f32.f16.f16", desc_a, desc_b, zeros(64), shared, scale_d=False, mods=mods)
    np.testing.assert_array_equal(d_matrix(d.view(np.float32), 64), a.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.parametrize(("bits", "kept"), [(13, True), (14, False)])
def test_fp8_keeps_thirteen_fraction_bits(bits: int, kept: bool) -> None:
    a, b = np.zeros((64, 32), ml_dtypes.float8_e4m3fn), np.ones((8, 32), ml_dtypes.float8_e4m3fn)
    a[:, 0], a[:, 1] = 1, -1
    a[:, 2], b[:, 2] = 2.0**-6, 2.0 ** (6 - bits)
    shared = np.zeros(1 << 16, np.uint8)
    desc_b = place_k_major(shared, 0, b, Swizzle.NONE)
    d = wgmma(8, "f32.e4m3.e4m3", a_registers(a), desc_b, zeros(8), shared, scale_d=False, mods=Modifiers())
    assert set(d.view(np.float32).ravel()) == {np.float32(2.0**-bits if kept else 0)}


def test_fp8_results_have_thirteen_mantissa_bits() -> None:
    a, b = np.ones((64, 32), ml_dtypes.float8_e4m3fn), np.zeros((8, 32), ml_dtypes.float8_e4m3fn)
    b[:, 0] = 1
    shared = np.zeros(1 << 16, np.uint8)
    desc_b = place_k_major(shared, 0, b, Swizzle.NONE)
    c = np.full((4, 32, 4), 2 + 2.0**-12 + 2.0**-13, np.float32).view(np.uint32)
    d = wgmma(8, "f32.e4m3.e4m3", a_registers(a), desc_b, c, shared, scale_d=True, mods=Modifiers())
    assert set(d.view(np.float32).ravel()) == {np.float32(3 + 2.0**-12)}


@pytest.mark.parametrize(
    ("types", "n", "mods", "message"),
    [
        ("f32.bf16.f16", 64, {}, "not modelled"),
        ("f32.bf16.bf16", 12, {}, "not modelled"),
        ("f16.bf16.bf16", 64, {}, "accumulates"),
        ("f32.e4m3.e4m3", 64, {"trans_b": True}, "K-major"),
    ],
)
def test_forms_that_do_not_exist_are_errors(types: str, n: int, mods: Any, message: str) -> None:
    shared = np.zeros(1 << 16, np.uint8)
    with pytest.raises(SimError, match=message):
        wgmma(n, types, 0, 0, zeros(n), shared, scale_d=False, mods=Modifiers(**mods))


def test_faulty_descriptors_are_errors() -> None:
    shared = np.zeros(1 << 14, np.uint8)
    good = descriptor(0, sbo=1024, swizzle=Swizzle.B128)
    run = {"scale_d": False, "mods": Modifiers()}
    with pytest.raises(SimMemoryError):
        wgmma(256, "f32.bf16.bf16", good, good, zeros(256), shared, **run)
    with pytest.raises(SimError, match="base offset"):
        wgmma(8, "f32.bf16.bf16", good | 1 << 49, good, zeros(8), shared, **run)
    with pytest.raises(SimError, match="runs over"):
        wgmma(8, "f32.bf16.bf16", good + 7, good, zeros(8), shared, **run)
