"""rmsnorm_fp4quant and add_rmsnorm_fp4quant against a copy of the same bytes, and against separate kernels.

Run on a GPU: ``python -m bench.bench_norm [--out DIR]``. float16, NVFP4, linear scales; the grid is that of
FlashInfer's benchmark of these functions.
``us`` is the median over PLACEMENTS sets of tensors at other addresses, ``worst_us`` the longest of these times.
``separate_us`` is an addition in place, where there is one, then the better of a Triton kernel and torch.compile for
the norm, then nvfp4_quantize(). ``fused_add_us`` lets the norm's kernel do the addition as well.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness import calls_per_graph, copy_us, geomean, time_us, write_results
from bench.stamp import stamp
from jitfp4 import SfLayout, add_rmsnorm_fp4quant, nvfp4_quantize, rmsnorm_fp4quant

BATCHES = (1000, 1024, 2048, 3000, 4096, 5000, 8192, 10000, 15000, 16384, 25000, 32768, 60000, 65536)
HIDDEN = (1536, 2048, 4096, 8192, 16384, 32768)
SMALL_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SMALL_HIDDEN = (4096, 7168)
BLOCK, EPS = 16, 1e-6
PLACEMENTS = 3


class Tensors(NamedTuple):
    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    scale: torch.Tensor
    q: torch.Tensor
    sf: torch.Tensor


def make_tensors(add: bool, m: int, h: int) -> Tensors:
    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16, device="cuda").normal_()

    q = torch.empty(m, h // 2, dtype=torch.uint8, device="cuda")
    sf = torch.empty(m, h // BLOCK, dtype=torch.uint8, device="cuda")
    scale = torch.tensor([2688 / 6.0], device="cuda")
    return Tensors(half(m, h), half(m, h) if add else None, half(h), scale, q, sf)


def moved_bytes(t: Tensors) -> int:
    """Bytes that the fused kernel reads and writes; the residual is both read and written."""
    return sum(p.nbytes for p in (t.x, t.weight, t.q, t.sf)) + (2 * t.residual.nbytes if t.residual is not None else 0)


# ---- the compared calls ----------------------------------------------------------------------------------------------


def fused(t: Tensors) -> None:
    if t.residual is None:
        rmsnorm_fp4quant(t.x, t.weight, t.q, t.sf, t.scale, EPS)
    else:
        add_rmsnorm_fp4quant(t.x, t.residual, t.weight, t.q, t.sf, t.scale, EPS)


def triton_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    from bench.triton_norm import rmsnorm  # here: without a GPU there is no Triton

    return rmsnorm(x, residual, weight, EPS)


def eager_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    if residual is not None:
        x = residual.add_(x)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


Norm = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]


def unfused(t: Tensors, norm: Norm, *, fuse_add: bool) -> None:
    if t.residual is None or fuse_add:
        y = norm(t.x, t.residual, t.weight)
    else:
        y = norm(t.residual.add_(t.x), None, t.weight)
    nvfp4_quantize(y, t.scale, SfLayout.layout_linear, out=t.q, out_sf=t.sf)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(add: bool, m: int, h: int, compiled: Norm) -> dict[str, object]:
    moved = moved_bytes(make_tensors(add, m, h))
    sets = [[make_tensors(add, m, h) for _ in range(calls_per_graph(moved))] for _ in range(PLACEMENTS)]

    def timed(call: Callable[[Tensors], object], held: list[Tensors]) -> float:
        calls = iter([partial(call, t) for t in held])
        return time_us(lambda: next(calls), moved)

    def best(*, fuse_add: bool) -> float:
        norms = (compiled, triton_norm)
        return min(timed(partial(unfused, norm=norm, fuse_add=fuse_add), sets[0]) for norm in norms)

    separate = best(fuse_add=False)  # first: while torch.compile works, the GPU's clocks fall
    fused_add = best(fuse_add=True) if add else None
    times, copy = [timed(fused, held) for held in sets], copy_us(moved)
    us = statistics.median(times)
    row = {"op": "add_rmsnorm" if add else "rmsnorm", "rows": m, "hidden": h, "mib": moved / 2**20}
    row |= {"us": us, "worst_us": max(times), "copy_us": copy, "ratio": copy / us, "worst_ratio": copy / max(times)}
    row |= {"tb_per_s": moved / us / 1e6}
    row |= {"separate_us": separate, "speedup": separate / us, "fused_add_us": fused_add}
    row |= {"speedup_over_fused_add": fused_add / us if fused_add else None}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    for op in ("rmsnorm", "add_rmsnorm"):
        mine = [row for row in rows if row["op"] == op]
        ratio, speedup = geomean(r["ratio"] for r in mine), geomean(r["speedup"] for r in mine)
        worst = min((r for r in mine if r["mib"] >= 64), key=lambda r: r["worst_ratio"])
        yield f"{op}: geomean ratio {ratio:.3f}, speed-up {speedup:.3f}; worst from 64 MiB on: {worst}"
    fused = geomean(r["speedup_over_fused_add"] for r in rows if r["speedup_over_fused_add"])
    yield f"add_rmsnorm over a norm that adds: {fused:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    for name, batches, hidden in (("norm", BATCHES, HIDDEN), ("norm_small", SMALL_BATCHES, SMALL_HIDDEN)):
        rows = []
        for add, h in itertools.product((False, True), hidden):
            torch.compiler.reset()
            compiled = torch.compile(eager_norm, dynamic=True)
            rows += [measure(add, m, h, compiled) for m in batches]
        write_results(out / name, rows, stamp())
        if name == "norm":
            print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
