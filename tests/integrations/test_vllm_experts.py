"""Layers of experts of the plugin for vLLM against vLLM's own classes, on the CPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.model_executor.layers import fused_moe, quantization
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

import jitfp4.integrations.vllm as plugin
from jitfp4 import ArgumentError, fp4_experts
from jitfp4.formats import MXFP4
from jitfp4.integrations import partitioned_experts
from jitfp4.integrations.fp8 import LEAST_ROWS_OF_EXPERT
from jitfp4.integrations.vllm.experts import Fp4ExpertsMethod, GptOssFp4ExpertsMethod
from tests.support.vllm_layers import CASES, Part, block_format_of, config_of, in_bfloat16, one_rank

plugin.register()

__all__ = ["in_bfloat16", "one_rank"]  # fixtures of all tests here
pytestmark = pytest.mark.usefixtures("one_rank", "in_bfloat16")

EXPERTS, HIDDEN, INTER = 4, 64, 32


def experts_of(case: str, **changes: Any) -> Any:
    """A layer of experts as vLLM makes it."""
    arguments: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": INTER}
    document = CASES[case][0]
    arguments |= {"quant_config": config_of(document), "prefix": f"model.layers.{len(_made)}.mlp.experts"} | changes
    _made.append(_new_experts(params_dtype=torch.bfloat16, **arguments))
    return _made[-1].routed_experts


_new_experts = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE  # its name until vLLM 0.26
_made: list[Any] = []  # vLLM keeps layers by name: each test has its own


@pytest.mark.parametrize("case", ["nvfp4-w4a16", "nvfp4-w4a4", "mxfp4", "modelopt"])
def test_experts_equal_the_checkpoint(case: str) -> None:
    layer = experts_of(case)
    method = layer.quant_method
    assert isinstance(method, Fp4ExpertsMethod)
    _, codes, global_scale, is_encode = CASES[case]
    weights = {}
    for expert in range(EXPERTS):
        for place, (shard, n, k) in enumerate((("w1", INTER, HIDDEN), ("w3", INTER, HIDDEN), ("w2", HIDDEN, INTER))):
            part = Part(n, k, block_format_of(case), 0.02 * (1 + expert + place), seed=3 * expert + place)
            weights[expert, shard] = part.weight
            tensors = {codes: part.codes, "weight_scale": part.scales}
            if global_scale is not None:
                tensors[global_scale] = torch.tensor(1 / part.scale if is_encode else part.scale, dtype=torch.float32)
            for name, tensor in tensors.items():
                full = f"{'w2' if shard == 'w2' else 'w13'}_{name}"
                parameter = getattr(layer, full)
                parameter.weight_loader(parameter, tensor, f"experts.{full}", shard_id=shard, expert_id=expert)
    method.process_weights_after_loading(layer)
    x = torch.randn(5, HIDDEN) / 4
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 3], [2, 0]], dtype=torch.int32)
    router = torch.rand(5, 2, dtype=torch.float32)
    out = method.apply(layer, x, router, ids, None, None)
    exact = torch.zeros(5, HIDDEN, dtype=torch.float64)
    for token in range(5):
        for slot in range(2):
            own = {shard: weights[int(ids[token, slot]), shard] for shard in ("w1", "w2", "w3")}
            gate, up = own["w1"] @ x[token].double(), own["w3"] @ x[token].double()
            h = (torch.nn.functional.silu(gate) * up).bfloat16().double()
            exact[token] += router[token, slot].double() * (own["w2"] @ h)
    assert torch.nn.functional.cosine_similarity(out.double(), exact).min() > 0.9999
    assert ((out.double() - exact).abs() <= 2**-6 * exact.abs().amax(1, keepdim=True)).all()


def gpt_oss_claimed(model_type: str = "gpt_oss", user: str | None = None) -> str | None:
    cls = quantization.get_quantization_config("jitfp4-gpt-oss")
    given = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return cls.override_quantization_method(given, user, hf_config=SimpleNamespace(model_type=model_type))


def test_gpt_oss_is_claimed_and_other_mxfp4_is_not() -> None:
    assert gpt_oss_claimed() == gpt_oss_claimed(user="jitfp4-gpt-oss") == "jitfp4-gpt-oss"
    assert gpt_oss_claimed("llama") is None and gpt_oss_claimed(user="gpt_oss_mxfp4") is None


def test_experts_of_gpt_oss_equal_the_checkpoint() -> None:
    """Biases, gates and up projections in turn, and its own SwiGLU; tensors as GptOssModel's loader gives them."""
    config = quantization.get_quantization_config("jitfp4-gpt-oss").from_config({"quant_method": "mxfp4"})
    layer = experts_of("mxfp4", quant_config=config, has_bias=True, activation="swigluoai")
    method = layer.quant_method
    assert type(method) is GptOssFp4ExpertsMethod
    parts = {
        name: [Part(n, k, MXFP4, 1.0, seed=10 * (name == "w2") + expert) for expert in range(EXPERTS)]
        for name, n, k in (("w13", 2 * INTER, HIDDEN), ("w2", HIDDEN, INTER))
    }
    biases = {name: torch.randn(EXPERTS, own[0].weight.shape[0]).bfloat16() for name, own in parts.items()}
    for name, own in parts.items():
        stacked = {
            f"{name}_weight": torch.stack([part.codes for part in own]),
            f"{name}_weight_scale": torch.stack([part.scales for part in own]),
            f"{name}_bias": biases[name],
        }
        for full, tensor in stacked.items():
            parameter = getattr(layer, full)
            parameter.weight_loader(parameter, tensor, weight_name=f"experts.{full}", shard_id=None, expert_id=None)
    method.process_weights_after_loading(layer)
    x = torch.randn(5, HIDDEN) / 64
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [2, 0]], dtype=torch.int32)
    router = torch.rand(5, 2, dtype=torch.float32)
    out = method.apply(layer, x, router, ids, None, None)
    exact = torch.zeros(5, HIDDEN, dtype=torch.float64)
    for token, slot in itertools.product(range(5), range(2)):
        expert = int(ids[token, slot])
        both = parts["w13"][expert].weight @ x[token].double() + biases["w13"][expert].double()
        gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
        h = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).bfloat16().double()
        own = parts["w2"][expert].weight @ h + biases["w2"][expert].double()
        exact[token] += router[token, slot].double() * own
    assert torch.nn.functional.cosine_similarity(out.double(), exact).min() > 0.9999
    assert ((out.double() - exact).abs() <= 2**-6 * exact.abs().amax(1, keepdim=True)).all()
    assert not hasattr(layer, "w13_weight") and not hasattr(layer, "w2_bias")


