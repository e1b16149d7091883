"""rmsnorm_fp4quant and add_rmsnorm_fp4quant against a copy of the same bytes, and against separate kernels.

Run on a GPU: ``python -m bench.bench_norm [--out DIR]``. float16, NVFP4, linear scales; the grid is that of
FlashInfer's benchmark of these functions. ``us`` is the kernel that select() takes; ``unitsN_us`` are the ones it
chooses from.
``unfused_us`` is the better of a Triton kernel and torch.compile for the norm, each followed by nvfp4_quantize().
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bench.harness import calls_per_graph, copy_us, geomean, time_us, write_results
from bench.stamp import stamp
from jitfp4 import SfLayout, add_rmsnorm_fp4quant, nvfp4_quantize, rmsnorm_fp4quant
from jitfp4.arch import Arch
from jitfp4.engine import Launch, target_of
from jitfp4.families.norm import kernel
from jitfp4.formats import DType

BATCHES = (1000, 1024, 2048, 3000, 4096, 5000, 8192, 10000, 15000, 16384, 25000, 32768, 60000, 65536)
HIDDEN = (1536, 2048, 4096, 8192, 16384, 32768)
SMALL_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SMALL_HIDDEN = (4096, 7168)
BLOCK, EPS = 16, 1e-6


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
    """What the fused kernel reads and writes; the residual does both."""
    return sum(p.nbytes for p in (t.x, t.weight, t.q, t.sf)) + (2 * t.residual.nbytes if t.residual is not None else 0)


# ---- what is compared ------------------------------------------------------------------------------------------------


def fused(t: Tensors) -> None:
    if t.residual is None:
        rmsnorm_fp4quant(t.x, t.weight, t.q, t.sf, t.scale, EPS)
    else:
        add_rmsnorm_fp4quant(t.x, t.residual, t.weight, t.q, t.sf, t.scale, EPS)


def variant(t: Tensors, units: int, arch: Arch) -> Callable[[], None] | None:
    """The smallest kernel that holds the row with ``units`` units in a thread, or None where there is none."""
    m, h = t.x.shape
    one = kernel.select(
        in_dtype=DType.F16, block=BLOCK, scale=kernel.Scale.E4M3, add=t.residual is not None, m=m, h=h, arch=arch
    )
    shapes = [replace(one, units=u, warps=w, clustered=c) for u, w, c in kernel.SHAPES if u == units]
    spec = next((spec for spec in shapes if h <= spec.capacity(arch)), None)
    if spec is None:
        return None
    geometry, row_threads = kernel.geometry(spec, m=m, h=h, padded=False, arch=arch)
    launch = Launch(kernel.RMSNORM, spec, geometry)
    args = (t.x, t.residual, t.weight, t.scale, t.q, None, t.sf, None, m, h, row_threads, EPS)
    return lambda: launch.run(args, target_of(t.x))


@triton.jit
def _triton_rmsnorm(x, residual, weight, y, h, eps, ADD: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    columns = tl.arange(0, SIZE)
    at = tl.program_id(0).to(tl.int64) * h + columns
    keep = columns < h
    value = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        value = (value + tl.load(residual + at, mask=keep, other=0.0).to(tl.float32)).to(tl.float16)
        tl.store(residual + at, value, mask=keep)
        value = value.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value) / h + eps)
    tl.store(y + at, value * rstd * tl.load(weight + columns, mask=keep, other=0.0).to(tl.float32), mask=keep)


def triton_norm(t: Tensors, y: torch.Tensor) -> torch.Tensor:
    m, h = t.x.shape
    size = triton.next_power_of_2(h)
    warps = min(max(size // 512, 4), 32)
    residual = t.x if t.residual is None else t.residual
    _triton_rmsnorm[(m,)](t.x, residual, t.weight, y, h, EPS, ADD=t.residual is not None, SIZE=size, num_warps=warps)
    return y


def eager_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    if residual is not None:
        x = residual.add_(x)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def unfused(t: Tensors, normed: Callable[[Tensors], torch.Tensor]) -> None:
    nvfp4_quantize(normed(t), t.scale, SfLayout.layout_linear, out=t.q, out_sf=t.sf)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(add: bool, m: int, h: int, compiled: Callable[..., torch.Tensor], arch: Arch) -> dict[str, object]:
    one = make_tensors(add, m, h)
    moved = moved_bytes(one)
    held = [one] + [make_tensors(add, m, h) for _ in range(calls_per_graph(moved) - 1)]
    y = torch.empty_like(one.x)

    def timed(bind: Callable[[Tensors], Callable[[], object]]) -> float:
        calls = iter([bind(t) for t in held])
        return time_us(lambda: next(calls), moved)

    def variant_us(units: int) -> float | None:
        fits = variant(one, units, arch) is not None
        return timed(lambda t: variant(t, units, arch)) if fits else None  # type: ignore[arg-type, return-value]

    def after(normed: Callable[[Tensors], torch.Tensor]) -> float:
        return timed(lambda t: lambda: unfused(t, normed))

    separate = {  # first: while torch.compile works, the GPU's clocks fall
        "compile_us": after(lambda t: compiled(t.x, t.residual, t.weight)),
        "triton_us": after(lambda t: triton_norm(t, y)),
    }
    us, copy = timed(lambda t: lambda: fused(t)), copy_us(moved)
    best = min(separate.values())
    variants = {f"units{n}_us": variant_us(n) for n in (1, 2, 4)}
    row = {"op": "add_rmsnorm" if add else "rmsnorm", "rows": m, "hidden": h, "mib": moved / 2**20}
    row |= {"us": us, "copy_us": copy, "ratio": copy / us, "tb_per_s": moved / us / 1e6}
    row |= {"unfused_us": best, "speedup": best / us, **separate, **variants}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    for op in ("rmsnorm", "add_rmsnorm"):
        mine = [row for row in rows if row["op"] == op]
        ratio, speedup = geomean(r["ratio"] for r in mine), geomean(r["speedup"] for r in mine)
        worst = min((r for r in mine if r["mib"] >= 64), key=lambda r: r["ratio"])
        yield f"{op}: geomean ratio {ratio:.3f}, speed-up {speedup:.3f}; worst from 64 MiB on: {worst}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over separate kernels, and achieved bandwidth, by hidden size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for column, op in enumerate(("rmsnorm", "add_rmsnorm")):
        for axis, value, label in zip(
            axes[:, column], ("speedup", "tb_per_s"), ("speed-up over separate kernels", "TB/s"), strict=True
        ):
            for h in HIDDEN:
                line = [row for row in rows if row["op"] == op and row["hidden"] == h]
                axis.plot([r["rows"] for r in line], [r[value] for r in line], marker=".", label=f"hidden {h}")
            axis.set(xscale="log", xlabel="rows", ylabel=label, title=f"{op}_fp4quant")
            axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    arch = target_of(torch.empty(1, device="cuda")).arch
    for name, batches, hidden in (("norm", BATCHES, HIDDEN), ("norm_small", SMALL_BATCHES, SMALL_HIDDEN)):
        rows = []
        for add, h in itertools.product((False, True), hidden):
            torch.compiler.reset()
            compiled = torch.compile(eager_norm, dynamic=True)
            rows += [measure(add, m, h, compiled, arch) for m in batches]
        write_results(out / name, rows, stamp())
        if name == "norm":
            print(*summary(rows), sep="\n")
            plot(rows, out / "norm.png")


if __name__ == "__main__":
    main()
