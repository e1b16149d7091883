"""Products of E4M3 activations and NVFP4 weights beside cuBLAS in bf16 and in FP8, on a Hopper GPU.

Run on a GPU: ``python -m bench.bench_fp8 [--out DIR]`` writes ``fp8.csv``, a line for each layer and number of rows.
``--part search`` measures the tactics of the kernel for fewer numbers of rows, and writes ``fp8_search.csv``.

A case is a graph of calls on copies of the weight, more than an L2 holds, with warm activations; our calls follow each
other by programmatic dependent launch, those of cuBLAS do not. cuBLAS multiplies the same values dequantized to bf16
(``cublas_bf16_us``), and weights that are E4M3 (torch._scaled_mm), with a scale for each row of both operands
(``row_wise_us``) and with one for each operand (``tensor_wise_us``). All graphs of a case are replayed in turn, because
the clock falls with the power that a product draws, and medians are compared. The activations are E4M3 already.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from bench.bench_gemm import LAYERS, Replay, copies_of, make_weights, medians
from bench.bench_gemm_wide import cublas, dequantized
from bench.harness import geomean, write_results
from bench.stamp import stamp
from jitfp4 import Fp4Weight, fp8_row_scale, mm_bf16_fp4, mm_fp8_fp4
from jitfp4.arch import Arch
from jitfp4.engine import build, target_of
from jitfp4.families.gemm.fp8_operation import MM_FP8_FP4
from jitfp4.families.gemm.kernels.wide_fp8 import KERNEL, TILE_MS, Fp8Tactic
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.formats import NVFP4, DType

ROWS = (512, 2048, 8192)
SEARCHED = (64, 128, 512, 2048)
REPLAYS = 5
PAUSE_S = 0.1
_E4M3_MAX = 448.0
_NEARLY = 1.1  # times the fastest


def activations(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16, and E4M3 with a scale for each row."""
    a = torch.randn(m, k, device="cuda").bfloat16()
    scale = a.float().abs().amax(-1) / _E4M3_MAX
    return a, (a / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


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


def measure(rows: Sequence[int]) -> Iterator[dict[str, object]]:
    for n, k in LAYERS:
        weights = make_weights(n, k)
        row_scale, values = fp8_row_scale(weights[0]), dequantized(weights[0])
        for m in rows:
            a, eights, scale = activations(m, k)
            out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            half = Replay([lambda weight=weight: mm_bf16_fp4(a, weight, out=out) for weight in weights])  # type: ignore[misc] # noqa: B023
            replays = [ours(eights, scale, weights, row_scale), half, cublas(a, values)]
            time.sleep(PAUSE_S)
            us, bf16, reference, row_wise, tensor_wise = medians(
                [*replays, *scaled_mm(eights, scale, values[0])], REPLAYS
            )
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
                "of_cublas": round(reference / us, 3),
                "of_row_wise": round(row_wise / us, 3),
                "of_tensor_wise": round(tensor_wise / us, 3),
            }


def search(rows: Sequence[int], arch: Arch, layers: Sequence[tuple[int, int]]) -> Iterator[dict[str, object]]:
    """The tactics for every layer, but for those whose tiles are far smaller than they could be."""

    def candidates(case: Fp8Problem) -> list[Fp8Tactic]:
        return [tactic for tactic in KERNEL.candidates(case, arch) if 2 * tactic.tile_m >= min(case.m, max(TILE_MS))]

    cases = [Fp8Problem(DType.BF16, NVFP4, m, n, k) for n, k in layers for m in rows]
    specs = {KERNEL.specialise(case, tactic) for case in cases for tactic in candidates(case)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: build(KERNEL, spec, arch), specs))
    for n, k in layers:
        weights = make_weights(n, k)
        row_scale = fp8_row_scale(weights[0])
        for m in rows:
            _, eights, scale = activations(m, k)
            replays = {}
            for tactic in candidates(Fp8Problem(DType.BF16, NVFP4, m, n, k)):
                with MM_FP8_FP4.forced(tactic):
                    replays[tactic] = ours(eights, scale, weights, row_scale)
            times = {tactic: replay.us() for tactic, replay in replays.items()}
            fast = [tactic for tactic in times if times[tactic] <= _NEARLY * min(times.values())]
            times.update(zip(fast, medians([replays[tactic] for tactic in fast], REPLAYS), strict=True))
            for tactic, us in times.items():
                yield {"n": n, "k": k, "m": m, **asdict(tactic), "us": round(us, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--part", choices=("cases", "search"), default="cases")
    parser.add_argument("--rows", type=int, nargs="+", help="other numbers of rows")
    parser.add_argument("--layers", type=int, nargs="+", help="numbers of layers of bench.bench_gemm, for a search")
    options = parser.parse_args()
    if options.part == "search":
        arch = target_of(torch.empty(1, device="cuda")).arch
        layers = LAYERS if options.layers is None else [LAYERS[number] for number in options.layers]
        write_results(options.out / "fp8_search", list(search(options.rows or SEARCHED, arch, layers)), stamp())
        return
    rows = options.rows or ROWS
    lines = list(measure(rows))
    write_results(options.out / "fp8", lines, stamp())
    for m in rows:
        for name in ("of_cublas", "of_row_wise", "of_tensor_wise"):
            of = [float(str(line[name])) for line in lines if line["m"] == m]
            print(m, f"{name}: geometric mean {geomean(of):.3f}, least {min(of):.3f}")


if __name__ == "__main__":
    main()
