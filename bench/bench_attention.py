"""Decode attention over a paged NVFP4 cache, and recorded peers.

Run on a GPU: ``python -m bench.bench_attention [--out DIR] [--gib LIMIT]``. Every call reads pages that are not in L2:
no call has read them since L2 was overwritten. ``tb_per_s`` counts the codes and scales of the attended tokens, and
``of_read`` compares it with a kernel that only reads, in the same run. Peers are recorded rows, in
results/h200/attention_peers.csv with their names and date.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import jitfp4
from bench.harness import Call, geomean, time_us, write_results
from bench.stamp import stamp
from jitfp4 import nvrtc
from jitfp4.arch import Arch
from jitfp4.driver import LoadedKernel
from jitfp4.spec import I64, Geometry, Ptr

BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (1024, 4096, 8192, 32768, 131072)
HEADS = ((64, 8), (32, 8), (8, 1))
LAYOUTS = (("HND", 16), ("HND", 64), ("NHD", 16))
HEAD_DIM = 128
CACHES = {"nvfp4": HEAD_DIM // 2 + HEAD_DIM // 16, "fp8": HEAD_DIM, "bf16": 2 * HEAD_DIM}
"""Bytes of a token in K, and also in V, for one KV head."""
READ_BYTES = 1 << 30
PEERS = Path(__file__).parent / "results/h200/attention_peers.csv"

READ = r"""
extern "C" __global__ void read(const uint4* p, unsigned* out, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  unsigned sum = 0;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i + 3 * step < n; i += 4 * step) {
    const uint4 a = p[i], b = p[i + step], c = p[i + 2 * step], d = p[i + 3 * step];
    sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  if (sum == 12345) *out = sum;
}
"""


class Case(NamedTuple):
    cache: str
    heads: int
    kv_heads: int
    kv_layout: str
    page: int
    batch: int
    context: int

    @property
    def bytes(self) -> int:
        return self.batch * self.context * self.kv_heads * 2 * CACHES[self.cache]


def cases(limit: int) -> Iterator[Case]:
    """The whole grid for the first heads, and its edges for other heads and caches, as far as they fit in memory."""
    for cache, (heads, kv_heads), (layout, page), batch, context in itertools.product(
        CACHES, HEADS, LAYOUTS, BATCHES, CONTEXTS
    ):
        case = Case(cache, heads, kv_heads, layout, page, batch, context)
        first = (heads, kv_heads, page) == (64, 8, 64)
        edge = context in (1024, 8192, 131072) and batch in (1, 16, 64, 256)
        if case.bytes <= limit and (first if cache == "nvfp4" else first and edge) | (cache == "nvfp4" and edge):
            yield case


class Pages(NamedTuple):
    """K and V, their scales, and page numbers [batch, columns]."""

    cache: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor] | None
    numbers: torch.Tensor


class Pool:
    """Random floats that all cases share as the bytes of their pages, in any layout: E4M3, and bf16 or NVFP4."""

    def __init__(self, size: int) -> None:
        self._halves = torch.randn(size // 2, dtype=torch.bfloat16, device="cuda").view(torch.uint8)
        self._bytes = torch.randn(size, dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
        self._scales = torch.randint(36, 60, (size // 8,), dtype=torch.uint8, device="cuda")
        self.workspace = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
        self._next = 0

    def pages(self, case: Case, head_dim: int = HEAD_DIM) -> Pages:
        """Pages for one call, different from those of other calls as long as there are enough."""
        columns = -(-case.context // case.page)
        order = (case.kv_heads, case.page) if case.kv_layout == "HND" else (case.page, case.kv_heads)
        row = head_dim // 2 if case.cache == "nvfp4" else head_dim * CACHES[case.cache] // HEAD_DIM
        data = self._bytes if case.cache == "fp8" else self._halves
        pages = len(data) // (2 * case.kv_heads * case.page * row)
        dtype = {"nvfp4": torch.uint8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}[case.cache]

        def sides(memory: torch.Tensor, row: int) -> list[torch.Tensor]:
            size = pages * case.kv_heads * case.page * row
            return [memory[side * size : (side + 1) * size].view(pages, *order, row) for side in (0, 1)]

        key, value = (side.view(dtype) for side in sides(data, row))
        scales = None
        if case.cache == "nvfp4":
            k_scales, v_scales = sides(self._scales, head_dim // 16)
            scales = (k_scales, v_scales)
        numbers = (torch.arange(case.batch * columns, device="cuda") + self._next) % pages
        self._next = (self._next + case.batch * columns) % pages
        numbers = numbers[torch.randperm(len(numbers), device="cuda")].view(case.batch, columns).to(torch.int32)
        return Pages((key, value), scales, numbers)

    def call(self, case: Case, head_dim: int = HEAD_DIM) -> Call:
        """One call of decode."""
        cache, scales, numbers = self.pages(case, head_dim)
        query = torch.randn(case.batch, case.heads, head_dim, dtype=torch.bfloat16, device="cuda")
        lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
        out = torch.empty_like(query)
        return lambda: jitfp4.trtllm_batch_decode_with_kv_cache(
            query,
            cache,
            self.workspace,
            numbers,
            lengths,
            case.context,
            head_dim**-0.5,
            0.5,
            out=out,
            kv_layout=case.kv_layout,
            kv_cache_sf=scales,
            v_scale_layout="linear",
        )


def read_tb_per_s() -> float:
    """The bandwidth of a kernel that only reads."""
    arch = Arch.of_capability(*torch.cuda.get_device_capability())
    params = (Ptr("p", "const uint4"), Ptr("out", "unsigned"), I64("n"))
    kernel = LoadedKernel(nvrtc.compile_cubin(READ, arch, symbol="read"), "read", params, 0)
    sums = torch.zeros(4, dtype=torch.int32, device="cuda")

    def make(ctas: int) -> Call:
        data = torch.randint(0, 1 << 30, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
        geometry = Geometry((ctas * arch.num_sms, 1, 1), (512, 1, 1))
        arguments = (data, sums, READ_BYTES // 16)
        return lambda: kernel.launch(geometry, arguments, stream=torch.cuda.current_stream().cuda_stream, pdl=False)

    return max(READ_BYTES / time_us(lambda ctas=ctas: make(ctas), READ_BYTES) / 1e6 for ctas in (4, 8, 16))


def peers() -> dict[tuple[int, int, int, int], dict[str, float]]:
    """The best recorded peer of each format, by heads, KV heads, batch and context."""
    found: dict[tuple[int, int, int, int], dict[str, float]] = {}
    with PEERS.open(newline="") as file:
        for row in csv.DictReader(file):
            key = int(row["heads"]), int(row["kv_heads"]), int(row["batch"]), int(row["context"])
            found.setdefault(key, {})[row["cache"]] = float(row["us"])
    return found


def measure(case: Case, pool: Pool, read: float, best: dict[str, float]) -> dict[str, Any]:
    us = time_us(lambda: pool.call(case), case.bytes)
    row: dict[str, Any] = case._asdict() | {"mib": case.bytes / 2**20, "us": us, "tb_per_s": case.bytes / us / 1e6}
    row["of_read"] = row["tb_per_s"] / read
    for cache in ("bf16", "fp8", "nvfp4"):
        row[f"{cache}_us"] = best.get(cache)
        row[f"over_{cache}"] = best[cache] / us if cache in best else None
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    kinds = ("cache", "heads", "kv_heads", "kv_layout", "page")
    for kind, group in itertools.groupby(rows, key=lambda row: tuple(row[name] for name in kinds)):
        mine = list(group)
        big = [row for row in mine if row["mib"] >= 512]
        yield f"{kind}: geomean of the read bandwidth {geomean(r['of_read'] for r in mine):.3f}" + (
            f", from 512 MiB on {min(r['of_read'] for r in big):.3f} to {max(r['of_read'] for r in big):.3f}"
            if big
            else ""
        )
        for cache in ("bf16", "fp8", "nvfp4"):
            known = [row for row in mine if row[f"over_{cache}"]]
            if known:
                worst = min(known, key=lambda row: row[f"over_{cache}"])
                yield (
                    f"  over the best {cache} peer: geomean {geomean(r[f'over_{cache}'] for r in known):.2f}, least"
                    f" {worst[f'over_{cache}']:.2f} at {worst['batch']} x {worst['context']}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--gib", type=float, default=10.0, help="the largest cache")
    arguments = parser.parse_args()
    limit = int(arguments.gib * 2**30)
    read, known, pool = read_tb_per_s(), peers(), Pool(limit)
    rows = []
    for case in cases(limit):
        best = known.get((case.heads, case.kv_heads, case.batch, case.context), {})
        rows.append(measure(case, pool, read, best))
    write_results(arguments.out / "attention", rows, stamp() | {"read_tb_per_s": round(read, 3)})
    print(f"read: {read:.3f} TB/s", *summary(rows), sep="\n")


if __name__ == "__main__":
    main()
