"""Tiny random language models of each architecture, and FP4 checkpoints of them in the formats of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from jitfp4.formats import MXFP4, NVFP4, BlockFormat  # noqa: E402
from jitfp4.integrations.layers import quantized  # noqa: E402

COMMON = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.08,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**COMMON, **EXPERTS),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **COMMON, **EXPERTS, **DELTA_NET, shared_expert_intermediate_size=64, rope_parameters=HALF_ROTATED
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**COMMON, **DELTA_NET),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4, "head_dim": 32},
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=64,
    ),
}


def save(kind: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A random model in floats, saved as transformers saves it."""
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    """The model of a folder in bf16, unless options say otherwise."""
    options = {"dtype": torch.bfloat16} | options
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def to_fp4(folder: Path, target: Path, source: str, block_format: BlockFormat = NVFP4, shards: int = 1) -> Path:
    """Write a saved float model as an FP4 checkpoint of ``source``: all linear weights of layers, but no router."""
    target.mkdir()
    floats = load_file(folder / "model.safetensors")
    named: dict[str, torch.Tensor] = {}
    for name, tensor in floats.items():
        if name.endswith(("gate_up_proj", "down_proj")) and source == "mxfp4":
            layers = [quantized(weight.T, block_format) for weight in tensor]
            named[f"{name}_blocks"] = torch.stack([layer.codes.unflatten(1, (-1, 16)) for layer in layers])
            named[f"{name}_scales"] = torch.stack([layer.scales for layer in layers])
            continue
        if not name.endswith("proj.weight") or tensor.dim() != 2 or source == "mxfp4":
            named[name] = tensor
            continue
        layer, stem = quantized(tensor, block_format), name.removesuffix("weight")
        scale = torch.tensor([1.7])  # not a power of two
        if source == "compressed-tensors":
            own = {"weight_packed": layer.codes, "weight_scale": layer.scales}
            if layer.decode_scale is not None:
                own |= {"weight_global_scale": scale / layer.decode_scale, "input_global_scale": torch.tensor([9.0])}
        else:
            assert layer.decode_scale is not None
            decode = (layer.decode_scale / scale).reshape(())
            own = {"weight": layer.codes, "weight_scale": layer.scales, "weight_scale_2": decode}
        named |= {stem + kind: value.contiguous() for kind, value in own.items()}
    names = sorted(named)
    for number in range(shards):
        part = {name: named[name] for name in names[number::shards]}
        save_file(part, target / f"model-{number + 1:05}-of-{shards:05}.safetensors", {"format": "pt"})
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "compressed-tensors": _compressed(block_format),
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    }[source]
    (target / "config.json").write_text(json.dumps(config))
    return target


def _compressed(block_format: BlockFormat) -> dict[str, Any]:
    name = "nvfp4-pack-quantized" if block_format is NVFP4 else "mxfp4-pack-quantized"
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": block_format.block}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": name}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups, "ignore": ["lm_head"]}


def prompts(rows: int = 2, length: int = 9) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(7))


__all__ = ["CONFIGS", "MXFP4", "NVFP4", "load", "prompts", "save", "to_fp4"]
