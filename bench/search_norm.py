"""Every kernel of the norm family that can hold a row, over rows and hidden sizes: what its select() rests on.

Run on a GPU: ``python -m bench.search_norm [--out DIR]``. float16, NVFP4, linear scales. ``shape`` is units of a
thread, warps of a CTA at most, and ``c`` for clusters; ``ratio`` is to a copy of the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import torch

from bench.bench_norm import BLOCK, EPS, Tensors, make_tensors, moved_bytes
from bench.harness import Call, calls_per_graph, copy_us, time_us, write_results
from bench.stamp import stamp
from jitfp4.arch import Arch
from jitfp4.engine import Launch, target_of
from jitfp4.families.norm import kernel
from jitfp4.formats import DType

ROWS = (1, 64, 1000, 3000, 8192, 32768)
HIDDEN = (1536, 2048, 4096, 5120, 7168, 8192, 16384, 32768)


def selected(add: bool, m: int, h: int, arch: Arch) -> kernel.Spec:
    return kernel.select(in_dtype=DType.F16, block=BLOCK, scale=kernel.Scale.E4M3, add=add, m=m, h=h, arch=arch)


def holders(one: kernel.Spec, h: int, arch: Arch) -> list[kernel.Spec]:
    """Kernels that hold the row and leave less than half of their threads without work."""
    every = [replace(one, units=u, warps=w, clustered=c, stream=False) for u, w, c in kernel.SHAPES]
    return [s for s in every if h <= s.capacity(arch) and (s.warps > 1 or 2 * h > s.capacity(arch))]


def bind(spec: kernel.Spec, t: Tensors, arch: Arch) -> Call:
    m, h = t.x.shape
    geometry, row_threads = kernel.geometry(spec, m=m, h=h, padded=False, arch=arch)
    launch, target = Launch(kernel.RMSNORM, spec, geometry), target_of(t.x)
    args = (t.x, t.residual, t.weight, t.scale, t.q, None, t.sf, None, m, h, row_threads, EPS)
    return lambda: launch.run(args, target)


def measure(add: bool, m: int, h: int, arch: Arch) -> list[dict[str, object]]:
    one = selected(add, m, h, arch)
    tensors = [make_tensors(add, m, h)]
    moved = moved_bytes(tensors[0])
    tensors += [make_tensors(add, m, h) for _ in range(calls_per_graph(moved) - 1)]
    us = {}
    for spec in (
        holders(one, h, arch) * 2
    ):  # whatever is measured first after an allocation is slower: the second counts
        calls = iter([bind(spec, t, arch) for t in tensors])
        us[spec] = time_us(lambda calls=calls: next(calls), moved)  # type: ignore[misc]
    copy = copy_us(moved)
    return [
        {
            "op": "add_rmsnorm" if add else "rmsnorm",
            "rows": m,
            "hidden": h,
            "shape": f"{spec.units}x{spec.warps}{'c' if spec.clustered else ''}",
            "selected": spec == one,
            "us": round(time, 3),
            "ratio": round(copy / time, 3),
        }
        for spec, time in us.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    arch = target_of(torch.empty(1, device="cuda")).arch
    rows = []
    for add, m, h in itertools.product((False, True), ROWS, HIDDEN):
        rows += measure(add, m, h, arch)
    write_results(out / "norm_shapes", rows, stamp())


if __name__ == "__main__":
    main()
