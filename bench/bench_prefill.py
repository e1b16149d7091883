"""Prefill and extend attention over a paged cache, cuDNN in the same run, and recorded peers.

Run on a GPU: ``python -m bench.bench_prefill [--out DIR]``. A request's new tokens are the last of its context, causal.
``tflops`` counts four operations for each dimension, query head, and pair of a query and a token that it sees.
Each measurement follows a pause, in which the clock recovers from the load before it.
``cudnn_us`` is cuDNN's kernel, called through torch, over contiguous bf16 keys and values, where all tokens are new.
Other peers are recorded rows, in results/h200/prefill_peers.csv with their names and date.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import jitfp4
from bench.bench_attention import CACHES, HEAD_DIM, Case, Pool
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4.families.attention.kernels.prefill import PrefillTactic
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.tuning import GRAPH_BYTES, Call, time_us

CELLS = (
    *((4, 4096, 4096), (1, 32768, 32768), (1, 512, 32768), (1, 2048, 32768)),
    *((1, 1024, 1024), (1, 16, 8192), (1, 16, 32768), (8, 16, 8192), (1, 128, 32768)),  # few blocks of query rows
)
"""Requests, and the new tokens and the context of each."""
HEADS = (64, 8)
LAYOUTS = (("HND", 64), ("NHD", 16))
POOL_BYTES = 1 << 30
PAUSE_S = 0.2
PEERS = Path(__file__).parent / "results/h200/prefill_peers.csv"
MMA_SYNC = PrefillTactic(8, 32, 64, 1)  # what 256 rows and more would get on sm_90a without wgmma


class Cell(NamedTuple):
    """The last ``q_len`` tokens of ``case``'s context are new. ``forced``: not the tactic of the table."""

    case: Case
    q_len: int
    head_dim: int = HEAD_DIM
    forced: PrefillTactic | None = None

    @property
    def tflop(self) -> float:
        """Operations of one call, in 10^12."""
        seen = self.q_len * (self.case.context - self.q_len) + self.q_len * (self.q_len + 1) // 2
        return 4e-12 * self.head_dim * self.case.heads * self.case.batch * seen


def cells() -> Iterator[Cell]:
    for cache in CACHES:
        for layout, page in LAYOUTS:
            for batch, q_len, context in CELLS:
                yield Cell(Case(cache, *HEADS, layout, page, batch, context), q_len)


def other_cells() -> Iterator[Cell]:
    """Cells without peers: other head dimensions, and the kernel of mma.sync."""
    batch, q_len, context = CELLS[0]
    for cache in ("nvfp4", "bf16"):
        case = Case(cache, *HEADS, *LAYOUTS[0], batch, context)
        yield from (Cell(case, q_len, head_dim) for head_dim in (64, 256))
        yield Cell(case, q_len, forced=MMA_SYNC)


def call(cell: Cell, pool: Pool) -> Call:
    """One call of prefill."""
    case = cell.case
    cache, scales, numbers = pool.pages(case, cell.head_dim)
    query = torch.randn(case.batch * cell.q_len, case.heads, cell.head_dim, dtype=torch.bfloat16, device="cuda")
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
    q_ends, kv_ends = ends * cell.q_len, ends * case.context
    out = torch.empty_like(query)
    return lambda: jitfp4.trtllm_batch_context_with_kv_cache(
        query,
        cache,
        pool.workspace,
        numbers,
        lengths,
        cell.q_len,
        case.context,
        cell.head_dim**-0.5,
        0.5,
        case.batch,
        q_ends,
        kv_ends,
        out=out,
        kv_layout=case.kv_layout,
        kv_cache_sf=scales,
        v_scale_layout="linear",
    )


def call_cudnn(batch: int, tokens: int, head_dim: int, heads: tuple[int, int] = HEADS) -> Call:
    """One call of cuDNN's causal attention over bf16 tensors, [batch, tokens, heads, head_dim] in memory."""
    query, key, value = (
        torch.randn(batch, tokens, count, head_dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for count in (heads[0], heads[1], heads[1])
    )

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return call


def time_cudnn(cell: Cell, heads: tuple[int, int] = HEADS) -> float | None:
    """Microseconds, or None where some tokens are not new, or cuDNN has no kernel."""
    batch, tokens = cell.case.batch, cell.q_len
    if tokens < cell.case.context:
        return None
    time.sleep(PAUSE_S)
    try:
        return time_us(lambda: call_cudnn(batch, tokens, cell.head_dim, heads), GRAPH_BYTES)
    except RuntimeError as error:
        print(f"cuDNN, head dimension {cell.head_dim}: {error}")
        return None


def peers() -> dict[tuple[int, int, int], dict[str, float]]:
    """The best recorded peer of each format by requests, new tokens and context."""
    found: dict[tuple[int, int, int], dict[str, float]] = {}
    with PEERS.open(newline="") as file:
        for row in csv.DictReader(file):
            times = found.setdefault((int(row["batch"]), int(row["q_len"]), int(row["context"])), {})
            times[row["cache"]] = min(float(row["us"]), times.get(row["cache"], float("inf")))
    return found


def measure(cell: Cell, pool: Pool, best: dict[str, float]) -> dict[str, Any]:
    time.sleep(PAUSE_S)
    with ATTENTION.forced(cell.forced) if cell.forced else contextlib.nullcontext():
        us = time_us(lambda: call(cell, pool), GRAPH_BYTES)
    row: dict[str, Any] = cell.case._asdict() | {
        "q_len": cell.q_len,
        "head_dim": cell.head_dim,
        "kernel": "mma.sync" if cell.forced else "",
        "us": us,
        "tflops": 1e6 * cell.tflop / us,
    }
    for name, peer in {"cudnn": time_cudnn(cell), **dict.fromkeys(("bf16", "fp8", "nvfp4")), **best}.items():
        row[f"{name}_us"] = peer
        row[f"over_{name}"] = peer / us if peer else None
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    arguments = parser.parse_args()
    known, pool, rows = peers(), Pool(POOL_BYTES), []
    for cell in cells():
        rows.append(measure(cell, pool, known.get((cell.case.batch, cell.q_len, cell.case.context), {})))
        print(rows[-1])
    for cell in other_cells():
        rows.append(measure(cell, pool, {}))
        print(rows[-1])
    write_results(arguments.out / "prefill", rows, stamp())


if __name__ == "__main__":
    main()
