"""Layers of experts of given shapes with random FP4 weights: what to tune for a model that is not at hand.

    jitfp4 tune --out h200.tactics.json -- examples/expert_layers.py 128x8x2048x768 --tokens 1 8 64 2048
    jitfp4 tune --out h200.tactics.json -- examples/expert_layers.py 128x4x2880x2880 --format mxfp4 --routing zipf

Each layer is E x K x H x I: E experts, K for each token, hidden size H and I features within an expert. For each number
of tokens it runs once, from the logits of a router to the sum over experts. How tokens are spread over experts decides
which of them are read: ``uniform``, ``zipf`` (the popularity of an expert falls with its rank) or ``few`` (all tokens
on the same K experts). Run by itself, it prints what it ran.
"""

from __future__ import annotations

import argparse
import math

import torch

import jitfp4
from jitfp4 import Fp4Experts, SfLayout

FORMATS = {"nvfp4": (16, (40, 60)), "mxfp4": (32, (118, 124))}  # elements of a block; bytes of ordinary scales
ROUTINGS = ("uniform", "zipf", "few")


def read_shape(text: str) -> tuple[int, int, int, int]:
    sizes = text.split("x")
    if len(sizes) != 4:
        raise ValueError(text)
    experts, slots, hidden, inter = map(int, sizes)
    return experts, slots, hidden, inter


def make_experts(experts: int, hidden: int, inter: int, block_format: str, device: str) -> Fp4Experts:
    block, (low, high) = FORMATS[block_format]

    def matrix(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
        return codes, torch.randint(low, high, (experts, n, k // block), dtype=torch.uint8, device=device)

    (w13, w13_scales), (w2, w2_scales) = matrix(2 * inter, hidden), matrix(hidden, inter)
    return jitfp4.prepare_fp4_experts(
        w13,
        w13_scales,
        w2,
        w2_scales,
        order="concatenated gate,up",
        sf_layout=SfLayout.layout_linear,
        block_size=block,
    )


def make_logits(tokens: int, experts: int, slots: int, routing: str, device: str) -> torch.Tensor:
    """Logits whose top-k are draws without replacement, with the experts' popularity as the probability."""
    popularity = torch.zeros(experts, device=device)
    if routing == "zipf":
        popularity = -torch.arange(1, experts + 1, device=device).log()
    elif routing == "few":
        popularity[slots:] = -math.inf
    gumbel = -(-torch.rand(tokens, experts, device=device).clamp(1e-9, 1 - 1e-6).log()).log()
    return popularity + gumbel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", type=read_shape, metavar="ExKxHxI")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 256, 2048])
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N, or cpu")
    arguments = parser.parse_args()
    for experts, slots, hidden, inter in arguments.shapes:
        layer = make_experts(experts, hidden, inter, arguments.format, arguments.device)
        for tokens in arguments.tokens:
            logits = make_logits(tokens, experts, slots, arguments.routing, arguments.device)
            ids, weights = jitfp4.route_experts(logits, slots, method="softmax", renormalize=True)
            x = torch.randn(tokens, hidden, device=arguments.device).bfloat16()
            out = jitfp4.fp4_experts(x, layer, ids, weights)
            print(f"{tokens} tokens on {ids.unique().numel()} of {experts} experts -> {list(out.shape)}")


if __name__ == "__main__":
    main()
