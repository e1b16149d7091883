"""tcgen05.mma of every kind of operand, against matrix products: without block scales, and with one byte per row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jitfp4.arch import Arch
from jitfp4.errors import SimError
from jitfp4.sim.swizzle import Swizzle
from jitfp4.sim.tcgen05 import TmemOperand, mma, mma_block_scale
from tests.sim.tcgen05_problems import (
    A_AT,
    B_AT,
    LAYOUT,
    RNG,
    SFA_COLUMN,
    SFB_COLUMN,
    Fp4Problem,
    assert_close,
    copy_scales,
    descriptor,
    new_cta,
    run_k64,
    tma_write,
)

NUMPY = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
         "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn, "e2m3": ml_dtypes.float6_e2m3fn,
         "e3m2": ml_dtypes.float6_e3m2fn, "s8": np.int8, "u8": np.uint8}  # fmt: skip
KIND = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "s8": "i8", "u8": "i8"}
TYPE_CODE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5, "u8": 0, "s8": 1}


def matrix(name: str, rows: int, k: int) -> np.ndarray:
    low, high = (0, 4) if name == "u8" else (-3, 4)
    return RNG.integers(low, high, (rows, k)).astype(NUMPY[name])


def plain_idesc(m: int, n: int, a_type: str, b_type: str, d_code: int, **flags: int) -> int:
    bits = d_code << 4 | TYPE_CODE[a_type] << 7 | TYPE_CODE[b_type] << 10 | n >> 3 << 17 | m >> 4 << 24
    return bits | sum(value << bit for bit, value in zip((13, 14, 15, 16), flags.values(), strict=False))


def shared_rows(tile: np.ndarray) -> np.ndarray:
    """Bytes of a K-major row; 4- and 6-bit elements in 16-byte groups of 16."""
    bits = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}.get(tile.dtype.name, 0)
    if not bits:
        return np.ascontiguousarray(tile).view(np.uint8)
    codes = tile.view(np.uint8).reshape(len(tile), -1, 16)
    out = np.zeros((*codes.shape[:2], 16), np.uint8)
    for index in np.ndindex(codes.shape[:2]):
        word = sum(int(c) << bits * i for i, c in enumerate(codes[index]))
        out[index] = np.frombuffer(word.to_bytes(16, "little"), np.uint8)
    return out.reshape(len(tile), -1)


def lanes_of(m: int) -> np.ndarray:
    return np.arange(m) if m == 128 else np.concatenate([np.arange(16) + 32 * q for q in range(4)])


@pytest.mark.parametrize(
    ("a_type", "b_type"),
    [("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32"), ("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e2m1", "e4m3"),
     ("e3m2", "e2m3"), ("s8", "u8")],
)  # fmt: skip
@pytest.mark.parametrize(("m", "n"), [(128, 128), (64, 8), (128, 256)])
def test_kinds_without_scales(a_type: str, b_type: str, m: int, n: int) -> None:
    k = 32 // (np.dtype(NUMPY[a_type]).itemsize)
    a, b = matrix(a_type, m, 2 * k), matrix(b_type, n, 2 * k)
    cta = new_cta()
    tma_write(cta.shared, A_AT, shared_rows(a), Swizzle.B64)
    tma_write(cta.shared, B_AT, shared_rows(b), Swizzle.B64)
    idesc = plain_idesc(m, n, a_type, b_type, 2 if a_type == "s8" else 1)
    for step in range(2):
        at = (descriptor(x + 32 * step, sbo=512, swizzle=Swizzle.B64) for x in (A_AT, B_AT))
        mma((cta,), KIND.get(a_type, "f8f6f4"), 0, *at, idesc, enable_input_d=step > 0, arch=Arch.of("sm_100a"))
    got = cta.tmem[lanes_of(m), :n].view(np.int32 if a_type == "s8" else np.float32)
    np.testing.assert_array_equal(got, a.astype(np.float64) @ b.astype(np.float64).T)
    untouched = np.setdiff1d(np.arange(128), lanes_of(m))
    assert (cta.tmem[untouched, :n] == 0x7FC00000).all()


@pytest.mark.parametrize("swizzle", list(LAYOUT))
def test_mn_major_operands(swizzle: Swizzle) -> None:
    a, b = matrix("bf16", 128, 16), matrix("bf16", 128, 16)
    cta, span = new_cta(), swizzle.span
    for at, tile in ((A_AT, a), (B_AT, b)):
        raw = np.ascontiguousarray(tile.T).view(np.uint8)
        for i in range(raw.shape[1] // span):
            tma_write(cta.shared, at + i * 16 * span, raw[:, i * span : (i + 1) * span], swizzle)
    strides = {"sbo": 256, "lbo": 128} if swizzle is Swizzle.NONE else {"sbo": 8 * span, "lbo": 16 * span}
    at = (descriptor(x, swizzle=swizzle, **strides) for x in (A_AT, B_AT))
    idesc = plain_idesc(128, 128, "bf16", "bf16", 1, neg_a=0, neg_b=0, trans_a=1, trans_b=1)
    mma((cta,), "f16", 0, *at, idesc, enable_input_d=False, arch=Arch.of("sm_100a"))
    np.testing.assert_array_equal(cta.tmem[:, :128].view(np.float32), a.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.parametrize("m", [128, 256])
def test_f16_kind_with_a_pair_of_ctas_and_negation(m: int) -> None:
    a, b = matrix("f16", m, 16), matrix("f16", 64, 16)
    ctas = (new_cta(), new_cta())
    for v, cta in enumerate(ctas):
        tma_write(cta.shared, A_AT, a[v * m // 2 : (v + 1) * m // 2], Swizzle.B32)
        tma_write(cta.shared, B_AT, b[32 * v : 32 * v + 32], Swizzle.B32)
    at = (descriptor(x, sbo=256, swizzle=Swizzle.B32) for x in (A_AT, B_AT))
    mma(
        ctas, "f16", 8, *at, plain_idesc(m, 64, "f16", "f16", 1, neg_a=1), enable_input_d=False, arch=Arch.of("sm_100a")
    )
    d = [c.tmem[:, 8:72].view(np.float32) for c in ctas]
    if m == 128:
        d = [np.concatenate([x[:64, :32], x[64:, :32]], 1) for x in d]
    np.testing.assert_array_equal(np.concatenate(d), -(a.astype(np.float64) @ b.astype(np.float64).T))


def test_f16_accumulators_live_in_the_low_half_of_a_cell() -> None:
    a, b = matrix("f16", 128, 16), matrix("f16", 16, 16)
    cta = new_cta()
    tma_write(cta.shared, A_AT, a, Swizzle.B32)
    tma_write(cta.shared, B_AT, b, Swizzle.B32)
    cta.tmem[:, :16] = np.float16(2.5).view(np.uint16)
    at = (descriptor(x, sbo=256, swizzle=Swizzle.B32) for x in (A_AT, B_AT))
    mma((cta,), "f16", 0, *at, plain_idesc(128, 16, "f16", "f16", 0), enable_input_d=True, arch=Arch.of("sm_100a"))
    got = cta.tmem[:, :16].astype(np.uint16).view(np.float16)
    np.testing.assert_array_equal(got, (a.astype(np.float64) @ b.astype(np.float64).T + 2.5).astype(np.float16))


def test_a_from_tensor_memory_and_disabled_lanes() -> None:
    a, b = matrix("bf16", 128, 16), matrix("bf16", 32, 16)
    cta = new_cta()
    cta.tmem[:, 100:108] = np.ascontiguousarray(a).view(np.uint32)
    tma_write(cta.shared, B_AT, b, Swizzle.B32)
    disabled = np.zeros((1, 128), bool)
    disabled[0, 5::7] = True
    mma(
        (cta,), "f16", 0, TmemOperand(100), descriptor(B_AT, sbo=256, swizzle=Swizzle.B32),
        plain_idesc(128, 32, "bf16", "bf16", 1), enable_input_d=False, arch=Arch.of("sm_100a"), disabled_lanes=disabled,
    )  # fmt: skip
    got = cta.tmem[:, :32]
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(got[~disabled[0]].view(np.float32), expected[~disabled[0]])
    assert (got[disabled[0]] == 0x7FC00000).all()


@pytest.mark.parametrize("sf_id", [0, 1, 2, 3])
@pytest.mark.parametrize(("a_type", "b_type"), [("e4m3", "e4m3"), ("e2m1", "e5m2"), ("e3m2", "e2m3")])
def test_mxf8f6f4_takes_one_scale_byte_per_row(sf_id: int, a_type: str, b_type: str) -> None:
    a, b = matrix(a_type, 128, 32), matrix(b_type, 64, 32)
    problem = Fp4Problem(128, 64, 128, 32, ue4m3=False)  # four scales per row: one word
    cta = new_cta()
    copy_scales((cta,), problem, 0, 1)
    tma_write(cta.shared, A_AT, shared_rows(a), Swizzle.B32)
    tma_write(cta.shared, B_AT, shared_rows(b), Swizzle.B32)
    at = (descriptor(x, sbo=256, swizzle=Swizzle.B32) for x in (A_AT, B_AT))
    other = 3 - sf_id
    idesc = TYPE_CODE[a_type] << 7 | TYPE_CODE[b_type] << 10 | 8 << 17 | 1 << 23 | 1 << 27 | other << 4 | sf_id << 29
    mma_block_scale(
        (cta,), "mxf8f6f4", 32, 0, *at, idesc, (SFA_COLUMN, SFB_COLUMN), enable_input_d=False, arch=Arch.of("sm_100a")
    )
    scale = 2.0 ** (problem.sfa[:, sf_id, None].astype(int) + problem.sfb[:, other].astype(int) - 254)
    expected = (a.astype(np.float64) @ b.astype(np.float64).T) * scale
    np.testing.assert_array_equal(cta.tmem[:, :64].view(np.float32), expected)


@pytest.mark.parametrize(("flags", "sign"), [(1 << 13, -1), (1 << 14, -1), (3 << 13, 1)])
def test_block_scaled_negation(flags: int, sign: int) -> None:
    problem, cta = Fp4Problem(128, 64, 256), new_cta()
    run_k64(problem, (cta,), idesc=problem.idesc() | flags)
    assert_close(cta.tmem[:, :64].view(np.float32), sign * problem.expected)


@pytest.mark.parametrize(
    ("kind", "idesc", "message"),
    [
        ("f16", plain_idesc(128, 24, "f16", "f16", 1), "N = 24"),
        ("f16", plain_idesc(128, 32, "f16", "bf16", 1), "two types"),
        ("f16", plain_idesc(128, 32, "f16", "f16", 2), "accumulator"),
        ("tf32", plain_idesc(128, 32, "tf32", "tf32", 1, neg_a=0, neg_b=0, trans_a=1), "MN-major"),
        ("f8f6f4", plain_idesc(128, 32, "tf32", "e4m3", 1), "operand types"),
        ("mxf4", 0x08A00480, "without .block_scale"),
        ("mxf9", 0, "not modelled"),
    ],
)
def test_illegal_plain_instructions_are_errors(kind: str, idesc: int, message: str) -> None:
    at = (descriptor(x, sbo=256, swizzle=Swizzle.B32) for x in (A_AT, B_AT))
    with pytest.raises(SimError, match=message):
        mma((new_cta(),), kind, 0, *at, idesc, enable_input_d=False, arch=Arch.of("sm_100a"))
