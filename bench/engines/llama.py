"""Llama-3.1-8B for vLLM without a checkpoint: its configuration, weights that are seeded by name, and engines."""

from __future__ import annotations

import json
import os
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
_STD = 0.02  # of weights
_ENCODE = 190.0  # makes the codes' standard deviation that of the weights
_CAPTURED = (1, 8, 64)  # batches that have a CUDA graph


class Variant(NamedTuple):
    """What runs where."""

    quantized: bool = True
    plugin: bool = False
    backend: str | None = None
    cache: str = "auto"
    norms: bool = False
    rounds: bool = False


VARIANTS = {
    "bf16": Variant(quantized=False),
    "own": Variant(),
    "own-rounded": Variant(rounds=True),
    "plugin": Variant(plugin=True),
    "plugin-attention": Variant(plugin=True, backend="CUSTOM"),
    "plugin-kv": Variant(plugin=True, backend="CUSTOM", cache="nvfp4"),
    "plugin-norms": Variant(plugin=True, norms=True),
    "plugin-kv-norms": Variant(plugin=True, backend="CUSTOM", cache="nvfp4", norms=True),
}
"""``own``: NVFP4 weights in vLLM's kernels. ``own-rounded``: its cache holds what an NVFP4 cache would. ``plugin``: the
weights in jitfp4's kernels; ``-attention``: and its attention, over a bf16 cache; ``-kv``: over an NVFP4 cache;
``-norms``: and its norms."""


def config_of(variant: Variant, layers: int) -> dict[str, Any]:
    """The model's ``config.json``."""
    config = LLAMA | {"num_hidden_layers": layers}
    if variant.quantized:
        form = "nvfp4-pack-quantized"
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        weights |= {"symmetric": True, "dynamic": False}
        group = {"targets": ["Linear"], "format": form, "weights": weights, "input_activations": None}
        quantization = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
        config["quantization_config"] = quantization | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}
    return config


def set_environment() -> None:
    """What vLLM reads from the environment before it is imported: offline, in one process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def register_loader() -> None:
    """Name the loader of seeded weights: the same tensors for each engine, with the spread of a trained model's."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("seeded")
    class Seeded(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            del model_config
            for name, tensor in model.state_dict().items():
                made = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
                if tensor.dtype == torch.uint8:
                    tensor.random_(0, 256, generator=made)
                elif tensor.dtype == torch.float8_e4m3fn:
                    tensor.copy_(torch.rand(tensor.shape, device=tensor.device, generator=made).mul_(1.5).add_(0.5))
                elif "global_scale" in name:
                    tensor.fill_(_ENCODE)
                elif "norm" in name:
                    tensor.fill_(1.0)
                elif tensor.dim() >= 2 and "weight" in name:
                    tensor.normal_(0, _STD, generator=made)


def engine_of(name: str, layers: int, context: int, **changes: Any) -> tuple[Any, float]:
    """vLLM with the model, and the seconds until it was ready. Decode steps are CUDA graphs, nothing is compiled."""
    variant = VARIANTS[name]
    os.environ["VLLM_PLUGINS"] = "jitfp4" if variant.plugin else ""
    from vllm import LLM

    register_loader()
    folder = Path(tempfile.mkdtemp(prefix="llama_"))
    (folder / "config.json").write_text(json.dumps(config_of(variant, layers)))
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(_CAPTURED)}
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "seeded",
        "dtype": "bfloat16",
        "max_model_len": max(2048, context + 512),
        "gpu_memory_utilization": 0.85 if context > 2048 else 0.5,
        "max_num_seqs": 64,
        "enable_prefix_caching": context > 2048,  # prompts are then read once
        "seed": 0,
        "kv_cache_dtype": variant.cache,
        "compilation_config": graphs,
    }
    if variant.backend is not None:
        arguments["attention_config"] = {"backend": variant.backend}
    if variant.norms:
        arguments["ir_op_priority"] = {"rms_norm": ["jitfp4"], "fused_add_rms_norm": ["jitfp4"]}
    begun = time.perf_counter()
    llm = LLM(**arguments | changes)
    return llm, time.perf_counter() - begun
