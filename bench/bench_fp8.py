"""Products of E4M3 activations and NVFP4 weights beside cuBLAS in bf16 and in FP8, on a Hopper GPU.

Run on a GPU: ``python -m bench.bench_fp8 [--out DIR]`` writes ``fp8.csv``, a line for each layer and number of rows.
``--part search [--seconds S]`` measures the tactics of both kernels, and writes ``fp8_search.csv``, from which the
table of mm_fp8_fp4 follows.

A case is a graph of calls on copies of the weight, more than an L2 holds, with warm activations; our calls follow each
other by programmatic dependent launch, those of cuBLAS do not. cuBLAS multiplies the same values dequantized to bf16
(``cublas_bf16_us``), and weights that are E4M3 (torch._scaled_mm), with a scale for each row of both operands
(``row_wise_us``) and with one for each operand (``tensor_wise_us``). All graphs of a case are replayed in turn, because
the clock falls with the power that a product draws, and medians are compared. The activations are E4M3 already, but for
``with_norm_us``: there rmsnorm_fp8quant() makes them, before each product, and rmsnorm() makes those of cuBLAS in bf16
(``cublas_with_norm_us``).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from bench.bench_gemm import LAYERS, Replay, copies_of, make_weights, medians
from bench.bench_gemm_wide import cublas, dequantized
from bench.harness import geomean, write_results
from bench.stamp import stamp
from jitfp4 import Fp4Weight, fp8_row_scale, mm_bf16_fp4, mm_fp8_fp4, rmsnorm, rmsnorm_fp8quant, rows_fp8quant
from jitfp4.arch import Arch
from jitfp4.engine import build, target_of
from jitfp4.families.gemm.fp8_operation import MM_FP8_FP4
from jitfp4.families.gemm.kernels.expanded_fp8 import ExpandedTactic
from jitfp4.families.gemm.kernels.wide_fp8 import TILE_MS, Fp8Tactic
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.formats import NVFP4, DType
from jitfp4.kernel import Kernel
from jitfp4.spec import fields_of

ROWS = (512, 2048, 8192)
SEARCHED = (512, 1024, 2048, 8192)
REPLAYS = 5
PAUSE_S = 0.1
_E4M3_MAX = 448.0
_NEARLY = 1.1  # times the fastest
_MANY = 1024  # rows


def activations(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16, and E4M3 with a scale for each row."""
    a = torch.randn(m, k, device="cuda").bfloat16()
    return a, *rows_fp8quant(a)


def ours(a: torch.Tensor, scale: torch.Tensor, weights: Sequence[Fp4Weight], row_scale: torch.Tensor) -> Replay:
    out = torch.empty(a.shape[0], weights[0].n, dtype=torch.bfloat16, device="cuda")
    return Replay([lambda weight=weight: mm_fp8_fp4(a, scale, weight, row_scale, out=out) for weight in weights])  # type: ignore[misc]


