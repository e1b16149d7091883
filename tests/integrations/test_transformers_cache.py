"""generate() over a cache in NVFP4, against the same model over a cache in floats: tiny random models, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from jitfp4.errors import ArgumentError
from jitfp4.integrations.transformers import Nvfp4Cache, calibrate, register
from tests.support.tiny_models import load, prompts, save

register()
KINDS = ("llama", "qwen3", "gpt_oss", "qwen3_next")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {kind: load(save(kind, tmp_path_factory.mktemp(kind)), attn_implementation="jitfp4") for kind in KINDS}


def rounded(states: torch.Tensor, decode: float) -> torch.Tensor:
    """Keys or values as the cache holds them."""
    from jitfp4 import nvfp4_kv_dequantize, nvfp4_kv_quantize

    rows = states.reshape(-1, states.shape[-1]).contiguous()
    codes, scales = nvfp4_kv_quantize(rows, torch.tensor([decode]))
    return nvfp4_kv_dequantize(codes, scales, torch.tensor([decode]), rows.dtype).view(states.shape)


class Rounding:
    """An ordinary cache, whose keys and values are rounded to NVFP4 first."""

    def __init__(self, cache: Any, scales: list[tuple[float, float]]) -> None:
        self.cache, self.scales, self.update_of = cache, scales, cache.update
        cache.update = self.update

    def update(self, key: torch.Tensor, value: torch.Tensor, index: int, *rest: Any) -> Any:
        k, v = self.scales[index]
        return self.update_of(rounded(key, k), rounded(value, v), index, *rest)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_oss"])
def test_attention_is_that_over_rounded_keys_and_values(kind: str, models: dict[str, Any]) -> None:
    from transformers import DynamicCache

    model, tokens = models[kind], prompts(3, 40)  # beyond gpt-oss's window of 16
    scales = calibrate(model, tokens)
    cache = Nvfp4Cache(model.config, 64, scales)
    rounding = Rounding(DynamicCache(config=model.config), scales)
    for part in (tokens[:, :30], tokens[:, 30:33], tokens[:, 33:34], tokens[:, 34:]):
        got = model(part, past_key_values=cache).logits
        want = model(part, past_key_values=rounding.cache).logits
        error = (got - want).float().norm(dim=-1) / want.float().norm(dim=-1)
        assert error.median() < 0.05  # not of every token: routers may choose another expert
    assert cache.get_seq_length() == 40
    floats = model(tokens).logits[:, -1:].float()
    assert 1e-3 < torch.linalg.norm(got[:, -1:].float() - floats) / torch.linalg.norm(floats) < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_generate_gives_the_tokens_of_its_steps(kind: str, models: dict[str, Any]) -> None:
    model, tokens = models[kind], prompts(2, 12)
    cache = Nvfp4Cache(model.config, 32)
    got = model.generate(tokens, past_key_values=cache, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert got.shape == (2, 18)
    steps = Nvfp4Cache(model.config, 32)
    logits = model(tokens, past_key_values=steps).logits
    for place in range(12, 18):
        new = logits[:, -1:].argmax(-1)
        assert torch.equal(new, got[:, place : place + 1])
        logits = model(new, past_key_values=steps).logits
    again = Nvfp4Cache(model.config, 32)
    assert torch.equal(
        got, model.generate(tokens, past_key_values=again, max_new_tokens=6, do_sample=False, eos_token_id=None)
    )


def test_left_padding_is_not_stored_and_changes_nothing(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], prompts(2, 12)
    short = tokens[1:, 5:]
    padded = torch.stack((tokens[0], torch.cat((torch.zeros(5, dtype=torch.int64), short[0]))))
    attention = torch.tensor([[1] * 12, [0] * 5 + [1] * 7])
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    scales = calibrate(model, tokens)
    cache = Nvfp4Cache(model.config, 32, scales)
    got = model.generate(padded, attention_mask=attention, past_key_values=cache, **options)
    alone = model.generate(short, past_key_values=Nvfp4Cache(model.config, 32, scales), **options)
    assert torch.equal(got[1, 12:], alone[0, 7:])
    assert cache.layers[0].requests.lengths.tolist() == [16, 11]


def test_a_cache_is_reset_and_reordered(models: dict[str, Any]) -> None:
    model, tokens = models["qwen3"], prompts(2, 9)
    cache = Nvfp4Cache(model.config, 32, calibrate(model, tokens))
    first = model(tokens, past_key_values=cache).logits
    cache.reset()
    assert torch.equal(model(tokens, past_key_values=cache).logits, first)
    new = torch.tensor([[5], [9]])
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = model(new.flip(0), past_key_values=cache).logits
    cache.reset()
    model(tokens, past_key_values=cache)
    torch.testing.assert_close(swapped.flip(0), model(new, past_key_values=cache).logits)
    beams = model.generate(
        tokens, past_key_values=Nvfp4Cache(model.config, 32), num_beams=2, max_new_tokens=4, do_sample=False
    )
    assert beams.shape[0] == 2


def test_the_cache_is_a_quarter_and_says_when_it_is_full(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], prompts(2, 9)
    cache = Nvfp4Cache(model.config, 64)
    model(tokens, past_key_values=cache)
    assert cache.nbytes() == 2 * 2 * 2 * 2 * 64 * (64 // 2 + 64 // 16)  # layers, sides, requests, heads, tokens, bytes
    small = Nvfp4Cache(model.config, 8)
    with pytest.raises(ArgumentError, match="max_cache_len: got 8; allowed: at least 9"):
        model(tokens, past_key_values=small)
    with pytest.raises(ArgumentError, match="scales: got 1 pairs; allowed: 2"):
        Nvfp4Cache(model.config, 8, [(1.0, 1.0)])
    model.set_attn_implementation("sdpa")
    with pytest.raises(ArgumentError, match="attn_implementation='sdpa'"):
        Nvfp4Cache(model.config, 8)
    model.set_attn_implementation("jitfp4")


@pytest.mark.parametrize("kind", KINDS)
def test_other_caches_work_as_with_other_implementations(kind: str, models: dict[str, Any]) -> None:
    model, tokens = models[kind], prompts(2, 20)
    got = model.generate(tokens, max_new_tokens=3, do_sample=False, eos_token_id=None)
    logits = model(tokens).logits
    model.set_attn_implementation("eager")
    want = model(tokens).logits
    assert torch.linalg.norm((logits - want).float()) < 0.02 * torch.linalg.norm(want.float())
    assert torch.equal(got, model.generate(tokens, max_new_tokens=3, do_sample=False, eos_token_id=None))
    model.set_attn_implementation("jitfp4")


@torch.no_grad()
def test_a_step_is_traced_whole_and_not_again_for_each_token(models: dict[str, Any]) -> None:
    model, tokens = models["llama"], prompts(2, 12)
    scales = calibrate(model, tokens)
    eager, traced = (Nvfp4Cache(model.config, 64, scales) for _ in range(2))
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for cache in (eager, traced):
        model(tokens, past_key_values=cache)
    for place in range(12, 17):
        new, position = tokens[:, place - 12 : place - 11], torch.full((2, 1), place)
        got = compiled(new, position_ids=position, past_key_values=traced).logits
        assert torch.equal(got, model(new, position_ids=position, past_key_values=eager).logits)
    assert graphs <= 2  # the second: the number of tokens so far is a variable
