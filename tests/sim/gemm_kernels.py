"""Whole tiles of a GEMM as real kernels compute them: bulk copies into a ring of stages, multiplies, an epilogue.

Names in capitals are the synchronising pieces; ``with_pieces`` puts them in, or something else in their place.
Operands lie in global memory stage by stage, each K-major without swizzle: 16-byte chunk c of row r at
``c * rows * 16 + r * 16``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

STAGES = 3

_COMMON = """
__device__ __forceinline__ bool elect() {
  uint32 p;
  asm volatile("{.reg .pred P; elect.sync _|P, 0xffffffff; selp.u32 %0, 1, 0, P;}" : "=r"(p));
  return p;
}
__device__ __forceinline__ uint64 descriptor(const void* p, uint32 rows) {
  return (uint64(address(p)) & 0x3FFFF) >> 4 | uint64(rows) << 16 | 8ull << 32;
}
"""

WGMMA = (
    _COMMON
    + """
extern "C" __global__ void __launch_bounds__(160) kernel(const char* a, const char* b, float* d, int tiles) {
  extern __shared__ __align__(128) char stages[];  // of each stage A [64, 64] and B [128, 64] bf16
  __shared__ __align__(8) uint64 full[3], empty[3];
  const int t = threadIdx.x;
  if (t == 0) {
    for (int s = 0; s < 3; s++) { init(full + s, 1); init(empty + s, EMPTY_COUNT); }
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < tiles; i++) {
        const int s = i % 3;
        char* to = stages + s * 24576;
        if (i >= 3) WAIT_EMPTY;
        expect(full + s, 24576);
        copy_in(to, a + i * 8192, 8192, full + s);
        copy_in(to + 8192, b + i * 16384, 16384, full + s);
      }
    return;
  }
  float c[64];
  for (int i = 0; i < tiles; i++) {
    const int s = i % 3;
    const char* from = stages + s * 24576;
    WAIT_FULL;
    for (int j = 0; j < 64; j++) asm volatile("" : "+f"(c[j])::"memory");
    FENCE;
    for (int k = 0; k < 4; k++)
      asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\\n"
                   "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {OUTPUTS}, %64, %65, p, 1, 1, 0, 0;}"
                   : CONSTRAINTS
                   : "l"(descriptor(from + k * 2048, 64)), "l"(descriptor(from + 8192 + k * 4096, 128)),
                     "r"(i + k));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    WAIT_WGMMA;
    for (int j = 0; j < 64; j++) asm volatile("" : "+f"(c[j])::"memory");
    ARRIVE_EMPTY;
  }
  for (int i = 0; i < 64; i++) {
    const int row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2), col = i / 4 * 8 + t % 4 * 2 + i % 2;
    d[row * 128 + col] = c[i];
  }
}
""".replace("OUTPUTS", ", ".join(f"%{i}" for i in range(64))).replace(
        "CONSTRAINTS", ", ".join(f'"+f"(c[{i}])' for i in range(64))
    )
)
WGMMA_PIECES = {
    "EMPTY_COUNT": "4",
    "WAIT_EMPTY": "wait(empty + s, i / 3 - 1 & 1)",
    "WAIT_FULL": "wait(full + s, i / 3 & 1)",
    "FENCE;": 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");',
    "WAIT_WGMMA;": 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");',
    "ARRIVE_EMPTY;": "__syncwarp(); if (t % 32 == 0) arrive(empty + s);",
}

# A tile of 128 x 256 of nvfp4: stages of K = 256, four multiplies each, scale atoms of 128 rows and K = 64.
TCGEN05 = (
    _COMMON
    + """
