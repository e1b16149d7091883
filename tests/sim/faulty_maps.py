"""The same of tensor maps that a kernel puts into memory; not for a GPU, whose maps only the driver makes."""

from __future__ import annotations

from typing import Any

import numpy as np

from jitfp4 import sim
from jitfp4.sim.tensormap import ElementType
from tests.sim.faulty import INIT, Case

_RELEASE = 'asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");'
_ACQUIRE = 'asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(copy) : "memory");'
_SOURCE = (
    """
struct alignas(64) Map { uint64 words[16]; };
extern "C" __global__ void kernel(const __grid_constant__ Map map, Map* copy, int* y) {
  __shared__ __align__(128) int cells[64];
  __shared__ __align__(8) uint64 full;
  const int t = threadIdx.x;
  if (t < 32) {
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (t == i) copy->words[i] = map.words[i];
    RELEASE
  }
  if (t == 0) {"""
    + INIT
    + """}
  __syncthreads();
  if (t == 32) {
    ACQUIRE
    expect(&full, 256);
    asm volatile("cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];"
                 ::"r"(address(cells)), "l"(copy), "r"(0), "r"(address(&full)) : "memory");
  }
  wait(&full, 0);
  y[t] = cells[t];
}
"""
)
_SECTION = "membar/fence: fence.proxy.tensormap::generic; CUDA C++ Programming Guide: Encoding a Tensor Map on Device"


def _args() -> list[Any]:
    x = np.arange(64, dtype=np.int32)
    tensor_map = sim.TensorMap(base=x.view(np.uint8), dtype=ElementType.S32, dims=(64,), strides=(), box=(64,))
    return [tensor_map, np.zeros(16, np.uint64), np.zeros(64, np.int32)]


TENSOR_MAPS = [
    Case(
        name=f"tensor map in memory without the {name} fence",
        section=_SECTION,
        source=_SOURCE,
        right=right,
        message="tensor map is used that was written without fence.proxy.tensormap",
        args=_args,
        extra={"RELEASE": _RELEASE, "ACQUIRE": _ACQUIRE} | {name.upper(): "PIECE"},
    )
    for name, right in (("release", _RELEASE), ("acquire", _ACQUIRE))
]
