"""Qwen3-Next's and Qwen3.5's prompts and single tokens by jitfp4's kernels, against transformers' own layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from jitfp4.errors import ArgumentError
from jitfp4.integrations.transformers import use_gated_delta_rule
from tests.support.tiny_models import CONFIGS, load, prompts, save

KINDS = ("qwen3_next", "qwen3_5")


def model_of(kind: str) -> Any:
    """Random numbers that are far from what layers begin with."""
    torch.manual_seed(len(kind))
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "dt_bias", "A_log")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def steps(layer: Any, config: Any, inputs: list[torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
    """The outputs for a prompt behind left padding, more of it, and tokens, and the states at the end."""
    cache = DynamicCache(config=config)
    dtype = layer.out_proj.weight.dtype
    outs = [layer(x.to(dtype), cache_params=cache, attention_mask=mask if x is inputs[0] else None) for x in inputs]
    return [out.float() for out in (*outs, cache.layers[0].recurrent_states[0])]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(70, 5, 1, 1), (2, 1, 3)], ids=str)
def test_a_layer_is_about_as_near_to_float32_as_that_of_transformers(kind: str, lengths: tuple[int, ...]) -> None:
    model = model_of(kind)
    theirs = model.model.layers[0].linear_attn
    exact = copy.deepcopy(theirs).float()
    given = copy.deepcopy(model)
    assert use_gated_delta_rule(given) == use_gated_delta_rule(given) == 1
    ours = given.model.layers[0].linear_attn
    assert isinstance(ours, type(theirs)) and type(ours) is not type(theirs)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, length, 128, generator=generator).bfloat16() for length in lengths]
    mask = torch.ones(3, lengths[0], dtype=torch.bool)
    mask[1, : lengths[0] // 2] = False
    want, mine, other = (steps(layer, model.config, inputs, mask) for layer in (exact, ours, theirs))
    for exactly, got, rounded in zip(want, mine, other, strict=True):
        assert (got - exactly).norm() <= 1.4 * (rounded - exactly).norm() <= 0.05 * exactly.norm()
    alone = theirs(inputs[0], attention_mask=mask)
    torch.testing.assert_close(ours(inputs[0], attention_mask=mask), alone, rtol=0.1, atol=0.02)


@torch.no_grad()
def test_states_lie_as_kernels_like_them_and_as_others_left_them() -> None:
    model = model_of("qwen3_5")
    use_gated_delta_rule(model)
    layer, cache = model.model.layers[0].linear_attn, DynamicCache(config=model.config)
    x = torch.randn(2, 9, 128).bfloat16()
    layer(x[:, :8], cache_params=cache)
    held = cache.layers[0]
    state = held.recurrent_states[0]
    assert state.mT.is_contiguous()
    reordered = copy.deepcopy(held)
    reordered.reorder_cache(torch.tensor([0, 1]))
    assert reordered.recurrent_states[0].is_contiguous()
    out = layer(x[:, 8:], cache_params=cache)
    assert held.recurrent_states[0] is state
    cache.layers[0] = reordered
    torch.testing.assert_close(layer(x[:, 8:], cache_params=cache), out, rtol=0, atol=0)
    torch.testing.assert_close(reordered.recurrent_states[0], state, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_generates_the_same(kind: str, tmp_path: Path) -> None:
    model = load(save(kind, tmp_path / "floats"))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    want = model.generate(prompts(), **options)
    assert use_gated_delta_rule(model) == 1
    assert torch.equal(model.generate(prompts(), **options), want)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(norms) == 7 and all(norm.forward.__module__.startswith("jitfp4") for norm in norms)


@torch.no_grad()
def test_what_is_not_for_the_kernels_is_as_it_was(tmp_path: Path) -> None:
    model = model_of("qwen3_next").float()
    want = model(prompts()).logits
    use_gated_delta_rule(model)
    assert torch.equal(model(prompts()).logits, want)
    with pytest.raises(ArgumentError, match="model: got LlamaForCausalLM"):
        use_gated_delta_rule(load(save("llama", tmp_path / "llama")))
