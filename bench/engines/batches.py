"""Continuous batching of transformers, ``generate_batch()``: in bf16, with FP4 weights, and over NVFP4 pages.

    python -m bench.engines.batches [--model llama-3.1-8b] [--variant bf16 w4 w4-kv4] [--case 64:512]
        [--new 96] [--device cuda] [--out DIR]

Needs transformers 5.23. Weights are random, prompts are random tokens. ``bf16`` and ``w4``, FP4 weights, have
transformers' own cache and paged attention (``sdpa``); ``w4-kv4`` has jitfp4's, over NVFP4. A step is the median time
between two tokens of a request, of the second half of its tokens: all prompts are read then. ``s_all`` are the seconds
of the whole call, with what transformers prepares for it. CUDA graphs are transformers' choice for each variant.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.bench_model import case, give_back
from bench.harness import write_results
from bench.models import MODELS, build
from bench.stamp import stamp
from jitfp4.integrations.transformers import register
from jitfp4.integrations.transformers.batches import nvfp4_batches

VARIANTS = ("bf16", "w4", "w4-kv4")
PAGE, STEP, LEAST = 128, 4096, 8  # tokens of a page, of a step, and new ones


def seconds(model: Any, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """Of a step, and of a whole call."""
    pages = sum(-(-(len(prompt) + new) // PAGE) + 1 for prompt in prompts)
    options = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)
    batching = transformers.ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages, max_batch_tokens=STEP)
    begun = time.perf_counter()
    outs = model.generate_batch(
        prompts, generation_config=options, continuous_batching_config=batching, record_timestamps=True
    )
    took = time.perf_counter() - begun
    assert [len(out.generated_tokens) for out in outs.values()] == [new] * len(prompts)
    late = [out.timestamps[new // 2 :] for out in outs.values()]
    return statistics.median(b - a for times in late for a, b in itertools.pairwise(times)), took


def measured(model: Any, variant: str, requests: int, context: int, new: int) -> dict[str, object]:
    """One line."""
    made = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, model.config.vocab_size, (requests, context), generator=made).tolist()
    layers = model.config.num_hidden_layers
    model.set_attn_implementation("jitfp4" if variant == "w4-kv4" else "sdpa")
    with nvfp4_batches(model, [(0.01, 0.01)] * layers) if variant == "w4-kv4" else nullcontext():
        seconds(model, prompts, new)
        step, took = seconds(model, prompts, new)
    times = {"ms_per_step": round(1e3 * step, 3), "tokens_per_s": round(requests / step, 1), "s_all": round(took, 3)}
    return {"requests": requests, "prompt": context, "new": new} | times


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--case", nargs="+", type=case, default=[(64, 512)], metavar="REQUESTS:PROMPT")
    parser.add_argument("--new", type=int, default=96, help="tokens that are generated for each request")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    if options.new < LEAST:
        parser.error(f"--new must be at least {LEAST}")
    register()
    origin, rows = stamp() | {"transformers": transformers.__version__}, []
    for variant in options.variant:
        model = build(MODELS[options.model].config(), variant, options.device)
        for requests, context in options.case:
            line = measured(model, variant, requests, context, options.new)
            rows.append({"model": options.model, "variant": variant} | line)
            write_results(options.out / "batches", rows, origin)
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
        del model
        give_back(options.device)


if __name__ == "__main__":
    main()
