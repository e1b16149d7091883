"""Qwen3-Next with everything fused: the same numbers, few launches, and what is saved is the model."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from jitfp4.integrations.transformers import Jitfp4Config, Nvfp4Cache, register
from jitfp4.integrations.transformers.delta_rule import DeltaNet, fuse_delta_nets
from jitfp4.integrations.transformers.glue import fuse_glue
from jitfp4.integrations.transformers.mixtures import Block
from jitfp4.integrations.transformers.quantizer import fuse_siblings
from tests.integrations.test_transformers_glue import calls, steps
from tests.support.tiny_models import load, prompts, save

__all__ = ["calls"]  # a fixture
register()
SCALES = [(0.01, 0.01)]


def make(folder: Path, **options: Any) -> tuple[Any, Any]:
    """A model of random numbers that are far from what layers begin with, with everything fused, and as it is."""
    config = Jitfp4Config(fuse=False)
    model = load(save("qwen3_next", folder), quantization_config=config, attn_implementation="jitfp4", **options)
    torch.manual_seed(3)
    for name, parameter in model.requires_grad_(False).named_parameters():
        if name.endswith(("norm.weight", "dt_bias", "A_log")):
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif name.endswith("shared_expert_gate.weight"):
            parameter.normal_()
    fused = copy.deepcopy(model)
    assert fuse_siblings(fused) == 3  # queries, keys and values; two MLPs
    assert fuse_delta_nets(fused) == 1 and fuse_glue(fused) == 7 and fuse_glue(fused) == 0
    return fused, model


@pytest.mark.parametrize("padding", [0, 7])
@torch.no_grad()
def test_the_logits_are_as_near_to_float32(padding: int, tmp_path: Path) -> None:
    fused, model = make(tmp_path / "floats")
    got, known = (steps(one, Nvfp4Cache(model.config, 128, SCALES), padding) for one in (fused, model))
    model.set_attn_implementation("eager")
    want = steps(torch.nn.Module.float(model), transformers.DynamicCache(config=model.config), padding)
    errors = [((one - want).norm(dim=-1) / want.norm(dim=-1)).median() for one in (got, known)]
    assert errors[0] < 1.3 * errors[1] < 0.3, errors


@torch.no_grad()
def test_a_token_takes_few_launches(tmp_path: Path, calls: Counter[str]) -> None:
    fused, _ = make(tmp_path / "floats")
    cache = Nvfp4Cache(fused.config, 128, SCALES)
    fused(prompts(1, 8), past_key_values=cache)
    calls.clear()
    fused(prompts(1, 1), past_key_values=cache)
    assert calls == {
        "rmsnorm_linear": 1,  # with b and a
        "rmsnorm": 5,  # before attention and two routers, gated, the last
        "experts_router": 2,
        "mm_bf16_fp4": 4,
        "causal_conv1d": 1,
        "gated_delta_rule": 1,
        "rope_append": 1,
        "attention": 1,
        "experts_up": 2,
        "experts_down": 2,
    }


@torch.no_grad()
def test_a_shared_expert_is_one_of_the_others(tmp_path: Path) -> None:
    fused, model = make(tmp_path / "floats")
    ours, theirs = fused.model.layers[0].mlp, model.model.layers[0].mlp
    assert isinstance(ours, Block) and ours.experts.experts.experts == 5 and ours.experts.appended == 1
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = theirs(x).float()
    torch.testing.assert_close(ours(x).float(), want, rtol=0.05, atol=0.02 * float(want.abs().amax()))
    want = (x + theirs(x)).float()
    torch.testing.assert_close(ours(x, residual=x).float(), want, rtol=0.05, atol=0.02 * float(want.abs().amax()))


@torch.no_grad()
def test_what_is_saved_is_the_model(tmp_path: Path) -> None:
    options = {"quantization_config": Jitfp4Config()}
    model = load(save("qwen3_next", tmp_path / "floats"), **options)
    net = model.model.layers[0].linear_attn
    assert isinstance(net, DeltaNet)
    model.save_pretrained(tmp_path / "fp4")
    again = load(tmp_path / "fp4")
    assert torch.equal(again(prompts()).logits, model(prompts()).logits)
    state = net.state_dict()
    assert not torch.equal(state["in_proj_qkvz.weight"], net.in_proj_qkvz.weight)
    before = net.in_proj_qkvz.weight.clone()
    net.load_state_dict(state)
    assert torch.equal(net.in_proj_qkvz.weight, before)


@torch.no_grad()
def test_float32_goes_transformers_way(tmp_path: Path) -> None:
    fused, model = make(tmp_path / "floats", dtype=torch.float32)
    got, want = (one(prompts()).logits for one in (fused, model))
    assert (got - want).norm() < 0.02 * want.norm()
