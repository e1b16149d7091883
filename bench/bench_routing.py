"""route_experts for the routers of models, beside the same by torch's operations; both in CUDA graphs, and on the host.
route_tokens, which multiplies too, beside cuBLAS and route_experts: alone, and behind a norm and before experts.

Run on a GPU: ``python -m bench.bench_routing [--only routing] [--out DIR]``. Warm: the logits are in L2, where a router
leaves them. Weights of routers are cold.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.experts_layers import Layer, make_layer
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import fp4_experts, rmsnorm, route_experts, route_tokens
from jitfp4.formats import NVFP4
from jitfp4.tuning import Call, time_us

TOKENS, FEW_TOKENS = (1, 64, 2048), (1, 2, 4, 8, 16)
INTER = 256  # of the experts behind a router
HOST_CALLS, HOST_ROUNDS = 500, 5


class Router(NamedTuple):
    name: str
    experts: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    options: dict[str, Any]


ROUTERS = (
    Router("gpt-oss", 128, 2880, 4, torch.bfloat16, {"method": "softmax", "renormalize": True}),
    Router("qwen3", 128, 2048, 8, torch.bfloat16, {"method": "softmax", "renormalize": True}),
    Router("qwen3-next", 512, 2048, 10, torch.bfloat16, {"method": "softmax", "renormalize": True}),
    Router(
        "deepseek-v3",
        256,
        7168,
        8,
        torch.float32,
        {"method": "sigmoid", "renormalize": True, "groups": 8, "topk_groups": 4, "scale": 2.5},
    ),
)


def by_softmax(logits: torch.Tensor, router: Router, _: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), router.top_k, -1)
    return weights / weights.sum(-1, keepdim=True), ids.int()


def by_groups(logits: torch.Tensor, router: Router, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    groups, kept = router.options["groups"], router.options["topk_groups"]
    scores = torch.sigmoid(logits.float())
    choice = (scores + bias).view(len(logits), groups, -1)
    best = choice.topk(2, -1).values.sum(-1).topk(kept, -1).indices
    mask = torch.zeros(len(logits), groups, dtype=torch.bool, device=logits.device).scatter_(1, best, True)
    ids = choice.masked_fill(~mask.unsqueeze(-1), -torch.inf).view_as(scores).topk(router.top_k, -1).indices
    weights = scores.gather(1, ids)
    return router.options["scale"] * weights / (weights.sum(-1, keepdim=True) + 1e-20), ids.int()


def host_us(call: Call) -> float:
    """Median over rounds of the mean host microseconds of a call; the queue is drained between rounds."""
    rounds = []
    for _ in range(HOST_ROUNDS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append(1e6 * (time.perf_counter() - start) / HOST_CALLS)
    return statistics.median(rounds[1:])


def measure(router: Router, tokens: int) -> dict[str, object]:
    bias = torch.randn(router.experts, device="cuda") / 4 if "groups" in router.options else None
    options = router.options if bias is None else router.options | {"bias": bias}
    peer: Callable[..., object] = by_softmax if bias is None else by_groups

    def make(ours: bool) -> Call:
        logits = torch.randn(tokens, router.experts, device="cuda").to(router.dtype)
        if not ours:
            return lambda: peer(logits, router, bias)
        ids = torch.empty(tokens, router.top_k, dtype=torch.int32, device="cuda")
        weights = torch.empty(tokens, router.top_k, device="cuda")
        return lambda: route_experts(logits, router.top_k, **options, out_ids=ids, out_weights=weights)

    moved = tokens * (router.experts * router.dtype.itemsize + 8 * router.top_k)
    row: dict[str, object] = {
        "router": router.name,
        "experts": router.experts,
        "top_k": router.top_k,
        "dtype": str(router.dtype).removeprefix("torch."),
        "tokens": tokens,
    }
    for l2 in ("warm", "cold"):
        row[f"{l2}_us"], row[f"torch_{l2}_us"] = (
            round(time_us(lambda ours=ours: make(ours), moved, l2=l2), 2)  # type: ignore[misc,arg-type]
            for ours in (True, False)
        )
    row["host_us"], row["torch_host_us"] = (round(host_us(make(ours)), 2) for ours in (True, False))
    print(*row.values(), flush=True)
    return row


def measure_tokens(router: Router, tokens: int) -> dict[str, object]:
    """A row: from activations to experts, by one launch and by two; microseconds of that, and of a norm, that, and a
    small layer of experts.
    """
    bias = torch.randn(router.experts, device="cuda") / 4 if "groups" in router.options else None
    options = router.options if bias is None else router.options | {"bias": bias}
    shift = torch.randn(router.experts, device="cuda").bfloat16() if router.name == "gpt-oss" else None
    x = torch.randn(tokens, router.hidden, device="cuda").bfloat16()
    scale = torch.ones(router.hidden, device="cuda").bfloat16()
    layer = make_layer(
        Layer(router.name, router.experts, router.top_k, router.hidden, INTER, NVFP4, "swiglu", False, {})
    )
    moved = 2 * router.hidden * (router.experts + tokens)

    def make(way: str, chain: bool) -> Call:
        weight = torch.randn(router.experts, router.hidden, device="cuda").bfloat16()
        ids = torch.empty(tokens, router.top_k, dtype=torch.int32, device="cuda")
        weights = torch.empty(tokens, router.top_k, device="cuda")
        into = {"out_ids": ids, "out_weights": weights}

        def chosen(x: torch.Tensor) -> object:
            if way == "route_tokens":
                return route_tokens(x, weight, router.top_k, logit_bias=shift, **options, **into)
            if router.dtype is torch.float32:
                logits = torch.mm(x, weight.T, out_dtype=torch.float32)
            else:
                logits = torch.nn.functional.linear(x, weight, shift)
            return route_experts(logits, router.top_k, **options, **into)

        def call() -> object:
            if not chain:
                return chosen(x)
            normed = rmsnorm(x, scale)
            chosen(normed)
            return fp4_experts(normed, layer, ids, weights)

        return call

    row: dict[str, object] = {"router": router.name, "tokens": tokens}
    for chain, name in ((False, "alone"), (True, "chain")):
        for way in ("route_tokens", "cublas"):
            us = time_us(lambda way=way, chain=chain: make(way, chain), moved)  # type: ignore[misc]
            row[f"{name}_{way}_us"] = round(us, 2)
    print(*row.values(), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("routing", "route_tokens"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    arguments = parser.parse_args()
    for name, measured, counts in (("routing", measure, TOKENS), ("route_tokens", measure_tokens, FEW_TOKENS)):
        if arguments.only in (None, name):
            rows = [measured(router, tokens) for router in ROUTERS for tokens in counts]
            write_results(arguments.out / name, rows, stamp())


if __name__ == "__main__":
    main()
