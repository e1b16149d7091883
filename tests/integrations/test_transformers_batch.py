"""generate_batch(): continuous batching over transformers' own paged cache, with FP4 weights, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from jitfp4.integrations.transformers import Jitfp4Config, register
from tests.support.tiny_models import load, prompts, save

register()
NEW, LENGTHS = 6, (5, 9, 3)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@torch.no_grad()
def test_batches_continue_with_likely_tokens(kind: str, tmp_path: Path) -> None:
    """Each token has the largest logit of a run of its own request, or as much but for the rounding to bf16."""
    model = load(save(kind, tmp_path / "floats"), quantization_config=Jitfp4Config(), attn_implementation="sdpa")
    given = [prompts(1, length)[0].tolist() for length in LENGTHS]
    outs = model.generate_batch(
        given,
        generation_config=transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
    )
    assert len(outs) == len(given)
    for prompt, out in zip(given, outs.values(), strict=True):
        assert out.prompt_ids == prompt and len(out.generated_tokens) == NEW
        logits = model(torch.tensor([prompt + out.generated_tokens])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(out.generated_tokens).unsqueeze(1)).squeeze(1)
        most = logits.amax(1)
        assert (chosen >= most - most.abs() * 2**-6).all()
        assert (most - logits.median(1).values > most.abs() * 2**-3).all()  # other tokens would not do
