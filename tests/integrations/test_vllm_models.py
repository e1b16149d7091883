"""Whole models of the benchmark, with few and narrow layers, through vLLM's own classes on the CPU.

vLLM makes the model of its config.json, the benchmark's loader fills it, and a step without a cache runs through all
layers: what a name, a dtype or a shape breaks in an engine breaks here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import platforms
from vllm.config import CacheConfig, CompilationConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.argparse_utils import FlexibleArgumentParser

import jitfp4.integrations.vllm as plugin
from bench.engines.models import MODELS, OF_CHECKPOINTS, VARIANTS, checkpoint, config_of, seed
from jitfp4.integrations.vllm.experts import Fp4ExpertsMethod
from jitfp4.integrations.vllm.linear import Fp4LinearMethod
from jitfp4.reference.formats import decode_e2m1, decode_e4m3, decode_ue8m0, unpack_e2m1
from tests.support.vllm_layers import define_routing, one_rank

plugin.register()

__all__ = ["one_rank"]  # a fixture of all tests here
pytestmark = pytest.mark.usefixtures("one_rank")

LAYERS, TOKENS, EXPERTS, CHOSEN = 2, 5, 8, 2
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


_library = define_routing()


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The model ``request.param``, the tensors of its checkpoint, and vLLM's configuration."""
    document = config_of(request.param, VARIANTS["plugin-kv"], LAYERS)
    document |= {key: value for key, value in SMALL.items() if key in document}
    (tmp_path / "config.json").write_text(json.dumps(document))
    platform = type(platforms.current_platform)
    monkeypatch.setattr(platform, "current_device", lambda *_: "cpu", raising=False)
    gdn = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention"
    monkeypatch.setattr(f"{gdn}._warmup_prefill_kernels", lambda *_: None, raising=False)  # in Triton
    monkeypatch.setattr(platform, "get_attn_backend_cls", classmethod(lambda *_, **__: plugin.BACKEND))
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, seed=0
        ),
        cache_config=CacheConfig(cache_dtype="nvfp4"),
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
    )
    before = torch.get_default_dtype()
    with set_current_vllm_config(config), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config=config)
        if document["model_type"] in OF_CHECKPOINTS:
            loaded = model.load_weights(checkpoint(config.model_config.hf_config, "cpu"))
            assert {name for name, _ in model.named_parameters() if ".weight" in name} <= loaded
        else:
            seed(model)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        yield model, tensors, config
        torch.set_default_dtype(before)


def test_the_commands_of_the_guide_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(platforms.current_platform), "device_type", "cpu")
    guide = (Path(__file__).parents[2] / "docs/engines.md").read_text()
    commands = re.findall(r"vllm serve (MODEL.*?)(?:  #|`|$)", guide, re.MULTILINE)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    for command in commands:
        words = shlex.split(command.replace("MODEL", "--model MODEL"))
        assert parser.parse_args(words).model == "MODEL"
    options = [parser.parse_args(shlex.split(command)[1:]) for command in commands]
    assert any(given.kv_cache_dtype == "nvfp4" for given in options) and len(commands) > 3


@pytest.mark.parametrize("made", MODELS, indirect=True)
def test_a_step_runs_through_all_layers(made: Any) -> None:
    model, _, config = made
    with set_forward_context(None, config, num_tokens=TOKENS):
        out = model(torch.arange(TOKENS), torch.arange(TOKENS))
    assert out.shape == (TOKENS, SMALL["hidden_size"]) and out.isfinite().all()
    assert 0.3 < out.float().std() < 3  # the last norm's weight is 1
    methods = [module.quant_method for module in model.modules() if hasattr(module, "quant_method")]
    linears = [method for method in methods if isinstance(getattr(method, "method", method), Fp4LinearMethod)]
    experts = [method for method in methods if isinstance(method, Fp4ExpertsMethod)]
    kind = config.model_config.hf_config.model_type
    assert len(experts) == (0 if kind == "llama" else LAYERS)
    assert len(linears) == LAYERS * {"llama": 4, "qwen3_moe": 2, "qwen3_next": 4, "gpt_oss": 0}[kind]


@pytest.mark.parametrize("made", ["qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b"], indirect=True)
def test_a_layer_of_experts_equals_its_checkpoint(made: Any) -> None:
    """What the model's own layer makes of rows, its router included, against float64 products of the codes."""
    model, tensors, config = made
    layer, prefix = model.model.layers[1].mlp, "model.layers.1.mlp."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    rows = torch.randn(TOKENS, SMALL["hidden_size"], dtype=torch.bfloat16)
    with set_forward_context(None, config, num_tokens=TOKENS):
        out = layer(rows.clone()).double()
    is_gpt_oss = config.model_config.hf_config.model_type == "gpt_oss"
    x = rows.double()
    logits = x @ own["router.weight" if is_gpt_oss else "gate.weight"].double().T
    values, chosen = logits.bfloat16().float().softmax(-1).topk(CHOSEN)
    values = (values / values.sum(-1, keepdim=True)).double()
    exact = torch.zeros_like(x)
    for token in range(TOKENS):
        for value, expert in zip(values[token], chosen[token].tolist(), strict=True):
            exact[token] += value * expert_of(own, expert, x[token], is_gpt_oss)
    assert exact.norm() > 0 and (out - exact).norm() < 0.01 * exact.norm()


def expert_of(own: dict[str, torch.Tensor], expert: int, row: torch.Tensor, is_gpt_oss: bool) -> torch.Tensor:
    """An expert's output for ``row [hidden]``."""
    up = weight_of(own, "w13", expert) @ row
    if not is_gpt_oss:
        gate, up = up.chunk(2)
        return weight_of(own, "w2", expert) @ (gate * gate.sigmoid() * up)
    gate, up = up[0::2].clamp(max=7.0), up[1::2].clamp(-7.0, 7.0)
    return weight_of(own, "w2", expert) @ (gate * (1.702 * gate).sigmoid() * (up + 1))


def weight_of(own: dict[str, torch.Tensor], matrix: str, expert: int) -> torch.Tensor:
    """A matrix of an expert, float64."""
    names = {name.rpartition(".")[2]: tensor[expert] for name, tensor in own.items() if f".{matrix}_" in name}
    codes = names.get(f"{matrix}_weight_packed", names.get(f"{matrix}_weight"))
    scales, encode = names[f"{matrix}_weight_scale"], names.get(f"{matrix}_weight_global_scale")
    assert codes is not None
    values = decode_ue8m0(scales) if encode is None else decode_e4m3(scales.view(torch.uint8))
    factor = 1.0 if encode is None else 1 / float(encode.flatten()[0])
    blocks = decode_e2m1(unpack_e2m1(codes)).double().unflatten(-1, (values.shape[-1], -1))
    return (blocks * values.double().unsqueeze(-1)).flatten(-2) * factor
