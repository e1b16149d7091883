"""Decode steps of whole models on random weights: their launches, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from jitfp4 import (
    DecodeStep,
    Fp4Weight,
    fused_add_rmsnorm,
    mm_bf16_fp4,
    prepare_fp4_weight,
    rmsnorm,
    rope_append_paged_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.weight import CODE_BYTES

BF16 = torch.bfloat16
HEAD_DIM, PAGE = 128, 64
ROOM = 64  # tokens that a cache has room for beyond the context
CODE_RMS = 2.93  # of random codes
ONE = 0x38  # as E4M3


class Sizes(NamedTuple):
    """Of a model; ``layers`` of it are measured."""

    hidden: int
    heads: int
    kv_heads: int
    inter: int
    layers: int
    vocab: int = 128256

    def products(self) -> dict[str, tuple[int, int]]:
        """(n, k) of the products of a layer."""
        q = self.heads * HEAD_DIM
        return {
            "qkv": (q + 2 * self.kv_heads * HEAD_DIM, self.hidden),
            "o": (self.hidden, q),
            "gate_up": (2 * self.inter, self.hidden),
            "down": (self.hidden, self.inter),
        }


MODELS = {
    "8b": Sizes(hidden=4096, heads=32, kv_heads=8, inter=14336, layers=32),
    "70b/4": Sizes(hidden=8192, heads=64, kv_heads=8, inter=28672, layers=20),
}
PARTS = {
    "products": ("qkv", "o", "gate_up", "down"),
    "attention": ("attention",),
    "append": ("rope_append",),
    "glue": ("norm", "activation", "norm_mlp", "norm_head"),
    "head": ("head",),
    "layers": ("layers",),
}


class Kind(NamedTuple):
    """Of a step: whether epilogues do more, and ``enable_pdl``."""

    fused: bool = True
    pdl: bool | None = None


KINDS = {"separate": Kind(fused=False), "fused": Kind(), "broken": Kind(pdl=False)}

# ---- a model ---------------------------------------------------------------------------------------------------------


def random_weight(n: int, k: int) -> Fp4Weight:
    """Random codes with scales of 1."""
    codes = torch.zeros(64, k // 2, dtype=torch.uint8, device="cuda")
    scales = torch.full((64, k // 16), ONE, dtype=torch.uint8, device="cuda")
    like = prepare_fp4_weight(codes, scales, 16, SfLayout.layout_linear)
    data = torch.randint(0, 256, (ceil_div(n, 64), *like.data.shape[1:]), dtype=torch.uint8, device="cuda")
    data[..., CODE_BYTES:] = like.data[0, :, CODE_BYTES:]
    return Fp4Weight(data, None, n, k, like.format)


class Model:
    """Weights of a model."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.layers = [
            {name: random_weight(n, k) for name, (n, k) in sizes.products().items()} for _ in range(sizes.layers)
        ]
        self.gated = [replace(layer["gate_up"], gated=True) for layer in self.layers]
        self.alphas = {
            name: torch.full((1,), k**-0.5 / CODE_RMS, device="cuda") for name, (_, k) in sizes.products().items()
        }
        self.norm = torch.ones(sizes.hidden, dtype=BF16, device="cuda")
        self.head = torch.randn(sizes.vocab, sizes.hidden, dtype=BF16, device="cuda") * sizes.hidden**-0.5
        self.cos_sin = torch.randn(1 << 16, HEAD_DIM, device="cuda").clamp(-1, 1)

    def bytes_of(self, name: str) -> int:
        """Of the weight of a product in all layers."""
        return sum(layer[name].data.nbytes for layer in self.layers)


