"""Products of bf16 activations and NVFP4 weights: time, bandwidth, cuBLAS in bf16 in the same run, recorded peers.

Run on a GPU: ``python -m bench.bench_gemm [--out DIR]`` writes ``gemm.csv``, a line for each layer and number of rows.
``--part search`` measures every tactic of the kernel for few rows that can run a case and reads the weight once, and
writes ``gemm_search.csv``; the tables follow from it, from ``gemm_wide_search.csv`` of ``bench.bench_gemm_wide``, and
from ``step_search.csv`` of ``bench.search_step``. Each tactic has one replay, and those that are nearly the fastest
have five more, in turn. ``--part tuner`` writes ``tuner.csv``: what ``jitfp4.tune`` finds for some of these products,
and in how many seconds, and what the tables say,
beside a search of all tactics. Searches have two more layers: none of the others has more than 1.3 and less than 3
tiles of 64 rows for each SM. ``--part choose`` needs no GPU: from the files of both searches it prints, for each row
of the tables, the tactics that lose least.

A case is a graph of calls on copies of the weight, more than an L2 holds, in turn for at least a millisecond, with warm
activations; the time is the median of 7 replays. Calls follow each other by programmatic dependent launch, like layers
of a model. ``of_read`` is the time of a kernel that only reads the same bytes, divided by the time of the call. Peers,
the best FP4 kernel of each case, are from ``gemm_peers.csv``: vLLM 0.33.0's Marlin, humming-kernels 0.1.19,
triton_kernels and gemlite on an H200 on 2026-11-22, with the same protocol and their defaults: without dependent
launch, which of them only humming has, if it is asked for.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from bench.harness import geomean, write_results
from bench.stamp import stamp
from jitfp4 import Fp4Weight, mm_bf16_fp4, nvrtc, prepare_fp4_weight, tune
from jitfp4.arch import Arch
from jitfp4.driver import LoadedKernel
from jitfp4.engine import build, target_of
from jitfp4.families.gemm.kernels.narrow import KERNEL as NARROW
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.wide import KERNEL as WIDE
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import Problem
from jitfp4.formats import NVFP4, DType
from jitfp4.kernel import Kernel
from jitfp4.layouts import SfLayout
from jitfp4.spec import I64, Geometry, Ptr
from jitfp4.weight import TILE_ROWS

LAYERS = (
    (8192, 8192),
    (28672, 4096),
    (4096, 14336),
    (6144, 4096),
    (57344, 8192),
    (8192, 28672),
    (4096, 4096),
    (10240, 8192),
    (7168, 2048),
    (4096, 7168),
    (7168, 4608),
    (2112, 7168),
)
SEARCHED_LAYERS = (*LAYERS, (14336, 4096), (18944, 3584))
ROWS = (1, 2, 4, 8, 16, 32, 64)
SEARCHED_ROWS = (1, 8, 16, 24, 32, 64)
TUNED_LAYERS = ((4096, 4096), (28672, 4096))
TUNED_ROWS = (1, 8, 16, 64, 256, 2048)
LOADS = (0.25, 0.5, 1.0, 1.5, 2.0, float("inf"))  # tiles of 64 rows for each SM: buckets of the tables
COLD_BYTES = 330 << 20
REPLAYS = 7
_SEARCH_REPLAYS = 5
_NEARLY = 1.15  # times the fastest
_MOST_SHARED_ROWS = 32768  # of the weight, times the CTAs that share them
_LEAST_US = 1000.0  # of a graph
READ = r"""
extern "C" __global__ void __launch_bounds__(512) read(const uint4* p, unsigned int* out, long long vectors) {
  unsigned int seen = 0;
  for (long long i = blockIdx.x * 4096ll + threadIdx.x; i < vectors; i += gridDim.x * 4096ll) {
    uint4 v[8] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (i + j * 512 < vectors) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(p + i + j * 512));
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (seen == 0x12345678u) *out = seen;
}
"""

KINDS = {"gemm_search": NarrowTactic, "gemm_wide_search": WideTactic}

Call = Callable[[], object]


class Replay:
    """A graph of calls, repeated until it is long enough. It keeps the tensors of the calls alive."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)  # a graph knows addresses only: memory of a tensor that is gone may be unmapped
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            calls[0]()
            once = self._timed(calls[0])
            turns = 1 if once > _LEAST_US else -(-int(_LEAST_US / once) // len(calls))
            self.count = max(1, turns) * len(calls) if once < _LEAST_US else 1
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                for number in range(self.count):
                    calls[number % len(calls)]()

    def us(self) -> float:
        """Microseconds of a call, by one replay."""
        with torch.cuda.stream(self.stream):
            return self._timed(self.graph.replay) / self.count

    def _timed(self, call: Call) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(self.stream)
        call()
        stop.record(self.stream)
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop)


