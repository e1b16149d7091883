"""What rounding costs a Llama of random weights, by torch alone: what ``--check`` should find in vLLM.

    python -m bench.engines.random_model [--layers 2 8 32]

A quarter of Llama-3.1-8B's width, prompts of 16 tokens, the logits of each last token. ``noise`` is a run whose
products differ by 2^-10 before they are rounded to bf16, as another kernel's do; ``nvfp4`` rounds keys and values;
``fp8`` multiplies activations and weights in E4M3, each row with its own scale.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch.nn.functional import cosine_similarity, silu

from bench.engines.vllm_decode import rounded

HIDDEN, INTER, VOCAB, HEAD_DIM, HEADS, KV_HEADS = 1024, 3584, 128256, 128, 8, 2
PROMPTS, TOKENS = 8, 16
STD = 0.04  # as wide for this width as 0.02 is for 4096
RUNS = ("exact", "noise", "nvfp4", "nvfp4 noise", "fp8")
PAIRS = (("noise", "exact"), ("nvfp4 noise", "nvfp4"), ("nvfp4", "exact"), ("fp8", "exact"))


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def normalised(x: torch.Tensor) -> torch.Tensor:
    return bf16(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[prompts, tokens, heads, d] by their positions."""
    angles = torch.arange(TOKENS)[:, None, None] * 500000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return bf16(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rows in E4M3, whose largest value is E4M3's."""
    scale = x.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def layer(x: torch.Tensor, weights: list[torch.Tensor], run: str) -> torch.Tensor:
    """One layer of ``x [prompts, tokens, hidden]``, as one of RUNS rounds."""

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = e4m3(rows) @ e4m3(weight).T if "fp8" in run else rows @ weight.T
        return bf16(out * (1 + 2**-10 * torch.randn_like(out)) if "noise" in run else out)

    q, k, v, o, gate, up, down = weights
    rows = normalised(x)
    query, key, value = (product(rows, side).unflatten(-1, (-1, HEAD_DIM)) for side in (q, k, v))
    query, key = rotated(query), rotated(key)
    if "nvfp4" in run:
        key, value = (rounded(side.bfloat16(), HEAD_DIM).float() for side in (key, value))
    key, value = (side.repeat_interleave(HEADS // KV_HEADS, 2) for side in (key, value))
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(HEAD_DIM)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    attended = torch.einsum("bhqk,bkhd->bqhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), value)
    x = bf16(x + product(bf16(attended.flatten(2)), o))
    rows = normalised(x)
    return bf16(x + product(bf16(silu(product(rows, gate)) * product(rows, up)), down))


def compared(layers: int) -> None:
    """Print cosines and equal first tokens of pairs of runs."""
    torch.manual_seed(0)
    embedding, head = 0.02 * torch.randn(VOCAB, HIDDEN), STD * torch.randn(VOCAB, HIDDEN)
    ids = 7 * torch.arange(PROMPTS)[:, None] + 13 * torch.arange(TOKENS) + 10
    states = dict.fromkeys(RUNS, embedding[ids])
    rows = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HIDDEN, INTER, INTER, HIDDEN)
    columns = (HIDDEN, HIDDEN, HIDDEN, HEADS * HEAD_DIM, HIDDEN, HIDDEN, INTER)
    for _ in range(layers):
        weights = [STD * torch.randn(n, k) for n, k in zip(rows, columns, strict=True)]
        states = {name: layer(x, weights, name) for name, x in states.items()}
    logits = {name: normalised(x[:, -1]) @ head.T for name, x in states.items()}
    for name, other in PAIRS:
        cosines = cosine_similarity(logits[name], logits[other], dim=-1)
        same = int((logits[name].argmax(-1) == logits[other].argmax(-1)).sum())
        text = f"cosine least {cosines.min():.4f} mean {cosines.mean():.4f}, first token of {same} of {PROMPTS}"
        print(f"{layers} layers, {name} to {other}: {text}", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    for layers in parser.parse_args().layers:
        compared(layers)


if __name__ == "__main__":
    main()
