"""What a dependent launch gains or costs behind a kernel that knows none: pairs of kernels in CUDA graphs and streams.

Run on a GPU: ``python -m bench.bench_dependent [--out DIR]`` writes ``dependent.csv``. The first kernel of a pair is
torch's in-place addition, of as many float32 as the row says. The second is ``bare``, a kernel of one CTA for each SM
that adds 1 to as many floats as it has threads, or one of ours. It is launched without the attribute of programmatic
stream serialization (``without_us``) and with it (``with_us``); ``gain_us`` is the difference. ``bare, waits`` begins
with ``griddepcontrol.wait``. In a graph, 100 pairs follow each other; in a stream they are queued behind kernels that
keep the GPU busy meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from bench.bench_gemm import make_weights
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import mm_bf16_fp4, nvfp4_quantize, nvrtc, rmsnorm
from jitfp4.arch import Arch
from jitfp4.driver import LoadedKernel
from jitfp4.engine import target_of
from jitfp4.spec import I64, Geometry, Ptr

FIRST = (1 << 16, 1 << 20, 1 << 22)  # floats that the first kernel adds to
PRODUCTS = ((1, 4096, 4096), (8, 6144, 4096), (8, 28672, 4096), (64, 28672, 4096))  # m, n, k
PAIRS, REPLAYS = 100, 9
BUSY_BYTES, FILLS = 1 << 30, 24  # some milliseconds
BARE = r"""
extern "C" __global__ void __launch_bounds__(512) bare(float* p, long long waits) {
  if (waits) asm volatile("griddepcontrol.wait;" ::: "memory");
  p[blockIdx.x * 512 + threadIdx.x] += 1.0f;
}
"""

Call = Callable[[], object]


def bare(arch: Arch, *, waits: bool) -> Callable[[bool], Call]:
    params = (Ptr("p", "float"), I64("waits"))
    kernel = LoadedKernel(nvrtc.compile_cubin(BARE, arch, symbol="bare"), "bare", params, 0)
    geometry, p = Geometry((arch.num_sms, 1, 1), (512, 1, 1)), torch.zeros(arch.num_sms * 512, device="cuda")

    def launch(pdl: bool) -> object:
        return kernel.launch(geometry, (p, waits), stream=torch.cuda.current_stream().cuda_stream, pdl=pdl)

    return lambda pdl: partial(launch, pdl)


def kernels(arch: Arch) -> Iterator[tuple[str, Callable[[bool], list[Call]]]]:
    """The second kernels, as calls in turn, with and without dependent launch."""
    for waits in (False, True):
        one = bare(arch, waits=waits)
        yield "bare, waits" if waits else "bare", lambda pdl, one=one: [one(pdl)]  # type: ignore[misc]
    x, weight = torch.randn(64, 4096, device="cuda").bfloat16(), torch.ones(4096, device="cuda").bfloat16()
    scale, out = torch.ones(1, device="cuda"), torch.empty_like(x)
    yield "rmsnorm 64 x 4096", lambda pdl: [partial(rmsnorm, x, weight, out=out, enable_pdl=pdl)]
    yield "nvfp4_quantize 64 x 4096", lambda pdl: [partial(nvfp4_quantize, x, scale, enable_pdl=pdl)]
    for m, n, k in PRODUCTS:
        weights = make_weights(n, k)
        a, y = torch.randn(m, k, device="cuda").bfloat16(), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        yield (
            f"mm_bf16_fp4 {m} x {n} x {k}",
            lambda pdl, ws=weights, a=a, y=y: [partial(mm_bf16_fp4, a, w, out=y, enable_pdl=pdl) for w in ws],  # type: ignore[misc]
        )


def timed(run: Callable[[], object], stream: torch.cuda.Stream) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    run()
    stop.record(stream)
    stop.synchronize()
    return 1e3 * float(start.elapsed_time(stop)) / PAIRS


def queued(pairs: Callable[[], None], busy: torch.Tensor) -> float:
    """Microseconds of a pair in the current stream."""
    for _ in range(FILLS):
        busy.zero_()
    return timed(pairs, torch.cuda.current_stream())


def measure(arch: Arch) -> Iterator[dict[str, object]]:
    firsts = {size: torch.zeros(size, device="cuda") for size in FIRST}
    busy = torch.empty(BUSY_BYTES, dtype=torch.uint8, device="cuda")
    for name, second in kernels(arch):
        for size, p in firsts.items():

            def pairs(pdl: bool, p: torch.Tensor = p, second: Callable[[bool], list[Call]] = second) -> None:
                calls = second(pdl)
                for number in range(PAIRS):
                    p.add_(1.0)
                    calls[number % len(calls)]()

            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            graphs = [torch.cuda.CUDAGraph() for _ in (False, True)]
            with torch.cuda.stream(stream):
                for pdl, graph in enumerate(graphs):
                    pairs(bool(pdl))
                    with torch.cuda.graph(graph, stream=stream):
                        pairs(bool(pdl))
                in_graph = [[timed(graph.replay, stream) for graph in graphs] for _ in range(REPLAYS)]
                in_stream = [[queued(partial(pairs, pdl), busy) for pdl in (False, True)] for _ in range(REPLAYS)]
            for where, times in (("graph", in_graph), ("stream", in_stream)):
                without, dependent = (statistics.median(column) for column in zip(*times[1:], strict=True))
                yield {
                    "second": name,
                    "first_floats": size,
                    "where": where,
                    "without_us": round(without, 2),
                    "with_us": round(dependent, 2),
                    "gain_us": round(without - dependent, 2),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    rows = list(measure(target_of(torch.empty(1, device="cuda")).arch))
    write_results(options.out / "dependent", rows, stamp())
    for row in rows:
        print(*row.values())


if __name__ == "__main__":
    main()
