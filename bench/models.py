"""Models with the published configurations and random weights, made on the device, and glue between their products."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.nn import functional

from jitfp4.families.experts import Fp4Experts, prepare_fp4_experts
from jitfp4.formats import NVFP4
from jitfp4.integrations.experts import ExpertsModule
from jitfp4.integrations.layers import Fp4Linear, prepared, quantized
from jitfp4.integrations.transformers import use_gated_delta_rule
from jitfp4.integrations.transformers.experts import shape_of
from jitfp4.integrations.transformers.glue import fuse_glue
from jitfp4.integrations.transformers.quantizer import KEPT, fuse_siblings
from jitfp4.layouts import SfLayout
from jitfp4.weight import CODE_BYTES, Fp4Weight


class Model(NamedTuple):
    """``name``: of transformers' folder and module, and what its classes' names begin with."""

    folder: str
    classes: str
    config: Callable[[], Any]

    @property
    def module(self) -> ModuleType:
        return import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")


MODELS = {
    "llama-3.1-8b": Model(
        "llama",
        "Llama",
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
    "llama-3.1-70b": Model(
        "llama",
        "Llama",
        lambda: transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
        ),
    ),
    "qwen3-8b": Model(
        "qwen3",
        "Qwen3",
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
    "qwen3-30b-a3b": Model(
        "qwen3_moe",
        "Qwen3Moe",
        lambda: transformers.Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            max_position_embeddings=40960,
        ),
    ),
    "gpt-oss-120b": Model("gpt_oss", "GptOss", transformers.GptOssConfig),
    "qwen3-next-80b-a3b": Model("qwen3_next", "Qwen3Next", transformers.Qwen3NextConfig),
    "tiny": Model(
        "qwen3",
        "Qwen3",
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


def build(config: Any, variant: str, device: str) -> Any:
    """The model with random weights, made on the device. ``variant`` is one of bench_model's."""
    own, fp4 = variant == "transformers", variant.startswith("w4")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa" if own else "jitfp4"
        )
        for name, module in list(model.named_modules()) if fp4 else ():
            shape = shape_of(module)
            layer: nn.Module
            if shape is not None:
                layer = ExpertsModule(shape)
            elif is_fp4(name, module, variant):
                layer = Fp4Linear(module.in_features, module.out_features, module.bias is not None, torch.bfloat16)
            else:
                continue
            parent, _, child = name.rpartition(".")
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
        elif isinstance(module, ExpertsModule):
            fill_experts(module, device)
    fuse_siblings(model)
    if hasattr(model.config, "linear_num_value_heads") and not own:
        use_gated_delta_rule(model)
    if fp4:
        fuse_glue(model)
    return model.requires_grad_(False)


def is_fp4(name: str, module: nn.Module, variant: str) -> bool:
    """Whether a layer is in FP4 in a variant."""
    if type(module) is not nn.Linear or name.rpartition(".")[2] in KEPT:
        return False
    return name != "lm_head" or variant.endswith("head4")


def random_tiles(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Tiles of random codes with the scales of ``like`` [tiles, chunks, bytes], whose first tiles count."""
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=like.device)
    data[..., CODE_BYTES:] = like[0, :, CODE_BYTES:]
    return data


def fill_experts(module: ExpertsModule, device: str) -> None:
    """As fill(), for experts."""
    shape, sides = module.shape, []
    for rows, cols in ((2 * shape.inter, shape.hidden), (shape.hidden, shape.inter)):
        layer = quantized(torch.ones(rows, cols, device=device))
        sides += [layer.codes.unsqueeze(0), layer.scales.unsqueeze(0)]
    one = prepare_fp4_experts(*sides, order="concatenated gate,up", sf_layout=SfLayout.layout_linear)
    factor = 6 / float(one.dequantize(0)[0].weight[0, 0]) / 3
    parts = {}
    for name, size in (("13", shape.hidden), ("2", shape.inter)):
        tiles, scale = getattr(one, f"w{name}"), getattr(one, f"scale{name}")
        parts[f"w{name}"] = random_tiles(tiles[0], (shape.experts, *tiles.shape[1:]))
        parts[f"scale{name}"] = torch.full_like(scale, factor / math.sqrt(size)).repeat(shape.experts, 1)
        parts[f"bias{name}"] = torch.zeros_like(parts[f"scale{name}"]) if shape.biased else None
    module.assign(Fp4Experts(**parts, hidden=shape.hidden, inter=shape.inter, gated=True, format=NVFP4))


def fill(layer: Fp4Linear) -> None:
    """Random codes, and scales that keep the size of what is multiplied."""
    device = layer.weight.device
    one = prepared(quantized(torch.ones(64, layer.in_features, device=device)))
    data = random_tiles(one.data, tuple(layer.weight.shape))
    ones = float(one.dequantize()[0, 0]) / 6  # what a code of 1 stands for
    alpha = 2.0 ** round(math.log2(layer.in_features**-0.5 / (3 * ones)))
    size = -(-layer.out_features // 8) * 8
    layer.assign(Fp4Weight(data, None, size, one.k, NVFP4), torch.tensor([alpha], device=device))


def glued(model: Model, plain: bool) -> Any:
    """A context in which models of a kind have fewer and larger kernels between their products."""
    if plain:
        return nullcontext()
    modeling = model.module
    torch._dynamo.config.recompile_limit = 64  # sizes and strides of one row, of several, and of heads
    turn, swiglu = (
        torch.compile(function, dynamic=True, fullgraph=True) for function in (modeling.apply_rotary_pos_emb, swiglu_of)
    )
    norm = getattr(modeling, f"{model.classes}RMSNorm")
    values: list[tuple[Any, str, Any]] = [(modeling, "apply_rotary_pos_emb", turn)]
    if model.folder != "qwen3_next":  # whose norms are jitfp4's in every variant
        values.append(
            (norm, "forward", lambda m, x: functional.rms_norm(x, x.shape[-1:], m.weight, m.variance_epsilon))
        )
    mlp = getattr(modeling, f"{model.classes}MLP", None)
    if model.folder != "gpt_oss":  # whose MLP is its experts
        values.append((mlp, "forward", lambda m, x: m.down_proj(swiglu(m.gate_proj(x), m.up_proj(x)))))
    return patched(*values)


def swiglu_of(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What the last product of an MLP gets."""
    return functional.silu(gate) * up


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
