"""Tensor memory: lane tables of ld and st written out by hand, copies against byte loops, allocation rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jitfp4.arch import Arch
from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim import tmem
from jitfp4.sim.instruction_descriptor import InstructionDescriptor
from jitfp4.sim.ops.tcgen05_pipe import _Form, _Operands, _tensor_reads
from jitfp4.sim.tmem import Allocations

RNG = np.random.default_rng(29)


def cell(shape: str, t: int, r: int, split: int) -> tuple[int, int]:
    """Lane and column of register r of thread t, relative to the address."""
    if shape == "32x32b":
        return t, r
    if shape == "16x32bx2":
        return t % 16, r + (split if t >= 16 else 0)
    if shape == "16x64b":
        return t // 4 + (8 if t % 2 else 0), 2 * r + (1 if t % 4 >= 2 else 0)
    if shape == "16x128b":
        return t // 4 + (8 if r % 2 else 0), r // 2 * 4 + t % 4
    block, within = divmod(r, 4)
    return t // 4 + (8 if within >= 2 else 0), 8 * block + 2 * (t % 4) + within % 2


@pytest.mark.parametrize(
    ("shape", "num", "registers"),
    [("32x32b", 32, 32), ("16x64b", 8, 8), ("16x32bx2", 4, 4), ("16x128b", 4, 8), ("16x256b", 8, 32), ("32x32b", 1, 1)],
)
@pytest.mark.parametrize("warp", [0, 2, 7])
def test_loads_follow_the_lane_table(shape: str, num: int, registers: int, warp: int) -> None:
    memory = RNG.integers(0, 1 << 32, (128, 512), dtype=np.uint32)
    base = 32 * (warp % 4) + (16 if shape != "32x32b" else 0)
    got = tmem.load(memory, tmem.cells(shape, num, base << 16 | 40, warp, half_split=100))
    assert got.shape == (32, registers)
    for t, r in np.ndindex(32, registers):
        lane, column = cell(shape, t, r, 100)
        assert got[t, r] == memory[base + lane, 40 + column]


@pytest.mark.parametrize(("shape", "num"), [("32x32b", 16), ("16x64b", 4), ("16x128b", 2), ("16x256b", 2)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_store_is_read_back_and_touches_nothing_else(shape: str, num: int, packed: bool) -> None:
    memory = np.zeros((128, 512), np.uint32)
    at = tmem.cells(shape, num, 32 << 16 | 8, 1, packed=packed)
    values = RNG.integers(1, 1 << 32, at.shape[1:3], dtype=np.uint32)
    tmem.store(memory, at, values)
    np.testing.assert_array_equal(tmem.load(memory, at), values)
    assert (memory != 0).sum() <= values.size * (2 if packed else 1)
    assert len({(int(a), int(b)) for a, b in zip(at[0].ravel(), at[1].ravel(), strict=True)}) == at[0].size


def test_packing_joins_neighbouring_columns() -> None:
    memory = RNG.integers(0, 1 << 32, (128, 512), dtype=np.uint32)
    got = tmem.load(memory, tmem.cells("32x32b", 2, 0, 0, packed=True))
    half = memory[:32, :4] & 0xFFFF
    np.testing.assert_array_equal(got, half[:, 0::2] | half[:, 1::2] << 16)


@pytest.mark.parametrize(("shape", "num", "address", "warp"), [
    ("32x32b", 1, 32 << 16, 0), ("32x32b", 1, 16 << 16, 0), ("16x64b", 1, 0, 1), ("32x32b", 128, 400, 0),
])  # fmt: skip
def test_lanes_and_columns_out_of_reach_are_errors(shape: str, num: int, address: int, warp: int) -> None:
    with pytest.raises(SimMemoryError):
        tmem.cells(shape, num, address, warp)


@pytest.mark.parametrize(("shape", "num"), [("16x256b", 64), ("16x128b", 128), ("32x32b", 3), ("8x32b", 1)])
def test_unknown_forms_are_errors(shape: str, num: int) -> None:
    with pytest.raises(SimError, match="not a PTX form"):
        tmem.cells(shape, num, 0, 0)


def descriptor(address: int, *, sbo: int, lbo: int = 0) -> int:
    return address >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46


COPIES: dict[str, Any] = {
    "32x128b.warpx4": (32, 4, lambda r: [r, r + 32, r + 64, r + 96]),
    "64x128b.warpx2::02_13": (64, 4, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 4, lambda r: [r % 32 + 64 * (r // 32), r % 32 + 64 * (r // 32) + 32]),
    "128x128b": (128, 4, lambda r: [r]),
    "128x256b": (128, 8, lambda r: [r]),
    "4x256b": (4, 8, lambda r: [32 * r]),
}


@pytest.mark.parametrize("shape", COPIES)
def test_copies_put_every_byte_where_the_shape_says(shape: str) -> None:
    rows, columns, lanes = COPIES[shape]
    shared = RNG.integers(0, 256, 8192).astype(np.uint8)
    memory = np.full((128, 512), 0xAAAAAAAA, np.uint32)
    sbo, lbo = 128, 2048
    tmem.copy(memory, 20, descriptor(1024, sbo=sbo, lbo=lbo), shared, shape)
    expected = np.full((128, 512), 0xAAAAAAAA, np.uint32)
    for row, column, lane in ((r, c, i) for r in range(rows) for c in range(columns) for i in lanes(r)):
        byte = 1024 + row // 8 * sbo + row % 8 * 16 + column // 4 * lbo + column % 4 * 4
        expected[lane, 20 + column] = int.from_bytes(shared[byte : byte + 4].tobytes(), "little")
    np.testing.assert_array_equal(memory, expected)


def test_scale_atom_arrives_as_the_mma_wants_it() -> None:
    # byte 16 r + c of a 512-byte atom: lanes 32 q + r, column c / 4, byte c % 4
    shared = RNG.integers(0, 256, 512).astype(np.uint8)
    memory = np.zeros((128, 512), np.uint32)
    tmem.copy(memory, 0, descriptor(0, sbo=128), shared, "32x128b.warpx4")
    for r, c, q in np.ndindex(32, 16, 4):
        assert memory[32 * q + r, c // 4] >> 8 * (c % 4) & 0xFF == shared[16 * r + c]


def test_a_wrong_stride_in_the_copy_descriptor_moves_rows() -> None:
    shared = RNG.integers(0, 256, 2048).astype(np.uint8)
    good, bad = np.zeros((2, 128, 512), np.uint32)
    tmem.copy(good, 0, descriptor(0, sbo=128), shared, "32x128b.warpx4")
    tmem.copy(bad, 0, descriptor(0, sbo=256), shared, "32x128b.warpx4")
    assert (good[:8] == bad[:8]).all() and (good[8:32, :4] != bad[8:32, :4]).any()


def test_copy_faults_are_errors() -> None:
    shared, memory = np.zeros(512, np.uint8), np.zeros((128, 512), np.uint32)
    with pytest.raises(SimMemoryError, match="column"):
        tmem.copy(memory, 510, descriptor(0, sbo=128), shared, "32x128b.warpx4")
    with pytest.raises(SimMemoryError, match="shared memory"):
        tmem.copy(memory, 0, descriptor(256, sbo=128), shared, "32x128b.warpx4")
    with pytest.raises(SimError, match="46-48"):
        tmem.copy(memory, 0, 8 << 32, shared, "32x128b.warpx4")
    with pytest.raises(SimError, match="not modelled"):
        tmem.copy(memory, 0, descriptor(0, sbo=128), shared, "32x128b.warpx4.b8x16.b4x16_p64")


def test_allocation_takes_the_first_room_and_waits_when_full() -> None:
    state, first = Allocations().alloc(256) or (Allocations(), -1)
    state, second = state.alloc(128) or (state, -1)
    state, third = state.alloc(128) or (state, -1)
    assert (first, second, third) == (0, 256, 384)
    assert state.alloc(32) is None
    state.require(200, 300)
    freed = state.dealloc(256, 128)
    assert (freed.alloc(64) or (freed, -1))[1] == 256
    with pytest.raises(SimMemoryError):
        freed.require(200, 100)


def test_allocation_rules_are_enforced() -> None:
    state, _ = Allocations().alloc(64) or (Allocations(), -1)
    with pytest.raises(SimError, match="power of two"):
        state.alloc(48)
    with pytest.raises(SimError, match="must not increase"):
        state.alloc(128)
    with pytest.raises(SimError, match="dealloc"):
        state.dealloc(0, 32)
    with pytest.raises(SimError, match="relinquish"):
        state.relinquish().alloc(32)


@pytest.mark.parametrize(
    ("n", "k96", "block", "sf_id", "expected"),
    [
        (64, False, 16, 0, [(480, 2)]),
        (192, False, 16, 0, [(480, 6)]),  # not the two columns behind, which may belong to somebody else
        (256, True, 16, 2, [(480, 8), (488, 8)]),  # six scales from the third byte on
        (128, True, 32, 2, [(480, 4), (484, 4)]),  # three
        (128, True, 32, 0, [(480, 4)]),
    ],
)
def test_which_columns_of_scales_a_multiply_reads(
    n: int, k96: bool, block: int, sf_id: int, expected: list[tuple[int, int]]
) -> None:
    bits = 1 << 7 | 1 << 10 | n >> 3 << 17 | (block == 32) << 23 | 1 << 27 | sf_id << 4 | sf_id << 29 | k96 << 31
    shape = InstructionDescriptor.decode(bits, "mxf4nvf4", 1, Arch.of("sm_103a"), block=block)
    reads = _tensor_reads(_Form(1, "mxf4nvf4", block), shape, _Operands(0, 0, 0, bits, (464, 480), False))
    assert [read for read in reads if read[0] >= 480] == expected
