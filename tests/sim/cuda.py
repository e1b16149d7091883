"""CUDA snippets for tests: compiled once, run in the simulator."""

from __future__ import annotations

import functools
from typing import Any

from jitfp4 import nvrtc, sim
from jitfp4.arch import Arch
from jitfp4.spec import Dim3, Geometry

PRELUDE = r"""
using uint32 = unsigned int;
using uint64 = unsigned long long;
__device__ __forceinline__ uint32 address(const void* p) { return uint32(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void init(uint64* b, uint32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;"
               ::"r"(address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(uint64* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(b)) : "memory");
}
__device__ __forceinline__ void expect(uint64* b, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(uint64* b, uint32 parity) {
  asm volatile("{.reg .pred P;\nW%=:\n mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n"
               "@P bra D%=;\n bra W%=;\nD%=:\n}" ::"r"(address(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_in(void* to, const void* from, uint32 bytes, uint64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(b)) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32 cluster_rank() {
  uint32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
"""


@functools.cache
def compiled(source: str, arch: str) -> str:
    return nvrtc.compile_ptx(PRELUDE + source, Arch.of(arch), symbol="kernel")


def launch(
    source: str,
    args: list[Any],
    *,
    grid: int = 1,
    block: int | Dim3 = 32,
    arch: str = "sm_90a",
    shared: int = 0,
    races: bool = False,
) -> sim.Stats:
    """Compile ``source``, whose one entry is ``kernel``, and simulate it."""
    dims = block if isinstance(block, tuple) else (block, 1, 1)
    geometry = Geometry((grid, 1, 1), dims, shared_bytes=shared)
    return sim.run(compiled(source, arch), args, geometry, arch, races=races)
