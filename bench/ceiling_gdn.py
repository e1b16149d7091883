"""The speed that memory allows the gated delta rule: its loads and stores without its arithmetic.

Run on a GPU: ``python -m bench.ceiling_gdn [--out DIR]``. A kernel reads every state once, writes it once for every
token, and once more in place, with the tiles and the bulk stores of the real kernel; ``of_copy`` is the time of a copy
of the same bytes divided by its time. As in the real kernel, the states of ``ahead`` heads are prefetched into L2 in
one burst, so that DRAM switches from writing to reading less often; rows without loads show what these switches cost.
4096 float32 states of 64 KiB: batch 128 with 32 value heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness import copy_us, time_us, write_results
from bench.stamp import stamp
from jitfp4 import nvrtc
from jitfp4.arch import Arch
from jitfp4.driver import LoadedKernel
from jitfp4.families.gdn.kernels.delta_rule import share_of_sm
from jitfp4.spec import Geometry, Ptr

ARCH = Arch.of("sm_90a")
HEADS, HEAD_BYTES, VALUE_HEADS = 4096, 65536, 32
CUTS = ((1, 4), (1, 8), (2, 4))  # rows of a lane, warps of a CTA
TOKENS = (0, 1, 2, 4, 8)  # 0: only the final state is written
SOURCE = r"""
typedef unsigned int uint32;
typedef unsigned long long uint64;
constexpr uint32 kPiece = kRows * 2048;  // bytes of a warp
constexpr uint32 kTiles = 65536 / (kWarps * kPiece);

extern "C" __global__ void move(char* state, char* steps) {
  extern __shared__ __align__(16) char shared[];
  const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint64 at = (uint64(blockIdx.x) * kWarps + warp) * kPiece, head = at / 65536;
  if (kAhead) {
    const uint32 group_head = blockIdx.x / kTiles, place = group_head % (kAhead ? kAhead : 1);
    const uint32 wanted = group_head - place + kAhead + place * 4 + threadIdx.x;
    if (threadIdx.x < 4 && place < kAhead / 4 && wanted < kAllHeads) {
      const char* from = state + wanted * 65536ull + blockIdx.x % kTiles * (kWarps * kPiece);
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(kWarps * kPiece) : "memory");
    }
  }
  const uint32 mine = lane / 8 * (kRows * 512) + lane % 8 * 16;
  uint4 h[kRows][4];
#pragma unroll
  for (int i = 0; i < kRows * 4; ++i) {
    if (!kLoads) h[i / 4][i % 4] = {lane, warp, blockIdx.x, uint32(i)};
    else asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(h[i / 4][i % 4].x), "=r"(h[i / 4][i % 4].y), "=r"(h[i / 4][i % 4].z), "=r"(h[i / 4][i % 4].w)
                 : "l"(state + at + mine + i / 4 * 512 + i % 4 * 128));
  }
#pragma unroll 1
  for (int t = 0; t <= kTokens; ++t) {
    const uint64 step = ((head / kHeads * kTokens + t) * kHeads + head % kHeads) * 65536 + at % 65536;
    char* to = t < kTokens ? steps + step : state + at;
    char* slice = shared + (warp * 2 + t % 2) * kPiece;
    if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows * 4; ++i) {
      const uint32 offset = mine + i / 4 * 512 + i % 4 * 128;
      *reinterpret_cast<uint4*>(slice + offset) = h[i / 4][i % 4];
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) {
      uint64 policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n"
                   "cp.async.bulk.commit_group;"
                   ::"l"(to), "r"(uint32(__cvta_generic_to_shared(slice))), "r"(kPiece), "l"(policy) : "memory");
    }
  }
  if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
"""


class Variant(NamedTuple):
    """``loads``: states are also read; ``ahead``: 0 for no bursts; ``ctas_per_sm``: 0 for as many as fit."""

    tokens: int
    loads: bool
    rows: int
    warps: int
    ahead: int
    ctas_per_sm: int

    @property
    def moved_bytes(self) -> int:
        return HEADS * HEAD_BYTES * (1 + self.tokens + self.loads)

    @property
    def source(self) -> str:
        values = {
            "kTokens": self.tokens,
            "kLoads": int(self.loads),
            "kRows": self.rows,
            "kWarps": self.warps,
            "kAhead": self.ahead,
            "kHeads": VALUE_HEADS,
            "kAllHeads": HEADS,
        }
        return "".join(f"constexpr int {name} = {value};\n" for name, value in values.items()) + SOURCE


def variants() -> Iterator[Variant]:
    for tokens, (rows, warps), ctas_per_sm in product(TOKENS, CUTS, (0, 1, 2, 3, 4)):
        if ctas_per_sm == 0 or rows * warps * ctas_per_sm >= 8:
            for ahead in (0, 32, 64, 96):
                yield Variant(tokens, True, rows, warps, ahead, ctas_per_sm)
            yield Variant(tokens, False, rows, warps, 0, ctas_per_sm)


def measure() -> Iterator[dict[str, Any]]:
    chosen = list(variants())
    with ThreadPoolExecutor() as pool:
        cubins = list(pool.map(lambda variant: nvrtc.compile_cubin(variant.source, ARCH, symbol="move"), chosen))
    state = torch.randn(HEADS * HEAD_BYTES // 4, device="cuda")
    steps = torch.empty(HEADS * HEAD_BYTES // 4 * max(TOKENS), device="cuda")
    copied = {size: copy_us(size, l2="warm") for size in {variant.moved_bytes for variant in chosen}}
    params = (Ptr("state", "char", "[heads]"), Ptr("steps", "char", "[requests, tokens, heads]"))
    for variant, cubin in zip(chosen, cubins, strict=True):
        piece = variant.warps * variant.rows * 2048
        share = share_of_sm(ARCH, variant.ctas_per_sm)
        geometry = Geometry(
            grid=(HEADS * HEAD_BYTES // piece, 1, 1),
            block=(32 * variant.warps, 1, 1),
            shared_bytes=max(2 * piece, share),
        )
        kernel = LoadedKernel(cubin, "move", params, 0)

        def call(kernel: LoadedKernel = kernel, geometry: Geometry = geometry) -> None:
            kernel.launch(geometry, (state, steps), stream=torch.cuda.current_stream().cuda_stream, pdl=False)

        us = time_us(lambda call=call: call, 0, l2="warm", replays=5)
        figures = {"us": round(us, 2), "tb_per_s": round(variant.moved_bytes / us / 1e6, 3)}
        yield variant._asdict() | figures | {"of_copy": round(copied[variant.moved_bytes] / us, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    rows = sorted(measure(), key=lambda row: (row["tokens"], not row["loads"], row["us"]))
    write_results(out / "gdn_ceiling", rows, stamp())
    for _, same in groupby(rows, lambda row: (row["tokens"], row["loads"], row["ahead"] > 0)):
        print(*next(same).values(), sep="\t")


if __name__ == "__main__":
    main()
