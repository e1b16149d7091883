"""Host time of one call: nvfp4_quantize with preallocated outputs, a Triton kernel with as many arguments, a torch op.

Run on a GPU: ``python bench/bench_launch.py [--out DIR]``. The GPU work is tiny and asynchronous; what is measured is
the time until the call returns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import nvfp4_quantize
from jitfp4.families.quantize import ops

CALLS, ROUNDS = 2000, 9


def host_us(call: Callable[[], object]) -> float:
    """Median over rounds of the mean host microseconds per call; the queue is drained between rounds."""
    rounds = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append(1e6 * (time.perf_counter() - start) / CALLS)
    return statistics.median(rounds[2:])


def triton_call(a: torch.Tensor, scale: torch.Tensor, q: torch.Tensor, sf: torch.Tensor) -> Callable[[], object] | None:
    """A Triton kernel with nvfp4_quantize's seven arguments that does next to nothing; None without Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def kernel(x, scale, q, sf, m, k, x_stride):  # noqa: ARG001
        tl.store(q + tl.program_id(0), tl.load(scale).to(tl.uint8))

    return lambda: kernel[(1,)](a, scale, q, sf, 128, 256, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    a = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(1, device="cuda")
    q, sf = nvfp4_quantize(a, scale)
    operator = torch.ops.jitfp4.quantize.default
    calls: dict[str, Callable[[], object] | None] = {
        "jitfp4.nvfp4_quantize, outputs given": lambda: nvfp4_quantize(a, scale, out=q, out_sf=sf),
        "jitfp4.nvfp4_quantize, outputs allocated": lambda: nvfp4_quantize(a, scale),
        "its operator, through torch's dispatcher": lambda: operator(a, scale, q, sf, "nvfp4", 0, False, None),
        "its operator, called directly": lambda: ops.quantize(a, scale, q, sf, "nvfp4", 0, False, None),
        "triton kernel, 7 arguments": triton_call(a, scale, q, sf),
        "torch in-place add": lambda: a.add_(1),
    }
    rows = [{"call": name, "host_us": round(host_us(call), 2)} for name, call in calls.items() if call is not None]
    for row in rows:
        print(f"{row['host_us']:8.2f} us  {row['call']}")
    write_results(out / "launch", rows, stamp())


if __name__ == "__main__":
    main()
