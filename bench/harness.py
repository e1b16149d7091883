"""Timing on the GPU: CUDA-graph replay, cold L2, and a copy of the same bytes in the same run.

A case is measured as a graph of several calls, each on its own set of tensors. Before every replay the L2 is
overwritten, so that no call finds its input there; the flush lies outside the timed region. The copy that a kernel is
compared with is
measured in the same way and moves as many bytes in all: half of them read, half of them written.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

FLUSH_BYTES = 512 << 20  # several times any L2
GRAPH_BYTES = 2 << 30  # memory that the calls of one graph may touch together
COPY_GRAIN = 64 << 10
MAX_CALLS = 50
REPLAYS = 15

Call = Callable[[], object]


def calls_per_graph(bytes_per_call: int) -> int:
    """How many calls, each on its own tensors, one graph holds."""
    return max(2, min(MAX_CALLS, GRAPH_BYTES // max(bytes_per_call, 1)))


def time_us(make_call: Callable[[], Call], bytes_per_call: int, *, cold: bool = True) -> float:
    """Median microseconds of one call.

    Args:
        make_call: allocates and fills the tensors of one call and returns it, bound to them.
        bytes_per_call: memory that one call touches; decides how many calls a graph holds.
        cold: overwrite the L2 before each replay. Without it the same tensors are used by every call.
    """
    count = calls_per_graph(bytes_per_call)
    calls = [make_call() for _ in range(count)] if cold else [make_call()] * count
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
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if cold else None
        times = []
        for _ in range(REPLAYS):
            if flush is not None:
                flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / count)
    return statistics.median(times[2:])


def copy_us(total_bytes: int) -> float:
    """Median microseconds to read and write ``total_bytes`` together, cold: a memory copy or an element-wise kernel.

    The faster of the two counts. The size is rounded up to whole COPY_GRAIN: memory copies of other sizes run at two
    thirds of the speed.
    """
    size = -(-total_bytes // 2 // COPY_GRAIN) * COPY_GRAIN // 4
    pairs = [
        (torch.ones(size, device="cuda"), torch.empty(size, device="cuda")) for _ in range(calls_per_graph(8 * size))
    ]
    for source, _ in pairs:
        source.normal_()

    def timed(bind: Callable[[torch.Tensor, torch.Tensor], Call]) -> float:
        calls = iter([bind(*pair) for pair in pairs])
        return time_us(lambda: next(calls), 8 * size)

    copied = timed(lambda source, target: lambda: target.copy_(source))
    added = timed(lambda source, target: lambda: torch.add(source, 1.0, out=target))
    return min(copied, added)


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def write_results(path: Path, rows: Sequence[Mapping[str, object]], stamp: Mapping[str, object]) -> None:
    """``path``.csv with one line per case, and ``path``.json with the stamp and the same rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".json").write_text(json.dumps({"stamp": dict(stamp), "rows": list(rows)}, indent=1) + "\n")
