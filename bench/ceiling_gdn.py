"""How fast memory lets the gated delta rule be: its loads and stores without its arithmetic.

Run on a GPU: ``python -m bench.ceiling_gdn [--out DIR]``. A kernel reads every state once, writes it after every token
that is kept and once more in place, in the cuts and with the stores that the real one has; ``of_copy`` is the time of
a copy of the same bytes over its time. 4096 float32 states of 64 KiB: batch 128 with 32 value heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

from bench.bench_gdn import copy_us, replay_us
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import nvrtc
from jitfp4.arch import Arch
from jitfp4.driver import LoadedKernel
from jitfp4.spec import Geometry, Ptr

ARCH = Arch.of("sm_90a")
HEADS, HEAD_BYTES, VALUE_HEADS = 4096, 65536, 32
CUTS = ((1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8))  # rows of a lane, warps
TOKENS = (0, 1, 2, 4, 8)  # 0: only the final state is written
SOURCE = r"""
typedef unsigned int uint32;
typedef unsigned long long uint64;
constexpr uint32 kPiece = kRows * 2048;  // bytes of a warp

__device__ void store(char* to, uint4 v) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

extern "C" __global__ void move(char* state, char* steps) {
  extern __shared__ __align__(16) char shared[];
  const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint64 at = (uint64(blockIdx.x) * kWarps + warp) * kPiece, head = at / 65536;
  const uint32 mine = lane / 8 * (kRows * 512) + lane % 8 * 16;
  uint4 h[kRows][4];
#pragma unroll
  for (int i = 0; i < kRows * 4; ++i) {
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(h[i / 4][i % 4].x), "=r"(h[i / 4][i % 4].y), "=r"(h[i / 4][i % 4].z), "=r"(h[i / 4][i % 4].w)
                 : "l"(state + at + mine + i / 4 * 512 + i % 4 * 128));
  }
#pragma unroll 1
  for (int t = 0; t <= kTokens; ++t) {
    const uint64 step = ((head / kHeads * kTokens + t) * kHeads + head % kHeads) * 65536 + at % 65536;
    char* to = t < kTokens ? steps + step : state + at;
    char* slice = shared + (warp * 2 + t % 2) * kPiece;
    if (kBulk && lane == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows * 4; ++i) {
      const uint32 offset = mine + i / 4 * 512 + i % 4 * 128;
      if (kBulk) *reinterpret_cast<uint4*>(slice + offset) = h[i / 4][i % 4];
      else store(to + offset, h[i / 4][i % 4]);
    }
    if (kBulk) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n  cp.async.bulk.commit_group;"
                     ::"l"(to), "r"(uint32(__cvta_generic_to_shared(slice))), "r"(kPiece) : "memory");
      }
    }
  }
  if (kBulk && lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
"""


def source(tokens: int, rows: int, warps: int, *, bulk_stores: bool) -> str:
    values = {"kTokens": tokens, "kRows": rows, "kWarps": warps, "kHeads": VALUE_HEADS, "kBulk": int(bulk_stores)}
    return "".join(f"constexpr int {name} = {value};\n" for name, value in values.items()) + SOURCE


def variants() -> Iterator[tuple[int, int, int, bool, int]]:
    """Tokens, rows of a lane, warps, bulk stores, CTAs of an SM."""
    for tokens, (rows, warps), bulk_stores, ctas in product(TOKENS, CUTS, (False, True), (0, 1, 2, 3, 4)):
        if ctas * warps * rows <= 64 and (ctas == 0 or ctas * warps * rows >= 8):
            yield tokens, rows, warps, bulk_stores, ctas


def measure() -> Iterator[dict[str, object]]:
    chosen = list(variants())
    with ThreadPoolExecutor() as pool:
        cubins = list(
            pool.map(lambda v: nvrtc.compile_cubin(source(*v[:3], bulk_stores=v[3]), ARCH, symbol="move"), chosen)
        )
    state = torch.randn(HEADS * HEAD_BYTES // 4, device="cuda")
    steps = torch.empty(HEADS * HEAD_BYTES // 4 * max(TOKENS), device="cuda")
    copied = {tokens: copy_us(HEADS * HEAD_BYTES * (2 + tokens)) for tokens in TOKENS}
    params = (Ptr("state", "char", "[heads]"), Ptr("steps", "char", "[requests, tokens, heads]"))
    for (tokens, rows, warps, bulk_stores, ctas), cubin in zip(chosen, cubins, strict=True):
        slices = 2 * warps * rows * 2048 if bulk_stores else 0
        share = (ARCH.shared_bytes + 1024) // ctas - 1024 if ctas else 0
        geometry = Geometry(
            grid=(HEADS * HEAD_BYTES // (warps * rows * 2048), 1, 1),
            block=(32 * warps, 1, 1),
            shared_bytes=max(slices, share),
        )
        kernel = LoadedKernel(cubin, "move", params, 0)

        def call(kernel: LoadedKernel = kernel, geometry: Geometry = geometry) -> None:
            kernel.launch(geometry, (state, steps), stream=torch.cuda.current_stream().cuda_stream, pdl=False)

        us = replay_us(call, 5)
        yield {
            "tokens": tokens,
            "ilp_rows": rows,
            "warps": warps,
            "bulk_stores": bulk_stores,
            "ctas_per_sm": ctas,
            "us": round(us, 2),
            "of_copy": round(copied[tokens] / us, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    rows = sorted(measure(), key=lambda row: (int(str(row["tokens"])), float(str(row["us"]))))
    write_results(out / "gdn_ceiling", rows, stamp())
    for tokens in TOKENS:
        print(*next(row for row in rows if row["tokens"] == tokens).values(), sep="\t")


if __name__ == "__main__":
    main()
