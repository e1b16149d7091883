"""What bounds the kernels that stream memory: Nsight Compute's counters of one launch each, alone, with cold caches.

On a GPU, with ``ncu`` on the path: ``python -m bench.counters [--out DIR]``. It calls itself under ``ncu`` with
``--launch``, which makes the calls. Percentages are of what the GPU sustains at its clocks of that moment; ``stalls``
are the warps that wait for each reason when a warp issues, the four largest; longer waits hide behind more warps.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from bench import bench_conv, bench_gdn, bench_kv, bench_norm
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4.tuning import Call

FIGURES = {
    "us": "gpu__time_duration.sum",
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_pct": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
STALLS = (
    *("long_scoreboard", "short_scoreboard", "wait", "not_selected", "math_pipe_throttle", "lg_throttle"),
    *("mio_throttle", "barrier", "no_instruction", "drain", "branch_resolving", "dispatch_stall"),
)
OPTIONS = ("--csv", "--page=raw", "--print-units=base", "--clock-control=none", "--profile-from-start=off")


def stall(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def cases() -> Iterator[tuple[str, Call]]:
    """Names, and calls that launch one kernel each."""
    yield "conv, 8 prompts of 1024", bench_conv.Load(False, 8, 1024).make()
    yield "conv, a token of 256", bench_conv.Load(True, 256, 1).make()
    for add, name in ((False, "rmsnorm_fp4quant"), (True, "add_rmsnorm_fp4quant")):
        for rows, hidden in ((32768, 1536), (16384, 4096)):
            tensors = bench_norm.make_tensors(add, rows, hidden)
            yield f"{name}, {rows} x {hidden}", partial(bench_norm.fused, tensors)
    yield "dequantize pages, 16 x 8192", bench_kv.dequantize_pages("NHD", 16, 16, 8192)()[0]
    for state, tokens in (("f32", 1), ("f32", 4), ("f32", 8), ("bf16", 1), ("bf16", 4), (bench_gdn.K_MAJOR, 1)):
        case = bench_gdn.Case(batch=256, tokens=tokens, steps=False, state=state)
        yield f"gated delta rule, {tokens} of 256, {state}", partial(case.function, **bench_gdn.arguments(case))


def launch() -> None:
    """Make each call twice: the second under the profiler."""
    for name, call in cases():
        call()
        torch.cuda.synchronize()
        print(f"case {name}", flush=True)
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def measure() -> Iterator[dict[str, object]]:
    metrics = (*FIGURES.values(), READ, WRITTEN, *map(stall, STALLS))
    command = ("ncu", *OPTIONS, "--metrics", ",".join(metrics), sys.executable, "-m", "bench.counters", "--launch")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    names = [line.removeprefix("case ") for line in lines if line.startswith("case ")]
    # a header, a line of units, and one for each launch
    header, _, *launches = csv.reader(line for line in lines if line.startswith('"'))
    if len(launches) != len(names):
        raise RuntimeError(f"{len(launches)} launches of {len(names)} cases: {run.stdout[-2000:]} {run.stderr[-2000:]}")
    for name, values in zip(names, launches, strict=True):
        of = dict(zip(header, values, strict=True))
        number = {metric: float(of[metric].replace(",", "")) for metric in metrics}
        us = number[FIGURES["us"]] / 1e3
        waits = sorted(((number[stall(reason)], reason) for reason in STALLS), reverse=True)[:4]
        yield {
            "case": name,
            "kernel": of["Kernel Name"],
            "us": round(us, 2),
            "read_mib": round(number[READ] / 2**20, 1),
            "written_mib": round(number[WRITTEN] / 2**20, 1),
            **{figure: round(number[FIGURES[figure]], 1) for figure in FIGURES if figure != "us"},
            "stalls": " ".join(f"{reason}={count:.1f}" for count, reason in waits),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--launch", action="store_true", help="only make the calls")
    options = parser.parse_args()
    if options.launch:
        return launch()
    rows = list(measure())
    for row in rows:
        print(*row.values(), sep="\t")
    return write_results(options.out / "memory_counters", rows, stamp())


if __name__ == "__main__":
    main()