class Cache(NamedTuple):
    """Keys and values of a layer, NVFP4, and their scales: [pages, kv_heads, page, ...]."""

    data: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def random(pages: int, heads: int) -> Cache:
        shape = (pages, heads, PAGE)
        key, value = (
            torch.randint(0, 256, (*shape, HEAD_DIM // 2), dtype=torch.uint8, device="cuda") for _ in range(2)
        )
        scales = [
            torch.full((*shape, HEAD_DIM // 16), ONE, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
            for _ in range(2)
        ]
        return Cache((key, value), (scales[0], scales[1]))

    def bytes_of(self, share: float) -> float:
        return share * sum(tensor.nbytes for tensor in (*self.data, *self.scales))


# ---- a step ----------------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """A launch of a step: what it is, its layer, and the call."""

    name: str
    layer: int
    call: Callable[[], object]


def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    """What the last product of an MLP gets of [m, 2 inter]."""
    gate, up = x.chunk(2, -1)
    out.copy_(functional.silu(gate.float()) * up.float())


class Step:
    """A token of each request. All launches have tensors of their own kind, shared by all layers."""

    def __init__(self, model: Model, batch: int, context: int) -> None:
        self.model, self.batch, self.context = model, batch, context
        sizes = model.sizes
        pages = ceil_div(context + ROOM, PAGE)
        self.tables = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.positions = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
        self.slots = self.tables[:, (context - 1) // PAGE].long() * PAGE + (context - 1) % PAGE
        self.caches = [Cache.random(batch * pages, sizes.kv_heads) for _ in model.layers]
        self.share = context / (pages * PAGE)
        self.workspace = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
        self.outputs = {
            name: torch.randn(batch, n, dtype=BF16, device="cuda") for name, (n, _) in sizes.products().items()
        }
        self.residual, self.normed = (torch.randn(batch, sizes.hidden, dtype=BF16, device="cuda") for _ in range(2))
        self.attended = torch.randn(batch, sizes.heads, HEAD_DIM, dtype=BF16, device="cuda")
        self.query = torch.randn(batch, sizes.heads, HEAD_DIM, dtype=BF16, device="cuda")
        self.activated = torch.randn(batch, sizes.inter, dtype=BF16, device="cuda")
        self.logits = torch.empty(batch, sizes.vocab, dtype=BF16, device="cuda")
        self.activate = torch.compile(silu_and_mul, dynamic=True)

    def bytes_of(self, name: str) -> float:
        """What the launches of a name read, in all layers."""
        if name == "attention":
            return sum(cache.bytes_of(self.share) for cache in self.caches)
        if name == "head":
            return self.model.head.nbytes
        return self.model.bytes_of(name) if name in PARTS["products"] else 0

    def launches(self, kind: Kind) -> Iterator[Launch]:
        """All launches of a step in order."""
        last = len(self.caches)
        first, second = (self.normed if kind.fused else self.outputs[name] for name in ("down", "o"))
        for layer in range(last):
            yield self._norm("norm", layer, "down", kind)
            yield self._product("qkv", layer, first, kind)
            yield Launch("rope_append", layer, self._rope_append(layer, kind.pdl))
            yield Launch("attention", layer, self._attention(layer, kind.pdl))
            yield self._product("o", layer, self.attended.flatten(1), kind, residual="down")
            yield self._norm("norm_mlp", layer, "o", kind)
            yield self._product("gate_up", layer, second, kind)
            if not kind.fused:
                yield Launch("activation", layer, lambda: self.activate(self.outputs["gate_up"], self.activated))
            yield self._product("down", layer, self.activated, kind, residual="o")
        yield self._norm("norm_head", last, "down", kind)
        yield Launch("head", last, lambda: torch.mm(first, self.model.head.T, out=self.logits))

    def persistent(self) -> Iterator[Launch]:
        """One launch for all layers, on copies of weights and caches, then the norm and the head."""
        layers, sizes = self.model.layers, self.model.sizes
        norms = self.model.norm.expand(len(layers), 2, -1).contiguous()
        parts = ("qkv", "qkv", "qkv", "o", "gate_up", "gate_up", "down")
        alphas = torch.cat([self.model.alphas[name] for name in parts]).expand(len(layers), -1).contiguous()
        weights = [[layer[name] for layer in layers] for name in ("qkv", "o")]
        weights += [self.model.gated, [layer["down"] for layer in layers]]
        step = DecodeStep(*weights, norms, alphas, heads=sizes.heads, kv_heads=sizes.kv_heads, eps=1e-5)
        data = torch.stack([torch.stack(cache.data) for cache in self.caches])
        scales = torch.stack([torch.stack(cache.scales) for cache in self.caches])
        x, out = torch.randn_like(self.outputs["down"]), self.outputs["down"]
        place = self.tables, self.lengths, self.model.cos_sin
        yield Launch("layers", 0, lambda: step.run(x, data, scales, *place, out=out))
        yield from (launch for launch in self.launches(Kind()) if launch.layer == len(layers))

    def _norm(self, name: str, layer: int, of: str, kind: Kind) -> Launch:
        x, weight = self.outputs[of], self.model.norm
        if kind.fused:
            return Launch(name, layer, lambda: rmsnorm(x, weight, 1e-5, self.normed, kind.pdl))

        def call() -> None:
            fused_add_rmsnorm(x, self.residual, weight, 1e-5, kind.pdl)

        return Launch(name, layer, call)

    def _product(self, name: str, layer: int, x: torch.Tensor, kind: Kind, residual: str | None = None) -> Launch:
        """With a fused epilogue the outputs of o and down take turns as residuals."""
        out, weight, alpha = self.outputs[name], self.model.layers[layer][name], self.model.alphas[name]
        more: dict[str, Any] = {}
        if kind.fused and residual is not None:
            more["residual"] = self.outputs[residual]
        if kind.fused and name == "gate_up":
            out, weight, more["activation"] = self.activated, self.model.gated[layer], "swiglu"
        return Launch(name, layer, lambda: mm_bf16_fp4(x, weight, alpha, out=out, enable_pdl=kind.pdl, **more))

    def _rope_append(self, layer: int, pdl: bool | None) -> Callable[[], object]:
        sizes, cache = self.model.sizes, self.caches[layer]
        rows = self.outputs["qkv"].view(self.batch, -1, HEAD_DIM)
        query, key, value = rows.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), 1)
        return lambda: rope_append_paged_kv_cache(
            query,
            key,
            value,
            self.model.cos_sin,
            self.positions,
            self.slots,
            cache.data,
            cache.scales,
            is_neox=True,
            kv_layout="HND",
            query_out=self.query,
            enable_pdl=pdl,
        )

    def _attention(self, layer: int, pdl: bool | None) -> Callable[[], object]:
        cache = self.caches[layer]
        return lambda: trtllm_batch_decode_with_kv_cache(
            self.query,
            cache.data,
            self.workspace,
            self.tables,
            self.lengths,
            self.context,
            HEAD_DIM**-0.5,
            kv_layout="HND",
            kv_cache_sf=cache.scales,
            v_scale_layout="linear",
            out=self.attended,
            enable_pdl=pdl,
        )
