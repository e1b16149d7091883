"""Generate with nano-vllm, a whole small engine, on jitfp4: its attention, an NVFP4 cache and FP4 weights.

    git clone https://github.com/GeeeekExplorer/nano-vllm
    python examples/nano_vllm.py nano-vllm [MODEL] [--cache nvfp4|bf16] [--weights nvfp4|nvfp4-head|bf16]
        [--glue jitfp4|own] [--case REQUESTS:PROMPT ...] [--new 128] [--json]

Needs a GPU, transformers and xxhash, but not flash-attn. MODEL is a folder with a Qwen3 checkpoint in bf16; without it,
the configuration of Qwen3-8B and random weights. Prompts are random tokens, PROMPT of them for each request, and are
read once: later runs find them in the cache of prefixes. Prints tokens a second of decoding, which is that of whole
runs with many new tokens and with few, the difference divided.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from jitfp4.integrations.nano_vllm import install

FEW = 8  # new tokens of the short run


def random_weights(model: torch.nn.Module, _: str) -> None:
    """Weights that keep the size of what they multiply."""
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)


def random_model(folder: Path) -> None:
    """The configuration of Qwen3-8B."""
    config: Any = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)


def case(text: str) -> tuple[int, int]:
    """Requests and tokens of a prompt."""
    requests, _, prompt = text.partition(":")
    return int(requests), int(prompt)


def decoding(llm: Any, parameters: Any, requests: int, prompt: int, new: int) -> float:
    """Seconds of a step that gives each request a token."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 10000, (requests, prompt), generator=generator).tolist()
    seconds = []
    for tokens in (FEW, FEW, FEW, new):  # the second finds the prompt in the cache of prefixes
        torch.cuda.synchronize()
        start = time.perf_counter()
        wanted = parameters(temperature=0.6, ignore_eos=True, max_tokens=tokens)
        outs = llm.generate(prompts, wanted, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        assert all(len(out["token_ids"]) == tokens for out in outs)
    return (seconds[3] - seconds[2]) / (new - FEW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="of nano-vllm")
    parser.add_argument("model", nargs="?", type=Path, help="a folder")
    parser.add_argument("--cache", choices=("nvfp4", "bf16"), default="nvfp4")
    parser.add_argument("--weights", choices=("nvfp4", "nvfp4-head", "bf16"), default="nvfp4")
    parser.add_argument("--glue", choices=("jitfp4", "own"), default="jitfp4", help="norms and rotations")
    parser.add_argument("--case", nargs="+", type=case, default=[(64, 512)], metavar="REQUESTS:PROMPT")
    parser.add_argument("--new", type=int, default=128, help="tokens that are generated for each request")
    parser.add_argument("--json", action="store_true", help="print a JSON document for each case")
    options = parser.parse_args()
    if options.new <= FEW:
        parser.error(f"--new must be more than {FEW}")
    sys.path.insert(0, str(options.repository))
    load = None if options.model else random_weights
    fp4, head = options.weights != "bf16", options.weights == "nvfp4-head"
    glue = options.glue == "jitfp4"
    install(fp4_weights=fp4, fp4_head=head, glue=glue, cache=options.cache, load_weights=load)
    from nanovllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as made:
        folder = options.model or Path(made)
        if not options.model:
            random_model(folder)
            tokenizer = SimpleNamespace(eos_token_id=-1, decode=str)
            transformers.AutoTokenizer.from_pretrained = lambda *_, **__: tokenizer
        start = time.perf_counter()
        longest = max(prompt for _, prompt in options.case) + options.new + 1
        llm = LLM(str(folder), max_model_len=longest, max_num_seqs=max(requests for requests, _ in options.case))
        ready = time.perf_counter() - start
    for requests, prompt in options.case:
        step = decoding(llm, SamplingParams, requests, prompt, options.new)
        result = {"weights": options.weights, "cache": options.cache, "glue": options.glue}
        result |= {"requests": requests, "prompt": prompt, "new": options.new, "ready_s": round(ready, 1)}
        result |= {"tokens_per_s": round(requests / step, 1), "ms_per_step": round(1e3 * step, 3)}
        text = json.dumps(result) if options.json else " ".join(f"{name}={value}" for name, value in result.items())
        print(text, flush=True)


if __name__ == "__main__":
    main()
