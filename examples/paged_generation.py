"""A small transformer that generates with a paged KV cache in NVFP4, beside the same with a cache in bf16.

    python examples/paged_generation.py [--device cuda | --simulate sm_90a] [--layers 2] [--new 8]

Random weights; prompts of different lengths, in one ragged batch. Each step appends the keys and values of its new
tokens and attends with their queries: prompts by trtllm_batch_context_with_kv_cache, CHUNK tokens of each at a time,
then one token at a time by trtllm_batch_decode_with_kv_cache. The NVFP4 run follows the tokens that the bf16 run chose,
so that both can be compared at every step. Without a GPU the reference runs, or what NVRTC makes of the kernels,
simulated.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

import jitfp4

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 512, 256, 8, 2, 64
PROMPTS = (37, 5, 20)
PAGE, CHUNK = 16, 24
LEAST_COSINE = 0.97  # of logits: four bits cost about a tenth of a key or value, and half of it averages out


class Layer(NamedTuple):
    """Weights [out, in]."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Model(NamedTuple):
    embedding: torch.Tensor
    layers: list[Layer]


def make_model(layers: int, device: str) -> Model:
    """Random weights in bf16 that keep the size of what they multiply."""
    torch.manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(device, torch.bfloat16)

    sizes = (((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HEADS * HEAD_DIM))
    mlp = ((2 * HIDDEN, HIDDEN), (HIDDEN, 2 * HIDDEN))
    return Model(
        torch.randn(VOCABULARY, HIDDEN).to(device, torch.bfloat16),
        [Layer(*(weight(*size) for size in (*sizes, *mlp))) for _ in range(layers)],
    )


class Cache(Protocol):
    """Keys and values of all layers, [pages, PAGE, KV_HEADS, ...] each, and what they are to be multiplied by."""

    factors: list[tuple[float, float]]

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write [tokens, KV_HEADS, HEAD_DIM] to ``slots``: page * PAGE + token of the page."""

    def sides(self, layer: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]:
        """K and V, and their block scales."""

    def bytes(self) -> int:
        """Of memory."""


class Bf16Cache:
    """16-bit floats as they are."""

    def __init__(self, layers: int, pages: int, device: str) -> None:
        self.data = torch.zeros(layers, 2, pages, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        self.factors = [(1.0, 1.0)] * layers

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self.data[layer].flatten(1, 2)[:, slots] = torch.stack((key, value))

    def sides(self, layer: int) -> tuple[tuple[torch.Tensor, torch.Tensor], None]:
        return (self.data[layer, 0], self.data[layer, 1]), None

    def bytes(self) -> int:
        return self.data.nbytes


class Nvfp4Cache:
    """Codes and block scales. ``amax`` [layers, 2] are the largest keys and values to expect, from a calibration."""

    def __init__(self, layers: int, pages: int, device: str, amax: torch.Tensor) -> None:
        shape = (layers, 2, pages, PAGE, KV_HEADS)
        self.codes = torch.zeros(*shape, HEAD_DIM // 2, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(*shape, HEAD_DIM // 16, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.factors = [(k, v) for k, v in (amax / (448 * 6)).tolist()]

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        jitfp4.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            key, value, slots, *self.sides(layer), *self.factors[layer]
        )

    def sides(self, layer: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        (k, v), (k_scales, v_scales) = self.codes[layer], self.scales[layer]
        return (k, v), (k_scales, v_scales)

    def bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


class Engine:
    """The pages of a batch, how many tokens each request has, and the scratch memory of attention."""

    def __init__(self, model: Model, cache: Cache, tables: torch.Tensor) -> None:
        self.model, self.cache, self.tables = model, cache, tables
        self.lengths = [0] * len(tables)
        self.workspace = torch.empty(32 << 20, dtype=torch.uint8, device=tables.device)

    def step(self, tokens: list[torch.Tensor]) -> torch.Tensor:
        """Take new tokens of each request, perhaps none; returns logits [tokens, VOCABULARY] behind each of them."""
        counts, device = [len(new) for new in tokens], self.tables.device
        positions = torch.cat([n + torch.arange(count) for n, count in zip(self.lengths, counts, strict=True)])
        owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        positions, owners = positions.to(device), owners.to(device)
        slots = self.tables[owners, positions // PAGE].long() * PAGE + positions % PAGE
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        x = self.model.embedding[torch.cat(tokens)]
        for number, layer in enumerate(self.model.layers):
            qkv = functional.linear(normed(x), layer.qkv).unflatten(-1, (-1, HEAD_DIM))
            query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
            self.cache.append(number, rotated(key, positions), value.contiguous(), slots)
            attended = self._attend(number, rotated(query, positions), counts)
            x = x + functional.linear(attended.flatten(1), layer.out)
            x = x + functional.linear(functional.silu(functional.linear(normed(x), layer.up)), layer.down)
        return functional.linear(normed(x), self.model.embedding).float()

    def _attend(self, layer: int, query: torch.Tensor, counts: list[int]) -> torch.Tensor:
        cache, scales = self.cache.sides(layer)
        k_factor, v_factor = self.cache.factors[layer]
        ends, kv_ends, lengths = (
            torch.tensor(numbers, dtype=torch.int32, device=query.device)
            for numbers in (
                [0, *itertools.accumulate(counts)],
                [0, *itertools.accumulate(self.lengths)],
                self.lengths,
            )
        )
        first = (query, cache, self.workspace, self.tables, lengths)
        bmm1 = HEAD_DIM**-0.5 * k_factor
        if set(counts) == {1}:
            out = jitfp4.trtllm_batch_decode_with_kv_cache(
                *first,
                max(self.lengths),
                bmm1,
                v_factor,
                kv_layout="NHD",
                kv_cache_sf=scales,
                v_scale_layout="linear",
            )
        else:
            out = jitfp4.trtllm_batch_context_with_kv_cache(
                *first,
                max(counts),
                max(self.lengths),
                bmm1,
                v_factor,
                len(counts),
                ends,
                kv_ends,
                kv_layout="NHD",
                kv_cache_sf=scales,
                v_scale_layout="linear",
            )
        assert isinstance(out, torch.Tensor)
        return out


def normed(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, HEAD_DIM] turned by positions: attention takes queries and keys as they are to be multiplied."""
    rates = 10000 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = (positions[:, None] * rates).unsqueeze(1)
    one, two = x.float().chunk(2, -1)
    turned = (one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos())
    return torch.cat(turned, -1).to(x.dtype)


def generate(
    engine: Engine, prompts: list[torch.Tensor], new: int, follow: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [requests, new] and the logits that they were chosen by, or those behind ``follow``'s tokens."""
    last = [torch.empty(0)] * len(prompts)
    for begin in range(0, max(map(len, prompts)), CHUNK):
        chunks = [prompt[begin : begin + CHUNK] for prompt in prompts]
        logits = engine.step(chunks).split([len(chunk) for chunk in chunks])
        last = [own[-1] if len(own) else before for own, before in zip(logits, last, strict=True)]
    steps, chosen = [torch.stack(last)], []
    for i in range(new):
        chosen.append(steps[-1].argmax(-1) if follow is None else follow[:, i])
        if i + 1 < new:
            steps.append(engine.step(list(chosen[-1].unsqueeze(1))))
    return torch.stack(chosen, 1), torch.stack(steps, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--simulate", metavar="ARCH", help="run the kernels of an architecture on the CPU")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--new", type=int, default=8, help="tokens to generate for each request")
    options = parser.parse_args()
    device = "cpu" if options.simulate else options.device
    model = make_model(options.layers, device)
    columns = -(-(max(PROMPTS) + options.new) // PAGE)
    pages = len(PROMPTS) * columns
    tables = torch.randperm(pages).view(len(PROMPTS), columns).to(device, torch.int32)
    prompts = [torch.randint(0, VOCABULARY, (length,)).to(device) for length in PROMPTS]
    where = sim_of(options.simulate)
    with torch.no_grad(), where:
        wide = Bf16Cache(options.layers, pages, device)
        tokens, expected = generate(Engine(model, wide, tables), prompts, options.new)
        amax = wide.data.flatten(2).abs().amax(-1).float()
        narrow = Nvfp4Cache(options.layers, pages, device, amax)
        _, got = generate(Engine(model, narrow, tables), prompts, options.new, follow=tokens)
    cosine = functional.cosine_similarity(got, expected, -1)
    same = (got.argmax(-1) == expected.argmax(-1)).float().mean()
    print(
        f"{len(PROMPTS)} requests of {PROMPTS} tokens, {options.new} new ones each, {options.layers} layers, {device}"
    )
    print(f"bf16 cache: {wide.bytes()} bytes")
    print(f"NVFP4 cache: {narrow.bytes()} bytes, {wide.bytes() / narrow.bytes():.2f} times less")
    print(f"logits: cosine {cosine.mean():.4f}, least {cosine.min():.4f}; same next token {same:.0%}")
    if cosine.min() < LEAST_COSINE:
        sys.exit(f"a cosine below {LEAST_COSINE}: the caches do not hold the same")


def sim_of(arch: str | None) -> contextlib.AbstractContextManager[object]:
    """Inside, CPU tensors are computed by the kernels of ``arch``; without one, by the reference."""
    return jitfp4.sim.device(arch) if arch else contextlib.nullcontext()


if __name__ == "__main__":
    main()
