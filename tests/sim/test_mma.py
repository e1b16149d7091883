"""mma.sync, ldmatrix, stmatrix and movmatrix against the lane tables of the PTX manual and plain matrix products."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from jitfp4.arch import Arch
from jitfp4.errors import SimError
from jitfp4.sim import formats
from jitfp4.sim.fragments import ldmatrix, movmatrix, stmatrix
from jitfp4.sim.mma import Scales, mma, mma_block_scale

RNG = np.random.default_rng(17)
WARPS = 3

# (registers of a, of b, row and k of element i of lane 4 g + c in a, k of element i in b), as the manual draws them.
Layout = tuple[int, int, Callable[[int, int, int], tuple[int, int]], Callable[[int, int], int]]
LAYOUTS: dict[tuple[int, int], Layout] = {
    (16, 16): (4, 2, lambda g, c, i: (g + 8 * (i in (2, 3, 6, 7)), 2 * c + i % 2 + 8 * (i >= 4)),
               lambda c, i: 2 * c + i % 2 + 8 * (i >= 2)),
    (16, 8): (2, 1, lambda g, c, i: (g + 8 * (i >= 2), 2 * c + i % 2), lambda c, i: 2 * c + i),
    (32, 8): (4, 2, lambda g, c, i: (g + 8 * (i in (1, 3)), c + 4 * (i >= 2)), lambda c, i: c + 4 * i),
    (32, 4): (2, 1, lambda g, c, i: (g + 8 * i, c), lambda c, i: c + 4 * i),
    (8, 32): (4, 2, lambda g, c, i: (g + 8 * (i // 4 in (1, 3)), 4 * c + i % 4 + 16 * (i >= 8)),
              lambda c, i: 4 * c + i % 4 + 16 * (i >= 4)),
    (8, 16): (2, 1, lambda g, c, i: (g + 8 * (i >= 4), 4 * c + i % 4), lambda c, i: 4 * c + i),
    (4, 64): (4, 2, lambda g, c, i: (g + 8 * (i // 8 in (1, 3)), 8 * c + i % 8 + 32 * (i >= 16)),
              lambda c, i: 8 * c + i % 8 + 32 * (i >= 8)),
}  # fmt: skip


def registers(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes ``[..., n]`` packed 32 / bits to a register, element 0 lowest."""
    grouped = codes.astype(np.uint64).reshape(*codes.shape[:-1], -1, 32 // bits)
    return sum(grouped[..., i] << np.uint64(bits * i) for i in range(32 // bits)).astype(np.uint32)


def fragments(a: np.ndarray, b: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Operand registers of code matrices a ``[warps, 16, k]`` and b ``[warps, k, 8]``, lane by lane."""
    count_a, count_b, place_a, place_b = LAYOUTS[bits, a.shape[-1]]
    per = 32 // bits
    lanes_a = np.zeros((len(a), 32, count_a * per), np.uint32)
    lanes_b = np.zeros((len(a), 32, count_b * per), np.uint32)
    for lane in range(32):
        g, c = divmod(lane, 4)
        for i in range(count_a * per):
            row, k = place_a(g, c, i)
            lanes_a[:, lane, i] = a[:, row, k]
        for i in range(count_b * per):
            lanes_b[:, lane, i] = b[:, place_b(c, i), g]
    return registers(lanes_a, bits), registers(lanes_b, bits)


def accumulator(c: np.ndarray) -> np.ndarray:
    """Element i of lane 4 g + q: row g (+ 8 for i >= 2), column 2 q + i % 2."""
    lanes = np.zeros((len(c), 32, 4), c.dtype)
    for lane, i in np.ndindex(32, 4):
        lanes[:, lane, i] = c[:, lane // 4 + 8 * (i >= 2), 2 * (lane % 4) + i % 2]
    return lanes


def codes_of(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, int]:
    """Codes, values and width of small integers and halves: products and sums are exact in every tensor core."""
    values = RNG.choice([-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0], shape)
    if name in ("s8", "u8", "s4", "u4"):
        bits = int(name[1:])
        low, high = (0, 1 << bits) if name[0] == "u" else (-(1 << (bits - 1)), 1 << (bits - 1))
        values = RNG.integers(low, high, shape)
        return values & ((1 << bits) - 1), values, bits
    if name == "tf32":
        return values.astype(np.float32).view(np.uint32), values, 32
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn,
             "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}[name]  # fmt: skip
    narrow = values.astype(dtype)
    bits = {"f16": 16, "bf16": 16, "e2m1": 4}.get(name, 8)
    return narrow.view(np.uint16 if bits == 16 else np.uint8), narrow.astype(np.float64), bits


@pytest.mark.parametrize(
    ("k", "name", "other"),
    [(16, "f16", "f16"), (8, "f16", "f16"), (16, "bf16", "bf16"), (8, "bf16", "bf16"), (8, "tf32", "tf32"),
     (4, "tf32", "tf32"), (32, "e4m3", "e4m3"), (32, "e4m3", "e5m2"), (32, "e5m2", "e5m2")],
)  # fmt: skip
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_f32_accumulation_equals_the_matrix_product(k: int, name: str, other: str, arch: str) -> None:
    a_codes, a, bits = codes_of(name, (WARPS, 16, k))
    b_codes, b, _ = codes_of(other, (WARPS, k, 8))
    c = RNG.integers(-9, 10, (WARPS, 16, 8)).astype(np.float32)
    left, right = fragments(a_codes, b_codes, bits)
    d = mma(k, f"f32.{name}.{other}.f32", left, right, accumulator(c).view(np.uint32), arch=Arch.of(arch))
    np.testing.assert_array_equal(d.view(np.float32), accumulator((a @ b + c).astype(np.float32)))


def test_f16_accumulators_are_packed_pairs() -> None:
    a_codes, a, _ = codes_of("f16", (WARPS, 16, 16))
    b_codes, b, _ = codes_of("f16", (WARPS, 16, 8))
    c = RNG.integers(-9, 10, (WARPS, 16, 8)).astype(np.float16)
    left, right = fragments(a_codes, b_codes, 16)
    d = mma(16, "f16.f16.f16.f16", left, right, registers(accumulator(c).view(np.uint16), 16), arch=Arch.of("sm_90a"))
    expected = accumulator((a @ b + c).astype(np.float16)).view(np.uint16)
    np.testing.assert_array_equal(d, registers(expected, 16))


@pytest.mark.parametrize(
    ("k", "name", "other"), [(32, "s8", "s8"), (32, "u8", "s8"), (16, "s8", "u8"), (64, "s4", "u4")]
)
def test_integer_products_wrap_or_saturate(k: int, name: str, other: str) -> None:
    a_codes, a, bits = codes_of(name, (WARPS, 16, k))
    b_codes, b, _ = codes_of(other, (WARPS, k, 8))
    c = RNG.choice([-(1 << 31), -1, 5, (1 << 31) - 1], (WARPS, 16, 8))
    left, right = fragments(a_codes, b_codes, bits)
    total = a @ b + c
    for satfinite in (False, True):
        lanes = accumulator(c).astype(np.int32).view(np.uint32)
        d = mma(k, f"s32.{name}.{other}.s32", left, right, lanes, arch=Arch.of("sm_80"), satfinite=satfinite)
        expected = np.clip(total, -(1 << 31), (1 << 31) - 1) if satfinite else total.astype(np.int32)
        np.testing.assert_array_equal(d.view(np.int32), accumulator(expected))
    assert (total != total.astype(np.int32)).any()


def test_a_swapped_register_changes_the_product() -> None:
    a_codes, _, _ = codes_of("bf16", (1, 16, 16))
    b_codes, _, _ = codes_of("bf16", (1, 16, 8))
    left, right = fragments(a_codes, b_codes, 16)
    c = np.zeros((1, 32, 4), np.uint32)
    good = mma(16, "f32.bf16.bf16.f32", left, right, c, arch=Arch.of("sm_80"))
    assert (mma(16, "f32.bf16.bf16.f32", left[..., [0, 2, 1, 3]], right, c, arch=Arch.of("sm_80")) != good).any()


def test_hopper_fp8_adds_the_accumulator_last_and_to_nearest() -> None:
    # 1 + 2**-24 + 2**-25: nearest gives 1 + 2**-23, a fused sum towards zero gives 1
    a = np.zeros((1, 16, 32), ml_dtypes.float8_e4m3fn)
    b = np.zeros((1, 32, 8), ml_dtypes.float8_e4m3fn)
    a[0, :, 0], b[0, 0] = 2.0**-9, 2.0**-9
    a[0, :, 2], b[0, 2] = 2.0**-9, 2.0**-8
    left, right = fragments(a.view(np.uint8), b.view(np.uint8), 8)
    c = np.full((1, 32, 4), 2.0**7, np.float32).view(np.uint32)
    got = {
        arch: float(mma(32, "f32.e4m3.e4m3.f32", left, right, c, arch=Arch.of(arch)).view(np.float32)[0, 0, 0])
        for arch in ("sm_90a", "sm_120a")
    }
    assert got == {"sm_90a": 2.0**7 + 2.0**-16, "sm_120a": 2.0**7}


@pytest.mark.parametrize(
    ("arch", "kept"), [("sm_80", 24), ("sm_89", 24), ("sm_90a", 25), ("sm_100a", 25), ("sm_120a", 25)]
)
def test_kept_fraction_bits_are_those_of_the_architecture(arch: str, kept: int) -> None:
    for bits in (kept, kept + 1):
        a, b = np.zeros((1, 16, 8), ml_dtypes.bfloat16), np.ones((1, 8, 8), ml_dtypes.bfloat16)
        a[0, :, :3] = [1, -1, 2.0**-bits]
        left, right = fragments(a.view(np.uint16), b.view(np.uint16), 16)
        d = mma(8, "f32.bf16.bf16.f32", left, right, np.zeros((1, 32, 4), np.uint32), arch=Arch.of(arch))
        assert set(d.view(np.float32).ravel()) == {np.float32(2.0**-bits if bits == kept else 0)}


def test_hopper_fp8_pairs_the_halves_of_every_four_k() -> None:
    a, b = np.zeros((1, 16, 32), ml_dtypes.float8_e4m3fn), np.zeros((1, 32, 8), ml_dtypes.float8_e4m3fn)
    a[0, :, 0], b[0, 0] = 256, 256
    a[0, :, 16], b[0, 16] = -256, 256  # cancels in the first half, before the small product of the second
    a[0, :, 2], b[0, 2] = 2.0**-9, 0.5
    left, right = fragments(a.view(np.uint8), b.view(np.uint8), 8)
    zero = np.zeros((1, 32, 4), np.uint32)
    assert set(mma(32, "f32.e4m3.e4m3.f32", left, right, zero, arch=Arch.of("sm_90a")).view(np.float32).ravel()) == {
        2.0**-10
    }
    assert set(mma(32, "f32.e4m3.e4m3.f32", left, right, zero, arch=Arch.of("sm_120a")).view(np.float32).ravel()) == {
        0.0
    }


@pytest.mark.parametrize(
    ("kind", "scale_vec", "scale_type"),
    [("mxf4nvf4", 4, "ue4m3"), ("mxf4nvf4", 4, "ue8m0"), ("mxf4nvf4", 2, "ue8m0"), ("mxf4", 2, "ue8m0")],
)
@pytest.mark.parametrize(("thread_a", "thread_b", "byte"), [(0, 0, 0), (1, 3, 2), (0, 2, 2)])
def test_block_scaled_fp4(kind: str, scale_vec: int, scale_type: str, thread_a: int, thread_b: int, byte: int) -> None:
    byte = 0 if scale_vec == 4 else byte
    a_codes, a, _ = codes_of("e2m1", (WARPS, 16, 64))
    b_codes, b, _ = codes_of("e2m1", (WARPS, 64, 8))
    c = RNG.integers(-9, 10, (WARPS, 16, 8)).astype(np.float32)
    raw_a, raw_b = RNG.integers(0, 1 << 32, (2, WARPS, 32), dtype=np.uint32)
    scale = np.uint8(0x38) if scale_type == "ue4m3" else np.uint8(127)  # 1.0 in both encodings
    scale_a = (scale + RNG.integers(-2, 3, (WARPS, 16, scale_vec)) * (8 if scale_type == "ue4m3" else 1)).astype(
        np.uint8
    )
    scale_b = (scale + RNG.integers(-2, 3, (WARPS, 8, scale_vec)) * (8 if scale_type == "ue4m3" else 1)).astype(
        np.uint8
    )
    bytes_a, bytes_b = raw_a.view(np.uint8).reshape(WARPS, 32, 4), raw_b.view(np.uint8).reshape(WARPS, 32, 4)
    for row in range(16):  # rows 0..7 in the first lane of the pair, 8..15 in the second
        bytes_a[:, 4 * (row % 8) + 2 * thread_a + row // 8, byte : byte + scale_vec] = scale_a[:, row]
    for n in range(8):
        bytes_b[:, 4 * n + thread_b, byte : byte + scale_vec] = scale_b[:, n]
    value = lambda s: 2.0 ** ((s.astype(int) - 0x38) / 8 if scale_type == "ue4m3" else s.astype(int) - 127)  # noqa: E731
    block = 64 // scale_vec
    wide_a, wide_b = (np.repeat(value(s), block, -1) for s in (scale_a, scale_b))
    expected = (a * wide_a) @ (b * np.swapaxes(wide_b, -1, -2)) + c
    left, right = fragments(a_codes, b_codes, 4)
    d = mma_block_scale(
        kind, scale_vec, f"f32.e2m1.e2m1.f32.{scale_type}", left, right, accumulator(c).view(np.uint32),
        sfa=Scales(registers=raw_a, byte_id=byte, thread_id=thread_a),
        sfb=Scales(registers=raw_b, byte_id=byte, thread_id=thread_b),
    )  # fmt: skip
    np.testing.assert_array_equal(d.view(np.float32), accumulator(expected.astype(np.float32)))


def test_block_scaled_fp8_reads_fp4_in_the_middle_of_its_byte() -> None:
    a_codes, a, _ = codes_of("e2m1", (1, 16, 32))
    b_codes, b, _ = codes_of("e4m3", (1, 32, 8))
    left, right = fragments(a_codes.astype(np.uint32) << 2, b_codes, 8)
    scales = np.full((1, 32), 0x80818283, np.uint32)  # byte 1: 2**3, byte 2: 2**2
    d = mma_block_scale(
        "mxf8f6f4", 1, "f32.e2m1.e4m3.f32.ue8m0", left, right, np.zeros((1, 32, 4), np.uint32),
        sfa=Scales(registers=scales, byte_id=1, thread_id=0), sfb=Scales(registers=scales, byte_id=2, thread_id=0),
    )  # fmt: skip
    np.testing.assert_array_equal(d.view(np.float32), accumulator((a @ b * 2.0**5).astype(np.float32)))


def test_wrong_selectors_and_forms_are_errors() -> None:
    zeros = np.zeros((1, 32, 4), np.uint32)
    good = Scales(registers=zeros[..., 0], byte_id=0, thread_id=0)
    types = "f32.e2m1.e2m1.f32.ue8m0"
    with pytest.raises(SimError, match="selectors"):
        bad = Scales(registers=zeros[..., 0], byte_id=1, thread_id=0)
        mma_block_scale("mxf4", 2, types, zeros, zeros[..., :2], zeros, sfa=bad, sfb=good)
    with pytest.raises(SimError, match="not a PTX form"):
        mma_block_scale("mxf4", 4, types, zeros, zeros[..., :2], zeros, sfa=good, sfb=good)
    with pytest.raises(SimError, match="not modelled"):
        mma(16, "f64.f64.f64.f64", zeros, zeros[..., :2], zeros, arch=Arch.of("sm_80"))
    with pytest.raises(SimError, match="hold k"):
        mma(32, "f32.bf16.bf16.f32", zeros, zeros[..., :2], zeros, arch=Arch.of("sm_80"))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_gives_each_lane_its_pair(count: int, trans: bool) -> None:
    halves = RNG.integers(0, 1 << 16, (WARPS, 8 * count, 8)).astype(np.uint16)
    got = ldmatrix(halves.view(np.uint8), trans=trans)
    assert got.shape == (WARPS, 32, count)
    for lane, matrix in np.ndindex(32, count):
        tile = halves[:, 8 * matrix : 8 * matrix + 8]
        tile = np.swapaxes(tile, 1, 2) if trans else tile
        low, high = tile[:, lane // 4, 2 * (lane % 4)], tile[:, lane // 4, 2 * (lane % 4) + 1]
        np.testing.assert_array_equal(got[:, lane, matrix], low.astype(np.uint32) | high.astype(np.uint32) << 16)


@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_undoes_ldmatrix(trans: bool) -> None:
    rows = RNG.integers(0, 256, (WARPS, 32, 16)).astype(np.uint8)
    np.testing.assert_array_equal(stmatrix(ldmatrix(rows, trans=trans), trans=trans), rows)
    assert (stmatrix(ldmatrix(rows, trans=trans), trans=not trans) != rows).any()


def test_movmatrix_transposes_eight_by_eight() -> None:
    tile = RNG.integers(0, 1 << 16, (WARPS, 8, 8)).astype(np.uint16)
    got = movmatrix(ldmatrix(tile.view(np.uint8))[..., 0])
    np.testing.assert_array_equal(got, ldmatrix(np.ascontiguousarray(np.swapaxes(tile, 1, 2)).view(np.uint8))[..., 0])


def test_ldmatrix_feeds_mma_as_kernels_use_it() -> None:
    a_codes, a, _ = codes_of("f16", (WARPS, 16, 16))
    b_codes, b, _ = codes_of("f16", (WARPS, 16, 8))
    tiles = [a_codes[:, :8, :8], a_codes[:, 8:, :8], a_codes[:, :8, 8:], a_codes[:, 8:, 8:]]
    left = ldmatrix(np.concatenate([np.ascontiguousarray(t).view(np.uint8) for t in tiles], 1))
    right = ldmatrix(b_codes.view(np.uint8).reshape(WARPS, 16, 16), trans=True)  # b is stored [k, n]
    d = mma(16, "f32.f16.f16.f32", left, right, np.zeros((WARPS, 32, 4), np.uint32), arch=Arch.of("sm_80"))
    np.testing.assert_array_equal(d.view(np.float32), accumulator((a @ b).astype(np.float32)))


def test_small_formats_decode_inside_operands() -> None:
    codes = np.arange(64, dtype=np.uint8)
    assert formats.decode(formats.E3M2, codes).max() == 28.0
    assert formats.decode(formats.E2M3, codes).max() == 7.5
