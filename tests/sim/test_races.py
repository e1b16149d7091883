"""The race detector: what it must report and what it must leave alone."""

from __future__ import annotations

import numpy as np
import pytest

from jitfp4.errors import SimRaceError
from tests.sim.cuda import launch

pytestmark = [pytest.mark.sim, pytest.mark.compile]

EXCHANGE = """
extern "C" __global__ void kernel(int* y) {
  __shared__ int cells[64];
  cells[threadIdx.x] = threadIdx.x;
  FIRST;
  int v = cells[threadIdx.x ^ MASK];
  SECOND;
  cells[threadIdx.x] = v;
  __syncthreads();
  y[threadIdx.x] = cells[63 - threadIdx.x];
}
"""


def exchange(first: str, second: str, mask: int) -> None:
    y = np.zeros(64, np.int32)
    source = EXCHANGE.replace("FIRST", first).replace("SECOND", second).replace("MASK", str(mask))
    launch(source, [y], block=64, races=True)
    assert (y == (63 - np.arange(64)) ^ mask).all()


@pytest.mark.parametrize(("sync", "mask"), [("__syncthreads()", 32), ("__syncthreads()", 1), ("__syncwarp()", 1)])
def test_ordered_exchanges_pass(sync: str, mask: int) -> None:
    exchange(sync, sync, mask)


@pytest.mark.parametrize(
    ("first", "second", "mask", "message"),
    [
        ("", "__syncthreads()", 32, "read follows an unordered write by another warp"),
        ("__syncwarp()", "__syncthreads()", 32, "read follows an unordered write by another warp"),
        ("__syncthreads()", "", 32, "write follows an unordered read by another warp"),
        ("", "__syncwarp()", 1, "read follows an unordered write by another lane"),
        ("__syncwarp()", "", 1, "write follows a read by another lane without a warp sync"),
    ],
)
def test_a_missing_barrier_is_reported(first: str, second: str, mask: int, message: str) -> None:
    with pytest.raises(SimRaceError, match=message):
        exchange(first, second, mask)


def test_threads_that_write_one_cell_together_race() -> None:
    source = """
    extern "C" __global__ void kernel(int* y) {
      __shared__ volatile int cell;
      cell = 3;
      __syncthreads();
      y[threadIdx.x] = cell;
    }
    """
    with pytest.raises(SimRaceError, match="two threads write one byte"):
        launch(source, [np.zeros(32, np.int32)], races=True)


def test_atomics_do_not_race() -> None:
    source = """
    extern "C" __global__ void kernel(int* y) {
      __shared__ int cell;
      if (threadIdx.x == 0) cell = 0;
      __syncthreads();
      atomicAdd(&cell, 2);
      __syncthreads();
      y[threadIdx.x] = cell;
    }
    """
    y = np.zeros(96, np.int32)
    launch(source, [y], block=96, races=True)
    assert (y == 192).all()


def test_a_barrier_of_two_warps_does_not_order_a_third() -> None:
    source = """
    extern "C" __global__ void kernel(int* y) {
      __shared__ int cells[96];
      cells[threadIdx.x] = threadIdx.x;
      if (threadIdx.x < 64) asm volatile("bar.sync 1, 64;" ::: "memory");
      y[threadIdx.x] = threadIdx.x < 64 ? cells[threadIdx.x ^ LANES] : 0;
    }
    """
    launch(source.replace("^ LANES", "^ 32"), [np.zeros(96, np.int32)], block=96, races=True)
    with pytest.raises(SimRaceError):
        launch(source.replace("^ LANES", "+ 32"), [np.zeros(96, np.int32)], block=96, races=True)


def test_refilling_a_buffer_that_others_still_read_is_a_race() -> None:
    source = """
    extern "C" __global__ void kernel(const int* x, int* y) {
      __shared__ __align__(16) int cells[64];
      __shared__ __align__(8) uint64 full;
      if (threadIdx.x == 0) init(&full, 1);
      __syncthreads();
      for (int i = 0; i < 2; i++) {
        if (threadIdx.x == 0) { expect(&full, 256); copy_in(cells, x + 64 * i, 256, &full); }
        wait(&full, i & 1);
        y[64 * i + threadIdx.x] = cells[63 - threadIdx.x];
        RELEASE;
      }
    }
    """
    x, y = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    launch(source.replace("RELEASE", "__syncthreads()"), [x, y], block=64, races=True)
    assert (y.reshape(2, 64) == x.reshape(2, 64)[:, ::-1]).all()
    with pytest.raises(SimRaceError, match="write follows an unordered read by another warp"):
        launch(source.replace("RELEASE", ""), [x, y], block=64, races=True)


@pytest.mark.parametrize(("sync", "ordered"), [("cluster_sync()", True), ("__syncthreads()", False)])
def test_a_cluster_barrier_orders_warps_that_meet_it_at_different_places(sync: str, ordered: bool) -> None:
    source = """
    __device__ void put(int* p, int x) {
      unsigned to;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(p)), "r"(cluster_rank() ^ 1));
      asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
    }
    extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel(int* y) {
      __shared__ int cells[64];
      cluster_sync();
      y += blockIdx.x * 64;
      const int t = threadIdx.x;
      if (t < 32) {
        put(cells + t, t);
        SYNC;
        y[t] = cells[63 - t];
      } else {
        put(cells + t, 7);
        put(cells + t, t);
        SYNC;
        y[t] = cells[63 - t] * 2;
      }
    }
    """.replace("SYNC", sync)
    y = np.zeros(128, np.int32)
    if ordered:
        launch(source, [y], grid=2, block=64, races=True)
        assert (y[:64] == (63 - np.arange(64)) * np.repeat([1, 2], 32)).all() and (y[64:] == y[:64]).all()
    else:
        with pytest.raises(SimRaceError):
            launch(source, [y], grid=2, block=64, races=True)
