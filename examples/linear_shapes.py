"""Products with NVFP4 weights of given shapes: what to tune for the layers of a model that is not at hand.

    jitfp4 tune --out h200.tactics.json -- examples/linear_shapes.py 8192x8192 28672x4096 --rows 1 16 256

Each shape is N x K, as of a linear layer from K to N features. For each number of rows of activations, ``mm_bf16_fp4``
runs once (W4A16), or with --w4a4 ``mm_fp4`` and the quantization before it. Run by itself, it prints what it ran.
"""

from __future__ import annotations

import argparse

import torch

import jitfp4
from jitfp4 import SfLayout

BLOCK = 16


def read_shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return int(n), int(k)


def w4a16(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    weight = jitfp4.prepare_fp4_weight(codes, scales, sf_layout=SfLayout.layout_linear)
    return jitfp4.mm_bf16_fp4(x, weight)


def w4a4(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    a, a_scales = jitfp4.nvfp4_quantize(x, 1.0)
    return jitfp4.mm_fp4(a, codes.T, a_scales, jitfp4.block_scale_interleave(scales))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", type=read_shape, metavar="NxK")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256, 2048])
    parser.add_argument("--w4a4", action="store_true", help="quantize activations too")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here, help=f"cuda, cuda:N, or cpu (here {here})")
    arguments = parser.parse_args()
    run = w4a4 if arguments.w4a4 else w4a16
    for n, k in arguments.shapes:
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=arguments.device)
        scales = torch.randint(40, 60, (n, k // BLOCK), dtype=torch.uint8, device=arguments.device)
        for m in arguments.rows:
            out = run(torch.randn(m, k, device=arguments.device).bfloat16(), codes, scales)
            print(f"{run.__name__} [{m}, {k}] x [{n}, {k}] -> {list(out.shape)}")


if __name__ == "__main__":
    main()
