"""Tensor maps against element-by-element loops and the chunk tables of the swizzles."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.swizzle import Swizzle, swizzled
from jitfp4.sim.tensormap import ElementType, TensorMap

RNG = np.random.default_rng(11)


def tensor_map(tensor: np.ndarray, box: tuple[int, ...], **options: Any) -> TensorMap:
    """A map over a C-contiguous ``tensor``; ``box`` is innermost first."""
    options.setdefault("dtype", ElementType(tensor.dtype.name))
    return TensorMap(
        base=tensor.reshape(-1).view(np.uint8),
        dims=tensor.shape[::-1],
        strides=tensor.strides[-2::-1],
        box=box,
        **options,
    )


def loop_load(tensor: np.ndarray, coords: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...]) -> list[Any]:
    """The box element by element, dimension 0 fastest, zero outside."""
    counts = [-(-b // s) for b, s in zip(box, steps, strict=True)]
    values = []
    for index in itertools.product(*(range(n) for n in reversed(counts))):
        at = [c + i * s for c, i, s in zip(reversed(coords), index, reversed(steps), strict=True)]
        inside = all(0 <= a < d for a, d in zip(at, tensor.shape, strict=True))
        values.append(tensor[tuple(at)] if inside else 0)
    return values


@pytest.mark.parametrize(
    ("shape", "box", "coords", "steps"),
    [
        ((40,), (16,), (32,), (1,)),
        ((7, 24), (8, 4), (16, 5), (1, 1)),
        ((7, 24), (8, 4), (-8, -2), (1, 1)),
        ((9, 24), (8, 7), (16, 1), (1, 3)),
        ((3, 5, 8), (8, 4, 2), (0, 3, 2), (1, 1, 1)),
        ((2, 3, 5, 16), (8, 2, 3, 2), (8, -1, 1, 1), (1, 2, 1, 1)),
        ((2, 2, 3, 3, 8), (8, 2, 2, 2, 2), (0, 2, 1, 1, 1), (1, 1, 1, 1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_load_equals_the_element_loop(shape: tuple[int, ...], box: Any, coords: Any, steps: Any, dtype: Any) -> None:
    tensor = RNG.integers(1, 60000, shape).astype(dtype)
    loaded = tensor_map(tensor, box, element_strides=steps).load(coords).view(dtype)
    np.testing.assert_array_equal(loaded, loop_load(tensor, coords, box, steps))


@pytest.mark.parametrize("coords", [(0, 0), (16, 5), (8, 1), (104, 0)])
def test_store_writes_inside_only(coords: tuple[int, int]) -> None:
    tensor = RNG.integers(1, 60000, (7, 24)).astype(np.uint16)
    before = tensor.copy()
    data = RNG.integers(1, 60000, (4, 8)).astype(np.uint16)
    tensor_map(tensor, (8, 4)).store(coords, data.reshape(-1).view(np.uint8))
    for row, column in np.ndindex(tensor.shape):
        r, c = row - coords[1], column - coords[0]
        expected = data[r, c] if 0 <= r < 4 and 0 <= c < 8 else before[row, column]
        assert tensor[row, column] == expected


@pytest.mark.parametrize(
    ("mode", "span", "rows"), [(Swizzle.B32, 32, 8), (Swizzle.B64, 64, 8), (Swizzle.B128, 128, 16)]
)
def test_swizzled_chunks_follow_the_row_table(mode: Swizzle, span: int, rows: int) -> None:
    tensor = RNG.integers(0, 256, (rows, span)).astype(np.uint8)
    tiled = tensor_map(tensor, (span, rows), swizzle=mode)
    shared = np.zeros(8192, np.uint8)
    shared[tiled.shared_addresses(4096)] = tiled.load((0, 0))
    rows_per_line = 128 // span  # the row number of the XOR is that of the 128-byte line
    for row, chunk in np.ndindex(rows, span // 16):
        moved = chunk ^ ((row // rows_per_line) % (span // 16))
        at = 4096 + row * span + moved * 16
        np.testing.assert_array_equal(shared[at : at + 16], tensor[row, chunk * 16 : chunk * 16 + 16])


@pytest.mark.parametrize(("mode", "atom", "rows"), [(Swizzle.B128_ATOM_32B, 32, 4), (Swizzle.B128_ATOM_64B, 64, 2)])
def test_wide_atoms_move_whole(mode: Swizzle, atom: int, rows: int) -> None:
    for row, chunk, byte in np.ndindex(8, 128 // atom, atom):
        moved = row * 128 + (chunk ^ (row % rows)) * atom + byte
        assert swizzled(np.array(row * 128 + chunk * atom + byte), mode) == moved


def test_flip_exchanges_halves_in_odd_rows() -> None:
    plain = swizzled(np.arange(512), Swizzle.B128_ATOM_32B)
    flipped = swizzled(np.arange(512), Swizzle.B128_ATOM_32B_FLIP_8B)
    odd = np.arange(512) // 128 % 2 == 1
    np.testing.assert_array_equal(flipped, np.where(odd, plain ^ 8, plain))


@pytest.mark.parametrize("mode", list(Swizzle))
def test_swizzle_is_its_own_inverse_and_repeats(mode: Swizzle) -> None:
    address = np.arange(4096)
    np.testing.assert_array_equal(swizzled(swizzled(address, mode), mode), address)
    np.testing.assert_array_equal(swizzled(address + mode.pattern, mode), swizzled(address, mode) + mode.pattern)
    if mode is not Swizzle.NONE:
        half = mode.pattern // 2
        assert (swizzled(address + half, mode) != swizzled(address, mode) + half).any()


def test_swizzle_acts_on_the_shared_address_not_on_the_box() -> None:
    tiled = tensor_map(np.zeros((8, 128), np.uint8), (128, 8), swizzle=Swizzle.B128)
    aligned, shifted = tiled.shared_addresses(0), tiled.shared_addresses(128)
    assert aligned[0] == 0 and shifted[0] == 128 ^ 0x10
    assert (shifted != aligned + 128).any()


def test_load_and_store_through_a_swizzle_round_trip() -> None:
    tensor = RNG.integers(0, 256, (24, 256)).astype(np.uint8)
    out = np.zeros_like(tensor)
    options: dict[str, Any] = {"swizzle": Swizzle.B128}
    source, target = tensor_map(tensor, (128, 24), **options), tensor_map(out, (128, 24), **options)
    shared = np.zeros(4096, np.uint8)
    for x in (0, 128):
        shared[source.shared_addresses(1024)] = source.load((x, 0))
        target.store((x, 0), shared[target.shared_addresses(1024)])
    np.testing.assert_array_equal(out, tensor)


def test_nan_fill_writes_its_own_nan() -> None:
    tensor = np.ones((2, 16), ml_dtypes.bfloat16)
    loaded = tensor_map(tensor, (16, 2), nan_fill=True).load((8, 1)).view(np.uint16).reshape(2, 16)
    assert loaded[0, :8].tolist() == [0x3F80] * 8
    assert (loaded[0, 8:] == 0x7FF7).all() and (loaded[1] == 0x7FF7).all()


def test_box_bytes_count_what_is_out_of_bounds() -> None:
    tiled = tensor_map(np.zeros((3, 32), np.float32), (32, 8))
    assert tiled.box_bytes == 1024 == tiled.load((16, 2)).size


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        ("add", np.uint32, lambda a, b: a + b),
        ("max", np.int32, np.maximum),
        ("min", np.int64, np.minimum),
        ("xor", np.uint64, np.bitwise_xor),
        ("add", np.float32, lambda a, b: a + b),
        ("add", np.float16, lambda a, b: (a.astype(np.float64) + b).astype(np.float16)),
        ("max", ml_dtypes.bfloat16, np.maximum),
        ("add", ml_dtypes.bfloat16, lambda a, b: (a.astype(np.float64) + b.astype(np.float64)).astype(a.dtype)),
        ("inc", np.uint32, lambda a, b: np.where(a >= b, 0, a + 1)),
        ("dec", np.uint32, lambda a, b: np.where((a == 0) | (a > b), b, a - 1)),
    ],
)
def test_reduce_combines_in_the_element_type(op: str, dtype: Any, expected: Any) -> None:
    tensor = (RNG.standard_normal((6, 16)) * 100).astype(dtype)
    data = (RNG.standard_normal((4, 8)) * 100).astype(dtype)
    wanted = tensor.copy()
    wanted[4:6, 8:16] = expected(tensor[4:6, 8:16], data[:2])
    tensor_map(tensor, (8, 4)).reduce(op, (8, 4), data.reshape(-1).view(np.uint8))
    np.testing.assert_array_equal(tensor.view(np.uint8), wanted.view(np.uint8))


def test_packed_fp4_is_padded_to_sixteen_bytes_per_group() -> None:
    tensor = RNG.integers(0, 256, (2, 64)).astype(np.uint8)
    options: dict[str, Any] = {"dims": (128, 2), "strides": (64,), "base": tensor.reshape(-1)}
    padded = TensorMap(dtype=ElementType.U4_ALIGN16B, box=(128, 2), **options)
    groups = padded.load((0, 0)).reshape(2, 8, 16)
    np.testing.assert_array_equal(groups[:, :, :8], tensor.reshape(2, 8, 8))
    assert not groups[:, :, 8:].any()
    packed = TensorMap(dtype=ElementType.U4_ALIGN8B, box=(64, 2), **options)
    np.testing.assert_array_equal(packed.load((64, 0)).reshape(2, 32), tensor[:, 32:])
    with pytest.raises(SimError, match="loads only"):
        padded.store((0, 0), padded.load((0, 0)))


@pytest.mark.parametrize(
    ("box", "options", "message"),
    [
        ((8,), {}, "do not fit the rank"),
        ((300, 2), {}, "1..256"),
        ((6, 2), {}, "whole 16 bytes"),
        ((64, 2), {"swizzle": Swizzle.B64}, "exceed the span"),
        ((8, 2), {"element_strides": (1, 9)}, "1..8"),
        ((8, 2), {"nan_fill": True}, "NaN fill"),
    ],
)
def test_illegal_maps_are_refused(box: Any, options: Any, message: str) -> None:
    with pytest.raises(SimError, match=message):
        tensor_map(np.zeros((4, 64), np.uint16), box, **options)


def test_a_map_larger_than_its_storage_is_refused() -> None:
    with pytest.raises(SimMemoryError):
        TensorMap(base=np.zeros(100, np.uint8), dtype=ElementType.U8, dims=(32, 4), strides=(32,), box=(16, 2))


def test_misaligned_shared_addresses_are_refused() -> None:
    with pytest.raises(SimMemoryError, match="128"):
        tensor_map(np.zeros((4, 64), np.uint16), (8, 2)).shared_addresses(64)


@pytest.mark.parametrize("column", [1, 4, -4])
def test_a_box_that_begins_inside_sixteen_bytes_is_refused(column: int) -> None:
    with pytest.raises(SimError, match="16 bytes"):
        tensor_map(np.zeros((4, 64), np.uint16), (8, 2)).load((column, 0))


@pytest.mark.parametrize("coords", [(-8, 0), (0, -1)])
def test_stores_below_zero_are_refused(coords: tuple[int, int]) -> None:
    tiled = tensor_map(np.zeros((4, 64), np.uint16), (8, 2))
    with pytest.raises(SimError, match="below zero"):
        tiled.store(coords, np.zeros(32, np.uint8))
    with pytest.raises(SimError, match="below zero"):
        tiled.reduce("add", coords, np.zeros(32, np.uint8))


def test_rows_of_a_box_lie_a_span_of_the_swizzle_apart() -> None:
    addresses = tensor_map(np.zeros((4, 64), np.uint16), (8, 2), swizzle=Swizzle.B128).shared_addresses(1024)
    assert (addresses // 128).tolist() == [8] * 16 + [9] * 16


def test_a_sum_that_is_nan_is_the_canonical_one() -> None:
    tensor = np.full((4, 8), 0x7FC00041, np.uint32).view(np.float32)
    tensor_map(tensor, (8, 2)).reduce("add", (0, 0), np.zeros(64, np.uint8))
    assert (tensor.view(np.uint32)[:2] == 0x7FFFFFFF).all() and (tensor.view(np.uint32)[2:] == 0x7FC00041).all()


def test_integer_reduction_of_floats_is_refused() -> None:
    with pytest.raises(SimError, match="and"):
        tensor_map(np.zeros((4, 8), np.float32), (8, 2)).reduce("and", (0, 0), np.zeros(64, np.uint8))
