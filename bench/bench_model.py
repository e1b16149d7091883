"""Decode steps of whole models, through transformers: tokens a second, and where the time goes.

    python -m bench.bench_model [--model llama-3.1-8b qwen3-8b] [--batch 1 8 64] [--context 2048 8192]
        [--variant bf16 w4 w4-kv4 w4-kv4-head4 transformers] [--glue compiled|plain] [--seconds 170] [--device cuda]

A step is what ``generate()`` does for a token of each request: the model, the greedy choice, the next positions; on a
GPU, one CUDA graph that is replayed. Configurations are those of the published models, weights are random and made on
the device. Lines of ``model.csv`` differ in what is in FP4, and in nothing else: ``bf16`` nothing, ``w4`` the linear
layers in NVFP4, ``w4-kv4`` keys and values too, ``w4-kv4-head4`` the head too. All four read keys and values by
jitfp4's paged attention, and get the same glue: with ``--glue compiled``, torch's RMSNorm, and torch.compile for
rotations and SwiGLU; with ``plain``, transformers' own code. ``transformers`` is its own cache and attention with
``plain`` glue, in bf16, and is not among the variants by default.

``bound_ms`` is the time to read the step's bytes once (weights, keys and values) at the read bandwidth of the same run.
Parts are microseconds of kernels by their names; ``gaps`` is what no kernel of the step accounts for.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from bench.harness import write_results
from bench.stamp import stamp
from jitfp4.formats import NVFP4
from jitfp4.integrations.layers import Fp4Linear, prepared, quantized
from jitfp4.integrations.transformers import Nvfp4Cache, register
from jitfp4.integrations.transformers.cache import PAGE, Nvfp4Layer
from jitfp4.integrations.transformers.quantizer import fuse_siblings
from jitfp4.weight import CODE_BYTES, Fp4Weight

MODELS: dict[str, tuple[ModuleType, Callable[[], Any]]] = {
    "llama-3.1-8b": (
        modeling_llama,
        lambda: transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
        ),
    ),
    "qwen3-8b": (
        modeling_qwen3,
        lambda: transformers.Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
        ),
    ),
    "tiny": (
        modeling_qwen3,
        lambda: transformers.Qwen3Config(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
        ),
    ),
}
VARIANTS = ("bf16", "w4", "w4-kv4", "w4-kv4-head4", "transformers")
PARTS = {
    "linear": ("gemm", "gemv", "cutlass", "nvjet", "splitK", "cublas"),
    "attention": ("attention_", "flash", "fmha", "sdpa"),
    "append": ("kv_quantize", "index_put", "index_copy"),
}
WARM_UP, REPLAYS, PROFILED = 3, 20, 4
READ_BYTES = 4 << 30


class Bf16Layer(Nvfp4Layer):
    """The same pages with keys and values in bf16."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        shape = (*self.keys.shape[:-1], key_states.shape[-1])
        self.keys, self.values = (torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        self.scales = None

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.requests.owner == self.number:
            slots = self.requests.slots
            self.requests.places = slots // PAGE, slots % PAGE
        Bf16Layer.write(self.keys, self.values, *self.requests.places, key, value)

    @staticmethod
    def write(
        keys: torch.Tensor,
        values: torch.Tensor,
        page: torch.Tensor,
        token: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Tokens [n, heads, d] into pages [pages, heads, page, d]."""
        keys[page, :, token] = key
        values[page, :, token] = value


def build(config: Any, variant: str, device: str) -> Any:
    """The model with random weights, made on the device."""
    own = variant == "transformers"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa" if own else "jitfp4"
        )
        for name, linear in list(model.named_modules()):
            fp4 = variant.startswith("w4") and (name != "lm_head" or variant.endswith("head4"))
            if fp4 and type(linear) is nn.Linear:
                parent, _, child = name.rpartition(".")
                layer = Fp4Linear(linear.in_features, linear.out_features, linear.bias is not None, torch.bfloat16)
                setattr(model.get_submodule(parent), child, layer)
    model = model.to_empty(device=device).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    for module in model.modules():
        if isinstance(module, Fp4Linear):
            fill(module)
    fuse_siblings(model)
    return model.requires_grad_(False)


def fill(layer: Fp4Linear) -> None:
    """Random codes, and scales that keep the size of what is multiplied."""
    device = layer.weight.device
    one = prepared(quantized(torch.ones(64, layer.in_features, device=device)))
    data = torch.randint(0, 256, layer.weight.shape, dtype=torch.uint8, device=device)
    data[..., CODE_BYTES:] = one.data[..., CODE_BYTES:]
    ones = float(one.dequantize()[0, 0]) / 6  # what a code of 1 stands for
    alpha = 2.0 ** round(torch.log2(torch.tensor(layer.in_features**-0.5 / (3 * ones))).item())
    size = -(-layer.out_features // 8) * 8
    layer.assign(Fp4Weight(data, None, size, one.k, NVFP4), torch.tensor([alpha], device=device))


def glued(modeling: ModuleType, plain: bool) -> Any:
    """A context in which the models of a module have fewer and larger kernels between their products."""
    if plain:
        return nullcontext()
    functions = (rotated, swiglu_of, Bf16Layer.write)
    turn, swiglu, write = (torch.compile(function, dynamic=True, fullgraph=True) for function in functions)
    name = modeling.__name__.rpartition("_")[2].capitalize()
    norm, mlp = getattr(modeling, f"{name}RMSNorm"), getattr(modeling, f"{name}MLP")
    return patched(
        (modeling, "apply_rotary_pos_emb", turn),
        (Bf16Layer, "write", staticmethod(write)),
        (norm, "forward", lambda m, x: functional.rms_norm(x, x.shape[-1:], m.weight, m.variance_epsilon)),
        (mlp, "forward", lambda m, x: m.down_proj(swiglu(m.gate_proj(x), m.up_proj(x)))),
    )


def swiglu_of(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What the last product of an MLP gets."""
    return functional.silu(gate) * up


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by positions."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-two, one), -1) * sin.unsqueeze(1)

    return turn(q), turn(k)


class patched:  # noqa: N801 - reads as a context
    """Attributes that have other values inside."""

    def __init__(self, *values: tuple[Any, str, Any]) -> None:
        self.values = values

    def __enter__(self) -> None:
        self.before = [(owner, name, owner.__dict__[name]) for owner, name, _ in self.values]
        for owner, name, value in self.values:
            setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        for owner, name, value in self.before:
            setattr(owner, name, value)


def cache_of(model: Any, variant: str, batch: int, context: int, device: str) -> Any:
    """A cache that holds ``context`` tokens of each request, random ones."""
    config = model.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    room = -(-(context + WARM_UP + REPLAYS + PROFILED + 8) // PAGE) * PAGE
    if variant == "transformers":
        cache = transformers.StaticCache(config=config, max_cache_len=room)
        cache.early_initialization(batch, heads, head_dim, torch.bfloat16, torch.device(device))
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)
        return cache
    cache = Nvfp4Cache(config, room, [(0.01, 0.01)] * config.num_hidden_layers)
    if "kv4" not in variant:
        cache.layers = [Bf16Layer(room, layer.number, layer.shared, None) for layer in cache.layers]
    empty = torch.zeros(batch, heads, 0, head_dim, dtype=torch.bfloat16, device=device)
    for layer in cache.layers:
        layer.lazy_initialization(empty, empty)
        for pages in (layer.keys, layer.values):
            pages.random_(256) if pages.dtype == torch.uint8 else pages.normal_()
        for scales in layer.scales or ():
            scales.fill_(1.0)
    cache.layers[0].requests.lengths.fill_(context)
    return cache


class Step:
    """A token of each request: tokens [batch, 1] and positions are replaced by the next ones."""

    def __init__(self, model: Any, cache: Any, batch: int, context: int, device: str) -> None:
        self.model, self.cache = model, cache
        self.tokens = torch.randint(0, model.config.vocab_size, (batch, 1), device=device)
        self.positions = torch.full((batch, 1), context, dtype=torch.int64, device=device)

    def __call__(self) -> None:
        logits = self.model(self.tokens, position_ids=self.positions, past_key_values=self.cache).logits
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.positions.add_(1)

    def graph(self) -> Callable[[], None]:
        """A function that does the same by one launch."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


def time_ms(call: Callable[[], None], device: str) -> float:
    """The median of REPLAYS calls; on the CPU, one."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    call()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def parts_us(call: Callable[[], None]) -> dict[str, float]:
    """Microseconds of kernels of one call, by part."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    spent = dict.fromkeys((*PARTS, "other"), 0.0)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            part = next((p for p, words in PARTS.items() if any(word in event.name for word in words)), "other")
            spent[part] += event.device_time_total / PROFILED
    return spent


def bytes_read(model: Any, cache: Any, context: int) -> int:
    """Of a step: all weights but the embedding, which is looked up, and keys and values so far."""
    seen: dict[int, int] = {}
    embedding = model.get_input_embeddings().weight
    for tensor in (
        *model.parameters(),
        *(module.weight for module in model.modules() if isinstance(module, Fp4Linear)),
    ):
        if tensor is not embedding:
            seen[tensor.data_ptr()] = tensor.nbytes
    layers = [(layer.keys, layer.values, *(getattr(layer, "scales", None) or ())) for layer in cache.layers]
    held = sum(part.nbytes for layer in layers for part in layer)
    return sum(seen.values()) + held * context // cache.layers[0].max_cache_len


def read_bandwidth(device: str) -> float:
    """Bytes a second of a reduction over much memory."""
    x = torch.zeros((READ_BYTES if device != "cpu" else 1 << 20) // 4, device=device)
    times = [time_ms(lambda: x.amax(), device) for _ in range(3)]
    return 1e3 * x.nbytes / min(times)


def measure(model: Any, variant: str, batch: int, context: int, bandwidth: float, device: str) -> dict[str, object]:
    """One line."""
    cache = cache_of(model, variant, batch, context, device)
    step = Step(model, cache, batch, context, device)
    if device == "cpu":
        step()
        call, parts = step, dict.fromkeys((*PARTS, "other"), 0.0)
        ms = time_ms(call, device)
    else:
        call = step.graph()
        ms, parts = time_ms(call, device), parts_us(call)
    bound = 1e3 * bytes_read(model, cache, context) / bandwidth
    row = {"ms": round(ms, 3), "tokens_per_s": round(1e3 * batch / ms, 1), "bound_ms": round(bound, 3)}
    row |= {f"{part}_us": round(us, 1) for part, us in parts.items()}
    row["gaps_us"] = round(max(0.0, 1e3 * ms - sum(parts.values())), 1)
    row["memory_gib"] = 0.0 if device == "cpu" else round(torch.cuda.memory_allocated() / 2**30, 2)
    return row


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama-3.1-8b", "qwen3-8b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--context", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS[:-1]))
    parser.add_argument("--glue", choices=("compiled", "plain"), default="compiled")
    parser.add_argument("--seconds", type=float, default=170, help="begin no case later than this")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/h200")
    options = parser.parse_args()
    start, rows, left = time.perf_counter(), [], 0
    register()
    bandwidth = read_bandwidth(options.device)
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in options.model:
        modeling, config = MODELS[name]
        for variant in options.variant:
            with glued(modeling, options.glue == "plain" or variant == "transformers"):
                model = build(config(), variant, options.device)
                for batch in options.batch:
                    for context in options.context:
                        if time.perf_counter() - start > options.seconds:
                            left += 1
                            continue
                        row = {"model": name, "variant": variant, "glue": options.glue, "batch": batch}
                        row |= {"context": context}
                        row |= measure(model, variant, batch, context, bandwidth, options.device)
                        rows.append(row)
                        gc.collect()
                        text = " ".join(f"{key}={value}" for key, value in row.items())
                        print(f"{time.perf_counter() - start:5.0f} s {text}", flush=True)
                del model
                gc.collect()
                if options.device != "cpu":
                    torch.cuda.empty_cache()
    if left:
        print(f"{left} cases were not measured: {options.seconds} s had passed")
    write_results(options.out / "model", rows, stamp() | {"read_bandwidth": bandwidth})


if __name__ == "__main__":
    main()
