"""CTA barriers, cluster barriers and mbarriers: who waits, who goes on, and what is reported when nobody can."""

from __future__ import annotations

import numpy as np
import pytest

from jitfp4.errors import SimDeadlockError, SimError, SimMemoryError, SimRaceError
from tests.sim.cuda import launch
from tests.sim.snippets import evaluate

pytestmark = [pytest.mark.sim, pytest.mark.compile]

RING = """
extern "C" __global__ void kernel(const int* x, int* y, int n) {
  __shared__ __align__(8) uint64 full[2], empty[2];
  __shared__ int cells[2][32];
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; i++) { init(&full[i], 32); init(&empty[i], 32); }
  __syncthreads();
  int lane = threadIdx.x & 31;
  if (threadIdx.x < 32) {
    for (int i = 0; i < n; i++) {
      wait(&empty[i & 1], (i >> 1 & 1) ^ 1);
      cells[i & 1][lane] = x[i * 32 + lane];
      ARRIVE_FULL;
    }
  } else {
    int sum = 0;
    for (int i = 0; i < n; i++) {
      wait(&full[i & 1], i >> 1 & 1);
      sum += cells[i & 1][lane ^ 1] * (i + 1);
      arrive(&empty[i & 1]);
    }
    y[lane] = sum;
  }
}
"""


def test_reduction_through_shared_memory() -> None:
    source = """
    extern "C" __global__ void kernel(const float* x, float* y, int n) {
      __shared__ float part[32];
      float s = 0;
      for (int i = threadIdx.x; i < n; i += blockDim.x) s += x[blockIdx.x * n + i];
      for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
      if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = s;
      __syncthreads();
      if (threadIdx.x < 32) {
        s = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.f;
        for (int o = 16; o; o >>= 1) s += __shfl_down_sync(~0u, s, o);
        if (threadIdx.x == 0) y[blockIdx.x] = s;
      }
    }
    """
    x = np.random.default_rng(0).integers(-50, 50, (8, 500)).astype(np.float32)
    y = np.zeros(8, np.float32)
    launch(source, [x, y, 500], grid=8, block=128, races=True)
    assert (y == x.sum(1)).all()


def test_named_barriers_hand_over_between_warps() -> None:
    source = """
    extern "C" __global__ void kernel(int* y) {
      __shared__ int cells[32];
      int lane = threadIdx.x & 31;
      if (threadIdx.x < 32) {
        cells[lane] = lane * lane;
        asm volatile("bar.arrive 3, 64;" ::: "memory");
      } else if (threadIdx.x < 64) {
        asm volatile("bar.sync 3, 64;" ::: "memory");
        y[lane] = cells[31 - lane];
      }
    }
    """
    y = np.zeros(32, np.int32)
    launch(source, [y], block=128, races=True)
    assert (y == np.arange(31, -1, -1) ** 2).all()


def test_arrivals_alone_complete_a_barrier() -> None:
    """Nobody waits: the last arrival begins the barrier anew, for the hand-over that follows."""
    source = """
    extern "C" __global__ void kernel(int* y) {
      __shared__ int cells[64];
      asm volatile("bar.arrive 2, 64;" ::: "memory");
      cells[threadIdx.x] = threadIdx.x;
      if (threadIdx.x < 32) asm volatile("bar.arrive 2, 64;" ::: "memory");
      else {
        asm volatile("bar.sync 2, 64;" ::: "memory");
        y[threadIdx.x - 32] = cells[threadIdx.x - 32];
      }
    }
    """
    y = np.full(32, -1, np.int32)
    launch(source, [y], block=64, races=True)
    assert (y == np.arange(32)).all()


def test_barrier_reductions() -> None:
    body = "setp.gt.u32 %p, %a, 99; bar.red.popc.u32 %d, 0, %p; bar.red.or.pred %q, 1, !%p; @%q add.u32 %d, %d, 1000;"
    a = np.random.default_rng(1).integers(0, 200, 512, dtype=np.uint32)
    a[256:] = 150
    got = evaluate(body, a, out=np.uint32).reshape(2, 256)
    assert (got[0] == (a[:256] > 99).sum() + 1000).all() and (got[1] == 256).all()


def test_exited_threads_do_not_hold_a_barrier() -> None:
    body = ".reg .b32 %t; mov.u32 %d, 0; setp.ge.u32 %p, %a, 32; @%p exit; bar.sync 0; mov.u32 %d, 1;"
    got = evaluate(body, np.arange(96, dtype=np.uint32), out=np.uint32)
    assert (got[:32] == 1).all()


def test_a_barrier_that_a_warp_skips_is_reported() -> None:
    source = """
    extern "C" __global__ void kernel(int* y) {
      if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
      else asm volatile("bar.sync 2, 64;" ::: "memory");
      y[threadIdx.x] = 1;
    }
    """
    with pytest.raises(SimDeadlockError) as caught:
        launch(source, [np.zeros(64, np.int32)], block=64)
    message = str(caught.value)
    assert "barrier 1 of CTA (0, 0, 0): 32 of 64 threads arrived" in message
    assert "barrier 2 of CTA (0, 0, 0): 32 of 64 threads arrived" in message
    assert "bar.sync 1, 64" in message


def test_a_warp_divided_at_an_aligned_barrier_is_an_error() -> None:
    body = "setp.lt.u32 %p, %a, 7; mov.u32 %d, 0; @%p bra other; bar.sync 0; bra done; other: bar.sync 0; done:"
    with pytest.raises(SimError, match="divided at an aligned barrier"):
        evaluate(body, np.arange(64, dtype=np.uint32), out=np.uint32)


