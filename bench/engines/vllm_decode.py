"""Decode steps of whole models in vLLM: in bf16, with vLLM's own FP4 kernels, and with jitfp4's plugin.

    python -m bench.engines.vllm_decode [--model llama-3.1-8b qwen3-30b-a3b] [--variant bf16 own plugin plugin-kv]
        [--layers 32] [--batch 1 8 64] [--context 16] [--profile [VARIANT ...]] [--limit 110] [--out DIR]
        [--together GIB]
        [--check [--layers-too] [--given-routes] [--chunk 512]]

A step is the difference between generating 160 tokens and 32, divided by 128: prompts do not count. ``ms_first`` is the
time of a first token of all requests: their prompts are read, or found in the cache of prefixes where they are longer
than 2048 tokens. Weights are random, and the same for every variant. Runs are forks of this process and share its
imports. ``vllm.csv`` has a line for a model, a variant and a batch, and with ``--profile`` ``vllm_kernels.csv`` has the
kernels of a step, of all variants or of those that are named. Lines are written after each variant. With
``--together`` the engines of all variants start at once, and each is measured while the others wait on the same GPU.

``--check`` measures nothing. It compares logits of the same requests between variants: prompts of 1 to 700 tokens in
chunks of 512 (``--chunk``), then decode steps of six requests in graphs of eight, in which every variant is given the
same tokens. plugin-kv is right where it is much nearer to own-rounded than both are to own. The engines of all
variants start at once. With ``--layers-too`` outputs of each layer are compared, too, where steps are not in graphs.
With ``--given-routes`` routers choose the same experts in every variant, without graphs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.engines import layer_outputs
from bench.engines.forks import begun, finished, wait_for
from bench.engines.models import MODELS, VARIANTS, engine_of, set_environment
from bench.harness import write_results
from bench.stamp import stamp

FEW, MANY, ROUNDS = 32, 160, 2
FEW_LONG, MANY_LONG = 8, 40
PROFILED = (8, 40)  # tokens
KERNELS = 16  # of a profile
PROMPTS, MORE = (1, 16, 65, 128, 300), 188  # tokens; of the last prompt MORE than a chunk
FORCED = 24
PROBED = list(range(77, 128256, 1002))  # tokens whose logits are compared
NOISE = 2.0**-9  # of a number in bf16; it moves about one in seven
PAIRS = (
    ("plugin", "own"),
    ("plugin", "values"),
    ("own", "values"),
    ("values-noise", "values"),
    ("values-rounded", "values"),
    ("plugin-kv", "values-rounded"),
    ("plugin-fp8", "plugin"),
    ("plugin-attention", "own"),
    ("plugin-kv", "own-rounded"),
    ("plugin-kv", "plugin-rounded"),
    ("plugin-rounded", "plugin"),
    ("own-rounded", "own"),
    ("plugin-kv", "own"),
    ("plugin-2", "plugin"),
    ("plugin-kv-2", "plugin-kv"),
    ("bf16-compiled", "bf16"),
    ("plugin-compiled", "plugin"),
    ("plugin-kv-compiled", "plugin-kv"),
)
EARLY = ("vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_worker")
Rows = list[dict[str, object]]


def prompt(request: int, tokens: int) -> dict[str, list[int]]:
    """A prompt that no other request begins with."""
    return {"prompt_token_ids": [(7 * request + 13 * place) % 31000 + 10 for place in range(tokens)]}


def loaded(worker: Any) -> int:
    """Kernels of jitfp4 that a process of vLLM has loaded."""
    del worker
    from jitfp4 import engine

    return engine.loaded()


def measured(model: str, name: str, options: argparse.Namespace, folder: Path) -> dict[str, Rows]:
    """Lines of one variant of a model."""
    from vllm import SamplingParams

    changes: dict[str, Any] = {}
    if options.together is not None:
        changes = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": int(options.together * 2**30)}
    llm, ready = engine_of(model, name, options.layers, options.context, **changes)
    layers = options.layers or MODELS[model]["num_hidden_layers"]
    before = llm.collective_rpc(loaded)
    print(f"READY {model} {name}: {ready:.1f} s, kernels of ranks {before}", flush=True)
    (folder / f"{model} {name}.ready").touch()
    while options.together is not None and not (folder / f"{model} {name}.turn").exists():
        time.sleep(0.05)
    long = options.context > 2048
    few, many = (FEW_LONG, MANY_LONG) if long else (FEW, MANY)

    def run(batch: int, tokens: int) -> float:
        prompts = [prompt(request, options.context) for request in range(batch)]
        wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        llm.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - begun

    found: dict[str, Rows] = {"vllm": [], "vllm_kernels": []}
    for batch in options.batch:
        run(batch, few)
        least = [min(run(batch, tokens) for _ in range(ROUNDS)) for tokens in (few, many)]
        step = (least[1] - least[0]) / (many - few)
        row = {"model": model, "variant": name, "layers": layers, "batch": batch, "prompt": options.context}
        first = min(run(batch, 1) for _ in range(ROUNDS))
        times = {"ms_first": f"{first * 1e3:.2f}", "ms_per_step": f"{step * 1e3:.3f}"}
        times["tokens_per_s"] = f"{batch / step:.0f}"
        state = {"ready_s": f"{ready:.1f}", "loaded_after_ready": sum(llm.collective_rpc(loaded)) - sum(before)}
        found["vllm"].append(row | times | state)
        print("RESULT", found["vllm"][-1], flush=True)
        if options.profile is not None and name in (options.profile or [name]):
            found["vllm_kernels"] += [row | kernel for kernel in profiled(run, batch)]
    return found


def profiled(run: Callable[[int, int], float], batch: int) -> Rows:
    """The kernels of a step that take longest: totals of a long run less those of a short one."""
    run(batch, 2)
    few, many = (_totals(run, batch, tokens) for tokens in PROFILED)
    steps = PROFILED[1] - PROFILED[0]
    rows = []
    for kernel, (count, nanoseconds) in many.items():
        count, nanoseconds = count - few.get(kernel, (0, 0))[0], nanoseconds - few.get(kernel, (0, 0))[1]
        rows.append((nanoseconds / steps / 1e3, count / steps, kernel))
    rows = sorted(rows, reverse=True)[:KERNELS]
    return [{"kernel": kernel, "us_per_step": f"{us:.1f}", "launches": f"{count:.1f}"} for us, count, kernel in rows]


def _totals(run: Callable[[int, int], float], batch: int, tokens: int) -> dict[str, tuple[int, int]]:
    """Launches and nanoseconds by kernel."""
    from torch.autograd import DeviceType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(batch, tokens)
        torch.cuda.synchronize()
    found: dict[str, tuple[int, int]] = {}
    for event in profile.profiler.kineto_results.events():
        name = event.name().replace("void ", "").split("(")[0].split("<")[0]
        if event.device_type() == DeviceType.CUDA and not name.startswith(("ProfilerStep", "execute_", "gpu_model")):
            count, nanoseconds = found.get(name, (0, 0))
            found[name] = count + 1, nanoseconds + event.duration_ns()
    return found


def logits(model: str, name: str, options: argparse.Namespace) -> torch.Tensor:
    """Of each request, each of its tokens, and each of PROBED: [requests, FORCED, PROBED]."""
    from vllm import SamplingParams

    prompts = [prompt(request, tokens) for request, tokens in enumerate((*PROMPTS, options.chunk + MORE))]
    longest, hooked = options.chunk + 512, VARIANTS[name].rounds or VARIANTS[name].noise
    small: dict[str, Any] = {"max_num_batched_tokens": options.chunk, "max_model_len": longest, "max_num_seqs": 8}
    small |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 << 30}  # others use the GPU, too
    eager = hooked or options.given_routes
    small |= {"logprobs_mode": "raw_logits", "max_logprobs": len(PROBED), "enforce_eager": eager}
    llm, ready = engine_of(model, name, options.layers, 0, **small)
    before = llm.collective_rpc(loaded)
    print(f"READY {model} {name}: {ready:.1f} s, kernels of ranks {before}", flush=True)
    if hooked:
        llm.apply_model(round_keys_and_values if VARIANTS[name].rounds else add_noise)
    if options.given_routes:
        llm.apply_model(partial(layer_outputs.give_routes, rows=options.chunk))
    if options.layers_too:
        llm.apply_model(layer_outputs.watch)
    wanted = [
        SamplingParams(
            max_tokens=FORCED,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprob_token_ids=PROBED,
            allowed_token_ids=[1000 + 17 * request],
        )
        for request in range(len(prompts))
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, wanted, use_tqdm=False)]
    for request, output in enumerate(outputs):
        assert set(output.token_ids) == {1000 + 17 * request}, "a request got a token that was not its own"
    print(f"READY {model} {name}: loaded since {llm.collective_rpc(loaded)}", flush=True)
    return torch.tensor([[[step[token].logprob for token in PROBED] for step in one.logprobs] for one in outputs])


def round_keys_and_values(model: torch.nn.Module) -> None:
    """Let attention layers get keys and values as an NVFP4 cache of scale 1 would hold them, rounded on the CPU."""
    layers = [module for module in model.modules() if type(module).__name__ == "Attention"]
    assert layers, "the model has no attention layers"
    for layer in layers:
        layer.register_forward_pre_hook(_rounds)


def _rounds(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    query, key, value, *others = arguments
    return query, rounded(key, module.head_size), rounded(value, module.head_size), *others


def add_noise(model: torch.nn.Module) -> None:
    """Let outputs of linear layers and experts be off by NOISE of themselves, rounded again, as other kernels' are."""
    layers = [
        module for module in model.modules() if hasattr(module, "quant_method") or hasattr(module, "routed_experts")
    ]
    assert layers, "the model has no linear layers"
    for layer in layers:
        layer.register_forward_hook(_with_noise)