def scaled_mm(a: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> tuple[Replay, Replay]:
    """cuBLAS in FP8: a scale for each row, and one for each operand."""
    of_rows = values.float().abs().amax(-1) / _E4M3_MAX
    weights = [(values / of_rows.unsqueeze(-1)).to(torch.float8_e4m3fn) for _ in range(copies_of(values.numel()))]

    def replay(scale_a: torch.Tensor, scale_b: torch.Tensor) -> Replay:
        def call(weight: torch.Tensor) -> Callable[[], object]:
            return lambda: torch._scaled_mm(a, weight.T, scale_a, scale_b, out_dtype=torch.bfloat16)

        return Replay([call(weight) for weight in weights])

    one = torch.ones((), device="cuda")
    return replay(scale.unsqueeze(1), of_rows.unsqueeze(0)), replay(one, one)


def with_norm(
    a: torch.Tensor, weights: Sequence[Fp4Weight], row_scale: torch.Tensor, values: Sequence[torch.Tensor]
) -> tuple[Replay, Replay]:
    """Ours and cuBLAS in bf16, each behind its norm."""
    out = torch.empty(a.shape[0], weights[0].n, dtype=torch.bfloat16, device="cuda")
    norm, y = torch.ones(a.shape[1], dtype=torch.bfloat16, device="cuda"), torch.empty_like(a)
    eights = rmsnorm_fp8quant(a, norm)

    def call(weight: Fp4Weight) -> Callable[[], object]:
        return lambda: mm_fp8_fp4(*rmsnorm_fp8quant(a, norm, 1e-6, *eights), weight, row_scale, out=out)

    def reference(weight: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.mm(rmsnorm(a, norm, 1e-6, y), weight.T, out=out)

    return Replay([call(weight) for weight in weights]), Replay([reference(weight) for weight in values])


def measure(rows: Sequence[int]) -> Iterator[dict[str, object]]:
    for n, k in LAYERS:
        weights = make_weights(n, k)
        row_scale, values = fp8_row_scale(weights[0]), dequantized(weights[0])
        for m in rows:
            a, eights, scale = activations(m, k)
            out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            half = Replay([lambda weight=weight: mm_bf16_fp4(a, weight, out=out) for weight in weights])  # type: ignore[misc] # noqa: B023
            replays = [ours(eights, scale, weights, row_scale), half, cublas(a, values)]
            replays += [*scaled_mm(eights, scale, values[0]), *with_norm(a, weights, row_scale, values)]
            time.sleep(PAUSE_S)
            us, bf16, reference, row_wise, tensor_wise, normed, normed_reference = medians(replays, REPLAYS)
            yield {
                "n": n,
                "k": k,
                "m": m,
                "us": round(us, 2),
                "tflops": round(2e-6 * n * k * m / us, 1),
                "mm_bf16_fp4_us": round(bf16, 2),
                "cublas_bf16_us": round(reference, 2),
                "row_wise_us": round(row_wise, 2),
                "tensor_wise_us": round(tensor_wise, 2),
                "with_norm_us": round(normed, 2),
                "cublas_with_norm_us": round(normed_reference, 2),
                "of_cublas": round(reference / us, 3),
                "of_row_wise": round(row_wise / us, 3),
                "of_tensor_wise": round(tensor_wise / us, 3),
                "with_norm_of_cublas": round(normed_reference / normed, 3),
            }


def searched(case: Fp8Problem, arch: Arch) -> list[tuple[Kernel[Any, Any, Any], Fp8Tactic | ExpandedTactic]]:
    """What can run a case, but for tiles that are far smaller than they could be, and few tiles of many rows."""
    return [
        (kernel, tactic)
        for kernel in MM_FP8_FP4.kernels
        for tactic in kernel.candidates(case, arch)
        if isinstance(tactic, ExpandedTactic)
        or (2 * tactic.tile_m >= min(case.m, max(TILE_MS)) and (case.m < _MANY or tactic.split == 1))
    ]


def search(rows: Sequence[int], arch: Arch, seconds: float) -> Iterator[dict[str, object]]:
    """The tactics for every layer, until the time is over; a case is measured whole."""
    cases = [Fp8Problem(DType.BF16, NVFP4, m, n, k) for n, k in LAYERS for m in rows]
    specs = {(kernel, kernel.specialise(case, tactic)) for case in cases for kernel, tactic in searched(case, arch)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: build(*one, arch), specs))
    end = time.monotonic() + seconds
    for (n, k), group in groupby(cases, key=lambda case: (case.n, case.k)):
        weights = make_weights(n, k)
        row_scale = fp8_row_scale(weights[0])
        for case in group:
            if time.monotonic() > end:
                print(f"no time is left for m, n, k = {case.m}, {n}, {k}")
                continue
            _, eights, scale = activations(case.m, k)
            replays = {}
            for kernel, tactic in searched(case, arch):
                with MM_FP8_FP4.forced(tactic):
                    replays[kernel.name, tactic] = ours(eights, scale, weights, row_scale)
            times = {one: replay.us() for one, replay in replays.items()}
            fast = [one for one in times if times[one] <= _NEARLY * min(times.values())]
            times.update(zip(fast, medians([replays[one] for one in fast], REPLAYS), strict=True))
            for (name, tactic), us in times.items():
                fields = json.dumps(fields_of(tactic))
                yield {"n": n, "k": k, "m": case.m, "kernel": name, "tactic": fields, "us": round(us, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--part", choices=("cases", "search"), default="cases")
    parser.add_argument("--rows", type=int, nargs="+", help="other numbers of rows")
    parser.add_argument("--seconds", type=float, default=100.0, help="the most that a search may take")
    options = parser.parse_args()
    if options.part == "search":
        arch = target_of(torch.empty(1, device="cuda")).arch
        found = search(options.rows or SEARCHED, arch, options.seconds)
        write_results(options.out / "fp8_search", list(found), stamp())
        return
    rows = options.rows or ROWS
    lines = list(measure(rows))
    write_results(options.out / "fp8", lines, stamp())
    for m in rows:
        for name in ("of_cublas", "of_row_wise", "of_tensor_wise", "with_norm_of_cublas"):
            of = [float(str(line[name])) for line in lines if line["m"] == m]
            print(m, f"{name}: geometric mean {geomean(of):.3f}, least {min(of):.3f}")


if __name__ == "__main__":
    main()
