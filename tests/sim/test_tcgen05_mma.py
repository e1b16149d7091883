"""tcgen05.mma on tiles that TMA wrote and scales that tcgen05.cp copied, against dequantised matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim import tmem
from jitfp4.sim.swizzle import Swizzle
from jitfp4.sim.tcgen05 import Cta, TmemOperand, mma, mma_block_scale
from jitfp4.sim.tensormap import ElementType, TensorMap
from jitfp4.sim.tmem import Allocations

RNG = np.random.default_rng(31)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LAYOUT = {Swizzle.NONE: 0, Swizzle.B128: 2, Swizzle.B64: 4, Swizzle.B32: 6}
ALL_COLUMNS = Allocations(blocks=((0, 512),))
# Shared memory of the tests: A and B in up to three buffers each, then the scale atoms.
A_AT, B_AT, SFA_AT, SFB_AT = 0, 98304, 196608, 204800
SFA_COLUMN, SFB_COLUMN = 256, 288


def new_cta() -> Cta:
    poison = np.full((128, 512), 0x7FC00000, np.uint32)
    return Cta(shared=np.zeros(232448, np.uint8), tmem=poison, allocations=ALL_COLUMNS)


def descriptor(address: int, *, sbo: int, lbo: int = 0, swizzle: Swizzle = Swizzle.B128, absolute: bool = False) -> int:
    return address >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | absolute << 52 | LAYOUT[swizzle] << 61


def tma_write(shared: np.ndarray, base: int, tile: np.ndarray, swizzle: Swizzle = Swizzle.B128) -> None:
    raw = np.ascontiguousarray(tile).view(np.uint8)
    tiled = TensorMap(
        base=raw.reshape(-1), dtype=ElementType.U8, dims=raw.shape[::-1], strides=(raw.shape[1],),
        box=raw.shape[::-1], swizzle=swizzle,
    )  # fmt: skip
    shared[tiled.shared_addresses(base)] = tiled.load((0, 0))


def pack(codes: np.ndarray) -> np.ndarray:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def scale_atoms(scales: np.ndarray) -> np.ndarray:
    """Rows x blocks of scale bytes in the 128x4 order, ``[row blocks, k blocks, 512]``, byte by byte."""
    rows, blocks = -(-scales.shape[0] // 128), scales.shape[1] // 4
    atoms = np.zeros((rows, blocks, 512), np.uint8)
    for (m, j), value in np.ndenumerate(scales):
        atoms[m // 128, j // 4, m % 32 * 16 + m % 128 // 32 * 4 + j % 4] = value
    return atoms


@dataclass
class Fp4Problem:
    """Random codes and scales; ``expected`` is the dequantised product in float64."""

    m: int
    n: int
    k: int
    block: int = 16
    ue4m3: bool = True
    a: np.ndarray = field(init=False)
    b: np.ndarray = field(init=False)
    sfa: np.ndarray = field(init=False)
    sfb: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.a, self.b = (RNG.integers(0, 16, (rows, self.k)).astype(np.uint8) for rows in (self.m, self.n))
        low, high = (0x20, 0x58) if self.ue4m3 else (120, 134)
        shapes = ((rows, self.k // self.block) for rows in (self.m, self.n))
        self.sfa, self.sfb = (RNG.integers(low, high, shape).astype(np.uint8) for shape in shapes)

    def scale(self, sf: np.ndarray) -> np.ndarray:
        values = sf.view(ml_dtypes.float8_e4m3fn if self.ue4m3 else ml_dtypes.float8_e8m0fnu).astype(np.float64)
        return np.repeat(values, self.block, 1)

    @property
    def expected(self) -> np.ndarray:
        return np.asarray((E2M1[self.a] * self.scale(self.sfa)) @ (E2M1[self.b] * self.scale(self.sfb)).T)

    def idesc(self, *, k96: bool = False, sf_id: int = 0) -> int:
        bits = 1 << 7 | 1 << 10 | self.n >> 3 << 17 | (not self.ue4m3) << 23 | self.m >> 7 << 27
        return bits | k96 << 31 | sf_id << 4 | sf_id << 29


def copy_scales(ctas: tuple[Cta, ...], problem: Fp4Problem, k_block: int, words: int, slot: int = 0) -> None:
    """tcgen05.cp of ``words`` scale words from ``k_block`` on: A's own rows, all of B's, to both CTAs."""
    fa, fb = scale_atoms(problem.sfa), scale_atoms(problem.sfb)
    per_cta = problem.m // len(ctas) // 128 or 1
    step = 8 if problem.n > 128 else 4
    for v, cta in enumerate(ctas):
        for word in range(words):
            cta.shared[SFA_AT : SFA_AT + 512] = fa[v * per_cta, k_block + word]
            tmem.copy(cta.tmem, SFA_COLUMN + 4 * (slot + word), descriptor(SFA_AT, sbo=128, swizzle=Swizzle.NONE),
                      cta.shared, "32x128b.warpx4")  # fmt: skip
            for half in range(len(fb)):
                cta.shared[SFB_AT : SFB_AT + 512] = fb[half, k_block + word]
                column = SFB_COLUMN + step * (slot + word) + 4 * half
                source = descriptor(SFB_AT, sbo=128, swizzle=Swizzle.NONE)
                tmem.copy(cta.tmem, column, source, cta.shared, "32x128b.warpx4")


def run_k64(problem: Fp4Problem, ctas: tuple[Cta, ...], kind: str = "mxf4nvf4", **overrides: Any) -> None:
    """K = 256 per 128-byte row, four instructions each; A and B rows are split over the CTAs."""
    group = len(ctas)
    for tile in range(problem.k // 256):
        part = slice(128 * tile, 128 * tile + 128)
        for v, cta in enumerate(ctas):
            for at, codes in ((A_AT, problem.a), (B_AT, problem.b)):
                rows = len(codes) // group
                tma_write(cta.shared, at, pack(codes[v * rows : v * rows + rows])[:, part])
        for j in range(4):
            step = tile * 4 + j
            word, sf_id = (step, 0) if problem.block == 16 else (step // 2, 2 * (step % 2))
            copy_scales(ctas, problem, word, 1)
            call = {
                "d": 0, "a": descriptor(A_AT + 32 * j, sbo=1024), "b": descriptor(B_AT + 32 * j, sbo=1024),
                "idesc": problem.idesc(sf_id=sf_id), "scales": (SFA_COLUMN, SFB_COLUMN), "enable_input_d": step > 0,
                "arch": "sm_100a", **overrides,
            }  # fmt: skip
            mma_block_scale(ctas, kind, problem.block, **call)


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    """Rounding towards zero of a dozen instructions stays below 2**-22 of the largest value."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=12 * 2.0**-23 * np.abs(expected).max())


