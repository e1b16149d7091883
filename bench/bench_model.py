"""Decode steps and prefills of whole models, through transformers: tokens a second, and where the time goes.

    python -m bench.bench_model [--model llama-3.1-8b qwen3-8b] [--case 1:2048 64:8192] [--prefill 8192]
        [--variant bf16 w4 w4-kv4 w4-kv4-head4 transformers] [--layers N] [--glue compiled|plain] [--seconds 170]
        [--name model] [--device cuda]

A step is what ``generate()`` does for a token of each request: the model, the greedy choice, the next positions; on a
GPU, one CUDA graph that is replayed. Configurations are those of the published models, weights are random and made on
the device. Lines of ``model.csv`` differ in what is in FP4, and in nothing else: ``bf16`` nothing, ``w4`` the linear
layers and experts in NVFP4, ``w4-kv4`` keys and values too, ``w4-kv4-head4`` the head too. All four read keys and
values by jitfp4's paged attention. What is in FP4 has the glue that the integration gives it: norms, rotations with
the append, SwiGLU and sums in kernels of jitfp4. For ``bf16``, ``--glue compiled`` is torch's RMSNorm, and
torch.compile for rotations, SwiGLU and the writing of pages; ``plain`` is transformers' own code. ``transformers`` is
its own cache and attention with ``plain`` glue, in bf16, and is not among the variants by default. The others have
layers of gated delta rules, and the norms of models that have such layers, in kernels of jitfp4.

With ``--layers``, models have only their first ones, and names that say so. What the GPU's memory has no room for is
printed and has no line. ``--name`` is that of the files, and ``model`` without it.

With ``--prefill``, ``model_prefill.csv`` has a line for each number of tokens of one request's prompt, which is read at
once into an empty cache; its kernels are launched one by one.

``bound_ms`` is the time to read the step's bytes once (weights, keys and values, states of linear attention, which are
written too) at the read bandwidth of the same run.
Parts are microseconds of kernels by their names; ``gaps`` is what no kernel of the step accounts for.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from bench.harness import write_results
from bench.models import MODELS, build, glued, patched
from bench.stamp import stamp
from jitfp4.integrations.transformers import Nvfp4Cache, register
from jitfp4.integrations.transformers.cache import PAGE, Nvfp4Layer

VARIANTS = ("bf16", "w4", "w4-kv4", "w4-kv4-head4", "transformers")
PARTS = {
    "experts": ("experts_", "grouped", "Grouped"),
    "linear": ("gemm", "gemv", "cutlass", "nvjet", "splitK", "cublas"),
    "attention": ("attention_", "flash", "fmha", "sdpa"),
    "delta_rule": ("gdn_", "conv_"),
    "append": ("kv_quantize", "rope_append", "index_put", "index_copy"),
}
WARM_UP, REPLAYS, PROFILED = 3, 20, 4
PROMPTS = 2  # read for a time; one more tells the parts
CASES = [(batch, context) for batch in (1, 8, 64) for context in (2048, 8192, 32768)]
READ_BYTES = 4 << 30
LEAST_BYTES = 1 << 12  # of tensors that count


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


def written(plain: bool) -> Any:
    """A context in which pages in bf16 are written by one kernel."""
    if plain:
        return nullcontext()
    return patched((Bf16Layer, "write", staticmethod(torch.compile(Bf16Layer.write, dynamic=True, fullgraph=True))))


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
    count = sum(kind != "linear_attention" for kind in layer_types(config))
    cache = Nvfp4Cache(config, room, [(0.01, 0.01)] * count)
    if "kv4" not in variant:
        cache.layers = [
            Bf16Layer(room, layer.number, layer.shared, None) if isinstance(layer, Nvfp4Layer) else layer
            for layer in cache.layers
        ]
    empty = torch.zeros(batch, heads, 0, head_dim, dtype=torch.bfloat16, device=device)
    paged = [layer for layer in cache.layers if isinstance(layer, Nvfp4Layer)]
    for layer in paged:
        layer.lazy_initialization(empty, empty)
        for pages in (layer.keys, layer.values):
            pages.random_(256) if pages.dtype == torch.uint8 else pages.normal_()
        for scales in layer.scales or ():
            scales.fill_(1.0)
    if len(paged) < len(cache.layers):  # states of linear attention come from tokens
        model(torch.zeros(batch, PAGE, dtype=torch.int64, device=device), past_key_values=cache, logits_to_keep=1)
    paged[0].requests.lengths.fill_(context)
    return cache


def layer_types(config: Any) -> list[str]:
    """The kind of attention of each layer."""
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


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


def time_ms(call: Callable[[], None], device: str, calls: int = REPLAYS) -> float:
    """The median of calls; on the CPU, of one."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    call()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def parts_us(call: Callable[[], None], calls: int) -> dict[str, float]:
    """Microseconds of kernels of one call, by part."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    spent = dict.fromkeys((*PARTS, "other"), 0.0)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            part = next((p for p, words in PARTS.items() if any(word in event.name for word in words)), "other")
            spent[part] += event.device_time_total / calls
    return spent


def bytes_read(model: Any, cache: Any, context: int, batch: int) -> float:
    """Of a step: weights but the embedding, which is looked up; experts as often as random choices take one; tokens."""
    config, embedding = model.config, model.get_input_embeddings().weight
    chosen = getattr(config, "num_experts_per_tok", 0) * batch
    saved = model.state_dict().keys()  # others are copies of these
    total = 0.0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        own = tensor is embedding or tensor.nbytes < LEAST_BYTES or name not in saved
        share = 1 - (1 - 1 / tensor.shape[0]) ** chosen if ".experts." in name and tensor.dim() > 2 else 1.0
        total += 0 if own else share * tensor.nbytes
    for kind, layer in zip(layer_types(config), cache.layers, strict=True):
        if kind == "linear_attention":  # states are written, too
            states = (*layer.conv_states.values(), *layer.recurrent_states.values())
            total += 2 * sum(state.nbytes for state in states)
            continue
        tokens = min(context, config.sliding_window) if kind == "sliding_attention" else context
        held = sum(part.nbytes for part in (layer.keys, layer.values, *(getattr(layer, "scales", None) or ())))
        total += held * tokens / layer.max_cache_len
    return total


def read_bandwidth(device: str) -> float:
    """Bytes a second of a reduction over much memory."""
    x = torch.zeros((READ_BYTES if device != "cpu" else 1 << 20) // 4, device=device)
    times = [time_ms(lambda: x.amax(), device) for _ in range(3)]
    return 1e3 * x.nbytes / min(times)


class Options(NamedTuple):
    """Of lines: what is in FP4, bytes a second that can be read, and the device."""

    variant: str
    bandwidth: float
    device: str


def measure(model: Any, options: Options, batch: int, context: int) -> dict[str, object]:
    """One line of decoding."""
    variant, bandwidth, device = options
    cache = cache_of(model, variant, batch, context, device)
    step = Step(model, cache, batch, context, device)
    if device == "cpu":
        step()
    call = step if device == "cpu" else step.graph()
    ms = time_ms(call, device)
    bound = 1e3 * bytes_read(model, cache, context, batch) / bandwidth
    row = {"ms": round(ms, 3), "tokens_per_s": round(1e3 * batch / ms, 1), "bound_ms": round(bound, 3)}
    return row | parts_of(call, ms, device, PROFILED)


def prefilled(model: Any, options: Options, tokens: int) -> dict[str, object]:
    """One line of reading a prompt."""
    variant, _, device = options
    cache = cache_of(model, variant, 1, tokens, device)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)

    def call() -> None:
        cache.reset()
        model(ids, past_key_values=cache, logits_to_keep=1)

    ms = time_ms(call, device, PROMPTS)
    return {"ms": round(ms, 3), "tokens_per_s": round(1e3 * tokens / ms, 1)} | parts_of(call, ms, device, 1)


def parts_of(call: Callable[[], None], ms: float, device: str, calls: int) -> dict[str, object]:
    """Where the time of a call goes, and the memory that is taken."""
    parts = dict.fromkeys((*PARTS, "other"), 0.0) if device == "cpu" else parts_us(call, calls)
    row: dict[str, object] = {f"{part}_us": round(us, 1) for part, us in parts.items()}
    row["gaps_us"] = round(max(0.0, 1e3 * ms - sum(parts.values())), 1)
    row["memory_gib"] = 0.0 if device == "cpu" else round(torch.cuda.memory_allocated() / 2**30, 2)
    return row


def give_back(device: str) -> None:
    """The GPU's memory of what is held no more."""
    if device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


