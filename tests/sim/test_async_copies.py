"""Copies beside the threads: cp.async, bulk and tensor copies, and what happens when a wait is missing."""

from __future__ import annotations

import numpy as np
import pytest

from jitfp4 import sim
from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.swizzle import Swizzle
from jitfp4.sim.tensormap import ElementType
from tests.sim.cuda import launch

pytestmark = [pytest.mark.sim, pytest.mark.compile]

BULK = """
extern "C" __global__ void kernel(const int* x, int* y) {
  __shared__ __align__(128) int cells[256];
  __shared__ __align__(8) uint64 b;
  if (threadIdx.x == 0) init(&b, 1);
  __syncthreads();
  if (threadIdx.x == 0) { expect(&b, 1024); copy_in(cells, x + blockIdx.x * 256, 1024, &b); }
  WAIT;
  cells[threadIdx.x] *= 2;
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;"
                 ::"l"(y + blockIdx.x * 256), "r"(address(cells)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    DONE;
  }
}
"""
LATER = "__shared__ __align__(128) int more[4]; expect(&b, 16); copy_in(more, x, 16, &b); wait(&b, 1)"
WAIT, DONE = "wait(&b, 0)", 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory")'


@pytest.mark.parametrize("races", [False, True])
def test_bulk_copies_go_in_and_out(races: bool) -> None:
    x, y = np.arange(1024, dtype=np.int32), np.zeros(1024, np.int32)
    launch(BULK.replace("WAIT", WAIT).replace("DONE", DONE), [x, y], grid=4, block=256, races=races)
    assert (y == 2 * x).all()


def test_reading_before_the_copy_was_waited_for_is_found() -> None:
    with pytest.raises(SimMemoryError, match="an asynchronous copy is still writing"):
        launch(
            BULK.replace("WAIT", "").replace("DONE", DONE),
            [np.zeros(256, np.int32), np.zeros(256, np.int32)],
            block=256,
        )


@pytest.mark.parametrize("end", ["", LATER], ids=["at once", "behind a later copy"])
def test_exiting_before_a_copy_has_read_its_source_is_found(end: str) -> None:
    with pytest.raises(SimMemoryError, match=r"(?s)exits before its bulk copy.*cp.async.bulk.global"):
        launch(
            BULK.replace("WAIT", WAIT).replace("DONE", end),
            [np.zeros(256, np.int32), np.zeros(256, np.int32)],
            block=256,
        )


def test_overwriting_the_source_of_a_copy_changes_the_result() -> None:
    x, y = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    early = "cells[0] = -1; " + DONE
    launch(BULK.replace("WAIT", WAIT).replace("DONE", early), [x, y], block=256)
    assert y[0] == -1


def test_wrong_byte_counts_deadlock_or_overflow() -> None:
    from jitfp4.errors import SimDeadlockError

    source = BULK.replace("WAIT", WAIT).replace("DONE", DONE).replace("expect(&b, 1024)", "expect(&b, 1040)")
    with pytest.raises(SimDeadlockError, match="16 bytes are missing"):
        launch(source, [np.zeros(256, np.int32), np.zeros(256, np.int32)], block=256)


def test_bulk_copies_are_checked_for_bounds_and_alignment() -> None:
    source = BULK.replace("WAIT", WAIT).replace("DONE", DONE)
    with pytest.raises(SimMemoryError, match="outside"):
        launch(source, [np.zeros(255, np.int32), np.zeros(256, np.int32)], block=256)
    with pytest.raises(SimMemoryError, match="16-byte aligned"):
        launch(source, [np.zeros(260, np.int32)[1:257], np.zeros(256, np.int32)], block=256)


def test_reducing_bulk_copies_add_to_global_memory() -> None:
    source = """
    extern "C" __global__ void kernel(float* y) {
      __shared__ __align__(128) float cells[64];
      cells[threadIdx.x] = threadIdx.x + 0.5f;
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      if (threadIdx.x == 0) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 256;"
                     ::"l"(y), "r"(address(cells)) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
      }
    }
    """
    y = np.ones(64, np.float32)
    launch(source, [y], grid=3, block=64)
    assert (y == 1 + 3 * (np.arange(64) + 0.5)).all()