@pytest.mark.parametrize("n", [8, 64, 128, 256])
def test_nvfp4_with_one_cta(n: int) -> None:
    problem, cta = Fp4Problem(128, n, 512), new_cta()
    run_k64(problem, (cta,))
    assert_close(cta.tmem[:, :n].view(np.float32), problem.expected)
    assert (cta.tmem[:, n:SFA_COLUMN] == 0x7FC00000).all()


def test_nvfp4_with_a_pair_of_ctas() -> None:
    problem, ctas = Fp4Problem(256, 256, 256), (new_cta(), new_cta())
    run_k64(problem, ctas)
    got = np.concatenate([c.tmem[:, :256].view(np.float32) for c in ctas])
    assert_close(got, problem.expected)


def test_half_the_rows_per_cta_put_the_right_columns_in_the_upper_lanes() -> None:
    problem, ctas = Fp4Problem(128, 128, 256), (new_cta(), new_cta())
    sfa = np.zeros((256, 16), np.uint8)
    sfa[:64], sfa[128:192] = problem.sfa[:64], problem.sfa[64:]
    fa, fb = scale_atoms(sfa), scale_atoms(problem.sfb)
    for v, cta in enumerate(ctas):
        for at, codes in ((A_AT, problem.a), (B_AT, problem.b)):
            tma_write(cta.shared, at, pack(codes[64 * v : 64 * v + 64]))
    for j in range(4):
        for v, cta in enumerate(ctas):
            cta.shared[SFA_AT : SFA_AT + 512] = fa[v, j]
            source = descriptor(SFA_AT, sbo=128, swizzle=Swizzle.NONE)
            tmem.copy(cta.tmem, SFA_COLUMN, source, cta.shared, "32x128b.warpx4")
            words = fb[0, j].reshape(32, 16).view(np.uint32)  # word n / 32 of lane n % 32
            cta.tmem[:64, SFB_COLUMN : SFB_COLUMN + 2] = np.tile(words[:, :2], (2, 1))
            cta.tmem[64:, SFB_COLUMN : SFB_COLUMN + 2] = np.tile(words[:, 2:], (2, 1))
        mma_block_scale(
            ctas, "mxf4nvf4", 16, 0, descriptor(A_AT + 32 * j, sbo=1024), descriptor(B_AT + 32 * j, sbo=1024),
            problem.idesc(), (SFA_COLUMN, SFB_COLUMN), enable_input_d=j > 0, arch="sm_100a",
        )  # fmt: skip
    for v, cta in enumerate(ctas):
        d = cta.tmem[:, :64].view(np.float32)
        assert_close(np.concatenate([d[:64], d[64:]], 1), problem.expected[64 * v : 64 * v + 64])


