"""generate_batch(): continuous batching, with FP4 weights, over transformers' cache and over NVFP4, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from jitfp4.errors import ArgumentError
from jitfp4.integrations.transformers import Jitfp4Config, Nvfp4Cache, calibrate, register
from tests.support.tiny_models import load, prompts, save

register()
NEW, LENGTHS = 4, (5, 39, 3, 40)
PAGE, STEP = 16, 32  # tokens of a page, and of a step: longer prompts are read in parts


def batches(model: Any, given: list[list[int]]) -> list[list[int]]:
    outs = model.generate_batch(
        given,
        generation_config=transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=16, max_batch_tokens=STEP
        ),
    )
    assert [out.prompt_ids for out in outs.values()] == given
    return [out.generated_tokens for out in outs.values()]


def given_prompts() -> list[list[int]]:
    """The last begins as the second does: their pages are shared."""
    given = [prompts(1, length)[0].tolist() for length in LENGTHS]
    return [*given[:3], given[1][:35] + given[3][35:]]


def check(model: Any, given: list[list[int]], outs: list[list[int]], cache: Callable[[], Any]) -> None:
    """Each token has the largest logit of a run of its own request, or as much but for the rounding to bf16."""
    for prompt, out in zip(given, outs, strict=True):
        assert len(out) == NEW
        tokens = torch.tensor([prompt + out], device=model.device)
        logits = model(tokens, past_key_values=cache()).logits[0, len(prompt) - 1 : -1].float().cpu()
        chosen = logits.gather(1, torch.tensor(out).unsqueeze(1)).squeeze(1)
        most = logits.amax(1)
        assert (chosen >= most - most.abs() * 2**-6).all()
        assert (most - logits.median(1).values > most.abs() * 2**-3).all()  # other tokens would not do


@torch.no_grad()
def test_batches_continue_with_likely_tokens(tmp_path: Path) -> None:
    model = load(save("qwen3_moe", tmp_path / "floats"), quantization_config=Jitfp4Config(), attn_implementation="sdpa")
    given = given_prompts()
    check(model, given, batches(model, given), lambda: None)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
@torch.no_grad()
def test_batches_over_nvfp4_continue_as_an_nvfp4_cache_does(kind: str, tmp_path: Path) -> None:
    """Also with windows and sinks, prompts in parts, shared pages. Experts in floats are faster here."""
    batching = pytest.importorskip("jitfp4.integrations.transformers.batches", exc_type=ImportError)
    fp4 = {} if kind == "gpt_oss" else {"quantization_config": Jitfp4Config()}
    model = load(save(kind, tmp_path / "floats"), attn_implementation="jitfp4", **fp4)
    given, scales = given_prompts(), calibrate(model, prompts(2, 40))
    with batching.nvfp4_batches(model, scales):
        outs = batches(model, given)
        with pytest.raises(ArgumentError, match="cache: got another one, or none"):
            model(torch.tensor([[1, 2]]))
    check(model, given, outs, lambda: Nvfp4Cache(model.config, 64, scales))
    assert model.config._attn_implementation == "jitfp4"
    with pytest.raises(ArgumentError, match="scales: got 1 pairs; allowed: 2"):
        batching.nvfp4_batches(model, scales[:1]).__enter__()


def test_in_a_captured_step_each_token_is_a_request() -> None:
    """Two requests, the second of one token, with empty ones up to a size that has a graph."""
    batching = pytest.importorskip("jitfp4.integrations.transformers.batches", exc_type=ImportError)
    step, q_ends = SimpleNamespace(tokens=PAGE), torch.tensor([0, 3, 4, 4, 4, 4], dtype=torch.int32)
    ends = torch.tensor([0, 23, 29, 29, 29, 29], dtype=torch.int32)
    read = torch.tensor([80, 32, 112, *[999] * 7])
    written = torch.tensor([36, 37, 38, 117, 999])
    batching.Nvfp4Allocator.begin(step, q_ends, ends, 2 * PAGE, read, written)
    assert step.one_each and step.lengths.tolist() == [21, 22, 23, 6, 0]
    assert step.tables[:3].tolist() == [[5, 2]] * 3 and step.tables[3, 0] == 7
    batching.Nvfp4Allocator.begin(step, q_ends[:3], ends[:3], 2 * PAGE, read[:3], written[:4])
    assert not step.one_each and step.lengths.tolist() == [23, 6] and step.tables[0].tolist() == [5, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
@torch.no_grad()
def test_batches_over_nvfp4_on_a_gpu(kind: str, tmp_path: Path) -> None:
    """With CUDA graphs, where transformers captures them."""
    batching = pytest.importorskip("jitfp4.integrations.transformers.batches", exc_type=ImportError)
    model = load(save(kind, tmp_path / "floats"), attn_implementation="jitfp4", quantization_config=Jitfp4Config()).to(
        "cuda"
    )
    given, scales = given_prompts(), calibrate(model, prompts(2, 40).cuda())
    with batching.nvfp4_batches(model, scales):
        outs = batches(model, given)
    check(model, given, outs, lambda: Nvfp4Cache(model.config, 64, scales))
