"""The error of a quantized KV cache: NVFP4 beside FP8, on plain and on structured keys and values.

Run anywhere: ``python -m bench.accuracy_kv [--out DIR]``. It uses the exact reference on the CPU. "outliers": as in
real models, a few channels are larger than the others: 16 of 128, 30 times in K and twice in V. They are neighbours,
which share a block, or one in eight. Errors are root mean squares, relative to the root mean square of the quantized
tensor; ``k_rest_error`` is that of the channels that are not outliers. ``output_error`` is that of attention over the
quantized cache, in float64, for the queries of a decode step over 2048 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import nvfp4_kv_dequantize, nvfp4_kv_quantize

TOKENS, QUERIES, D = 2048, 64, 128
OUTLIERS = {
    "normal": torch.arange(0),
    "outliers side by side": torch.arange(D // 4, D // 4 + 16),
    "outliers scattered": torch.arange(0, D, 8),
}


def nvfp4(largest: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Codes times block scales reach ``largest`` at the largest magnitude."""

    def quantized(x: torch.Tensor) -> torch.Tensor:
        scale = (x.float().abs().amax() / largest).reshape(1)
        return nvfp4_kv_dequantize(*nvfp4_kv_quantize(x, scale), scale).double()

    return quantized


def fp8(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with one scale for the tensor, as in FP8 caches."""
    scale = x.float().abs().amax() / 448
    return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()


FORMATS = {"nvfp4, amax / 2688": nvfp4(448 * 6), "nvfp4, amax / 448": nvfp4(448), "fp8 by tensor": fp8}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.T * D**-0.5, dim=-1) @ v


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def inputs(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, D, generator=generator) for n in (QUERIES, TOKENS, TOKENS))
    k[:, OUTLIERS[kind]] *= 30
    v[:, OUTLIERS[kind]] *= 2
    q[:, OUTLIERS[kind]] /= 30  # so that logits keep their size
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu"))
    out, rows = parser.parse_args().out, []
    for kind, (name, quantized) in product(OUTLIERS, FORMATS.items()):
        q, k, v = inputs(kind)
        new_k, new_v = quantized(k), quantized(v)
        want = attention(q.double(), k.double(), v.double())
        rest = [channel for channel in range(D) if channel not in OUTLIERS[kind]]
        errors = {
            "k_error": error(new_k, k.double()),
            "k_rest_error": error(new_k[:, rest], k[:, rest].double()),
            "v_error": error(new_v, v.double()),
            "output_error": error(attention(q.double(), new_k, new_v), want),
        }
        rows.append({"inputs": kind, "format": name} | {key: round(value, 5) for key, value in errors.items()})
        print(rows[-1])
    write_results(out / "kv_accuracy", rows, stamp())


if __name__ == "__main__":
    main()
