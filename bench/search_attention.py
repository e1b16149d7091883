"""Every tactic that may be worth it, on loads that tell them apart: what the tables of decode attention are read from.

Run on a GPU: ``python -m bench.search_attention [--out DIR]``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

from bench.bench_attention import Case, Pool
from bench.harness import time_us, write_results
from bench.stamp import stamp
from jitfp4.errors import ArgumentError
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.attention.problem import Tactic

LOADS = ((1, 1024), (1, 8192), (16, 1024), (16, 8192), (256, 1024), (64, 8192), (16, 131072))
POOL_BYTES = 6 << 30
SIDES = {
    ("nvfp4", "HND", 64): ((12, 3, 1), (10, 3, 1), (8, 3, 1), (8, 4, 1), (6, 3, 2), (4, 3, 3), (4, 4, 2)),
    ("nvfp4", "NHD", 16): ((12, 3, 1), (8, 3, 1, 8), (8, 4, 1, 8), (12, 3, 1, 4), (4, 3, 3)),
    ("fp8", "HND", 64): ((6, 3, 1), (4, 4, 1), (4, 5, 1), (8, 2, 1), (3, 3, 2)),
    ("bf16", "HND", 64): ((4, 3, 1), (3, 4, 1), (5, 2, 1), (2, 3, 2), (6, 2, 1)),
}


def measure(pool: Pool) -> Iterator[dict[str, object]]:
    for (cache, layout, page), tactics in SIDES.items():
        for (batch, context), fields in itertools.product(LOADS, tactics):
            case = Case(cache, 64, 8, layout, page, batch, context)
            if case.bytes > POOL_BYTES:
                continue
            tactic = Tactic(*fields)
            try:
                with ATTENTION.forced(tactic):
                    us = time_us(lambda case=case: pool.call(case), case.bytes)  # type: ignore[misc]
            except ArgumentError:  # it does not fit
                continue
            yield case._asdict() | {
                "warps": tactic.warps,
                "stages": tactic.stages,
                "min_ctas": tactic.min_ctas,
                "head_warps": tactic.head_warps,
                "us": round(us, 2),
                "tb_per_s": round(case.bytes / us / 1e6, 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    rows = list(measure(Pool(POOL_BYTES)))
    write_results(parser.parse_args().out / "attention_search", rows, stamp())


if __name__ == "__main__":
    main()
