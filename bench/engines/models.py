"""Models for engines without a checkpoint: configurations, weights that are seeded by name, and engines."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

COMMON: dict[str, Any] = {
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "hidden_act": "silu",
    "attention_bias": True,
}
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
}
MODELS = {
    "llama-3.1-8b": LLAMA,
    "qwen3-30b-a3b": QWEN3_MOE,
    "qwen3-next-80b-a3b": QWEN3_NEXT,
    "gpt-oss-20b": GPT_OSS,
    "gpt-oss-120b": GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
}
OF_CHECKPOINTS = ("llama", "qwen3_moe")  # kinds that get their weights as a checkpoint
_STD = 0.02  # of weights
_EXPERTS = 32  # that are filled at once
_ENCODE = 190.0  # makes the standard deviation of NVFP4 codes that of the weights
_EXPONENTS = (119, 122)  # of UE8M0: likewise for MXFP4 codes
_RATES = (0.01, 16.0)  # of decay: exp(A_log)
_KEPT = ["lm_head", "re:.*mlp[.]gate$", "re:.*shared_expert_gate$", "re:.*in_proj_ba$"]
CAPTURED = (1, 8, 64)  # batches that have a CUDA graph


class Variant(NamedTuple):
    """What runs where."""

    quantized: bool = True
    plugin: bool = False
    backend: str | None = None
    cache: str = "auto"
    rounds: bool = False
    activations: str | None = None
    ranks: int = 1
    values: bool = False
    noise: bool = False
    compiled: bool = False


VARIANTS = {
    "bf16": Variant(quantized=False),
    "bf16-2": Variant(quantized=False, ranks=2),
    "values": Variant(quantized=False, values=True),
    "values-noise": Variant(quantized=False, values=True, noise=True),
    "values-rounded": Variant(quantized=False, values=True, rounds=True),
    "own": Variant(),
    "own-rounded": Variant(rounds=True),
    "plugin": Variant(plugin=True),
    "plugin-fp8": Variant(plugin=True, activations="fp8"),
    "plugin-rounded": Variant(plugin=True, rounds=True),
    "plugin-attention": Variant(plugin=True, backend="CUSTOM"),
    "plugin-kv": Variant(plugin=True, backend="CUSTOM", cache="nvfp4"),
    "plugin-2": Variant(plugin=True, ranks=2),
    "plugin-kv-2": Variant(plugin=True, backend="CUSTOM", cache="nvfp4", ranks=2),
    "bf16-compiled": Variant(quantized=False, compiled=True),
    "plugin-compiled": Variant(plugin=True, compiled=True),
    "plugin-kv-compiled": Variant(plugin=True, backend="CUSTOM", cache="nvfp4", compiled=True),
}
"""``values``: in bf16, the values of the FP4 weights; ``values-noise``: and outputs of layers off by 2^-10,
about as bf16 rounds. ``own``: FP4 weights in vLLM's kernels. ``-rounded``: its cache is rounded to NVFP4.
``plugin``: the weights in jitfp4's kernels, and its norms; ``-fp8``: activations of 512 tokens and more in FP8;
``-attention``: and its attention, over a bf16 cache; ``-kv``: over an NVFP4 cache; ``-2``: divided over two GPUs;
``-compiled``: by torch.compile, as vLLM does by default."""


def config_of(model: str, variant: Variant, layers: int | None = None) -> dict[str, Any]:
    """The model's ``config.json``: gpt-oss has experts in MXFP4, others linear layers and experts in NVFP4."""
    config = COMMON | MODELS[model]
    if layers is not None:
        config["num_hidden_layers"] = layers
    if config["model_type"] == "gpt_oss":
        config["layer_types"] = ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        quantization: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    else:
        form = "nvfp4-pack-quantized"
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        weights |= {"symmetric": True, "dynamic": False}
        group = {"targets": ["Linear"], "format": form, "weights": weights, "input_activations": None}
        quantization = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
        quantization |= {"ignore": _KEPT, "config_groups": {"group_0": group}}
    return config | ({"quantization_config": quantization} if variant.quantized else {"of_fp4": variant.values})


