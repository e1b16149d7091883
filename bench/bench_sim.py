"""The simulator's speed: thread-instructions per second, one public call, and the suite of simulated tests.

``python bench/bench_sim.py [--out DIR] [--skip-suite]``. Everything runs on one core. Exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import jitfp4
from jitfp4 import nvrtc, sim
from jitfp4.arch import Arch
from jitfp4.sim import tcgen05, wgmma
from jitfp4.sim.tmem import Allocations
from jitfp4.spec import Geometry
from tests.sim import gemm_kernels as gemm
from tests.sim.cuda import compiled

ROOT = Path(__file__).parents[1]
RUNS = 7
ARCHS = ("sm_90a", "sm_100a")
M, K = 64, 1024
CALL_S, SUITE_S, NVFP4_MMA_S, WGMMA_S, SANITISED = 1.0, 600.0, 0.03, 0.004, 3.0  # the bars

LOOPS = {
    "integer": "unsigned v = i; for (int n = 0; n < 256; ++n) v = v * 1664525u + (v >> 7) ^ n; y[i] = v;",
    "float": "float v = i; for (int n = 0; n < 256; ++n) v = fmaf(v, 0.5f, 1) + v * 0.25f; y[i] = __float_as_uint(v);",
    "divergent": "unsigned v = i; for (unsigned n = 0; n < (i & 255); ++n) v = v & 1 ? v * 3 + 1 : v >> 1; y[i] = v;",
    "shared": "__shared__ unsigned c[256]; unsigned v = i; for (int n = 0; n < 64; ++n) { c[threadIdx.x] = v;"
    " __syncthreads(); v += c[threadIdx.x ^ n]; __syncthreads(); } y[i] = v;",
}
SOURCE = """
extern "C" __global__ void kernel(unsigned* y) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  BODY
}
"""


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    middle, low, high = statistics.median(values), min(values), max(values)
    return {"median": round(middle, digits), "min": round(low, digits), "max": round(high, digits), "runs": len(values)}


def measure_loops() -> list[dict[str, Any]]:
    """Millions of thread-instructions per second of small kernels, 8192 threads."""
    rows = []
    for name, body in LOOPS.items():
        ptx = nvrtc.compile_ptx(SOURCE.replace("BODY", body), Arch.of("sm_90a"), symbol="kernel")
        geometry = Geometry((32, 1, 1), (256, 1, 1))
        runs = [sim.run(ptx, [np.zeros(8192, np.uint32)], geometry, "sm_90a") for _ in range(1 + RUNS)][1:]
        rates = [run.instructions / run.seconds / 1e6 for run in runs]
        rows.append({"case": f"{name} loop", "unit": "M instructions/s", **spread(rates, 1)})
    return rows


def measure_call(arch: str) -> list[dict[str, Any]]:
    """nvfp4_quantize() of [64, 1024] bf16 with 128x4 scales: the first call, which compiles, and later ones."""
    torch.manual_seed(0)
    a, scale = torch.randn(M, K, dtype=torch.bfloat16), torch.tensor([100.0])
    want = jitfp4.nvfp4_quantize(a, scale)
    stats: list[sim.Stats] = []
    run = sim.run

    def recording(*args: Any, **kwargs: Any) -> sim.Stats:
        stats.append(run(*args, **kwargs))
        return stats[-1]

    def call() -> float:
        start = time.perf_counter()
        with sim.device(arch):
            got = jitfp4.nvfp4_quantize(a, scale)
        elapsed = time.perf_counter() - start
        assert all(torch.equal(g.view(torch.uint8), w.view(torch.uint8)) for g, w in zip(got, want, strict=True))
        return elapsed

    with mock.patch.object(sim, "run", recording):
        times = [call() for _ in range(1 + RUNS)]
    rates = [s.instructions / s.seconds / 1e6 for s in stats[1:]]
    case = f"nvfp4_quantize [{M}, {K}] {arch}"
    return [
        {"case": f"{case}, first call", "unit": "s", **spread(times[:1])},
        {"case": case, "unit": "s", **spread(times[1:])},
        {"case": f"{case}, {stats[0].instructions} instructions", "unit": "M instructions/s", **spread(rates, 1)},
    ]


def measure_matrix_units() -> list[dict[str, Any]]:
    """Seconds of one instruction on normal operands in 128-byte rows, accumulating."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 1 << 17, np.uint8)  # E2M1 pairs
    scales = rng.integers(0x20, 0x58, (128, 512)).astype(np.uint32) * np.uint32(0x01010101)  # E4M3, equal in each row
    cta = tcgen05.Cta(shared=shared, tmem=np.tile(scales[:32], (4, 1)), allocations=Allocations(blocks=((0, 512),)))
    cta.tmem[:, :256] = 0
    rows_of_128 = (1024 >> 4) << 32
    a, b = 1 << 46 | 2 << 61 | rows_of_128, 1 << 46 | 2 << 61 | rows_of_128 | (1 << 15) >> 4
    idesc = 1 << 7 | 1 << 10 | (256 >> 3) << 17 | (128 >> 7) << 27
    halves = rng.standard_normal(3 << 13).astype(np.float32).view(np.uint16)[1::2].copy().view(np.uint8)  # bf16
    d = rng.standard_normal((4, 32, 64)).astype(np.float32).view(np.uint32)

    def nvfp4() -> None:
        places = {"d": 0, "a": a, "b": b, "idesc": idesc, "scales": (256, 320)}
        tcgen05.mma_block_scale((cta,), "mxf4nvf4", 16, **places, enable_input_d=True, arch="sm_100a")

    def bf16() -> None:
        left, right = 1 << 62 | rows_of_128, 1 << 62 | rows_of_128 | (1 << 13) >> 4
        wgmma.wgmma(128, "f32.bf16.bf16", left, right, d, halves, scale_d=True, mods=wgmma.Modifiers())

    rows = []
    for case, call in (("tcgen05.mma 128x256x64 nvfp4", nvfp4), ("wgmma 64x128x16 bf16", bf16)):
        times = []
        for _ in range(1 + RUNS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        rows.append({"case": case, "unit": "s", **spread(times[1:], 5)})
    return rows


def measure_tiles() -> list[dict[str, Any]]:
    """Seconds of whole CTAs with K = 1024, and how many times longer the sanitised run takes."""
    wgmma_ptx = compiled(gemm.with_pieces(gemm.WGMMA, gemm.WGMMA_PIECES), "sm_90a")
    tcgen05_ptx = compiled(gemm.with_pieces(gemm.TCGEN05, gemm.TCGEN05_PIECES), "sm_100a")
    rows = []
    for case, ptx, problem, threads, stage, arch in (
        ("wgmma tile 64x128x1024 bf16", wgmma_ptx, gemm.wgmma_problem, 160, 24576, "sm_90a"),
        ("tcgen05 tile 128x256x1024 nvfp4", tcgen05_ptx, gemm.tcgen05_problem, 128, 55296, "sm_100a"),
    ):
        geometry = Geometry((1, 1, 1), (threads, 1, 1), shared_bytes=gemm.STAGES * stage)
        sim.run(ptx, problem(1024)[0], geometry, arch)
        runs = [
            [sim.run(ptx, problem(1024)[0], geometry, arch, races=races).seconds for races in (False, True)]
            for _ in range(RUNS)
        ]
        rows.append({"case": case, "unit": "s", **spread([plain for plain, _ in runs])})
        rows.append({"case": f"{case}, sanitised", "unit": "s", **spread([checked for _, checked in runs])})
        ratios = [checked / plain for plain, checked in runs]
        rows.append({"case": f"{case}, sanitised / plain", "unit": "", **spread(ratios, 2)})
    return rows


def measure_suite() -> dict[str, Any]:
    """``pytest -m sim`` on one core."""
    start = time.perf_counter()
    command = (sys.executable, "-m", "pytest", "-m", "sim", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    summary = done.stdout.strip().splitlines()[-1]
    if done.returncode:
        sys.exit(done.stdout[-4000:])
    passed = re.search(r"(\d+) passed", summary)
    return {"case": f"pytest -m sim, {passed[1] if passed else 0} tests", "unit": "s", **spread([elapsed], 1)}


def on_one_core(measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        return measure()
    finally:
        os.sched_setaffinity(0, cores)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu")
    parser.add_argument("--skip-suite", action="store_true", help="leave the simulated tests out")
    arguments = parser.parse_args()
    from bench.harness import write_results
    from bench.stamp import stamp

    torch.set_num_threads(1)
    rows = on_one_core(
        lambda: [
            *measure_loops(),
            *(row for arch in ARCHS for row in measure_call(arch)),
            *measure_matrix_units(),
            *measure_tiles(),
        ]
    )
    median = {row["case"]: row["median"] for row in rows}
    bars = {
        f"nvfp4_quantize [{M}, {K}] for {arch} < {CALL_S:.0f} s on one core": median[
            f"nvfp4_quantize [{M}, {K}] {arch}"
        ]
        < CALL_S
        for arch in ARCHS
    }
    bars[f"tcgen05.mma 128x256x64 nvfp4 <= {NVFP4_MMA_S} s"] = median["tcgen05.mma 128x256x64 nvfp4"] <= NVFP4_MMA_S
    bars[f"wgmma 64x128x16 bf16 <= {WGMMA_S} s"] = median["wgmma 64x128x16 bf16"] <= WGMMA_S
    for case in (name for name in median if name.endswith("sanitised / plain")):
        bars[f"{case} <= {SANITISED}"] = median[case] <= SANITISED
    if not arguments.skip_suite:
        rows.append(on_one_core(lambda: [measure_suite()])[0])
        bars[f"the simulated suite < {SUITE_S:.0f} s on one core"] = rows[-1]["median"] < SUITE_S
    for row in rows:
        print(f"{row['case']:60} {row['median']:10} {row['unit']}  ({row['min']} to {row['max']})")
    for bar, holds in bars.items():
        print(f"{'holds ' if holds else 'MISSED'} {bar}")
    write_results(arguments.out / "sim", rows, stamp() | {"bars": bars})
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