def test_disagreement_about_the_thread_count_is_an_error() -> None:
    body = ".reg .b32 %n2; mov.u32 %d, 0; setp.lt.u32 %p, %a, 32; selp.u32 %n2, 64, 96, %p; bar.sync 1, %n2;"
    with pytest.raises(SimError, match="disagree"):
        evaluate(body, np.arange(64, dtype=np.uint32), out=np.uint32)


# Clusters


DSMEM = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel(int* y, int last) {
  __shared__ int cells[64];
  cells[threadIdx.x] = blockIdx.x * 1000 + threadIdx.x;
  FIRST;
  uint32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote) : "r"(address(&cells[threadIdx.x])), "r"(cluster_rank() ^ 1));
  int v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(remote));
  y[blockIdx.x * 64 + threadIdx.x] = v;
  if (last) cluster_sync();
}
"""


@pytest.mark.parametrize("races", [False, True])
def test_a_cluster_reads_its_neighbours_shared_memory(races: bool) -> None:
    y = np.zeros(256, np.int32)
    launch(DSMEM.replace("FIRST", "cluster_sync()"), [y, 1], grid=4, block=64, races=races)
    t = np.arange(64)
    assert (y.reshape(4, 64) == np.array([1000, 0, 3000, 2000])[:, None] + t).all()


def test_a_cluster_read_without_the_barrier_is_a_race() -> None:
    with pytest.raises(SimRaceError, match="unordered write by another warp"):
        launch(DSMEM.replace("FIRST", "__syncthreads()"), [np.zeros(256, np.int32), 1], grid=2, block=64, races=True)


def test_a_plain_shared_load_does_not_leave_its_cta() -> None:
    with pytest.raises(SimMemoryError, match="outside the CTA's own window"):
        source = DSMEM.replace("FIRST", "cluster_sync()").replace("ld.shared::cluster.u32", "ld.shared.u32")
        launch(source, [np.zeros(256, np.int32), 1], grid=2, block=64)


def test_a_cluster_may_not_touch_a_cta_that_has_exited() -> None:
    source = DSMEM.replace("FIRST", "cluster_sync(); if (cluster_rank() == 1) return; LINGER")
    source = source.replace("LINGER", "for (volatile int i = 0; i < 300; i = i + 1) {}")
    with pytest.raises(SimMemoryError, match="has exited"):
        launch(source, [np.zeros(256, np.int32), 0], grid=2, block=64)


# mbarriers


@pytest.mark.parametrize("races", [False, True])
def test_producer_and_consumer_share_a_ring(races: bool) -> None:
    x = np.random.default_rng(2).integers(0, 99, (7, 32)).astype(np.int32)
    y = np.zeros(32, np.int32)
    launch(RING.replace("ARRIVE_FULL", "arrive(&full[i & 1])"), [x, y, 7], block=64, races=races)
    assert (y == (x[:, np.arange(32) ^ 1] * np.arange(1, 8)[:, None]).sum(0)).all()


def test_a_lost_arrive_is_reported_with_the_missing_count() -> None:
    source = RING.replace("ARRIVE_FULL", "if (i != 3 || lane != 5) arrive(&full[i & 1])")
    with pytest.raises(SimDeadlockError) as caught:
        launch(source, [np.zeros((7, 32), np.int32), np.zeros(32, np.int32), 7], block=64)
    message = str(caught.value)
    assert "phase 1, 1 of 32 arrivals and 0 bytes are missing" in message
    assert "mbarrier.try_wait" in message


def test_an_mbarrier_must_be_initialised_once_and_left_alone() -> None:
    source = 'extern "C" __global__ void kernel(int* y) {{ __shared__ __align__(8) uint64 b; {} y[0] = 1; }}'
    cases = {
        "arrive(&b);": "it was not initialised",
        "init(&b, 1); init(&b, 1);": "initialised again",
        "init(&b, 1); *(volatile int*)&b = 3;": "which holds an mbarrier",
        "init(&b, 1); y[1] = *(volatile int*)&b;": "which holds an mbarrier",
        "init(&b, 0);": "count 0",
    }
    for body, message in cases.items():
        with pytest.raises(SimError, match=message):
            launch(source.format(body), [np.zeros(2, np.int32)], block=1)


def test_phases_and_states_of_an_mbarrier() -> None:
    source = """
    extern "C" __global__ void kernel(int* y) {
      __shared__ __align__(8) uint64 b;
      init(&b, 2);
      uint64 state;
      uint32 done, pending;
      asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(address(&b)));
      asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
      y[0] = pending;
      asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(done) : "r"(address(&b)), "l"(state) : "memory");
      y[1] = done;
      asm volatile("mbarrier.arrive_drop.shared::cta.b64 _, [%0];" :: "r"(address(&b)) : "memory");
      asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(done) : "r"(address(&b)), "l"(state) : "memory");
      y[2] = done;
      arrive(&b);  // one arrival is enough since the drop
      asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 1; selp.u32 %0, 1, 0, p;}"
                   : "=r"(done) : "r"(address(&b)) : "memory");
      y[3] = done;
    }
    """
    y = np.full(4, -1, np.int32)
    launch(source, [y], block=1)
    assert y.tolist() == [2, 0, 1, 1]


def test_remote_arrivals_complete_a_neighbours_mbarrier() -> None:
    source = """
    extern "C" __global__ void __cluster_dims__(4, 1, 1) kernel(int* y) {
      __shared__ __align__(8) uint64 b;
      if (threadIdx.x == 0) init(&b, 4);
      cluster_sync();
      if (threadIdx.x < 4) {
        uint32 remote;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address(&b)), "r"(threadIdx.x));
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
      }
      wait(&b, 0);
      y[blockIdx.x] = 1;
      cluster_sync();
    }
    """
    y = np.zeros(8, np.int32)
    launch(source, [y], grid=8)
    assert y.tolist() == [1] * 8
