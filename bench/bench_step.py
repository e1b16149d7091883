"""Decode steps of whole models, launch by launch: what a token takes, what of it is products, and what lies between.

Run on a GPU: ``python -m bench.bench_step [--model 8b 70b/4] [--step separate fused] [--out DIR]``.

A step is one CUDA graph: for each layer RMSNorm, the product for queries, keys and values, their rotation with the
append to an NVFP4 cache, attention, its product, RMSNorm, and the MLP; then the head in bf16. Weights are random, in
NVFP4, and made on the device. A step is ``separate`` (norms add residuals, and torch.compile makes SwiGLU), ``fused``
(both in the epilogues of products), ``broken`` (as fused, without dependent launches), or ``persistent``: DecodeStep,
whose one launch takes the place of all layers, for cells of one request. Its row says nothing of parts but the head,
and the time of the layers' launch.

``step.csv`` has a line for each step: its time; ``bound_ms``, the time to read its bytes once (weights, keys, values)
at the read bandwidth of the same run, and ``of_roof``, their ratio; and for parts of a step, the time of a graph of
nothing else. ``seams_us`` is what the step takes more than its parts together, less where they overlap.

``step_launches.csv`` has a line for each launch of a layer of the first step of each model: ``alone_us`` of a graph of
that launch of all layers, ``in_step_us``, by which a step without it is shorter, both for one layer, and ``bound_us``
for its own bytes; of a profile of one layer in the middle, when the launch began and ended.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.harness import write_results
from bench.stamp import stamp
from bench.steps import KINDS, MODELS, PARTS, Kind, Launch, Model, Step

REPLAYS, WARM_UP = 15, 3
READ_BYTES = 4 << 30
CELLS = ((1, 2048), (8, 2048), (64, 2048), (1, 32768), (64, 8192))
PERSISTENT = "persistent"


# ---- measuring -------------------------------------------------------------------------------------------------------


def graph_of(calls: Collection[Callable[[], object]]) -> Any:
    """A CUDA graph of calls, which run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: Any) -> float:
    """The median of REPLAYS replays."""
    for _ in range(WARM_UP):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a microsecond of a reduction over much memory."""
    x = torch.zeros(READ_BYTES // 4, device="cuda")
    return x.nbytes / replay_us(graph_of([lambda: x.amax()]))


def step_us(launches: Collection[Launch], names: Collection[str]) -> float:
    """Of a graph of the launches with these names; 0 where there are none."""
    calls = [launch.call for launch in launches if launch.name in names]
    return replay_us(graph_of(calls)) if calls else 0.0


def measure(step: Step, name: str, bandwidth: float) -> dict[str, object]:
    """A step, and its parts."""
    launches = list(step.persistent() if name == PERSISTENT else step.launches(KINDS[name]))
    names = dict.fromkeys(launch.name for launch in launches)
    read = [*PARTS["products"], "attention", "head"]
    us, bound = step_us(launches, names), sum(map(step.bytes_of, read)) / bandwidth
    parts = {part: step_us(launches, [name for name in names if name in of]) for part, of in PARTS.items()}
    row: dict[str, object] = {"ms": round(us / 1e3, 4), "tokens_per_s": round(1e6 * step.batch / us, 1)}
    row |= {"bound_ms": round(bound / 1e3, 4), "of_roof": round(bound / us, 3)}
    row |= {f"{part}_us": round(spent, 1) for part, spent in parts.items()}
    return row | {"seams_us": round(us - sum(parts.values()), 1), "launches": len(launches)}


def profile(graph: Any, per_layer: int, layers: int) -> list[tuple[float, float]]:
    """When the launches of a layer in the middle begin and end, in microseconds from the first; empty without them."""
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in on_gpu)
    middle = spans[layers // 2 * per_layer :][:per_layer]
    return [(start - middle[0][0], end - middle[0][0]) for start, end in middle]


def timeline(step: Step, kind: Kind, bandwidth: float) -> Iterator[dict[str, object]]:
    """A line for each launch of a layer."""
    launches = list(step.launches(kind))
    layers = len(step.caches)
    own = [launch.name for launch in launches if launch.layer == 0]
    names = set(own) | {launch.name for launch in launches}
    graph = graph_of([launch.call for launch in launches])
    whole, spans = replay_us(graph), profile(graph, len(own), layers)
    for number, name in enumerate(own):
        begin, end = spans[number] if spans else (0.0, 0.0)
        yield {
            "launch": name,
            "bound_us": round(step.bytes_of(name) / bandwidth / layers, 2),
            "alone_us": round(step_us(launches, {name}) / layers, 2),
            "in_step_us": round((whole - step_us(launches, names - {name})) / layers, 2),
            "begin_us": round(begin, 2),
            "end_us": round(end, 2),
        }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--step", nargs="+", choices=[*KINDS, PERSISTENT], default=[*KINDS, PERSISTENT])
    parser.add_argument("--cells", nargs="+", type=int, default=range(len(CELLS)), help="numbers of CELLS")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    lines: list[dict[str, object]] = []
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e6:.2f} TB/s", flush=True)
    for name in options.model:
        model = Model(MODELS[name])
        for batch, context in (CELLS[number] for number in options.cells):
            step = Step(model, batch, context)
            for kind in options.step:
                if kind == PERSISTENT and batch > 1:
                    continue
                row = {"model": name, "batch": batch, "context": context, "step": kind}
                rows.append(row | measure(step, kind, bandwidth))
                print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
                if (batch, context) == CELLS[0] and kind in KINDS:
                    lines += [row | line for line in timeline(step, KINDS[kind], bandwidth)]
            del step
    origin = stamp() | {"read_bandwidth": 1e6 * bandwidth}
    write_results(options.out / "step", rows, origin)
    if lines:
        write_results(options.out / "step_launches", lines, origin)


if __name__ == "__main__":
    main()