def _with_noise(_module: Any, _arguments: Any, out: Any) -> None:
    for part in out if isinstance(out, tuple) else (out,):
        if part is not None:
            exact = part.float()
            part.copy_(exact * (1 + NOISE * torch.randn_like(exact)))


def rounded(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """``rows`` [tokens, heads * head_dim] or [tokens, heads, head_dim] as NVFP4 holds them."""
    from jitfp4 import nvfp4_kv_dequantize, nvfp4_kv_quantize

    codes, scales = nvfp4_kv_quantize(rows.reshape(-1, head_dim).cpu(), 1.0)
    return nvfp4_kv_dequantize(codes, scales, 1.0).view(rows.shape).to(rows)


def cosines(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of logits less their mean, for each request and token."""
    one, other = (side.double() - side.double().mean(-1, keepdim=True) for side in (one, other))
    return torch.nn.functional.cosine_similarity(one, other, dim=-1)


def compared(model: str, name: str, others: Collection[str], folder: Path) -> None:
    """Print the cosines of a variant and others that ran before it."""
    for pair in (pair for pair in PAIRS if name in pair and not {*pair} - {name, *others}):
        found = cosines(*(torch.load(folder / f"{model} {name}.pt") for name in pair))
        text = f"prompts least {found[:, 0].min():.5f} mean {found[:, 0].mean():.5f}"
        text += f", steps least {found[:, 1:].min():.5f} mean {found[:, 1:].mean():.5f}"
        print(f"COSINE {model} {pair[0]} to {pair[1]}: {text}", flush=True)
        files = [folder / f"{model} {name}.layers" for name in pair]
        if all(file.exists() for file in files):
            chosen = MODELS[model].get("num_experts_per_tok", 1)
            lines = layer_outputs.compared(*(torch.load(file) for file in files), chosen)
            print("\n".join(f"LAYER {pair[0]} to {pair[1]}, {line}" for line in lines), flush=True)


def one(model: str, name: str, options: argparse.Namespace, folder: Path) -> None:
    """A variant of a model, in a process of its own."""
    if options.check:
        torch.save(logits(model, name, options), folder / f"{model} {name}.pt")
        if options.layers_too:
            torch.save(layer_outputs.taken(), folder / f"{model} {name}.layers")
    else:
        (folder / f"{model} {name}.json").write_text(json.dumps(measured(model, name, options, folder)))


def write(folder: Path, out: Path, origin: dict[str, object]) -> None:
    """All lines of the variants that have run."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    results = [json.loads(file.read_text()) for file in files]
    for name in ("vllm", "vllm_kernels"):
        if rows := [row for result in results for row in result[name]]:
            write_results(out / name, rows, origin)


def timed(model: str, options: argparse.Namespace, folder: Path, origin: dict[str, object]) -> list[str]:
    """Measure the variants of a model one after the other; returns those that failed."""
    logs = {name: folder / f"{model} {name}.log" for name in options.variant}
    runs = {name: partial(one, model, name, options, folder) for name in options.variant}
    children: dict[str, int] = {}
    if options.together is not None:
        children = {name: begun(run, logs[name]) for name, run in runs.items()}
        for name, child in children.items():
            wait_for(folder / f"{model} {name}.ready", child, options.limit)
    failed = []
    for name, run in runs.items():
        (folder / f"{model} {name}.turn").touch()
        if finished(children.get(name) or begun(run, logs[name]), logs[name], options.limit):
            failed.append(name)
        else:
            write(folder, options.out, origin)
    return failed


def checked(model: str, options: argparse.Namespace, folder: Path, _origin: dict[str, object]) -> list[str]:
    """Compare the variants of a model, which run at the same time; returns those that failed."""
    logs = {name: folder / f"{model} {name}.log" for name in options.variant}
    children = {name: begun(partial(one, model, name, options, folder), log) for name, log in logs.items()}
    done: list[str] = []
    for name, child in children.items():
        if finished(child, logs[name], options.limit) == 0:
            compared(model, name, done, folder)
            done.append(name)
    return [name for name in children if name not in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama-3.1-8b"])
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=["bf16", "own", "plugin", "plugin-kv"])
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--profile", nargs="*", choices=VARIANTS, help="the kernels of a step, too")
    parser.add_argument("--check", action="store_true", help="compare logits instead")
    parser.add_argument("--layers-too", action="store_true", help="and outputs of layers")
    parser.add_argument("--given-routes", action="store_true", help="the same experts for every variant")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step that is compared")
    parser.add_argument("--together", type=float, help="start engines at once, with a cache of so many GiB for each")
    parser.add_argument("--limit", type=float, default=110, help="seconds of a variant")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    set_environment()
    for module in EARLY:
        __import__(module)
    if torch.cuda.is_initialized():
        raise SystemExit("vLLM initialised CUDA while it was imported: forks could not use it")
    failed, origin = [], stamp() | {"vllm": version("vllm")}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for model in options.model:
            run = checked if options.check else timed
            failed += [f"{model} {name}" for name in run(model, options, folder, origin)]
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
