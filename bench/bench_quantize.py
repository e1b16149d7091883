"""The quantize and dequantize kernels against a copy of the same bytes, against each other, and against peers.

Run on a GPU: ``python -m bench.bench_quantize [--part grid|others|variants|better|peers] [--out DIR]``. Every figure
is CUDA-graph time with cold L2 (see harness.py); ``ratio`` is the time of a copy of the same bytes divided by the
kernel's.

grid      nvfp4_quantize, bf16, 128x4 scales, over the 99 points of FlashInfer #2838, with programmatic dependent
          launch (the default) and without: in a graph, a kernel with it overlaps the end of the previous one.
others    layouts, dtypes, formats, SwiGLU, batches, dequantization, on a diagonal of the grid
variants  every tactic that can run a problem, on the same diagonal; the table follows from it
better    4over6, the better of two scales for each block: every tactic on the diagonal, then each recipe and function
peers     torch.compile of the reference, a Triton kernel, and FlashInfer when it is installed
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

import jitfp4
from bench.harness import Call, copy_us, geomean, time_us, write_results
from bench.stamp import stamp
from jitfp4 import NVFP44Over6Config, SfLayout, nvfp4_quantize
from jitfp4.engine import target_of
from jitfp4.families.quantize.kernels.tma import TmaTactic
from jitfp4.families.quantize.kernels.vector import TACTICS as VECTOR_TACTICS
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.families.quantize.problem import Problem
from jitfp4.formats import NVFP4, DType
from jitfp4.reference import quantize as reference

ROWS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
COLUMNS = (512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 32768)
DIAGONAL = ((128, 512), (256, 2048), (1024, 4096), (4096, 4096), (8192, 8192), (32768, 8192), (65536, 16384))

_copies: dict[int, float] = {}


def measure(name: str, m: int, k: int, make_call: Callable[[], tuple[Call, int]], **facts: object) -> dict[str, Any]:
    """One row: the time of the call and, once for each size, of the copy. ``make_call`` returns a call and the bytes
    that it moves.
    """
    call, moved = make_call()
    first = [call]
    us = time_us(lambda: first.pop() if first else make_call()[0], moved)
    del call
    key = -(-moved >> 16)
    if key not in _copies:
        _copies[key] = copy_us(moved)
    row = {"case": name, "m": m, "k": k, **facts, "mib": moved / 2**20, "us": us, "copy_us": _copies[key]}
    row |= {"ratio": _copies[key] / us, "tb_per_s": moved / us / 1e6}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(m, k, dtype=torch.float16, device="cuda").normal_().to(dtype)


def of_function(function: Callable[..., Any], m: int, k: int, dtype: torch.dtype, **options: Any) -> Callable[[], Any]:
    """make_call of a public function on an [m, k] matrix; outputs are allocated once, if the function takes them."""

    def make_call() -> tuple[Call, int]:
        x, scale = matrix(m, k, dtype), torch.tensor([300.0], device="cuda")
        args = (x,) if function is jitfp4.mxfp4_quantize else (x, scale)
        outputs = function(*args, **options)
        given = {}
        if function in (jitfp4.nvfp4_quantize, jitfp4.mxfp4_quantize):
            given = {"out": outputs[0], "out_sf": outputs[1]}
        moved = x.nbytes + sum(out.nbytes for out in outputs)
        return lambda: function(*args, **options, **given), moved

    return make_call


def grid() -> Iterator[dict[str, Any]]:
    for m, k in product(ROWS, COLUMNS):
        row = measure("nvfp4_quantize", m, k, of_function(nvfp4_quantize, m, k, torch.bfloat16))
        without = measure("", m, k, of_function(nvfp4_quantize, m, k, torch.bfloat16, enable_pdl=False))
        yield row | {"no_pdl_us": without["us"], "no_pdl_ratio": without["ratio"]}


def others() -> Iterator[dict[str, Any]]:
    layouts = {layout.tag: {"sfLayout": layout} for layout in SfLayout}
    cases: list[tuple[str, Callable[..., Any], torch.dtype, dict[str, Any], int]] = [
        *(("nvfp4_quantize", nvfp4_quantize, torch.bfloat16, options, 1) for options in layouts.values()),
        ("nvfp4_quantize f16", nvfp4_quantize, torch.float16, {}, 1),
        ("nvfp4_quantize e4m3", nvfp4_quantize, torch.float8_e4m3fn, {}, 1),
        ("nvfp4_quantize per token", nvfp4_quantize, torch.bfloat16, {"per_token_activation": True}, 1),
        *(("mxfp4_quantize", jitfp4.mxfp4_quantize, torch.bfloat16, options, 1) for options in layouts.values()),
        ("silu_and_mul_nvfp4_quantize", jitfp4.silu_and_mul_nvfp4_quantize, torch.bfloat16, {}, 2),
    ]
    for (m, k), (name, function, dtype, options, wide) in product(DIAGONAL, cases):
        layout = options.get("sfLayout", SfLayout.layout_128x4).tag
        yield measure(name, m, k, of_function(function, m, wide * k, dtype, **options), layout=layout)
    for (m, k), (layout, out_dtype) in product(DIAGONAL, product(SfLayout, (torch.bfloat16, torch.float32))):
        name = f"nvfp4_dequantize to {str(out_dtype).removeprefix('torch.')}"
        yield measure(name, m, k, dequantize(m, k, layout, out_dtype), layout=layout.tag)


def dequantize(m: int, k: int, layout: SfLayout, out_dtype: torch.dtype) -> Callable[[], tuple[Call, int]]:
    def make_call() -> tuple[Call, int]:
        q, sf = nvfp4_quantize(matrix(m, k), 300.0, layout)
        scale, out = torch.tensor([1 / 300], device="cuda"), torch.empty(m, k, dtype=out_dtype, device="cuda")
        moved = q.nbytes + sf.nbytes + out.nbytes
        return lambda: jitfp4.nvfp4_dequantize(q, sf, scale, layout, out_dtype=out_dtype, out=out), moved

    return make_call


def variants() -> Iterator[dict[str, Any]]:
    arch = target_of(torch.empty(1, device="cuda")).arch
    for m, k in DIAGONAL:
        problem = Problem(NVFP4, DType.BF16, SfLayout.layout_128x4, silu=False, by_row=False, m=m, k=k)
        for tactic in QUANTIZE.candidates(problem, arch):
            cut = dict.fromkeys(("blocks_per_thread", "threads", "stages", "ctas_per_sm"), 0) | asdict(tactic)
            name = "tma" if isinstance(tactic, TmaTactic) else "vector"
            with QUANTIZE.forced(tactic):
                yield measure(name, m, k, of_function(nvfp4_quantize, m, k, torch.bfloat16), **cut)


def better() -> Iterator[dict[str, Any]]:
    recipes = [
        NVFP44Over6Config(err_mode=mode, err_use_fast_math=fast) for fast in (False, True) for mode in ("MAE", "MSE")
    ]
    for m, k in DIAGONAL:
        for tactic in VECTOR_TACTICS:
            with QUANTIZE.forced(tactic):
                call = of_function(nvfp4_quantize, m, k, torch.bfloat16, nvfp4_4over6=recipes[0])
                yield measure("vector", m, k, call, **asdict(tactic))
    chosen = {"blocks_per_thread": 0, "threads": 0}  # the table's
    for (m, k), recipe in product(DIAGONAL[3:6], recipes):
        name = f"{recipe.err_mode.name}{' fast' if recipe.err_use_fast_math else ''}"
        given = {"nvfp4_4over6": recipe}
        yield measure(name, m, k, of_function(nvfp4_quantize, m, k, torch.bfloat16, **given), **chosen)
        token = of_function(nvfp4_quantize, m, k, torch.bfloat16, per_token_activation=True, **given)
        yield measure(f"{name} per token", m, k, token, **chosen)
        silu = of_function(jitfp4.silu_and_mul_nvfp4_quantize, m, 2 * k, torch.bfloat16, **given)
        yield measure(f"{name} of SwiGLU", m, k, silu, **chosen)


def peers() -> Iterator[dict[str, Any]]:
    from bench.triton_quantize import quantize

    compiled = torch.compile(lambda x, g: reference.nvfp4_quantize(x, g, SfLayout.layout_128x4), dynamic=False)
    for m, k in DIAGONAL[1:6]:
        ours = measure("jitfp4", m, k, of_function(nvfp4_quantize, m, k, torch.bfloat16))
        yield ours | {"speedup": 1.0}
        for name, call in (("torch.compile of the reference", compiled), ("Triton", quantize)):
            row = measure(name, m, k, of_peer(call, m, k))
            yield row | {"speedup": round(row["us"] / ours["us"], 3)}
    yield from flashinfer_rows()


def of_peer(call: Callable[..., Any], m: int, k: int) -> Callable[[], tuple[Call, int]]:
    def make_call() -> tuple[Call, int]:
        x, scale = matrix(m, k), torch.tensor([300.0], device="cuda")
        outputs = call(x, scale)
        return lambda: call(x, scale), x.nbytes + sum(out.nbytes for out in outputs)

    return make_call


def flashinfer_rows() -> Iterator[dict[str, Any]]:
    """FlashInfer's fp4_quantize, where it is installed, and whether it wrote anything at all."""
    try:
        import flashinfer
    except ImportError:
        print("flashinfer is not installed: not compared")
        return
    for m, k in DIAGONAL[1:6]:
        q, _ = flashinfer.fp4_quantize(matrix(m, k), torch.tensor([300.0], device="cuda"))
        row = measure("flashinfer.fp4_quantize", m, k, of_peer(flashinfer.fp4_quantize, m, k))
        yield row | {"speedup": 0.0, "wrote": bool(q.any())}


