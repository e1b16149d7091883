"""All layers of a model in one launch: the tokens of the same model layer by layer, and what is refused."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
import transformers

from jitfp4 import DecodeStep
from jitfp4.errors import ArgumentError
from jitfp4.integrations.transformers import Jitfp4Config, Nvfp4Cache, register, use_decode_step
from jitfp4.operation import Operation
from tests.support import tiny_models
from tests.support.tiny_models import COMMON, load, prompts, save

register()
SIZES = COMMON | {"head_dim": 128, "intermediate_size": 256}
KINDS = {
    "llama": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=16),
}


def make(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A model with FP4 weights, and norms and biases that are not trivial."""
    monkeypatch.setattr(tiny_models, "CONFIGS", KINDS)
    file = save(kind, folder) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith("bias"):
            tensor.uniform_(0.5, 1.5)
    save_file(tensors, file, metadata={"format": "pt"})
    options = {"quantization_config": Jitfp4Config(), "attn_implementation": "jitfp4"} | options
    return load(folder, **options).requires_grad_(False)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_the_tokens_are_those_layer_by_layer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(kind, tmp_path / "floats", monkeypatch)
    one = copy.deepcopy(model)
    use_decode_step(one)
    counts: Counter[str] = Counter()
    call = Operation.__call__

    def counted(self: Operation[Any, Any], arguments: Any) -> None:
        counts[self.name] += 1
        call(self, arguments)

    monkeypatch.setattr(Operation, "__call__", counted)
    caches = [Nvfp4Cache(model.config, 128) for _ in range(2)]
    for tokens in (prompts(1, 63), *prompts(1, 2).split(1, -1), prompts(1, 3), prompts(1, 1)):
        want, got = (x(tokens, past_key_values=cache).logits for x, cache in zip((model, one), caches, strict=True))
        assert (got - want).norm() < 0.02 * want.norm() and torch.equal(got.argmax(-1), want.argmax(-1))
    assert counts["decode_step"] == 3
    for first, second in zip(*(cache.layers[1].keys for cache in caches), strict=True):
        assert (first != second).sum() < 0.05 * first.numel()
    want, got = (
        x.generate(prompts(1, 9), past_key_values=Nvfp4Cache(x.config, 64), max_new_tokens=3, do_sample=False)
        for x in (model, one)
    )
    assert torch.equal(got, want) and counts["decode_step"] == 5
    batch = one(prompts(2, 5), past_key_values=Nvfp4Cache(one.config, 64)).logits  # its weights are where they were
    assert torch.equal(batch, model(prompts(2, 5), past_key_values=Nvfp4Cache(model.config, 64)).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_the_tokens_on_a_gpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ends of pages, where a token is clear: logits of a random model often lie close together."""
    model = make(kind, tmp_path / "floats", monkeypatch).to("cuda")
    one = copy.deepcopy(model)
    use_decode_step(one)
    steps = 0
    run = DecodeStep.run

    def counted(self: DecodeStep, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(DecodeStep, "run", counted)
    caches = [Nvfp4Cache(model.config, 256) for _ in range(2)]
    pairs = [*zip((model, one), caches, strict=True)]
    errors, decided = [], 0
    for tokens in (prompts(1, 63).cuda(), *prompts(1, 80).cuda().split(1, -1)):
        want, got = (x(tokens, past_key_values=cache).logits[0, -1].float() for x, cache in pairs)
        errors.append((got - want).norm() / want.norm())
        first, second = want.topk(2).values
        if first - second > 0.3 * want.std():
            decided += 1
            assert got.argmax() == want.argmax()
    assert steps == 80 and decided > 20
    assert torch.stack(errors).median() < 0.05


@torch.no_grad()
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="window"):
        use_decode_step(make("mistral", tmp_path / "mistral", monkeypatch))
    with pytest.raises(ArgumentError, match="floats"):
        use_decode_step(make("qwen3", tmp_path / "floats", monkeypatch, quantization_config=Jitfp4Config(fuse=False)))
    model = make("qwen3", tmp_path / "mxfp4", monkeypatch, quantization_config=Jitfp4Config("mxfp4"))
    with pytest.raises(ArgumentError, match="another format"):
        use_decode_step(model)
    with pytest.raises(ArgumentError, match="Qwen3RMSNorm"):
        use_decode_step(model.model.norm)
