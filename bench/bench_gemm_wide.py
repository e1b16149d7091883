"""Products of many rows of bf16 activations and NVFP4 weights beside cuBLAS in bf16, on a Hopper GPU.

Run on a GPU: ``python -m bench.bench_gemm_wide [--out DIR]`` writes ``gemm_wide.csv``, a line for each layer and number
of rows. ``--part search`` measures every tactic of the kernel that can run a case, with the protocol of
``bench.bench_gemm``, and writes ``gemm_wide_search.csv``, from which the table of sm_90a follows.

A case is a graph of calls on copies of the weight, more than an L2 holds, with warm activations; calls follow each
other by programmatic dependent launch. cuBLAS multiplies the same values, dequantized. Both graphs are replayed in
turn, because the clock falls with the power that a product draws, and medians are compared. Each case follows a pause,
in which the clock recovers from the products before it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.bench_gemm import LAYERS, Replay, copies_of, make_weights, medians, products, search
from bench.harness import geomean, write_results
from bench.stamp import stamp
from jitfp4 import Fp4Weight
from jitfp4.engine import target_of
from jitfp4.families.gemm.kernels.wide import KERNEL as WIDE
from jitfp4.families.gemm.problem import Problem
from jitfp4.formats import NVFP4, DType

ROWS = (64, 128, 256, 512, 2048, 8192)
SEARCHED_ROWS = (16, 32, 64, 128, 256, 512, 2048)
REPLAYS = 7
PAUSE_S = 0.1


def cublas(a: torch.Tensor, weights: Sequence[torch.Tensor]) -> Replay:
    out = torch.empty(a.shape[0], weights[0].shape[0], dtype=a.dtype, device="cuda")
    return Replay([lambda weight=weight: torch.mm(a, weight.T, out=out) for weight in weights])  # type: ignore[misc]


def dequantized(weight: Fp4Weight) -> list[torch.Tensor]:
    """Copies of the values in bf16, enough for a cold L2."""
    values = weight.dequantize().bfloat16()
    return [values.clone() for _ in range(copies_of(2 * values.numel()))]


def cases(rows: Sequence[int]) -> Iterator[tuple[Problem, torch.Tensor, list[Fp4Weight], list[torch.Tensor]]]:
    for n, k in LAYERS:
        weights = make_weights(n, k)
        values = dequantized(weights[0])
        for m in rows:
            problem = Problem(DType.BF16, DType.BF16, NVFP4, m, n, k)
            yield problem, torch.randn(m, k, device="cuda").bfloat16(), weights, values


def measure(rows: Sequence[int]) -> Iterator[dict[str, object]]:
    for problem, a, weights, values in cases(rows):
        replays = [products(a, weights), cublas(a, values)]
        time.sleep(PAUSE_S)
        us, reference = medians(replays, REPLAYS)
        yield {
            "n": problem.n,
            "k": problem.k,
            "m": problem.m,
            "us": round(us, 2),
            "tflops": round(2e-6 * problem.n * problem.k * problem.m / us, 1),
            "cublas_bf16_us": round(reference, 2),
            "of_cublas": round(reference / us, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--part", choices=("cases", "search"), default="cases")
    parser.add_argument("--rows", type=int, nargs="+", help="other numbers of rows")
    parser.add_argument("--seconds", type=float, default=60.0, help="the most that a search may take")
    options = parser.parse_args()
    if options.part == "search":
        arch = target_of(torch.empty(1, device="cuda")).arch
        found = search(WIDE, options.rows or SEARCHED_ROWS, arch, options.seconds)
        write_results(options.out / "gemm_wide_search", list(found), stamp())
        return
    rows = options.rows or ROWS
    lines = list(measure(rows))
    write_results(options.out / "gemm_wide", lines, stamp())
    for m in rows:
        of = [float(str(line["of_cublas"])) for line in lines if line["m"] == m]
        print(m, f"of cuBLAS: geometric mean {geomean(of):.3f}, least {min(of):.3f}")


if __name__ == "__main__":
    main()