def test_experts_of_many_tokens_are_in_fp8_where_it_is_asked_for(
    one_rank: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, loads = one_rank, list[tuple[int, ...]]()
    monkeypatch.setattr(partitioned_experts, "load_fp8_experts", lambda _, __, *sizes: loads.append(sizes))
    many, made = EXPERTS * LEAST_ROWS_OF_EXPERT // 2, torch.Generator().manual_seed(0)  # of two experts each
    x = torch.randn(many, HIDDEN, generator=made)
    ids = torch.randint(EXPERTS, (many, 2), generator=made)
    router = torch.ones(many, 2, dtype=torch.float32)
    for asked in ({}, {"jitfp4_activations": "fp8"}):
        with monkeypatch.context() as patch:
            patch.setattr(config, "additional_config", asked)
            layer = experts_of("mxfp4")
        for name, parameter in layer.named_parameters():
            low, high = (0, 256) if name.endswith("packed") else (123, 125)  # codes; scales of 1 / 16 and 1 / 8
            parameter.data = torch.randint(low, high, parameter.shape, generator=made).byte()
        layer.quant_method.process_weights_after_loading(layer)
        for tokens in (many, many - 1):
            given = x[:tokens], layer.fp4_experts, ids[:tokens], router[:tokens]
            out = layer.quant_method.apply(layer, given[0], given[3], given[2])
            by_mode = [fp4_experts(*given, activations=mode) for mode in (None, "fp8")]
            equal = [torch.equal(out, own) for own in by_mode]
            assert equal == ([False, True] if asked and tokens == many else [True, False])
    assert loads == [(2, many, config.scheduler_config.max_num_batched_tokens)]
    monkeypatch.setattr(config, "additional_config", {"jitfp4_activations": "fp4"})
    with pytest.raises(ArgumentError, match="jitfp4_activations: got 'fp4'; allowed: 'fp8' or None"):
        experts_of("mxfp4")


def test_experts_that_jitfp4_does_not_have_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts_of("nvfp4-w4a16")
    for name, value in (("has_bias", True), ("hidden_dim", 72), ("activation", MoEActivation.GELU)):
        with monkeypatch.context() as patch:
            assert Fp4ExpertsMethod.serves(layer.moe_config)
            patch.setattr(layer.moe_config, name, value)
            assert not Fp4ExpertsMethod.serves(layer.moe_config)