def summarise(name: str, rows: Sequence[dict[str, Any]]) -> None:
    for case in dict.fromkeys((row["case"], row.get("layout", "")) for row in rows):
        mine = [row for row in rows if (row["case"], row.get("layout", "")) == case]
        worst = min(mine, key=lambda row: row["ratio"])
        line = f"{name} {' '.join(case)}: geomean {geomean(r['ratio'] for r in mine):.3f}, worst {worst['ratio']:.3f}"
        print(f"{line} at {worst['m']} x {worst['k']}")
    if name == "grid":
        large = [row for row in rows if row["m"] * row["k"] >= 1 << 27]
        print(f"grid without PDL: geomean {geomean(r['no_pdl_ratio'] for r in rows):.3f}")
        print(f"grid, m * k >= 2^27: worst {min(r['ratio'] for r in large):.3f}, without PDL "
              f"{min(r['no_pdl_ratio'] for r in large):.3f}")  # fmt: skip


PARTS = {"grid": grid, "others": others, "variants": variants, "better": better, "peers": peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be repeated; all of them without it")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    for part in options.part or PARTS:
        began, rows = time.time(), list(PARTS[part]())
        write_results(options.out / f"quantize_{part}", rows, stamp())
        summarise(part, rows)
        print(f"{part}: {len(rows)} rows in {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