def set_environment() -> None:
    """What vLLM reads from the environment before it is imported: offline, in one process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it would use NVLink's multicast, which shared hosts may forbid
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def seed(model: Any, *, of_fp4: bool = False) -> None:
    """Fill the parameters of a model that an engine made, by their names; with the values of its FP4 form, too.

    vLLM's experts hold their router and their shared expert once more: each is filled once, by its first name.
    """
    for name, parameter in model.named_parameters():
        (fill_values if of_fp4 and in_fp4(name) else fill)(name, parameter.data)


def in_fp4(name: str) -> bool:
    """Whether FP4 variants have codes for this tensor of the model in bf16."""
    layer, _, kind = name.rpartition(".")
    if not kind.endswith("weight") or "norm" in name or layer.endswith(("embed_tokens", "conv1d")):
        return False
    return not any(re.fullmatch(kept.removeprefix("re:").removesuffix("$"), layer) for kept in _KEPT)


def fill_values(name: str, tensor: Any) -> None:
    """What ``fill`` gives the codes and scales of an FP4 variant, as values in ``tensor``'s dtype."""
    import torch

    from jitfp4.reference.formats import decode_e2m1, unpack_e2m1

    *rows, k = tensor.shape
    codes = torch.empty(*rows, k // 2, dtype=torch.uint8, device=tensor.device)
    scales = torch.empty(*rows, k // 16, dtype=torch.float8_e4m3fn, device=tensor.device)
    fill(f"{name}_packed", codes)
    fill(f"{name}_scale", scales)
    parts = (tensor, codes, scales) if tensor.dim() == 3 else (part.unsqueeze(0) for part in (tensor, codes, scales))
    some = (part.split(_EXPERTS) for part in parts)
    for part, code, scale in zip(*some, strict=True):  # some experts at once: float32 takes eight times more
        values = decode_e2m1(unpack_e2m1(code)).unflatten(-1, (-1, 16))
        part.copy_((values * (scale.float() / _ENCODE).unsqueeze(-1)).flatten(-2))


def fill(name: str, tensor: Any) -> None:
    """Random values that the name alone decides, with a trained model's spread; FP4 ones are uniform codes."""
    import torch

    made = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
    if tensor.dtype == torch.uint8:
        tensor.random_(*(_EXPONENTS if name.endswith("weight_scale") else (0, 256)), generator=made)
    elif tensor.dtype == torch.float8_e4m3fn:
        for part in tensor.split(_EXPERTS) if tensor.dim() == 3 else (tensor,):  # float32 takes four times more
            part.copy_(torch.rand(part.shape, device=part.device, generator=made).mul_(1.5).add_(0.5))
    elif "global_scale" in name:
        tensor.fill_(_ENCODE)
    elif name.endswith("weight_scale_2"):  # ModelOpt's
        tensor.fill_(1 / _ENCODE)
    elif "norm" in name or name.endswith("input_scale"):
        tensor.fill_(1.0)
    elif name.endswith(("bias", "sinks")):
        tensor.zero_()
    elif name.endswith("A_log"):
        tensor.uniform_(*_RATES, generator=made).log_()
    elif tensor.dim() >= 2 and "weight" in name:
        tensor.normal_(0, 0.5 if "conv" in name else _STD, generator=made)


def checkpoint(config: Any, device: str) -> Iterator[tuple[str, Any]]:
    """The tensors of a checkpoint by name, whole: of any number of ranks each takes its part of the same."""
    import torch

    fp4 = getattr(config, "quantization_config", None) is not None
    width, vocabulary = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    products, others = _of_a_layer(config)
    for layer in range(config.num_hidden_layers):
        for name, shape in others.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape, torch.bfloat16
        for name, (n, k) in products.items():
            stem = f"model.layers.{layer}.{name}"
            if fp4:
                shapes[f"{stem}.weight_packed"] = (n, k // 2), torch.uint8
                shapes[f"{stem}.weight_scale"] = (n, k // 16), torch.float8_e4m3fn
                shapes[f"{stem}.weight_global_scale"] = (1,), torch.float32
            else:
                shapes[f"{stem}.weight"] = (n, k), torch.bfloat16
    shapes["model.norm.weight"] = (width,), torch.bfloat16
    for name in ("model.embed_tokens", "lm_head"):
        shapes[f"{name}.weight"] = (vocabulary, width), torch.bfloat16
    for name, (shape, dtype) in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        (fill_values if getattr(config, "of_fp4", False) and in_fp4(name) else fill)(name, tensor)
        yield name, tensor


def _of_a_layer(config: Any) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, ...]]]:
    """Shapes of the matrices of a layer that are in FP4, and of its other weights, by name."""
    width, heads, d = config.hidden_size, config.num_attention_heads, config.head_dim
    kv, experts = config.num_key_value_heads * d, getattr(config, "num_experts", None)
    attention = {"q": (heads * d, width), "k": (kv, width), "v": (kv, width), "o": (width, heads * d)}
    products = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    others: dict[str, tuple[int, ...]] = {f"{name}_layernorm": (width,) for name in ("input", "post_attention")}
    if experts is not None:
        others |= {"mlp.gate": (experts, width), "self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
    inter = config.intermediate_size if experts is None else config.moe_intermediate_size
    for stem in ["mlp"] if experts is None else [f"mlp.experts.{expert}" for expert in range(experts)]:
        products |= {f"{stem}.gate_proj": (inter, width), f"{stem}.up_proj": (inter, width)}
        products[f"{stem}.down_proj"] = width, inter
    return products, others


def register_loader() -> None:
    """Name the loader of seeded weights: the same tensors for each engine, with the spread of a trained model's.

    Llamas and Qwen3's mixtures get them as a checkpoint, by vLLM's own loader.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("seeded")
    class Seeded(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            config = model_config.hf_config
            if config.model_type in OF_CHECKPOINTS:
                model.load_weights(checkpoint(config, "cuda"))
            else:
                seed(model, of_fp4=getattr(config, "of_fp4", False))


def engine_of(model: str, name: str, layers: int | None, context: int, **changes: Any) -> tuple[Any, float]:
    """vLLM with a model, and the seconds until it was ready. Decode steps are CUDA graphs."""
    variant = VARIANTS[name]
    os.environ["VLLM_PLUGINS"] = "jitfp4" if variant.plugin else ""
    from vllm import LLM

    register_loader()
    folder = Path(tempfile.mkdtemp(prefix="model_"))
    (folder / "config.json").write_text(json.dumps(config_of(model, variant, layers)))
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": list(CAPTURED)}
    if not variant.compiled:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "seeded",
        "dtype": "bfloat16",
        "max_model_len": max(2048, context + 512),
        "gpu_memory_utilization": 0.85,
        "max_num_seqs": 64,
        "enable_prefix_caching": context > 2048,  # prompts are then read once
        "seed": 0,
        "kv_cache_dtype": variant.cache,
        "compilation_config": graphs,
        "tensor_parallel_size": variant.ranks,
    }
    if variant.backend is not None:
        arguments["attention_config"] = {"backend": variant.backend}
    if variant.activations is not None:
        arguments["additional_config"] = {"jitfp4_activations": variant.activations}
    elif not variant.plugin:
        arguments["additional_config"] = {"gdn_prefill_backend": "triton"}  # FlashInfer's is compiled by nvcc
    begun = time.perf_counter()
    llm = LLM(**arguments | changes)
    return llm, time.perf_counter() - begun
