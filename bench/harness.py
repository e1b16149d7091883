"""Timing on the GPU by CUDA-graph replay, with a cold or a warm L2, and a copy of the same bytes in the same run.

A case is measured as a graph of several calls. Cold: each call has its own set of tensors, and before every replay the
L2 is overwritten, so that no call finds its input there; that lies outside the timed region. Warm: all calls share one
set of tensors, and replays follow each other. The copy that a kernel is compared with is measured in the same way and
moves as many bytes in all: half of them read, half of them written.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

FLUSH_BYTES = 512 << 20  # several times any L2
GRAPH_BYTES = 2 << 30  # memory that the calls of one cold graph may touch together
COPY_GRAIN = 64 << 10
COPY_CHUNK = 256 << 20  # one memory copy of more than this runs at two thirds of the speed
MAX_CALLS, WARM_CALLS = 50, 10
REPLAYS, UNCOUNTED = 15, 2  # the first ones do not count
WARM_UP_S = 0.03  # after a pause, what runs first is up to a tenth slower

Call = Callable[[], object]
L2 = Literal["cold", "warm"]


def calls_per_graph(bytes_per_call: int) -> int:
    """How many calls, each on its own tensors, one cold graph holds."""
    return max(2, min(MAX_CALLS, GRAPH_BYTES // max(bytes_per_call, 1)))


def time_us(make_call: Callable[[], Call], bytes_per_call: int, *, l2: L2 = "cold", replays: int = REPLAYS) -> float:
    """Median microseconds of one call.

    Args:
        make_call: allocates and fills the tensors of one call and returns it, bound to them.
        bytes_per_call: memory that one call touches; decides how many calls a cold graph holds.
        l2: see above.
        replays: of the graph, that count.
    """
    if l2 == "cold":
        calls = [make_call() for _ in range(calls_per_graph(bytes_per_call))]
    else:
        calls = [make_call()] * WARM_CALLS
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # where the tensors were filled
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if l2 == "cold" else None
        if flush is None:
            until = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < until:
                graph.replay()
                stream.synchronize()
        times = []
        for _ in range(replays + UNCOUNTED):
            if flush is not None:
                flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times[UNCOUNTED:])


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

    What was measured on a tree that differed from its commit goes to ``path``.dirty.csv and .dirty.json, which git
    ignores: nobody can tell what it measured.
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
