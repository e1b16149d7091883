"""Small random checkpoints for SGLang, and whether its logits are those of their weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.engines.models import COMMON, LLAMA, QWEN3_MOE

SMALL: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 4096}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 2048}
CHECKED = {
    "small-llama": COMMON | LLAMA | SMALL,
    "small-qwen3": COMMON | LLAMA | SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "small-qwen3-moe": COMMON | QWEN3_MOE | SMALL | {"num_experts": 16, "moe_intermediate_size": 256},
}
STD = 0.06  # of weights, as wide for this width as 0.02 is for 4096
DECODE = 2.0**-6  # the global scale: codes of 2.9 times scales of 1.3 get the spread of STD, and bf16 holds them
PROMPTS = (1, 16, 65, 128, 300)  # tokens
TOKENS = 24
PROBED = list(range(7, 4096, 37))  # tokens whose logits are compared
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS | {"symmetric": True, "dynamic": False}, "input_activations": None}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": GROUP | {"format": "nvfp4-pack-quantized"}},
    },
}
KEPT = {"modelopt": ["lm_head", "*.mlp.gate"], "compressed-tensors": ["lm_head", "re:.*mlp[.]gate$"]}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def matrices(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Names and sizes [n, k] of FP4 matrices."""
    hidden, d = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    experts, inter = config.get("num_experts"), config.get("moe_intermediate_size", config["intermediate_size"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield from (
            (f"{at}self_attn.{name}_proj", n, hidden) for name, n in zip("qkv", (queries, keys, keys), strict=True)
        )
        yield f"{at}self_attn.o_proj", hidden, queries
        for place in [f"{at}mlp"] if experts is None else [f"{at}mlp.experts.{expert}" for expert in range(experts)]:
            yield from ((f"{place}.{name}_proj", inter, hidden) for name in ("gate", "up"))
            yield f"{place}.down_proj", hidden, inter


def others(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What stays in bf16."""
    hidden, d, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    tensors = {f"{name}.weight": STD * torch.randn(vocab, hidden) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config["model_type"] != "llama":
            norms |= {"self_attn.q_norm": d, "self_attn.k_norm": d}
        tensors |= {f"{at}{name}.weight": 1 + 0.1 * torch.randn(size) for name, size in norms.items()}
        if "num_experts" in config:
            tensors[f"{at}mlp.gate.weight"] = STD * torch.randn(config["num_experts"], hidden)
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def write_checkpoints(model: str, folder: Path) -> None:
    """Folders ``modelopt``, ``compressed-tensors`` and ``bf16`` with the same values."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = CHECKED[model]
    kept = others(config)
    tensors = {form: dict(kept) for form in (*QUANTIZATION, "bf16")}
    for name, n, k in matrices(config):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        scales = (torch.rand(n, k // 16) * 1.5 + 0.5).to(torch.float8_e4m3fn)
        values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()].unflatten(1, (-1, 16))
        exact = (values * scales.float().unsqueeze(-1)).flatten(1) * DECODE
        assert torch.equal(exact.bfloat16().float(), exact)
        tensors["bf16"][f"{name}.weight"] = exact.bfloat16()
        own = {
            "weight": codes,
            "weight_scale": scales,
            "weight_scale_2": torch.tensor(DECODE),
            "input_scale": torch.tensor(1.0),
        }
        tensors["modelopt"] |= {f"{name}.{part}": tensor.clone() for part, tensor in own.items()}
        own = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": torch.tensor([1 / DECODE])}
        tensors["compressed-tensors"] |= {f"{name}.{part}": tensor for part, tensor in own.items()}
    for form, given in tensors.items():
        (folder / form).mkdir(parents=True)
        save_file(given, folder / form / "model.safetensors", {"format": "pt"})
        quantization = {} if form == "bf16" else {"quantization_config": QUANTIZATION[form] | {"ignore": KEPT[form]}}
        (folder / form / "config.json").write_text(json.dumps(config | quantization))


def logits(entries: list[Any]) -> torch.Tensor:
    """[tokens, PROBED] of SGLang's lists."""
    return torch.tensor([[found[0] for found in sorted(step, key=lambda found: found[1])] for step in entries])


def checked(
    model: str, name: str, folder: Path, engine_of: Callable[..., Any], attention: str, ready: Callable[[], None]
) -> None:
    """Run a checkpoint of ``folder``: what it generates; and, in bf16, what the others generated, as prompts.

    ``ready`` is called when the engine is ready, and returns at its turn, which is that of bf16 after the others.
    """
    engine, seconds = engine_of(folder, attention, max_total_tokens=16384)
    print(f"READY {model} {name}: {seconds:.1f} s", flush=True)
    ready()
    prompts = [
        [(7 * request + 13 * place) % 4000 + 10 for place in range(size)] for request, size in enumerate(PROMPTS)
    ]
    probed: dict[str, Any] = {"return_logprob": True, "token_ids_logprob": [PROBED] * len(PROMPTS)}

    def generate(given: list[list[int]], tokens: int, since: list[int]) -> list[dict[str, Any]]:
        wanted = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        settings = {"sampling_params": wanted, "logprob_start_len": since, **probed}
        answers: list[dict[str, Any]] = engine.generate(input_ids=given, **settings)
        return answers

    answers = generate(prompts, TOKENS, [size - 1 for size in PROMPTS])
    tokens = [answer["output_ids"] for answer in answers]
    found = [logits(answer["meta_info"]["output_token_ids_logprobs"]) for answer in answers]
    torch.save({"name": name, "tokens": tokens, "logits": found}, folder.with_suffix(".pt"))
    print(f"READY {model} {name}: first tokens {[one[:8] for one in tokens]}", flush=True)
    if folder.name == "bf16":
        for file in sorted(folder.parent.glob("*.pt")):
            read = torch.load(file)
            given = [first + more for first, more in zip(prompts, read["tokens"], strict=True)]
            answers = generate(given, 1, [0] * len(PROMPTS))
            # entry i of a prompt is what its first i tokens say of the next
            steps = [
                logits(answer["meta_info"]["input_token_ids_logprobs"][size:])
                for answer, size in zip(answers, PROMPTS, strict=True)
            ]
            torch.save(steps, file.with_suffix(".read"))
    engine.shutdown()


def compared(model: str, folder: Path) -> None:
    """Print cosines of logits less their mean, and how many tokens are the largest logit of both."""
    for file in sorted(folder.glob("*.read")):
        generated, read = torch.load(file.with_suffix(".pt")), torch.load(file)
        pairs = list(zip(generated["logits"], read, strict=True))
        one, other = (torch.cat(side).double() for side in zip(*pairs, strict=True))
        one, other = (side - side.mean(-1, keepdim=True) for side in (one, other))
        cosines = torch.nn.functional.cosine_similarity(one, other, dim=-1)
        same = int((one.argmax(-1) == other.argmax(-1)).sum())
        text = f"{model} {generated['name']} {file.stem} to bf16: least {cosines.min():.5f} mean {cosines.mean():.5f}"
        print(f"COSINE {text}, largest of {same} of {len(cosines)}", flush=True)
