"""Every tactic of the norm kernels that can hold a row, over rows and hidden sizes: its table follows from the results.

Run on a GPU: ``python -m bench.search_norm [--out DIR]``. float16, NVFP4, linear scales. ``shape`` is the units of a
thread, the most warps of a CTA, ``c`` for clusters, and ``r`` for the kernel with a CTA for each row; ``ratio`` is the
time of a copy of the same bytes divided by that of the call.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from bench.bench_norm import BLOCK, fused, make_tensors, moved_bytes
from bench.harness import calls_per_graph, copy_us, time_us, write_results
from bench.stamp import stamp
from jitfp4.arch import Arch
from jitfp4.engine import target_of
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic
from jitfp4.families.norm.kernels.rows_fp4quant import RowsSpec, RowsTactic
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.norm.problem import TURN, Problem, Scale
from jitfp4.formats import DType

ROWS = (1, 64, 1000, 3000, 8192, 32768)
REPLAYS = 7
HIDDEN = (1536, 2048, 4096, 5120, 7168, 8192, 16384, 32768)


def holders(problem: Problem, arch: Arch) -> Iterator[Tactic | RowsTactic]:
    """Tactics that hold the row and leave less than half of the threads that a row has at least without work."""
    for tactic in RMSNORM.candidates(problem, arch):
        idle = isinstance(tactic, Tactic) and tactic.warps == 1 and 2 * problem.h <= TURN * tactic.units
        if not (idle or tactic == Tactic(8, 16, stream=True)):
            yield tactic


def shape(tactic: Tactic | RowsTactic) -> str:
    if isinstance(tactic, RowsTactic):
        return f"{tactic.units}x{RowsSpec.warps}r"
    return f"{tactic.units}x{tactic.warps}{'c' if tactic.clustered else ''}"


def measure(add: bool, m: int, h: int, arch: Arch) -> list[dict[str, object]]:
    problem = Problem(DType.F16, BLOCK, Scale.E4M3, add, gate=False, padded=False, m=m, h=h)
    tensors = [make_tensors(add, m, h)]
    moved = moved_bytes(tensors[0])
    tensors += [make_tensors(add, m, h) for _ in range(calls_per_graph(moved) - 1)]
    tactics, us = [*holders(problem, arch)], {}
    for tactic in [tactics[0], *tactics]:  # the first calls after an allocation are slower, and measured again
        calls = iter([partial(fused, t) for t in tensors])
        with RMSNORM.forced(tactic):
            us[tactic] = time_us(lambda calls=calls: next(calls), moved, replays=REPLAYS)  # type: ignore[misc]
    copy = copy_us(moved)
    return [
        {
            "op": "add_rmsnorm" if add else "rmsnorm",
            "rows": m,
            "hidden": h,
            "shape": shape(tactic),
            "selected": tactic == RMSNORM.select(problem, arch),
            "us": round(time, 3),
            "ratio": round(copy / time, 3),
        }
        for tactic, time in us.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    arch = target_of(torch.empty(1, device="cuda")).arch
    rows = []
    for add, m, h in itertools.product((False, True), ROWS, HIDDEN):
        rows += measure(add, m, h, arch)
    write_results(out / "norm_shapes", rows, stamp())


if __name__ == "__main__":
    main()
