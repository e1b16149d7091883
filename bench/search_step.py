"""Tactics of products inside a decode step: the best of a kernel alone may not be the best between others.

Run on a GPU: ``python -m bench.search_step [--model 8b 70b/4] [--batch 1 8] [--out DIR]``.

``step_search.csv`` has a line for each product of a layer and each tactic that can run it: ``us`` of a layer of a graph
of a few layers of fused steps of bench_step, whose weights do not fit into L2, where only that product has the tactic.
``table`` marks the tactic of the tables. The nearly fastest are measured again, in turn. Last, ``all`` has the fastest
of each product at once, beside a line of the tables alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.bench_gemm import is_searched
from bench.bench_step import graph_of
from bench.harness import write_results
from bench.stamp import stamp
from bench.steps import MODELS, PARTS, Kind, Model, Step
from jitfp4.arch import Arch
from jitfp4.engine import build, target_of
from jitfp4.families.gemm.kernels import narrow, wide
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import Problem
from jitfp4.formats import NVFP4, DType

LAYERS = {"8b": 4, "70b/4": 2}  # of which the weights are larger than L2
CONTEXT = 2048
FIRST, AGAIN = 3, 11  # replays
NEARLY, MOST = 1.02, 6  # of the fastest, how many are measured again
PRODUCTS = PARTS["products"]
KERNELS: dict[type, Any] = {kernel.tactic: kernel for kernel in (narrow.KERNEL, wide.KERNEL)}


class Chain:
    """Layers of a step, of which products may have other tactics than the tables'."""

    def __init__(self, model: Model, batch: int) -> None:
        self.batch, self.layers, self.products = batch, len(model.layers), model.sizes.products()
        self.launches = [launch for launch in Step(model, batch, CONTEXT).launches(Kind()) if launch.name != "head"]

    def problem(self, product: str) -> Problem:
        n, k = self.products[product]
        return Problem(DType.BF16, DType.BF16, NVFP4, self.batch, n, k, product == "gate_up")

    def graph(self, tactics: Mapping[str, Any]) -> Any:
        """A graph of the layers with these tactics."""

        def forced(call: Callable[[], object], tactic: Any) -> Callable[[], object]:
            def run() -> None:
                with MM_BF16_FP4.forced(tactic):
                    call()

            return run

        return graph_of([
            forced(launch.call, tactics[launch.name]) if launch.name in tactics else launch.call
            for launch in self.launches
        ])  # fmt: skip

    def us(self, graphs: Iterable[Any], replays: int) -> list[float]:
        """Median microseconds of a layer of each, replayed in turn after a first replay."""
        times = [[self._replay(graph) for graph in graphs] for _ in range(replays + 1)][1:]
        return [statistics.median(column) / self.layers for column in zip(*times, strict=True)]

    @staticmethod
    def _replay(graph: Any) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop)


def tactics_of(problem: Problem, arch: Arch) -> list[Any]:
    """What may run a product."""
    return [tactic for tactic in MM_BF16_FP4.candidates(problem, arch) if is_searched(problem, tactic, arch)]


def search(chain: Chain, arch: Arch) -> Iterator[dict[str, object]]:
    base = chain.graph({})
    best: dict[str, Any] = {}
    for product in PRODUCTS:
        problem = chain.problem(product)
        table = MM_BF16_FP4.select(problem, arch)
        tactics = dict.fromkeys([table, *tactics_of(problem, arch)])
        graphs = {tactic: chain.graph({product: tactic}) for tactic in tactics}
        times = {tactic: chain.us([graph], FIRST)[0] for tactic, graph in graphs.items()}
        near = sorted(times, key=times.__getitem__)[:MOST]
        near = list(dict.fromkeys([table, *(one for one in near if times[one] <= NEARLY * times[near[0]])]))
        times.update(zip(near, chain.us([graphs[tactic] for tactic in near], AGAIN), strict=True))
        best[product] = min(near, key=times.__getitem__)
        for tactic, us in sorted(times.items(), key=lambda item: item[1]):
            yield {"product": product, "tactic": tactic, "us": round(us, 2), "table": tactic == table}
        print(f"{product}: table {times[table]:.2f}, {best[product]} {times[best[product]]:.2f}", flush=True)
    ours, tables = chain.us([chain.graph(best), base], AGAIN)
    print(f"all: tables {tables:.2f}, together {ours:.2f}", flush=True)
    yield {"product": "all", "tactic": "the fastest of each", "us": round(ours, 2), "table": False}
    yield {"product": "all", "tactic": "tables", "us": round(tables, 2), "table": True}


def build_all(models: Iterable[str], batches: Iterable[int], arch: Arch) -> None:
    """Builds all kernels of the products at once."""
    problems = [
        Problem(DType.BF16, DType.BF16, NVFP4, batch, n, k, product == "gate_up")
        for batch in batches
        for model in models
        for product, (n, k) in MODELS[model].products().items()
    ]
    specs = {
        (KERNELS[type(tactic)], KERNELS[type(tactic)].specialise(problem, tactic))
        for problem in problems
        for tactic in tactics_of(problem, arch)
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: build(*one, arch), specs))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    arch = target_of(torch.empty(1, device="cuda")).arch
    start = time.monotonic()
    build_all(options.model, options.batch, arch)
    print(f"built after {time.monotonic() - start:.0f} s", flush=True)
    rows = []
    for name in options.model:
        model = Model(MODELS[name]._replace(layers=LAYERS[name]))
        for batch in options.batch:
            print(f"{name}, {batch}, after {time.monotonic() - start:.0f} s", flush=True)
            rows += [{"model": name, "batch": batch} | row for row in search(Chain(model, batch), arch)]
    write_results(options.out / "step_search", rows, stamp())


if __name__ == "__main__":
    main()