@pytest.mark.parametrize(
    ("kind", "block", "ue4m3"), [("mxf4", 32, False), ("mxf4nvf4", 32, False), ("mxf4nvf4", 16, False)]
)
def test_ue8m0_scales(kind: str, block: int, ue4m3: bool) -> None:
    problem, cta = Fp4Problem(128, 128, 512, block, ue4m3), new_cta()
    run_k64(problem, (cta,), kind)
    assert_close(cta.tmem[:, :128].view(np.float32), problem.expected)


def run_k96(problem: Fp4Problem, cta: Cta, arch: str = "sm_103a", wrap: bool = True) -> None:
    """A K tile of 768: three 128-byte buffers, eight instructions, scale words as CUTLASS schedules them."""
    step = 8 if problem.n > 128 else 4
    for buffer in range(3):
        part = slice(128 * buffer, 128 * buffer + 128)
        tma_write(cta.shared, A_AT + 16384 * buffer, pack(problem.a)[:, part])
        tma_write(cta.shared, B_AT + 128 * problem.n * buffer, pack(problem.b)[:, part])
    per = 6 if problem.block == 16 else 3  # scales of one instruction
    for i in range(8):
        buffer, chunk = divmod(3 * i, 8)
        following = buffer + (1 if chunk + 3 > 8 and wrap else 0)
        word, sf_id = divmod(per * i % 12, 4)
        copy_scales((cta,), problem, per * i // 12 * 3, 3)
        mma_block_scale(
            (cta,), "mxf4nvf4", problem.block, 0,
            descriptor(A_AT + 16384 * buffer + 16 * chunk, sbo=1024, lbo=A_AT + 16384 * following, absolute=True),
            descriptor(B_AT + 128 * problem.n * buffer + 16 * chunk, sbo=1024,
                       lbo=B_AT + 128 * problem.n * following, absolute=True),
            problem.idesc(k96=True, sf_id=sf_id), (SFA_COLUMN + 4 * word, SFB_COLUMN + step * word),
            enable_input_d=i > 0, arch=arch,
        )  # fmt: skip


@pytest.mark.parametrize("n", [128, 256])
@pytest.mark.parametrize(("block", "ue4m3"), [(16, True), (32, False)])
def test_k96_wraps_into_the_next_buffer(n: int, block: int, ue4m3: bool) -> None:
    problem, cta = Fp4Problem(128, n, 768, block, ue4m3), new_cta()
    run_k96(problem, cta)
    assert_close(cta.tmem[:, :n].view(np.float32), problem.expected)


def test_k96_without_the_next_buffer_is_wrong_and_belongs_to_sm_103a() -> None:
    problem, cta = Fp4Problem(128, 128, 768), new_cta()
    run_k96(problem, cta, wrap=False)
    assert np.abs(cta.tmem[:, :128].view(np.float32) - problem.expected).max() > 1
    with pytest.raises(SimError, match="only sm_103a"):
        run_k96(problem, cta, arch="sm_100a")


def swap_nibbles(problem: Fp4Problem) -> None:
    problem.a = problem.a.reshape(problem.m, -1, 2)[:, :, ::-1].reshape(problem.m, -1).copy()


def roll_scales(problem: Fp4Problem) -> None:
    problem.sfb = np.roll(problem.sfb, 1, 1)


@pytest.mark.parametrize("fault", [swap_nibbles, roll_scales])
def test_planted_data_faults_change_the_result(fault: Callable[[Fp4Problem], None]) -> None:
    problem, cta = Fp4Problem(128, 64, 256), new_cta()
    expected = problem.expected
    fault(problem)
    run_k64(problem, (cta,))
    assert (np.abs(cta.tmem[:, :64].view(np.float32) - expected) > 1e-3 * np.abs(expected).max()).mean() > 0.5


@pytest.mark.parametrize("swizzle", [Swizzle.NONE, Swizzle.B64])
def test_a_wrong_swizzle_changes_the_result(swizzle: Swizzle) -> None:
    problem, cta = Fp4Problem(128, 64, 256), new_cta()
    run_k64(problem, (cta,))
    good = cta.tmem[:, :64].copy()
    wrong = descriptor(A_AT, sbo=1024, swizzle=swizzle)
    run_k64(problem, (cta,), a=wrong)
    assert (cta.tmem[:, :64] != good).any()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param({"scales": (SFA_COLUMN, SFB_COLUMN + 1)}, "even column", id="odd SFB column"),
        pytest.param({"scales": (SFA_COLUMN | 2 << 30, SFB_COLUMN)}, "different ids", id="id in the address differs"),
        pytest.param({"idesc": 0x08400480 | 1 << 3}, "reserved", id="reserved bit"),
        pytest.param({"idesc": 0x08400480 | 1 << 2}, "sparse", id="sparse"),
        pytest.param({"idesc": 0x88400480}, "only sm_103a", id="K = 96"),
        pytest.param({"idesc": 0x08400480 | 2 << 29}, "scale ids", id="block-16 scale id"),
        pytest.param({"idesc": 0x10400480}, "M = 256", id="M of a pair"),
        pytest.param({"idesc": 0x08408480}, "reserved", id="transposed"),
        pytest.param({"a": 0x40 << 32 | 2 << 61}, "46-48", id="descriptor constant"),
        pytest.param({"a": descriptor(A_AT + 112, sbo=1024)}, "runs over", id="descriptor over the row"),
        pytest.param(
            {"a": descriptor(A_AT, sbo=1024, absolute=True)}, "belongs to K = 96", id="absolute mode at K = 64"
        ),
        pytest.param({"d": 300}, "column", id="D past the end"),
        pytest.param({"d": 32 << 16}, "lane", id="D at a lane"),
    ],
)
def test_illegal_instructions_are_errors(override: dict[str, Any], message: str) -> None:
    problem, cta = Fp4Problem(128, 256, 256), new_cta()
    with pytest.raises(SimError, match=message):
        run_k64(problem, (cta,), **override)