def if_it_fits(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or None where the GPU's memory has no room for it."""
    try:
        return function(*arguments)
    except torch.OutOfMemoryError:
        return None


def config_of(name: str, layers: int | None) -> tuple[str, Any]:
    """A model's name and configuration, with its first ``layers`` only if that is not None."""
    config = MODELS[name].config()
    if layers is None:
        return name, config
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return f"{name.removesuffix('-80b-a3b')}-{layers}-layers", config


def case(text: str) -> tuple[int, int]:
    """Requests and tokens of each."""
    batch, _, context = text.partition(":")
    return int(batch), int(context)


def cases(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, int], Callable[..., dict[str, object]]]]:
    """What is to be measured of a model: what the file's name ends with, the sizes, and what takes them."""
    for batch, context in options.case:
        yield "", {"batch": batch, "context": context}, measure
    for tokens in options.prefill:
        yield "_prefill", {"tokens": tokens}, prefilled


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama-3.1-8b", "qwen3-8b"])
    parser.add_argument("--case", nargs="*", type=case, default=CASES, metavar="BATCH:CONTEXT")
    parser.add_argument("--prefill", nargs="+", type=int, default=[], help="tokens of prompts")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS[:-1]))
    parser.add_argument("--glue", choices=("compiled", "plain"), default="compiled")
    parser.add_argument("--layers", type=int, help="the first ones only")
    parser.add_argument("--seconds", type=float, default=170, help="begin no case later than this")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--name", default="model", help="of the files (default: model)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/h200")
    options = parser.parse_args()
    start, left = time.perf_counter(), 0
    rows: dict[str, list[dict[str, object]]] = {"": [], "_prefill": []}
    register()
    bandwidth = read_bandwidth(options.device)
    origin = stamp() | {"transformers": transformers.__version__, "read_bandwidth": bandwidth}
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for model_name, variant in itertools.product(options.model, options.variant):
        plain = options.glue == "plain" or variant == "transformers"
        name, config = config_of(model_name, options.layers)
        model = if_it_fits(build, config, variant, options.device)
        with glued(MODELS[model_name], plain), written(plain):
            for file, sizes, line in cases(options):
                if time.perf_counter() - start > options.seconds:
                    left += 1
                    continue
                row: dict[str, object] = {"model": name, "variant": variant, "glue": options.glue} | sizes
                own = Options(variant, bandwidth, options.device)
                found = None if model is None else if_it_fits(line, model, own, *sizes.values())
                give_back(options.device)
                if found is not None:
                    rows[file].append(row | found)
                    write_results(options.out / f"{options.name}{file}", rows[file], origin)
                text = " ".join(f"{key}={value}" for key, value in (row | (found or {"memory": "too little"})).items())
                print(f"{time.perf_counter() - start:5.0f} s {text}", flush=True)
        del model
        give_back(options.device)
    if left:
        print(f"{left} cases were not measured: {options.seconds} s had passed")


if __name__ == "__main__":
    main()
