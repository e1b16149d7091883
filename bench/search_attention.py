"""Every tactic worth trying, on loads that tell tactics apart: the tables of attention follow from the results.

Run on a GPU: ``python -m bench.search_attention [--out DIR] [--only decode|prefill|widths]``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bench.bench_attention import CACHES, Case, Pool
from bench.bench_prefill import POOL_BYTES as PREFILL_POOL_BYTES
from bench.bench_prefill import Cell, call, cells, time_cudnn
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4.errors import ArgumentError
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.kernels.prefill import PrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.attention.problem import TILE
from jitfp4.operation import Observed, observed
from jitfp4.tuning import GRAPH_BYTES, on_gpu, time_us

LOADS = (
    *((1, 1024), (1, 8192), (16, 1024), (64, 1024), (1, 131072), (16, 8192)),
    *((256, 1024), (64, 8192), (16, 131072), (256, 8192)),
)
SMALL_LOADS = ((1, 2048), (1, 4096), (2, 1024), (4, 1024), (8, 1024), (8, 4096), (16, 2048), (32, 1024))
CLUSTERS = (
    *((4, 2, 1, 1, 8), (8, 2, 1, 1, 8), (4, 2, 3, 1, 8), (8, 2, 1, 1, 4)),
    *((8, 2, 1, 1, 2), (8, 2, 1, 1, 1), (4, 2, 1, 1, 1)),
)
MOST_TILES = 16  # of a warp, of an item that a cluster takes: others take long
POOL_BYTES = 6 << 30
PREFILL_CELLS = {"HND": (4096, 2048, 1024, 512, 128, 16), "NHD": (2048, 128, 16)}  # new tokens
PREFILL_REPLAYS = 5
WIDTH_CELLS = {64: ((4, 4096), (1, 1024), (1, 128, 32768)), 256: ((4, 4096), (1, 128, 32768)), 128: ((4, 4096),)}
"""Requests, new tokens, and contexts where they are longer, by head dimension."""
WIDTHS: dict[int, tuple[WgmmaTactic | PrefillTactic, ...]] = {
    64: (
        WgmmaTactic(2, 1, 128, 4, True),
        *(WgmmaTactic(3, 1, 64, *cut) for cut in ((3, True), (4, True), (4, True, 2))),
        PrefillTactic(8, 32, 64, 1),
        PrefillTactic(4, 32, 64, 2),
    ),
    256: (
        PrefillTactic(8, 16, 32, 1),
        *(WgmmaTactic(2, 1, 64, 2, *cut) for cut in ((False, 1), (False, 2), (True, 2))),
    ),
    128: (
        *(WgmmaTactic(3, 1, 64, *cut) for cut in ((3, True), (3, True, 2), (4, True, 2))),
        *(PrefillTactic(8, rows, tile, 1) for rows, tile in ((32, 64), (32, 32), (16, 64))),
    ),
}
"""By head dimension."""
SIDES = {
    ("nvfp4", "HND", 64): (
        *((12, 3, 1), (12, 2, 1), (8, 3, 1), (8, 2, 1), (4, 2, 1), (8, 2, 2), (6, 3, 2), (6, 2, 2), (4, 3, 3)),
        *((12, 2, 1, 2), (12, 2, 1, 4), (8, 2, 1, 2), (6, 3, 2, 2), (6, 2, 2, 2)),
        *CLUSTERS,
    ),
    ("nvfp4", "NHD", 16): (
        *((12, 2, 1), (8, 2, 1), (4, 2, 1), (6, 3, 2), (12, 2, 1, 2), (8, 2, 1, 2), (6, 2, 2, 2)),
        *((8, 3, 1, 8), (8, 2, 1, 8), (12, 3, 1, 4), (12, 2, 1, 4), (8, 2, 1, 4)),
        *((8, 2, 2, 8), (16, 2, 1, 8), (8, 2, 2, 4)),
        *CLUSTERS,
    ),
    ("fp8", "HND", 64): (
        *((6, 3, 1), (4, 4, 1), (8, 2, 1), (10, 2, 1), (4, 2, 2), (3, 3, 2)),
        *((4, 2, 1, 1, 8), (8, 2, 1, 1, 8), (8, 2, 1, 1, 2), (8, 2, 1, 1, 1), (4, 2, 1, 1, 1)),
    ),
    ("bf16", "HND", 64): (
        *((4, 3, 1), (6, 2, 1), (5, 2, 1), (3, 2, 2), (2, 3, 2)),
        *((4, 2, 1, 1, 8), (4, 3, 1, 1, 8), (4, 2, 1, 1, 2), (4, 3, 1, 1, 2), (4, 2, 1, 1, 1), (4, 3, 1, 1, 1)),
    ),
}


def measure(pool: Pool) -> Iterator[dict[str, object]]:
    for (cache, layout, page), tactics in SIDES.items():
        for (batch, context), fields in itertools.product((*LOADS, *SMALL_LOADS), tactics):
            case = Case(cache, 64, 8, layout, page, batch, context)
            tactic = DecodeTactic(*fields)
            many = tactic.cluster and context // TILE > MOST_TILES * tactic.warps * tactic.cluster
            if case.bytes > POOL_BYTES or many:
                continue
            try:
                with ATTENTION.forced(tactic):
                    us = time_us(lambda case=case: pool.call(case), case.bytes)  # type: ignore[misc]
            except ArgumentError:  # the tactic does not fit
                continue
            yield case._asdict() | {
                "warps": tactic.warps,
                "stages": tactic.stages,
                "min_ctas": tactic.min_ctas,
                "head_warps": tactic.head_warps,
                "cluster": tactic.cluster,
                "us": round(us, 2),
                "tb_per_s": round(case.bytes / us / 1e6, 3),
            }


def measure_prefill(pool: Pool) -> Iterator[dict[str, object]]:
    """Tactics for many query rows. The first cells are bound by products; others have few items, or long ones."""
    for cell in cells():
        if cell.q_len not in PREFILL_CELLS[cell.case.kv_layout]:
            continue
        seen: list[Observed] = []
        with observed(seen.append):
            call(cell, pool)()
        tactics = list(ATTENTION.candidates(seen[0].problem, seen[0].target.arch))
        with on_gpu(seen[0], tactics) as measured:
            for tactic in tactics:
                us = measured(tactic, PREFILL_REPLAYS)
                yield cell.case._asdict() | {
                    "q_len": cell.q_len,
                    "kernel": type(tactic).__name__,
                    "tactic": " ".join(f"{name}={value}" for name, value in asdict(tactic).items()),
                    "us": round(us, 2),
                    "tflops": round(1e6 * cell.tflop / us, 1),
                }


def measure_widths(pool: Pool) -> Iterator[dict[str, object]]:
    """Tactics for many query rows by head dimension, those of mma.sync too, and cuDNN where all tokens are new."""
    for head_dim, tactics in WIDTHS.items():
        for (batch, q_len, *context), cache in itertools.product(WIDTH_CELLS[head_dim], CACHES):
            cell = Cell(Case(cache, 64, 8, "HND", 64, batch, *(context or [q_len])), q_len, head_dim)
            peer = time_cudnn(cell) if cache == "bf16" else None
            for tactic in tactics:
                try:
                    with ATTENTION.forced(tactic):
                        us = time_us(lambda cell=cell: call(cell, pool), GRAPH_BYTES, replays=PREFILL_REPLAYS)  # type: ignore[misc]
                except ArgumentError:  # the tactic does not fit
                    continue
                yield cell.case._asdict() | {
                    "q_len": q_len,
                    "head_dim": head_dim,
                    "kernel": type(tactic).__name__,
                    "tactic": " ".join(f"{name}={value}" for name, value in asdict(tactic).items()),
                    "us": round(us, 2),
                    "tflops": round(1e6 * cell.tflop / us, 1),
                    "cudnn_us": round(peer, 2) if peer else None,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--only", choices=("decode", "prefill", "widths"))
    arguments = parser.parse_args()
    searches = {
        "decode": ("attention_search", measure, POOL_BYTES),
        "prefill": ("prefill_search", measure_prefill, PREFILL_POOL_BYTES),
        "widths": ("prefill_search_widths", measure_widths, PREFILL_POOL_BYTES),
    }
    for name, (file, search, size) in searches.items():
        if arguments.only in (None, name):
            write_results(arguments.out / file, list(search(Pool(size))), stamp())


if __name__ == "__main__":
    main()