def test_scales_that_differ_between_quadrants_are_errors() -> None:
    problem, cta = Fp4Problem(128, 64, 256), new_cta()
    run_k64(problem, (cta,))
    cta.tmem[70, SFA_COLUMN] ^= 1
    call = (descriptor(A_AT, sbo=1024), descriptor(B_AT, sbo=1024), problem.idesc(), (SFA_COLUMN, SFB_COLUMN))
    with pytest.raises(SimError, match="quadrants"):
        mma_block_scale((cta,), "mxf4nvf4", 16, 0, *call, enable_input_d=False, arch="sm_100a")


def test_columns_must_be_allocated() -> None:
    problem, full = Fp4Problem(128, 64, 256), new_cta()
    cta = Cta(shared=full.shared, tmem=full.tmem, allocations=Allocations(blocks=((0, 256),)))
    with pytest.raises(SimMemoryError, match="allocated"):
        run_k64(problem, (cta,))


@pytest.mark.parametrize(("m", "n", "k", "bits"), [(128, 256, 64, 0x08400480), (256, 256, 96, 0x90400480)])
def test_descriptor_values_known_from_elsewhere(m: int, n: int, k: int, bits: int) -> None:
    assert Fp4Problem(m, n, 96).idesc(k96=k == 96) == bits


# ---- kinds without block scales --------------------------------------------

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
        mma((cta,), KIND.get(a_type, "f8f6f4"), 0, *at, idesc, enable_input_d=step > 0, arch="sm_100a")
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
    mma((cta,), "f16", 0, *at, idesc, enable_input_d=False, arch="sm_100a")
    np.testing.assert_array_equal(cta.tmem[:, :128].view(np.float32), a.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.parametrize("m", [128, 256])
def test_f16_kind_with_a_pair_of_ctas_and_negation(m: int) -> None:
    a, b = matrix("f16", m, 16), matrix("f16", 64, 16)
    ctas = (new_cta(), new_cta())
    for v, cta in enumerate(ctas):
        tma_write(cta.shared, A_AT, a[v * m // 2 : (v + 1) * m // 2], Swizzle.B32)
        tma_write(cta.shared, B_AT, b[32 * v : 32 * v + 32], Swizzle.B32)
    at = (descriptor(x, sbo=256, swizzle=Swizzle.B32) for x in (A_AT, B_AT))
    mma(ctas, "f16", 8, *at, plain_idesc(m, 64, "f16", "f16", 1, neg_a=1), enable_input_d=False, arch="sm_100a")
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
    mma((cta,), "f16", 0, *at, plain_idesc(128, 16, "f16", "f16", 0), enable_input_d=True, arch="sm_100a")
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
        plain_idesc(128, 32, "bf16", "bf16", 1), enable_input_d=False, arch="sm_100a", disabled_lanes=disabled,
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
        (cta,), "mxf8f6f4", 32, 0, *at, idesc, (SFA_COLUMN, SFB_COLUMN), enable_input_d=False, arch="sm_100a"
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
        mma((new_cta(),), kind, 0, *at, idesc, enable_input_d=False, arch="sm_100a")
