"""Decode and prefill attention for every head dimension, and cuDNN's prefill in the same run.

Run on a GPU: ``python -m bench.bench_head_dims [--out DIR]``. ``of_read`` compares the bytes of a decode's tokens, each
second, with a kernel that only reads; a prefill has ``tflops`` instead, as bench_prefill counts them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.bench_attention import CACHES, HEAD_DIM, Case, Pool, read_tb_per_s
from bench.bench_prefill import Cell, call, time_cudnn
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4.families.attention.problem import HEAD_DIMS
from jitfp4.tuning import GRAPH_BYTES, time_us

HEADS = (32, 8)
PAGES = ("HND", 64)
DECODE = (16, 8192)  # requests, tokens
PREFILL = (4, 4096)
POOL_BYTES = 2 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    arguments = parser.parse_args()
    read, pool = read_tb_per_s(), Pool(POOL_BYTES)
    rows = []
    for head_dim in HEAD_DIMS:
        peer = time_cudnn(Cell(Case("bf16", *HEADS, *PAGES, *PREFILL), PREFILL[1], head_dim), HEADS)
        for cache in CACHES:
            case = Case(cache, *HEADS, *PAGES, *DECODE)
            bytes_ = case.bytes * head_dim // HEAD_DIM
            us = time_us(lambda case=case, head_dim=head_dim: pool.call(case, head_dim), bytes_)
            rows.append(_row("decode", head_dim, case, us) | {"of_read": round(bytes_ / us / 1e6 / read, 3)})
            cell = Cell(Case(cache, *HEADS, *PAGES, *PREFILL), PREFILL[1], head_dim)
            us = time_us(lambda cell=cell: call(cell, pool), GRAPH_BYTES)
            of_cudnn = round(peer / us, 3) if peer else None
            rows.append(
                _row("prefill", head_dim, cell.case, us)
                | {"tflops": round(1e6 * cell.tflop / us, 1), "over_cudnn": of_cudnn}
            )
            print(*rows[-2:], sep="\n", flush=True)
    columns = {name: None for row in rows for name in row}
    rows = [columns | row for row in rows]
    write_results(arguments.out / "attention_head_dims", rows, stamp() | {"read_tb_per_s": round(read, 3)})


def _row(kind: str, head_dim: int, case: Case, us: float) -> dict[str, Any]:
    return {"kind": kind, "head_dim": head_dim} | case._asdict() | {"us": round(us, 3)}


if __name__ == "__main__":
    main()
