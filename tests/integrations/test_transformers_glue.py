"""Norms, routers, rotations and sums of transformers' models by jitfp4: the same numbers, and all by its kernels."""

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
from jitfp4.integrations.transformers.glue import fuse_glue
from jitfp4.operation import Operation
from tests.support import tiny_models
from tests.support.tiny_models import COMMON, load, prompts, save

register()
MORE = {
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=16),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
}
FAMILIES = ("llama", "qwen3", "qwen3_moe", "gpt_oss", *MORE)
WITH_EXPERTS = ("qwen3_moe", "gpt_oss", "mixtral")
SCALES = [(0.01, 0.01)] * 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operation was called."""
    counts: Counter[str] = Counter()
    call = Operation.__call__

    def counted(self: Operation[Any, Any], arguments: Any) -> None:
        counts[self.name] += 1
        call(self, arguments)

    monkeypatch.setattr(Operation, "__call__", counted)
    return counts


def make(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A model, and the same without jitfp4's glue; norms with weights that are not 1."""
    monkeypatch.setattr(tiny_models, "CONFIGS", tiny_models.CONFIGS | MORE)
    model = load(
        save(kind, folder), quantization_config=Jitfp4Config(fuse=False), attn_implementation="jitfp4"
    ).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
    fused = copy.deepcopy(model)
    assert fuse_glue(fused) > 4 and fuse_glue(fused) == 0
    return fused, model


def steps(model: Any, cache: Any, padding: int) -> torch.Tensor:
    """Logits of a prompt of three requests, the first padded at its left, and of tokens after it."""
    tokens = prompts(3, 40)
    mask = torch.ones(3, 44, dtype=torch.int64)
    mask[0, :padding] = 0
    found, seen = [], 0
    for count in (30, 1, 1, 8, 1):
        part = tokens[:, seen : seen + count] if seen + count <= 40 else tokens[:, :count]
        seen += count
        positions = (mask[:, :seen].cumsum(-1) - 1).clamp(min=0)[:, -count:]
        out = model(part, past_key_values=cache, attention_mask=mask[:, :seen], position_ids=positions)
        found.append(out.logits[:, -1])
    return torch.stack(found).float()


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_models_give_the_same_logits(kind: str, padding: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A code of the cache that is rounded otherwise changes them all: so both are compared with floats."""
    fused, model = make(kind, tmp_path / "floats", monkeypatch)
    caches = [Nvfp4Cache(model.config, 128, SCALES) for _ in range(2)]
    got, known = (steps(one, cache, padding) for one, cache in zip((fused, model), caches, strict=True))
    for first, second in zip(*((cache.layers[0].keys, cache.layers[0].values) for cache in caches), strict=True):
        assert (first != second).float().sum() < 0.06 * (second != 0).sum()
    model.set_attn_implementation("eager")
    want = steps(torch.nn.Module.float(model), transformers.DynamicCache(config=model.config), padding)
    errors = [((one - want).norm(dim=-1) / want.norm(dim=-1)).median() for one in (got, known)]
    room = 1.3 if kind in WITH_EXPERTS else 1.1  # a router may decide otherwise
    assert errors[0] < room * errors[1] < 0.5, errors


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_a_token_takes_few_launches(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Counter[str]
) -> None:
    fused, _ = make(kind, tmp_path / "floats", monkeypatch)
    cache = Nvfp4Cache(fused.config, 128, SCALES)
    fused(prompts(1, 8), past_key_values=cache)
    calls.clear()
    fused(prompts(1, 1), past_key_values=cache)
    experts = {"experts_router": 2, "experts_up": 2, "experts_down": 2} if kind in WITH_EXPERTS else {}
    found = {name: count for name, count in calls.items() if name not in ("mm_bf16_fp4", "experts_route")}
    assert found == {"rmsnorm": 5, "rope_append": 2, "attention": 2, **experts}


@torch.no_grad()
def test_another_cache_and_another_dtype_go_transformers_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, model = make("qwen3", tmp_path / "floats", monkeypatch)
    for one in (fused, model):
        one.set_attn_implementation("sdpa")
    got, want = (one.generate(prompts(2, 9), max_new_tokens=5, do_sample=False) for one in (fused, model))
    assert got.shape == want.shape
    alone, known = (one(prompts(2, 9)).logits for one in (fused, model))
    assert (alone - known).norm() < 0.04 * known.norm()
    got, want = (torch.nn.Module.float(one)(prompts(2, 9)).logits for one in (fused, model))
    assert (got - want).norm() < 0.04 * want.norm()


@torch.no_grad()
def test_the_quantizer_fuses_and_what_is_saved_is_the_model(tmp_path: Path) -> None:
    model = load(save("qwen3_moe", tmp_path / "floats"), quantization_config=Jitfp4Config())
    assert type(model.model.norm).__mro__[1].__name__ == "Norm"
    model.save_pretrained(tmp_path / "fp4")
    again = load(tmp_path / "fp4")
    assert torch.equal(again(prompts()).logits, model(prompts()).logits)
    assert again(prompts(), output_router_logits=True).router_logits[0].shape[-1] == model.config.num_experts


def test_hooked_modules_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = make("llama", tmp_path / "floats", monkeypatch)
    for module in model.modules():
        module._hf_hook = object()
    assert fuse_glue(model) == 0
