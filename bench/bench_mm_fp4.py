"""Products of two NVFP4 matrices: every kernel and tactic of mm_fp4 beside cuBLAS in bf16, on the present GPU.

Run on a GPU: ``python -m bench.bench_mm_fp4 [--out DIR]`` writes ``mm_fp4.csv``, a line for each layer and number of
rows: the call as selected, cuBLAS in bf16, the arithmetic and the bytes of codes and scales in that time.

``--part kernels [--seconds S]`` measures every tactic that can run a case of FlashInfer's comparison of its sm_100 and
sm_103 kernels, and writes ``mm_fp4_kernels.csv``: a line for each tactic. It prints the best of each kernel: on an
sm_103a GPU, that compares instructions of 96 columns with those of 64. An sm_100a GPU has the latter alone.

In these parts a case is a graph of calls, each on its own tensors, with a cold L2; calls follow each other by
programmatic dependent launch.

``--part search [--seconds S]`` measures the tactics of wgmma and what mma.sync would get, with the protocol of
``bench.bench_gemm``: graphs of calls on copies of b, more than an L2 holds, replayed in turn with cuBLAS on the same
values. It writes ``mm_fp4_search.csv``, from which the table of sm_90a follows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.bench_gemm import LAYERS, Replay, copies_of, medians
from bench.harness import geomean, time_us, write_results
from bench.stamp import stamp
from jitfp4 import mm_fp4
from jitfp4.arch import Arch
from jitfp4.engine import build, target_of
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.fp4_tables import TABLE
from jitfp4.families.gemm.kernels.portable import PortableTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.kernels.wide_fp4 import KERNEL as FP4_WIDE
from jitfp4.families.gemm.problem import Fp4Problem
from jitfp4.formats import NVFP4, DType
from jitfp4.layouts import SfLayout
from jitfp4.reference.gemm import decode
from jitfp4.spec import fields_of

LAYOUT = SfLayout.layout_128x4
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
SEARCHED_ROWS = (1, 16, 32, 64, 128, 256, 512, 2048, 8192)
COMPARED = (  # m, n, k
    *((m, 4096, 7168) for m in (1, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096)),
    (128, 7168, 2048),
    (256, 14336, 4096),
    (512, 14336, 4096),
    (4096, 4096, 4096),
)

NEARLY = 1.15  # times the fastest: measured again
REPLAYS = 4

Call = Callable[[], object]
Row = dict[str, object]


def make_operand(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and E4M3 scales about 1."""
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(40, 60, LAYOUT.shape(rows, k // NVFP4.block), dtype=torch.uint8, device="cuda")
    return codes, scales


def bytes_of(m: int, n: int, k: int) -> int:
    """Bytes of codes, scales and the output."""
    return (m + n) * (k // 2 + k // NVFP4.block) + 2 * m * n


def make_call(m: int, n: int, k: int) -> Call:
    (a, a_scales), (b, b_scales) = make_operand(m, k), make_operand(n, k)
    out, alpha = torch.empty(m, n, dtype=torch.bfloat16, device="cuda"), torch.ones(1, device="cuda")
    return lambda: mm_fp4(a, b.T, a_scales, b_scales.T, alpha, out=out)


def make_cublas(m: int, n: int, k: int) -> Call:
    a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    return lambda: torch.mm(a, b.T, out=out)


def measure() -> Iterator[Row]:
    for n, k in LAYERS:
        for m in ROWS:
            size = bytes_of(m, n, k)
            us = time_us(lambda m=m, n=n, k=k: make_call(m, n, k), size)  # type: ignore[misc]
            cublas = time_us(lambda m=m, n=n, k=k: make_cublas(m, n, k), 2 * (m * k + n * k + m * n))  # type: ignore[misc]
            yield {
                "n": n,
                "k": k,
                "m": m,
                "us": round(us, 2),
                "tflops": round(2e-6 * m * n * k / us, 1),
                "tbps": round(size / us / 1e6, 3),
                "cublas_bf16_us": round(cublas, 2),
                "of_cublas": round(cublas / us, 3),
            }


def compare(arch: Arch, seconds: float) -> Iterator[Row]:
    """Every tactic of every kernel for every case, until the time is over."""
    cases = [Fp4Problem(NVFP4, LAYOUT, DType.BF16, m, n, k) for m, n, k in COMPARED]
    found = [(case, kernel, tactic) for case in cases for kernel in MM_FP4.kernels
             for tactic in kernel.candidates(case, arch)]  # fmt: skip
    specs = {(kernel, kernel.specialise(case, tactic)) for case, kernel, tactic in found}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: build(*one, arch), specs))
    began = time.monotonic()
    for case, kernel, tactic in found:
        if time.monotonic() > began + seconds:
            return
        m, n, k = case.m, case.n, case.k
        with MM_FP4.forced(tactic):
            us = time_us(lambda m=m, n=n, k=k: make_call(m, n, k), bytes_of(m, n, k))  # type: ignore[misc]
        yield {"m": m, "n": n, "k": k, "kernel": kernel.name, "tactic": str(tactic), "us": round(us, 2)}


def searched(case: Fp4Problem, arch: Arch) -> Iterator[PortableTactic | WideTactic]:
    """What mma.sync would get, and the tactics of wgmma whose tiles suit the number of rows."""
    yield next(row.tactic for row in TABLE.rows if row.of(case, arch))
    least = min(case.m, 128 if case.m < 1024 else 256)
    for tactic in FP4_WIDE.candidates(case, arch):
        if tactic.tile_m >= least and (case.m < 1024 or tactic.split == 1):
            yield tactic


def values(operand: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """What an operand stands for, in bf16; a tile of scales at a time, because float32 takes more memory."""
    parts = zip(operand[0].split(128), operand[1].split(128), strict=True)
    return torch.cat([decode(codes, scales, NVFP4, LAYOUT).bfloat16() for codes, scales in parts])


def times_of(case: Fp4Problem, arch: Arch) -> tuple[dict[PortableTactic | WideTactic, float], float]:
    """Microseconds by tactic, and those of cuBLAS. All are measured once, the fast ones again, in turn with cuBLAS."""
    m, n, k = case.m, case.n, case.k
    a, b, out = make_operand(m, k), make_operand(n, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    copies = [[part.clone() for part in b] for _ in range(copies_of(sum(part.numel() for part in b)))]
    replays = {}
    for tactic in searched(case, arch):
        with MM_FP4.forced(tactic):
            replays[tactic] = Replay([lambda b=b: mm_fp4(a[0], b[0].T, a[1], b[1].T, out=out) for b in copies])  # type: ignore[misc]
    x, weight = values(a), values(b)
    weights = [weight.clone() for _ in range(copies_of(2 * n * k))]
    cublas = Replay([lambda weight=weight: torch.mm(x, weight.T, out=out) for weight in weights])  # type: ignore[misc]
    times = {tactic: replay.us() for tactic, replay in replays.items()}
    fast = [tactic for tactic in times if times[tactic] <= NEARLY * min(times.values())]
    reference, *again = medians([cublas, *(replays[tactic] for tactic in fast)], REPLAYS)
    return times | dict(zip(fast, again, strict=True)), reference


def search(rows: Sequence[int], arch: Arch, seconds: float) -> Iterator[Row]:
    """The searched tactics for every layer, until the time is over; a case is measured whole."""
    end = time.monotonic() + seconds
    for m in rows:
        for n, k in LAYERS:
            if time.monotonic() > end:
                print(f"no time is left for m, n, k = {m}, {n}, {k}")
                continue
            times, cublas = times_of(Fp4Problem(NVFP4, LAYOUT, DType.BF16, m, n, k), arch)
            for tactic, us in times.items():
                yield {
                    "n": n,
                    "k": k,
                    "m": m,
                    "kernel": "gemm/wide_fp4" if isinstance(tactic, WideTactic) else "gemm/portable",
                    "tactic": json.dumps(fields_of(tactic)),
                    "us": round(us, 2),
                    "cublas_bf16_us": round(cublas, 2),
                }


def best_of_each_kernel(rows: list[Row]) -> Iterator[str]:
    """For each case, the kernels by the time of their best tactic."""
    best: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        kernels = best.setdefault((row["m"], row["n"], row["k"]), {})
        kernels[str(row["kernel"])] = min(float(str(row["us"])), kernels.get(str(row["kernel"]), float("inf")))
    for case, kernels in best.items():
        yield f"{case}: " + ", ".join(f"{name} {us}" for name, us in sorted(kernels.items(), key=lambda one: one[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--part", choices=("cases", "kernels", "search"), default="cases")
    parser.add_argument("--rows", type=int, nargs="+", help="other numbers of rows for a search")
    parser.add_argument("--seconds", type=float, default=400.0, help="the most that measuring tactics may take")
    options = parser.parse_args()
    if options.part == "search":
        found = search(options.rows or SEARCHED_ROWS, target_of(torch.empty(1, device="cuda")).arch, options.seconds)
        write_results(options.out / "mm_fp4_search", list(found), stamp())
        return
    if options.part == "kernels":
        rows = list(compare(target_of(torch.empty(1, device="cuda")).arch, options.seconds))
        write_results(options.out / "mm_fp4_kernels", rows, stamp())
        print(*best_of_each_kernel(rows), sep="\n")
        return
    rows = list(measure())
    write_results(options.out / "mm_fp4", rows, stamp())
    for m in ROWS:
        print(m, round(geomean(float(str(row["of_cublas"])) for row in rows if row["m"] == m), 3))


if __name__ == "__main__":
    main()
