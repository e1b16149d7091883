"""The error of products of E4M3 activations and FP4 weights, and what each step of mm_fp8_fp4 adds to it.

Run anywhere: ``python -m bench.accuracy_fp8 [--out DIR]`` writes ``fp8_accuracy.csv``. Sums are made by the simulator's
tensor core, which keeps 13 bits of mantissa of a sum of E4M3 products. Each error is the root mean square of what a
product differs from another one, both in float64 but for the sums, divided by the root mean square of the latter:

- ``fp4_error``: the FP4 weight, from the weight before it was quantized;
- ``weight_error``: the same weight, rounded to E4M3, from the FP4 weight;
- ``activation_error``: activations in E4M3, with a scale for each row, from those in bf16, with the FP4 weight;
- ``sums_error``: sums that stay in the tensor core, from exact ones of the same operands; ``promoted_sums_error``: sums
  that would be added in float32 every 128 columns;
- ``total_error``: all of mm_fp8_fp4, from bf16 activations and the FP4 weight; ``promoted_total_error``: with adding in
  float32.

Activations are normal, or have heavy tails (Student's t, 3 degrees of freedom), or outliers: one channel of 32 is 30
times larger. Weights are normal, or their rows differ, or blocks of 16 columns, by powers of two down to 2^-8.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
import torch

from bench.accuracy_kv import error
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import Fp4Weight, SfLayout, fp8_row_scale, mxfp4_quantize, nvfp4_quantize, prepare_fp4_weight
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.sim import formats
from jitfp4.sim.tensorcore import DotUnit, Operand, fused_dot_add
from jitfp4.weight import TILE_COLS
from jitfp4.weight import rounded_to_e4m3 as rounded

M, N = 16, 64
COLUMNS = (4096, 14336, 28672)  # of normal operands; of others, the first
TENSOR_CORE = DotUnit(chunk=32, fraction_bits=13, result="e8m13")
_MOST = 8  # binades by which rows or blocks differ


def activations(kind: str, k: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 [m, k]."""
    x = torch.randn(M, k, generator=generator)
    if kind == "heavy tails":
        x = x / (torch.randn(M, k, 3, generator=generator).square().mean(-1)).sqrt()
    if kind == "outliers":
        x[:, ::32] *= 30
    return x.bfloat16()


def weights(kind: str, k: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 [n, k]."""
    w = torch.randn(N, k, generator=generator)
    if kind == "rows differ":
        w = w * 2.0 ** -torch.randint(0, _MOST + 1, (N, 1), generator=generator)
    if kind == "blocks differ":
        w = w * (2.0 ** -torch.randint(0, _MOST + 1, (N, k // 16), generator=generator)).repeat_interleave(16, -1)
    return w.bfloat16()


def quantized(w: torch.Tensor, block_format: BlockFormat) -> tuple[Fp4Weight, float]:
    """The prepared weight, and its global decode scale."""
    if block_format is MXFP4:
        codes, scales = mxfp4_quantize(w, sfLayout=SfLayout.layout_linear)
        return prepare_fp4_weight(codes, scales, MXFP4.block, SfLayout.layout_linear), 1.0
    encode = 448 * 6 / w.float().abs().amax().reshape(1)
    codes, scales = nvfp4_quantize(w, encode, SfLayout.layout_linear)
    return prepare_fp4_weight(codes, scales, NVFP4.block, SfLayout.layout_linear), 1 / float(encode)


def summed(a: torch.Tensor, w: torch.Tensor, every: int) -> torch.Tensor:
    """Sums by the tensor core, of E4M3 values, in float32 for every ``every`` columns."""
    total = np.zeros((len(a), len(w)), np.float32)
    left, right = (Operand.of(x.numpy(), formats.E4M3) for x in (a, w))
    for first in range(0, a.shape[1], every):
        cut = slice(first, first + every)
        of = [Operand(values=x.values[:, cut], exponents=x.exponents[:, cut]) for x in (left, right)]
        total += fused_dot_add(of[0], of[1], np.zeros_like(total), TENSOR_CORE)
    return torch.from_numpy(total).double()


def measure(of_activations: str, of_weights: str, block_format: BlockFormat, k: int = COLUMNS[0]) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    a, w = activations(of_activations, k, generator), weights(of_weights, k, generator)
    weight, decode = quantized(w, block_format)
    row_scale = fp8_row_scale(weight)
    row = row_scale[:N].double()
    fp4, eights = weight.dequantize().double() * decode, rounded(weight, row_scale).double() * decode
    scale = a.float().abs().amax(-1, keepdim=True) / 448
    codes = (a.float() / scale).to(torch.float8_e4m3fn).double()
    x, back = a.double(), scale.double() * row * decode
    of_fp4, exact = x @ fp4.T, codes @ (eights / decode / row.unsqueeze(-1)).T * back
    promoted, plain = (summed(codes, eights / decode / row.unsqueeze(-1), every) * back for every in (TILE_COLS, k))
    found = {
        "fp4_error": error(of_fp4, x @ w.double().T),
        "weight_error": error(x @ eights.T, of_fp4),
        "activation_error": error(codes * scale.double() @ fp4.T, of_fp4),
        "sums_error": error(plain, exact),
        "promoted_sums_error": error(promoted, exact),
        "total_error": error(plain, of_fp4),
        "promoted_total_error": error(promoted, of_fp4),
    }
    what = {"activations": of_activations, "weights": of_weights, "format": str(block_format), "k": k}
    return {**what, **{name: f"{value:.3g}" for name, value in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu"))
    options = parser.parse_args()
    cases = product(("normal", "heavy tails", "outliers"), ("normal", "rows differ", "blocks differ"), BlockFormat)
    lines = [measure(*case) for case in cases]
    lines += [measure("normal", "normal", form, k) for form in BlockFormat for k in COLUMNS[1:]]
    write_results(options.out / "fp8_accuracy", lines, stamp())


if __name__ == "__main__":
    main()
