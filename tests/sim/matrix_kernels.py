"""CUDA of one wgmma and of one tcgen05.mma, with names in capitals for the pieces that tests replace."""

from __future__ import annotations

# wgmma: d [64, 16] = a [64, 16] b [16, 16]^T, operands K-major without swizzle:
# row r, 16-byte chunk c of k at (r / 8) * 128 + c * stride + (r % 8) * 16.

WGMMA = """
__device__ __forceinline__ uint64 descriptor(const void* p, uint32 lbo, uint32 sbo) {
  return (uint64(address(p)) & 0x3FFFF) >> 4 | uint64(lbo >> 4) << 16 | uint64(sbo >> 4) << 32;
}
extern "C" __global__ void kernel(const uint4* a, const uint4* b, float* d, int again) {
  __shared__ __align__(128) uint4 sa[128], sb[32];
  int t = threadIdx.x;
  sa[t / 2 + t % 2 * 64] = a[t];
  if (t < 32) sb[t / 2 + t % 2 * 16] = b[t];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  float c[8];
  for (int i = 0; i < 8; i++) c[i] = 2;
  FENCE;
  for (int i = 0; i <= again; i++)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %10, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;}"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
                 : "l"(descriptor(sa, 1024, 128)), "l"(descriptor(sb, 256, 128)), "r"(i));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  EARLY;
  WAIT;
  for (int i = 0; i < 8; i++) {
    int row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2), col = i / 4 * 8 + t % 4 * 2 + i % 2;
    d[row * 16 + col] = c[i];
  }
}
"""
FENCE = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory")'
WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory")'

# tcgen05: d [128, 16] = a [128, 16] b [16, 16]^T in tensor memory, the same operand layout.

TCGEN05 = """
__device__ __forceinline__ uint64 descriptor(const void* p, uint32 lbo, uint32 sbo) {
  return (uint64(address(p)) & 0x3FFFF) >> 4 | uint64(lbo >> 4) << 16 | uint64(sbo >> 4) << 32 | 1ull << 46;
}
__device__ __forceinline__ bool elect() {
  uint32 p;
  asm volatile("{.reg .pred P; elect.sync _|P, 0xffffffff; selp.u32 %0, 1, 0, P;}" : "=r"(p));
  return p;
}
extern "C" __global__ void CLUSTER kernel(const uint4* a, const uint4* b, float* d) {
  __shared__ __align__(128) uint4 sa[256], sb[32];
  __shared__ __align__(8) uint64 done;
  __shared__ uint32 column;
  int t = threadIdx.x, warp = t / 32;
  a += 256 * blockIdx.x;
  b += BROWS * 2 * RANK;
  for (int i = t; i < 256; i += 128) sa[i / 2 + i % 2 * 128] = a[i];
  if (t < BROWS * 2) sb[t / 2 + t % 2 * 16] = b[t];
  if (t == 0) init(&done, 1);
  if (warp == 0)
    asm volatile("tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%0], 32;"
                 ::"r"(address(&column)) : "memory");
  asm volatile("fence.proxy.async.shared::cta; tcgen05.fence::before_thread_sync;" ::: "memory");
  SYNC;
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  if (warp == 1 && RANK == 0 && elect()) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;\\n tcgen05.mma.cta_group::GROUP.kind::f16 [%0], %1, %2, %3, p;}"
                 ::"r"(column), "l"(descriptor(sa, 2048, 128)), "l"(descriptor(sb, 256, 128)), "r"(IDESC) : "memory");
    COMMIT;
  }
  WAIT;
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  uint32 r[16];
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32"
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]),
                 "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
               : "r"(column + (warp << 21)));
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  for (int i = 0; i < 16; i++) d[(blockIdx.x * 128 + t) * 16 + i] = __uint_as_float(r[i]);
  SYNC;
  FREE;
}
"""
FREE = 'if (warp == 0) asm volatile("tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %0, 32;" ::"r"(column))'
COMMIT = (
    'asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"'
    ' ::"r"(address(&done)) : "memory")'
)
PAIR_COMMIT = (
    'asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"'
    ' ::"r"(address(&done)), "h"((unsigned short)3) : "memory")'
)