CP_ASYNC = """
extern "C" __global__ void kernel(const float4* x, float4* y, int valid) {
  __shared__ float4 cells[2][128];
  for (int i = 0; i < 2; i++) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(address(&cells[i][threadIdx.x])), "l"(x + i * 128 + threadIdx.x), "r"(valid));
    asm volatile("cp.async.commit_group;");
  }
  asm volatile("cp.async.wait_group FIRST;" ::: "memory");
  __syncthreads();
  y[threadIdx.x] = cells[0][threadIdx.x ^ 1];
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  y[128 + threadIdx.x] = cells[1][threadIdx.x ^ 3];
}
"""


@pytest.mark.parametrize("valid", [16, 8, 0])
def test_small_copies_land_by_group_and_fill_with_zeros(valid: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 128, 4)).astype(np.float32)
    y = np.zeros_like(x)
    launch(CP_ASYNC.replace("FIRST", "1"), [x, y, valid], block=128)
    x[:, :, valid // 4 :] = 0
    t = np.arange(128)
    assert (y[0] == x[0, t ^ 1]).all() and (y[1] == x[1, t ^ 3]).all()


def test_waiting_for_too_few_groups_is_found() -> None:
    x = np.zeros((2, 128, 4), np.float32)
    with pytest.raises(SimMemoryError, match="an asynchronous copy is still writing"):
        launch(CP_ASYNC.replace("FIRST", "2"), [x, x.copy(), 16], block=128)


def test_small_copies_arrive_on_an_mbarrier() -> None:
    source = """
    extern "C" __global__ void kernel(const int* x, int* y) {
      __shared__ int cells[64];
      __shared__ __align__(8) uint64 b;
      if (threadIdx.x == 0) init(&b, 64);
      __syncthreads();
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                   ::"r"(address(&cells[threadIdx.x])), "l"(x + threadIdx.x));
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(&b)) : "memory");
      wait(&b, 0);
      y[threadIdx.x] = cells[63 - threadIdx.x];
    }
    """
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    launch(source, [x, y], block=64)
    assert (y == x[::-1]).all()


# Tensor copies


TENSOR = """
struct alignas(64) Map { uint64 opaque[16]; };
extern "C" __global__ void CLUSTER
kernel(const __grid_constant__ Map map, const __grid_constant__ Map out, unsigned char* y, int col, int row) {
  __shared__ __align__(1024) unsigned char cells[32 * 128];
  __shared__ __align__(8) uint64 b;
  if (threadIdx.x == 0) init(&b, 1);
  SYNC;
  if (threadIdx.x == 0) {
    expect(&b, 32 * 128);
    LOAD;
  }
  wait(&b, 0);
  for (int i = threadIdx.x; i < 32 * 128; i += blockDim.x) {
    int r = i / 128, chunk = i % 128 / 16;
    y[blockIdx.x * 4096 + i] = cells[r * 128 + ((chunk UNSWIZZLE) * 16) + i % 16];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&out), "r"(col), "r"(row), "r"(address(cells)) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
  }
  SYNC;
}
"""
LOAD = (
    'asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes'
    ' [%0], [%1, {%2, %3}], [%4];" ::"r"(address(cells)), "l"(&map), "r"(col), "r"(row), "r"(address(&b)) : "memory")'
)
MULTICAST = (
    'asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster'
    ' [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(address(cells) + cluster_rank() * 2048), "l"(&map), "r"(col),'
    ' "r"(row + int(cluster_rank()) * 16), "r"(address(&b)), "h"((unsigned short)3) : "memory")'
)

PAIRS = (
    'unsigned leader; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(leader) : "r"(address(&b)),'
    ' "r"(cluster_rank() & ~1u));'
    'asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster'
    '.cta_group::2 [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(address(cells) + cluster_rank() * 1024), "l"(&map), "r"(col),'
    ' "r"(row + int(cluster_rank()) * 8), "r"(leader), "h"((unsigned short)15) : "memory")'
)


def tensor(base: np.ndarray, rows: int = 32) -> sim.TensorMap:
    return sim.TensorMap(
        base=base.view(np.uint8).reshape(-1),
        dtype=ElementType.U8,
        dims=(base.shape[1], base.shape[0]),
        strides=(base.shape[1],),
        box=(128, rows),
        swizzle=Swizzle.B128,
    )


@pytest.mark.parametrize(("col", "row"), [(0, 0), (128, 16), (64, 40), (192, 30)])
def test_tensor_copies_swizzle_and_fill_with_zeros(col: int, row: int) -> None:
    x = np.random.default_rng(1).integers(0, 256, (48, 256), dtype=np.uint8)
    y, back = np.zeros((32, 128), np.uint8), np.zeros((48, 256), np.uint8)
    source = TENSOR.replace("CLUSTER", "").replace("SYNC", "__syncthreads()").replace("LOAD", LOAD)
    launch(source.replace("UNSWIZZLE", "^ r % 8"), [tensor(x), tensor(back), y, col, row], block=64, races=True)
    padded = np.zeros((48 + 64, 256 + 256), np.uint8)
    padded[32:80, 128:384] = x
    box = padded[32 + row : 64 + row, 128 + col : 256 + col]
    assert (y == box).all()
    inside = np.zeros_like(padded)
    inside[32 + row : 64 + row, 128 + col : 256 + col] = box
    assert (back == inside[32:80, 128:384]).all()


def test_a_wrong_swizzle_changes_the_result() -> None:
    x = np.random.default_rng(2).integers(0, 256, (32, 128), dtype=np.uint8)
    y = np.zeros((32, 128), np.uint8)
    source = TENSOR.replace("CLUSTER", "").replace("SYNC", "__syncthreads()").replace("LOAD", LOAD)
    launch(source.replace("UNSWIZZLE", "^ r % 4"), [tensor(x), tensor(x.copy()), y, 0, 0], block=64)
    assert (y[[0, 1, 2, 3]] == x[[0, 1, 2, 3]]).all() and (y[4:8] != x[4:8]).any()


def test_multicast_fills_the_shared_memory_of_the_cluster() -> None:
    x = np.random.default_rng(3).integers(0, 256, (64, 128), dtype=np.uint8)
    y = np.zeros((2, 32, 128), np.uint8)
    source = TENSOR.replace("CLUSTER", "__cluster_dims__(2, 1, 1)").replace("SYNC", "cluster_sync()")
    source = source.replace("LOAD", MULTICAST).replace("UNSWIZZLE", "^ r % 8")
    launch(source, [tensor(x, 16), tensor(x.copy()), y, 0, 32], grid=2, block=64)
    assert (y == x[32:64]).all()


@pytest.mark.parametrize("waiter", [0, 1])
def test_multicast_to_pairs_signals_one_cta_of_each(waiter: int) -> None:
    """Of each pair the one with the parity of the CTA that has the given mbarrier: here the first."""
    x = np.random.default_rng(4).integers(0, 256, (64, 128), dtype=np.uint8)
    y = np.zeros((4, 32, 128), np.uint8)
    source = TENSOR.replace("CLUSTER", "__cluster_dims__(4, 1, 1)").replace("SYNC", "cluster_sync()")
    source = source.replace("expect(&b, 32 * 128);", "if (cluster_rank() % 2 == WAITER) expect(&b, 2 * 32 * 128);")
    source = source.replace("wait(&b, 0);", "if (cluster_rank() % 2 == WAITER) wait(&b, 0);\n cluster_sync();")
    source = source.replace("LOAD", PAIRS).replace("WAITER", str(waiter)).replace("UNSWIZZLE", "^ r % 8")
    source = source.replace('"r"(row), "r"(address(cells)) :', '"r"(32 * blockIdx.x), "r"(address(cells)) :')
    args = [tensor(x, 8), tensor(np.zeros((128, 128), np.uint8)), y, 0, 32]
    if waiter == 1:
        with pytest.raises(SimError, match="every live thread waits"):
            launch(source, args, grid=4, block=64, arch="sm_100a", races=True)
        return
    launch(source, args, grid=4, block=64, arch="sm_100a", races=True)
    assert (y == x[32:64]).all()


def test_a_pointer_that_is_no_tensor_map_is_an_error() -> None:
    source = TENSOR.replace("CLUSTER", "").replace("SYNC", "__syncthreads()").replace("UNSWIZZLE", "")
    source = source.replace("LOAD", LOAD.replace('"l"(&map)', '"l"(y)'))
    x = np.zeros((32, 128), np.uint8)
    with pytest.raises(SimError, match="no tensor map"):
        launch(source, [tensor(x), tensor(x), x.copy(), 0, 0], block=64)
