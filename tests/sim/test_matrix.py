"""Matrix instructions through whole kernels: operands in shared memory, descriptors, tensor memory, waits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jitfp4.errors import SimDeadlockError, SimError, SimMemoryError
from tests.sim.cuda import launch
from tests.sim.matrix_kernels import COMMIT, FENCE, FREE, PAIR_COMMIT, TCGEN05, WAIT, WGMMA

pytestmark = [pytest.mark.sim, pytest.mark.compile]

BF16 = ml_dtypes.bfloat16


def integers(seed: int, *shape: int) -> np.ndarray:
    """Small integers: every product and sum below is exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(BF16)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) @ b.astype(np.float32).T


MMA = """
extern "C" __global__ void kernel(const uint4* a, const uint4* b, float* d) {
  __shared__ uint4 sa[32], sb[16];
  int t = threadIdx.x;
  sa[t] = a[t];
  if (t < 16) sb[t] = b[t];
  SYNC;
  uint32 ra[4], rb[2];
  float c[4] = {1, 1, 1, 1};
  // matrices 0 to 3 of A: rows 0-7 and 8-15 of k 0-7, then of k 8-15; a row of 16 k is two chunks of 16 bytes
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(address(&sa[t % 16 * 2 + t / 16])));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(rb[0]), "=r"(rb[1]) : "r"(address(&sb[t % 8 * 2 + t / 8 % 2])));
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
  for (int i = 0; i < 4; i++) d[(t / 4 + 8 * (i / 2)) * 8 + t % 4 * 2 + i % 2] = c[i];
}
"""


def test_ldmatrix_feeds_mma() -> None:
    a, b, d = integers(0, 16, 16), integers(1, 8, 16), np.zeros((16, 8), np.float32)
    launch(MMA.replace("SYNC", "__syncwarp()"), [a.view(np.uint16), b.view(np.uint16), d], races=True)
    assert (d == product(a, b) + 1).all()


def test_stmatrix_writes_what_ldmatrix_reads() -> None:
    source = """
    extern "C" __global__ void kernel(unsigned short* y) {
      __shared__ uint4 cells[32];
      int t = threadIdx.x;
      uint32 r[4];
      for (int i = 0; i < 4; i++) r[i] = (1000 * i + t * 2 + 1) << 16 | (1000 * i + t * 2);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                   ::"r"(address(&cells[t])), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
      __syncwarp();
      for (int i = t; i < 256; i += 32) y[i] = reinterpret_cast<unsigned short*>(cells)[i];
    }
    """
    y = np.zeros((4, 64), np.uint16)
    launch(source, [y])
    assert (y == 1000 * np.arange(4)[:, None] + np.arange(64)).all()


def test_an_exited_lane_makes_mma_an_error() -> None:
    source = MMA.replace("SYNC", "if (t == 31) return")
    with pytest.raises(SimError, match="not every thread of the warp"):
        launch(
            source, [integers(0, 16, 16).view(np.uint16), integers(1, 8, 16).view(np.uint16), np.zeros(128, np.float32)]
        )


def wgmma(fence: str = FENCE, wait: str = WAIT, early: str = "", again: int = 1) -> tuple[np.ndarray, np.ndarray]:
    a, b, d = integers(2, 64, 16), integers(3, 16, 16), np.zeros((64, 16), np.float32)
    source = WGMMA.replace("FENCE", fence).replace("WAIT", wait).replace("EARLY", early)
    launch(source, [a.view(np.uint16), b.view(np.uint16), d, again], block=128)
    return d, product(a, b)


@pytest.mark.parametrize("again", [0, 1, 3])
def test_wgmma_accumulates_products_of_shared_operands(again: int) -> None:
    d, one = wgmma(again=again)
    assert (d == one * (again + 1)).all()


def test_accumulators_read_before_the_wait_are_poisoned() -> None:
    d, _ = wgmma(wait="")
    assert np.isnan(d).all()


def test_overwriting_an_operand_before_the_wait_changes_the_product() -> None:
    d, one = wgmma(early="__syncthreads(); if (t < 32) sb[t] = make_uint4(0, 0, 0, 0); __syncthreads()")
    assert (d != 2 * one).any()


def test_wgmma_needs_a_fence() -> None:
    with pytest.raises(SimError, match=r"before the first wgmma.fence"):
        wgmma(fence="")


def tcgen05(
    pair: bool = False, wait: str = "wait(&done, 0)", free: str = FREE, commit: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    ctas = 2 if pair else 1
    a, b, d = integers(4, 128 * ctas, 16), integers(5, 32 if pair else 16, 16), np.zeros((128 * ctas, 16), np.float32)
    source = TCGEN05.replace("COMMIT", commit if commit is not None else PAIR_COMMIT if pair else COMMIT)
    source = source.replace("WAIT", wait).replace("FREE", free).replace("GROUP", str(ctas))
    n = 32 if pair else 16
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | n >> 3 << 17 | (128 * ctas >> 4) << 24
    source = source.replace("IDESC", f"{idesc}u").replace("BROWS", "16")
    source = source.replace("SYNC", "cluster_sync()" if pair else "__syncthreads()")
    source = source.replace("CLUSTER", "__cluster_dims__(2, 1, 1)" if pair else "")
    source = source.replace("RANK", "cluster_rank()" if pair else "0")
    launch(source, [a.view(np.uint16), b.view(np.uint16), d], grid=ctas, block=128, arch="sm_100a")
    return d, product(a, b)[:, :16]


@pytest.mark.parametrize("pair", [False, True])
def test_tcgen05_multiplies_into_tensor_memory(pair: bool) -> None:
    d, want = tcgen05(pair)
    assert (d == want).all()


def test_tensor_memory_read_before_the_commit_is_found() -> None:
    with pytest.raises(SimMemoryError, match="before the queued work"):
        tcgen05(wait="__syncthreads()")


def test_a_missing_commit_is_a_deadlock() -> None:
    with pytest.raises(SimDeadlockError, match="1 of 1 arrivals"):
        tcgen05(commit="")


def test_tensor_memory_must_be_given_back() -> None:
    with pytest.raises(SimError, match=r"without tcgen05.dealloc"):
        tcgen05(free="")


def test_a_descriptor_outside_shared_memory_is_found() -> None:
    source = (
        WGMMA.replace("FENCE", FENCE)
        .replace("WAIT", WAIT)
        .replace("EARLY", "")
        .replace("descriptor(sa, 1024, 128)", "descriptor(sa, 1024, 4096)")
    )
    with pytest.raises(SimMemoryError, match="leaves shared memory"):
        launch(
            source,
            [integers(2, 64, 16).view(np.uint16), integers(3, 16, 16).view(np.uint16), np.zeros(1024, np.float32), 0],
            block=128,
        )