__device__ __forceinline__ uint64 operand(const void* p, uint32 rows) { return descriptor(p, rows) | 1ull << 46; }
extern "C" __global__ void __launch_bounds__(128) kernel(const char* a, const char* b, const char* sfa,
                                                         const char* sfb, float* d, int tiles) {
  extern __shared__ __align__(128) char stages[];  // A [128, 256] and B [256, 256] of e2m1, 4 and 8 scale atoms
  __shared__ __align__(8) uint64 full[3], empty[3], done;
  __shared__ uint32 column;
  const int t = threadIdx.x, warp = t / 32;
  if (t == 0) {
    for (int s = 0; s < 3; s++) { init(full + s, 1); init(empty + s, 1); }
    init(&done, 1);
  }
  if (warp == 0)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 512;"
                 ::"r"(address(&column)) : "memory");
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const uint32 at = column;
  if (warp == 0 && elect()) {
    for (int i = 0; i < tiles; i++) {
      const int s = i % 3;
      char* to = stages + s * 55296;
      if (i >= 3) WAIT_EMPTY;
      expect(full + s, 55296);
      copy_in(to, a + i * 16384, 16384, full + s);
      copy_in(to + 16384, b + i * 32768, 32768, full + s);
      copy_in(to + 49152, sfa + i * 2048, 2048, full + s);
      copy_in(to + 51200, sfb + i * 4096, 4096, full + s);
    }
  }
  if (warp == 1 && elect()) {
    for (int i = 0; i < tiles; i++) {
      const int s = i % 3;
      const char* from = stages + s * 55296;
      WAIT_FULL;
      for (int k = 0; k < 4; k++) {
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"
                     ::"r"(at + 256), "l"(operand(from + 49152 + k * 512, 0)) : "memory");
        for (int half = 0; half < 2; half++)
          asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"
                       ::"r"(at + 264 + 4 * half), "l"(operand(from + 51200 + k * 1024 + half * 512, 0)) : "memory");
        asm volatile("{.reg .pred p; setp.ne.b32 p, %6, 0;\\n"
                     "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p;}"
                     ::"r"(at), "l"(operand(from + k * 4096, 128)), "l"(operand(from + 16384 + k * 8192, 256)),
                       "r"(IDESC), "r"(at + 256), "r"(at + 264), "r"(i + k) : "memory");
      }
      COMMIT_EMPTY;
    }
    COMMIT_DONE;
  }
  __syncwarp();
  WAIT_DONE;
  AFTER;
  for (int n = 0; n < 256; n += 8) {
    uint32 r[8];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
                 : "r"(at + n + (warp << 21)));
    WAIT_LD;
    for (int i = 0; i < 8; i++) d[t * 256 + n + i] = __uint_as_float(r[i]);
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  if (warp == 0) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 512;" ::"r"(at));
}
""".replace("IDESC", f"{1 << 7 | 1 << 10 | 256 >> 3 << 17 | 128 >> 7 << 27}u")
)


def _commit(barrier: str) -> str:
    return (
        'asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"'
        f' ::"r"(address({barrier})) : "memory");'
    )


TCGEN05_PIECES = {
    "WAIT_EMPTY": "wait(empty + s, i / 3 - 1 & 1)",
    "WAIT_FULL": "wait(full + s, i / 3 & 1)",
    "COMMIT_EMPTY;": _commit("empty + s"),
    "COMMIT_DONE;": _commit("&done"),
    "WAIT_DONE": "wait(&done, 0)",
    "AFTER;": 'asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");',
    "WAIT_LD;": 'asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");',
}


def with_pieces(source: str, pieces: dict[str, str], **instead: str) -> str:
    """The kernel with all its pieces, but for those in ``instead``."""
    for name, text in pieces.items():
        source = source.replace(name, instead.get(name.rstrip(";"), text))
    return source


def _chunks(rows: np.ndarray, stage_bytes: int) -> np.ndarray:
    """Bytes ``[rows, k bytes]`` stage by stage, each in the kernels' order."""
    stages = rows.reshape(len(rows), -1, stage_bytes // 16, 16)
    return np.ascontiguousarray(stages.transpose(1, 2, 0, 3)).reshape(-1)


def wgmma_problem(k: int) -> tuple[list[Any], np.ndarray]:
    """Arguments for ``k`` (a multiple of 64) and the product, which is exact."""
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-4, 5, (rows, k)).astype(np.float32) for rows in (64, 128))
    packed = [_chunks(x.view(np.uint16)[:, 1::2].copy().view(np.uint8), 128) for x in (a, b)]
    return [*packed, np.zeros((64, 128), np.float32), np.int32(k // 64)], a @ b.T


def tcgen05_problem(k: int) -> tuple[list[Any], np.ndarray]:
    """The same for nvfp4, with scales of 1 and 2; ``k`` a multiple of 256."""
    rng = np.random.default_rng(k)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    operands, scales, dequantised = [], [], []
    for rows in (128, 256):
        codes = rng.integers(0, 16, (rows, k)).astype(np.uint8)
        twice = rng.integers(0, 2, (rows, k // 16))
        operands.append(_chunks(codes[:, 0::2] | codes[:, 1::2] << 4, 128))
        e4m3 = (0x38 + 8 * twice).astype(np.uint8)  # row r of an atom: lane r % 32, word r / 32, four scales of k
        atoms = e4m3.reshape(rows // 128, 4, 32, k // 64, 4).transpose(3, 0, 2, 1, 4)
        scales.append(np.ascontiguousarray(atoms).reshape(-1))
        dequantised.append(values[codes] * np.repeat(1 + twice, 16, 1))
    out = np.zeros((128, 256), np.float32)
    return [*operands, *scales, out, np.int32(k // 256)], (dequantised[0] @ dequantised[1].T).astype(np.float32)
