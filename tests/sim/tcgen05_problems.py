"""Operands of tcgen05.mma as TMA writes them and tcgen05.cp copies their scales, and block-scaled products to check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from jitfp4.arch import Arch
from jitfp4.sim import tmem
from jitfp4.sim.swizzle import Swizzle
from jitfp4.sim.tcgen05 import Cta, mma_block_scale
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
                "arch": Arch.of("sm_100a"), **overrides,
            }  # fmt: skip
            mma_block_scale(ctas, kind, problem.block, **call)


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    """Rounding towards zero of a dozen instructions stays below 2**-22 of the largest value."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=12 * 2.0**-23 * np.abs(expected).max())
