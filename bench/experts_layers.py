"""Layers of FP4 experts with random weights, and graphs of calls of them, over routings that leave weights cold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from bench.bench_gemm import COLD_BYTES, Replay
from jitfp4 import Fp4Experts, fp4_experts
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.layouts import ceil_div
from jitfp4.weight import CODE_BYTES, TILE_COLS, TILE_ROWS, tile_bytes


@dataclass(frozen=True)
class Layer:
    name: str
    experts: int
    slots: int
    hidden: int
    inter: int
    format: BlockFormat
    activation: str
    biases: bool
    goals: dict[int, float]  # us by tokens

    @property
    def flops(self) -> int:
        """Of one row of an expert."""
        return 6 * self.hidden * self.inter

    @property
    def expert_bytes(self) -> int:
        values = 3 * self.hidden * self.inter
        return values // 2 + values // self.format.block


LAYERS = (
    Layer("gpt-oss-120b", 128, 4, 2880, 2880, MXFP4, "swigluoai", True, {1: 20, 8: 105, 64: 385, 256: 450, 2048: 820}),
    Layer("qwen3-30b-a3b", 128, 8, 2048, 768, NVFP4, "swiglu", False, {1: 12, 8: 42, 64: 95, 256: 115, 2048: 330}),
    Layer("deepseek-v3-ep8", 32, 1, 7168, 2048, NVFP4, "swiglu", False, {1: 14, 8: 50, 64: 190, 256: 215, 2048: 430}),
)
ROUTINGS = ("uniform", "zipf", "8 experts")
COPIES = 2
_SCALES = 0x88  # every scale is 2^-4
_LEAST_CALLS, _MOST_CALLS = 4, 32


class Copies(NamedTuple):
    """Copies of a layer, and what a kernel that only reads them takes."""

    experts: list[Fp4Experts]
    data: list[torch.Tensor]  # w13 and w2 of a copy in one piece


def make_copies(layer: Layer) -> Copies:
    """Random codes and constant scales, made where they are used."""
    found = [_make(layer) for _ in range(COPIES)]
    return Copies([experts for experts, _ in found], [data for _, data in found])


def make_layer(layer: Layer) -> Fp4Experts:
    """One copy of a layer."""
    return _make(layer)[0]


def _make(layer: Layer) -> tuple[Fp4Experts, torch.Tensor]:
    shapes = [
        (layer.experts, ceil_div(n, TILE_ROWS), ceil_div(k, TILE_COLS), tile_bytes(layer.format))
        for n, k in ((2 * layer.inter, layer.hidden), (layer.hidden, layer.inter))
    ]
    sizes = [shape[0] * shape[1] * shape[2] * shape[3] for shape in shapes]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda").random_(0, 256)
    w13, w2 = data[: sizes[0]].view(shapes[0]), data[sizes[0] :].view(shapes[1])
    for weight in (w13, w2):
        weight[..., CODE_BYTES:] = _SCALES
    rows = [(shape[0], shape[1] * TILE_ROWS) for shape in shapes]
    scales = [torch.full(shape, 2.0**-3, device="cuda") for shape in rows]
    biases = [torch.randn(shape, device="cuda") if layer.biases else None for shape in rows]
    experts = Fp4Experts(
        w13, scales[0], biases[0], w2, scales[1], biases[1], layer.hidden, layer.inter, True, layer.format
    )
    return experts, data


def make_ids(layer: Layer, tokens: int, routing: str, generator: torch.Generator) -> torch.Tensor:
    """int32 [tokens, slots]: different experts for each token."""
    weights = torch.ones(layer.experts)
    if routing == "zipf":
        weights = 1 / torch.arange(1, layer.experts + 1)
    elif routing == "8 experts":
        weights[8:] = 0
    shuffled = weights[torch.randperm(layer.experts, generator=generator)]
    return torch.multinomial(shuffled.expand(tokens, -1), layer.slots, generator=generator).int()


class Case(NamedTuple):
    """A layer, and routings through it, one for each call of a graph."""

    layer: Layer
    tokens: int
    ids: list[torch.Tensor]
    weights: torch.Tensor
    x: torch.Tensor
    touched: float

    @property
    def bytes(self) -> int:
        return int(self.touched * self.layer.expert_bytes)


def make_case(layer: Layer, tokens: int, routing: str) -> Case:
    generator = torch.Generator().manual_seed(tokens)
    first = make_ids(layer, tokens, routing, generator)
    size = len(first.unique()) * layer.expert_bytes
    count = min(_MOST_CALLS, max(_LEAST_CALLS, 2 * ceil_div(COLD_BYTES, size)))
    ids = [first, *(make_ids(layer, tokens, routing, generator) for _ in range(count - 1))]
    touched = sum(len(one.unique()) for one in ids) / len(ids)
    weights = torch.rand(tokens, layer.slots, device="cuda")
    x = torch.randn(tokens, layer.hidden, device="cuda").bfloat16()
    return Case(layer, tokens, [one.to(device="cuda") for one in ids], weights, x, touched)


def layer_replay(case: Case, copies: Copies, activations: str | None = None) -> Replay:
    out = torch.empty_like(case.x)
    calls = [
        partial(
            fp4_experts, case.x, copies.experts[number % COPIES], ids, case.weights,
            activation=case.layer.activation, activations=activations, out=out,
        )
        for number, ids in enumerate(case.ids)
    ]  # fmt: skip
    return Replay(calls)
