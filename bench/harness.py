"""The time of a copy of the same bytes in the same run, and result files. jitfp4.tuning times the calls.

The copy that a kernel is compared with is measured like the kernel, and moves the same number of bytes: half of them
are read, half are written.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from jitfp4.tuning import L2, Call, calls_per_graph, time_us

COPY_GRAIN = 64 << 10
COPY_CHUNK = 256 << 20  # one memory copy of more than this runs at two thirds of the speed


def copy_us(total_bytes: int, *, l2: L2 = "cold") -> float:
    """Median microseconds to read and write ``total_bytes`` together: by memory copies or an element-wise kernel.

    The faster of the two counts. The size is rounded up to whole COPY_GRAIN: memory copies of other sizes run at two
    thirds of the speed.
    """
    size = -(-total_bytes // 2 // COPY_GRAIN) * COPY_GRAIN // 4
    count = calls_per_graph(8 * size) if l2 == "cold" else 1
    pairs = [(torch.ones(size, device="cuda").normal_(), torch.empty(size, device="cuda")) for _ in range(count)]

    def timed(bind: Callable[[torch.Tensor, torch.Tensor], Call]) -> float:
        calls = iter([bind(*pair) for pair in pairs])
        return time_us(lambda: next(calls), 8 * size, l2=l2)

    def by_copies(source: torch.Tensor, target: torch.Tensor) -> Call:
        chunks = list(zip(source.split(COPY_CHUNK // 4), target.split(COPY_CHUNK // 4), strict=True))
        return lambda: [part.copy_(of) for of, part in chunks]

    added = timed(lambda source, target: lambda: torch.add(source, 1.0, out=target))
    return min(timed(by_copies), added)


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def write_results(path: Path, rows: Sequence[Mapping[str, object]], stamp: Mapping[str, object]) -> None:
    """``path``.csv with one line per case, and ``path``.json with the stamp alone.

    Results from a tree that differed from its commit are written to ``path``.dirty.csv and .dirty.json, which git
    ignores, because the measured code is not known.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if stamp["dirty"]:
        path = path.with_name(f"{path.name}.dirty")
        print(f"the tree differs from commit {stamp['commit']}: results go to {path}.csv")
    with path.with_name(f"{path.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    path.with_name(f"{path.name}.json").write_text(json.dumps({"stamp": dict(stamp)}, indent=1) + "\n")
