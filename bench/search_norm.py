"""Every tactic of the norm kernel that can hold a row, over rows and hidden sizes: its table follows from the results.

Run on a GPU: ``python -m bench.search_norm [--out DIR]``. float16, NVFP4, linear scales. ``shape`` is the units of a
thread, the most warps of a CTA, and ``c`` for clusters; ``ratio`` is the time of a copy of the same bytes divided by
that of the call.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from pathlib import Path

import torch

from bench.bench_norm import BLOCK, fused, make_tensors, moved_bytes
from bench.harness import calls_per_graph, copy_us, time_us, write_results
from bench.stamp import stamp
from jitfp4.arch import Arch
from jitfp4.engine import target_of
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic, specialise
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.norm.problem import Problem, Scale
from jitfp4.formats import DType

ROWS = (1, 64, 1000, 3000, 8192, 32768)
HIDDEN = (1536, 2048, 4096, 5120, 7168, 8192, 16384, 32768)


def holders(problem: Problem, arch: Arch) -> list[Tactic]:
    """Tactics that hold the row and leave less than half of their threads without work."""
    held = [tactic for tactic in RMSNORM.candidates(problem, arch) if not tactic.stream]
    return [t for t in held if t.warps > 1 or 2 * problem.h > specialise(problem, t).capacity(arch)]


def measure(add: bool, m: int, h: int, arch: Arch) -> list[dict[str, object]]:
    problem = Problem(DType.F16, BLOCK, Scale.E4M3, add, padded=False, m=m, h=h)
    tensors = [make_tensors(add, m, h)]
    moved = moved_bytes(tensors[0])
    tensors += [make_tensors(add, m, h) for _ in range(calls_per_graph(moved) - 1)]
    us = {}
    for tactic in holders(problem, arch) * 2:  # the first calls after an allocation are slower: the second time counts
        calls = iter([partial(fused, t) for t in tensors])
        with RMSNORM.forced(tactic):
            us[tactic] = time_us(lambda calls=calls: next(calls), moved)  # type: ignore[misc]
    copy = copy_us(moved)
    return [
        {
            "op": "add_rmsnorm" if add else "rmsnorm",
            "rows": m,
            "hidden": h,
            "shape": f"{tactic.units}x{tactic.warps}{'c' if tactic.clustered else ''}",
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
