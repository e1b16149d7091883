"""Decode steps of whole models, launch by launch: what a token takes, what of it is products, and what lies between.

Run on a GPU: ``python -m bench.bench_step [--model 8b 70b/4] [--step separate fused] [--out DIR]``.

A step is one CUDA graph: for each layer RMSNorm, the product for queries, keys and values, their rotation with the
append to an NVFP4 cache, attention, its product, RMSNorm, and the MLP; then the head in bf16. Weights are random, in
NVFP4, and made on the device. A step is ``separate`` (norms add residuals, and torch.compile makes SwiGLU), ``fused``
(both in the epilogues of products), ``broken`` (as fused, without dependent launches), or ``persistent``: DecodeStep,
whose one launch takes the place of all layers, for cells of one request. Its row says nothing of parts but the head,
and the time of the layers' launch.

``step.csv`` has a line for each step: its time; ``bound_ms``, the time to read its bytes once (weights, keys, values)
at the read bandwidth of the same run, and ``of_roof``, their ratio; and for parts of a step, the time of a graph of
nothing else. ``seams_us`` is what the step takes more than its parts together, less where they overlap.

``step_launches.csv`` has a line for each launch of a layer of the first step of each model: ``alone_us`` of a graph of
that launch of all layers, ``in_step_us``, by which a step without it is shorter, both for one layer, and ``bound_us``
for its own bytes; of a profile of one layer in the middle, when the launch began and ended.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from bench.harness import write_results
from bench.stamp import stamp
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
REPLAYS, WARM_UP = 15, 3
READ_BYTES = 4 << 30


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
CELLS = ((1, 2048), (8, 2048), (64, 2048), (1, 32768), (64, 8192))
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
PERSISTENT = "persistent"


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
        alphas = torch.cat([self.model.alphas[name] for name in PARTS["products"]]).expand(len(layers), -1).contiguous()
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


# ---- measuring -------------------------------------------------------------------------------------------------------


def graph_of(calls: Collection[Callable[[], object]]) -> Any:
    """A CUDA graph of calls, which run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: Any) -> float:
    """The median of REPLAYS replays."""
    for _ in range(WARM_UP):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a microsecond of a reduction over much memory."""
    x = torch.zeros(READ_BYTES // 4, device="cuda")
    return x.nbytes / replay_us(graph_of([lambda: x.amax()]))


def step_us(launches: Collection[Launch], names: Collection[str]) -> float:
    """Of a graph of the launches with these names; 0 where there are none."""
    calls = [launch.call for launch in launches if launch.name in names]
    return replay_us(graph_of(calls)) if calls else 0.0


def measure(step: Step, name: str, bandwidth: float) -> dict[str, object]:
    """A step, and its parts."""
    launches = list(step.persistent() if name == PERSISTENT else step.launches(KINDS[name]))
    names = dict.fromkeys(launch.name for launch in launches)
    read = [*PARTS["products"], "attention", "head"]
    us, bound = step_us(launches, names), sum(map(step.bytes_of, read)) / bandwidth
    parts = {part: step_us(launches, [name for name in names if name in of]) for part, of in PARTS.items()}
    row: dict[str, object] = {"ms": round(us / 1e3, 4), "tokens_per_s": round(1e6 * step.batch / us, 1)}
    row |= {"bound_ms": round(bound / 1e3, 4), "of_roof": round(bound / us, 3)}
    row |= {f"{part}_us": round(spent, 1) for part, spent in parts.items()}
    return row | {"seams_us": round(us - sum(parts.values()), 1), "launches": len(launches)}


def profile(graph: Any, per_layer: int, layers: int) -> list[tuple[float, float]]:
    """When the launches of a layer in the middle begin and end, in microseconds from the first; empty without them."""
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in on_gpu)
    middle = spans[layers // 2 * per_layer :][:per_layer]
    return [(start - middle[0][0], end - middle[0][0]) for start, end in middle]


def timeline(step: Step, kind: Kind, bandwidth: float) -> Iterator[dict[str, object]]:
    """A line for each launch of a layer."""
    launches = list(step.launches(kind))
    layers = len(step.caches)
    own = [launch.name for launch in launches if launch.layer == 0]
    names = set(own) | {launch.name for launch in launches}
    graph = graph_of([launch.call for launch in launches])
    whole, spans = replay_us(graph), profile(graph, len(own), layers)
    for number, name in enumerate(own):
        begin, end = spans[number] if spans else (0.0, 0.0)
        yield {
            "launch": name,
            "bound_us": round(step.bytes_of(name) / bandwidth / layers, 2),
            "alone_us": round(step_us(launches, {name}) / layers, 2),
            "in_step_us": round((whole - step_us(launches, names - {name})) / layers, 2),
            "begin_us": round(begin, 2),
            "end_us": round(end, 2),
        }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--step", nargs="+", choices=[*KINDS, PERSISTENT], default=[*KINDS, PERSISTENT])
    parser.add_argument("--cells", nargs="+", type=int, default=range(len(CELLS)), help="numbers of CELLS")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    lines: list[dict[str, object]] = []
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e6:.2f} TB/s", flush=True)
    for name in options.model:
        model = Model(MODELS[name])
        for batch, context in (CELLS[number] for number in options.cells):
            step = Step(model, batch, context)
            for kind in options.step:
                if kind == PERSISTENT and batch > 1:
                    continue
                row = {"model": name, "batch": batch, "context": context, "step": kind}
                rows.append(row | measure(step, kind, bandwidth))
                print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
                if (batch, context) == CELLS[0] and kind in KINDS:
                    lines += [row | line for line in timeline(step, KINDS[kind], bandwidth)]
            del step
    origin = stamp() | {"read_bandwidth": 1e6 * bandwidth}
    write_results(options.out / "step", rows, origin)
    if lines:
        write_results(options.out / "step_launches", lines, origin)


if __name__ == "__main__":
    main()