def replay_us(calls: Sequence[Call]) -> float:
    """Median microseconds of a call in a graph of all calls; the first replay does not count."""
    replay = Replay(calls)
    return statistics.median([replay.us() for _ in range(REPLAYS + 1)][1:])


def medians(replays: Sequence[Replay], turns: int) -> list[float]:
    """Median microseconds of a call of each, replayed in turn; the first turn does not count."""
    times = [[replay.us() for replay in replays] for _ in range(turns + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def copies_of(size: int) -> int:
    return max(2, -(-COLD_BYTES // size))


def make_weights(n: int, k: int) -> list[Fp4Weight]:
    """Copies of one random weight, enough for a cold L2."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(40, 60, (n, k // NVFP4.block), dtype=torch.uint8, device="cuda")
    weight = prepare_fp4_weight(codes, scales, sf_layout=SfLayout.layout_linear)
    return [replace(weight, data=weight.data.clone()) for _ in range(copies_of(weight.data.numel()))]


def products(a: torch.Tensor, weights: Sequence[Fp4Weight]) -> Replay:
    out = torch.empty(a.shape[0], weights[0].n, dtype=a.dtype, device="cuda")
    return Replay([lambda weight=weight: mm_bf16_fp4(a, weight, out=out) for weight in weights])  # type: ignore[misc]


def time_cublas(a: torch.Tensor, n: int) -> float:
    k = a.shape[1]
    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies_of(2 * n * k))]
    out = torch.empty(a.shape[0], n, dtype=a.dtype, device="cuda")
    return replay_us([lambda weight=weight: torch.mm(a, weight.T, out=out) for weight in weights])  # type: ignore[misc]


def time_read(arch: Arch, weights: Sequence[Fp4Weight]) -> float:
    """The shortest time of several grids."""
    params = (Ptr("p", "const uint4"), Ptr("out", "unsigned int"), I64("vectors"))
    kernel = LoadedKernel(nvrtc.compile_cubin(READ, arch, symbol="read"), "read", params, 0)
    out = torch.zeros(1, dtype=torch.int32, device="cuda")

    def call(weight: Fp4Weight, ctas: int) -> Call:
        args = (weight.data, out, weight.data.numel() // 16)
        geometry = Geometry((ctas * arch.num_sms, 1, 1), (512, 1, 1))
        return lambda: kernel.launch(geometry, args, stream=torch.cuda.current_stream().cuda_stream, pdl=False)

    return min(replay_us([call(weight, ctas) for weight in weights]) for ctas in (4, 8, 16))


def recorded() -> dict[tuple[int, int, int], tuple[str, float]]:
    """The best peer and its microseconds by n, k and m."""
    path = Path(__file__).parent / "results/h200/gemm_peers.csv"
    with path.open() as file:
        return {
            (int(row["n"]), int(row["k"]), int(row["m"])): (row["peer"], float(row["peer_us"]))
            for row in csv.DictReader(file)
        }


def measure(arch: Arch) -> Iterator[dict[str, object]]:
    peers = recorded()
    for n, k in LAYERS:
        weights = make_weights(n, k)
        read, size = time_read(arch, weights), weights[0].data.numel()
        for m in ROWS:
            a = torch.randn(m, k, device="cuda").bfloat16()
            (us,), cublas = medians([products(a, weights)], REPLAYS), time_cublas(a, n)
            peer, peer_us = peers.get((n, k, m), ("", 0.0))
            yield {
                "n": n,
                "k": k,
                "m": m,
                "us": round(us, 2),
                "tbps": round(size / us / 1e6, 3),
                "read_us": round(read, 2),
                "of_read": round(read / us, 3),
                "cublas_bf16_us": round(cublas, 2),
                "of_cublas": round(cublas / us, 3),
                "peer": peer,
                "peer_us": peer_us,
                "of_peer": round(peer_us / us, 3),
            }


def search(
    kernel: Kernel[Any, Problem, Any], rows: Sequence[int], arch: Arch, seconds: float
) -> Iterator[dict[str, object]]:
    """The tactics of a kernel for every layer, until the time is over; a case is measured whole."""
    cases = [Problem(DType.BF16, DType.BF16, NVFP4, m, n, k) for n, k in SEARCHED_LAYERS for m in rows]
    tactics = {
        case: [tactic for tactic in kernel.candidates(case, arch) if is_searched(case, tactic, arch)] for case in cases
    }
    specs = {kernel.specialise(case, tactic) for case in cases for tactic in tactics[case]}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: build(kernel, spec, arch), specs))
    end = time.monotonic() + seconds
    for (n, k), group in groupby(cases, key=lambda case: (case.n, case.k)):
        weights = make_weights(n, k)
        for case in group:
            if time.monotonic() > end:
                print(f"no time is left for m, n, k = {case.m}, {n}, {k}")
                continue
            a = torch.randn(case.m, k, device="cuda").bfloat16()
            for tactic, us in times_of(a, weights, tactics[case]):
                yield {"n": n, "k": k, "m": case.m, **asdict(tactic), "us": round(us, 2)}


def is_searched(problem: Problem, tactic: Any, arch: Arch) -> bool:
    """Whether a tactic is searched: it reads the weight once for few rows, its clusters run at the same time, and they
    are enough for half of the GPU.
    """
    if isinstance(tactic, WideTactic):
        ctas = math.prod(WIDE.geometry(problem, tactic, arch).grid)
        is_one_wave = tactic.split * tactic.depth == 1 or ctas <= tactic.ctas * arch.num_sms
        return tactic.tile_m > ROWS[-1] or (tactic.tile_m >= problem.m and is_one_wave and 2 * ctas > arch.num_sms)
    crowded = tactic.split > 1 and tactic.split * problem.n > _MOST_SHARED_ROWS
    return bool(tactic.tile_m >= problem.m and not crowded)


def times_of(a: torch.Tensor, weights: Sequence[Fp4Weight], tactics: Sequence[Any]) -> Iterator[tuple[Any, float]]:
    replays = {}
    for tactic in tactics:
        with MM_BF16_FP4.forced(tactic):
            replays[tactic] = products(a, weights)
    times = {tactic: replay.us() for tactic, replay in replays.items()}
    fast = [tactic for tactic in tactics if times[tactic] <= _NEARLY * min(times.values())]
    times.update(zip(fast, medians([replays[tactic] for tactic in fast], _SEARCH_REPLAYS), strict=True))
    yield from times.items()


def tuned(arch: Arch) -> Iterator[dict[str, object]]:
    for n, k in TUNED_LAYERS:
        weights = make_weights(n, k)
        for m in TUNED_ROWS:
            problem = Problem(DType.BF16, DType.BF16, NVFP4, m, n, k)
            candidates = list(MM_BF16_FP4.candidates(problem, arch))
            a = torch.randn(m, k, device="cuda").bfloat16()
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                file = tune(lambda: mm_bf16_fp4(a, weights[0]), Path(folder) / "tactics.json", progress=False)  # noqa: B023
            seconds = time.monotonic() - start
            found = MM_BF16_FP4.tuned(problem, arch, file)
            table = MM_BF16_FP4.select(problem, arch)
            times = dict(times_of(a, weights, candidates))
            best = min(times, key=times.__getitem__)
            yield {
                "n": n,
                "k": k,
                "m": m,
                "candidates": len(candidates),
                "seconds": round(seconds, 1),
                "best": best,
                "best_us": round(times[best], 2),
                "tuned": found,
                "tuned_us": round(times[found], 2),
                "of_best": round(times[found] / times[best], 3),
                "table": table,
                "table_us": round(times[table], 2),
                "table_of_best": round(times[table] / times[best], 3),
            }


def choose(folder: Path, arch: Arch) -> Iterator[str]:
    """For each bucket of the tables, tactics by the geometric mean of their time over the best of each case."""
    measured: dict[tuple[int, int, int], dict[object, float]] = {}
    for path in sorted(folder.glob("gemm_*search.csv")):
        kind = KINDS[path.stem]
        with path.open() as file:
            for row in csv.DictReader(file):
                tactic = tactic_of(kind, row)
                measured.setdefault((int(row["m"]), int(row["n"]), int(row["k"])), {})[tactic] = float(row["us"])
    buckets: dict[tuple[int, float], list[dict[object, float]]] = {}
    for (m, n, _), times in sorted(measured.items()):
        load = -(-n // TILE_ROWS) / arch.num_sms
        bucket = max(8, m), next(limit for limit in LOADS if load <= limit)
        best = min(times.values())
        buckets.setdefault(bucket, []).append({tactic: us / best for tactic, us in times.items()})
    for (m, limit), cases in sorted(buckets.items(), key=lambda item: item[0]):
        everywhere = [tactic for tactic in cases[0] if all(tactic in ratios for ratios in cases)]
        means = sorted(
            (geomean(ratios[tactic] for ratios in cases), max(ratios[tactic] for ratios in cases), repr(tactic))
            for tactic in everywhere
        )
        yield f"m <= {m}, tiles_per_sm <= {limit}: {len(cases)} cases"
        for mean, worst, tactic in means[:4]:
            yield f"  {tactic} {mean:.3f}, at worst {worst:.3f}"


def tactic_of(kind: type[Any], row: Mapping[str, str]) -> Any:
    """The tactic that a line of a search names."""
    named = {field.name: row[field.name] for field in fields(kind) if field.name in row}
    return kind(**{name: text == "True" if text in ("True", "False") else int(text) for name, text in named.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--part", choices=("cases", "search", "tuner", "choose"), default="cases")
    parser.add_argument("--rows", type=int, nargs="+", help="other numbers of rows for a search")
    parser.add_argument("--seconds", type=float, default=60.0, help="the most that a search may take")
    options = parser.parse_args()
    if options.part == "choose":
        print(*choose(options.out, Arch.of("sm_90a")), sep="\n")
        return
    arch = target_of(torch.empty(1, device="cuda")).arch
    if options.part == "search":
        found = search(NARROW, options.rows or SEARCHED_ROWS, arch, options.seconds)
        write_results(options.out / "gemm_search", list(found), stamp())
        return
    if options.part == "tuner":
        write_results(options.out / "tuner", list(tuned(arch)), stamp())
        return
    rows = list(measure(arch))
    write_results(options.out / "gemm", rows, stamp())
    for m in ROWS:
        of = [row for row in rows if row["m"] == m]
        means = {name: geomean(float(str(row[name])) for row in of if row[name]) for name in ("of_read", "of_cublas")}
        print(m, {name: round(mean, 3) for name, mean in means.items()})


if __name__ == "__main__":
    main()
