"""Qwen3-Next's prompts and single tokens by jitfp4's gated delta rule, against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers.models.qwen3_next import modeling_qwen3_next

from jitfp4.errors import ArgumentError
from jitfp4.integrations.transformers import use_gated_delta_rule
from tests.support.tiny_models import load, prompts, save

NAME = "torch_recurrent_gated_delta_rule"
PROMPT = "torch_chunk_gated_delta_rule"


@pytest.fixture(autouse=True)
def theirs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """transformers' functions, which are there again after the test."""
    functions = {name: getattr(modeling_qwen3_next, name) for name in (NAME, PROMPT)}
    for name, function in functions.items():
        monkeypatch.setattr(modeling_qwen3_next, name, function)
    return functions


@torch.no_grad()
def test_a_token_is_that_of_transformers(theirs: dict[str, Any], tmp_path: Path) -> None:
    model = load(save("qwen3_next", tmp_path / "floats"))
    assert use_gated_delta_rule(model) == use_gated_delta_rule(model) == 1
    rule = getattr(modeling_qwen3_next, NAME)
    assert rule.known is theirs[NAME]
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(3, 1, 4, 64, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(3, 1, 4, 64, generator=generator).bfloat16()
    g = -torch.rand(3, 1, 4, generator=generator) * torch.tensor([1e-6, 0.1, 3.0, 50.0])
    beta = torch.rand(3, 1, 4, generator=generator).bfloat16()
    beta[0], g[0] = 1.0, 0.0
    state = torch.randn(3, 4, 64, 64, generator=generator)
    options = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    want, end = theirs[NAME](q, k, v, initial_state=state.clone(), **options)
    mine = state.clone()
    got, updated = rule(q, k, v, initial_state=mine, **options)
    assert updated is mine
    torch.testing.assert_close(updated, end, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("initial", [False, True], ids=["new", "continued"])
def test_a_prompt_is_that_of_transformers(theirs: dict[str, Any], initial: bool, tmp_path: Path) -> None:
    model = load(save("qwen3_next", tmp_path / "floats"))
    use_gated_delta_rule(model)
    rule = getattr(modeling_qwen3_next, PROMPT)
    assert rule.known is theirs[PROMPT]
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 70, 2, 64, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(2, 70, 4, 64, generator=generator).bfloat16()
    g, beta = -0.2 * torch.rand(2, 70, 4, generator=generator), torch.rand(2, 70, 4, generator=generator).bfloat16()
    state = torch.randn(2, 4, 64, 64, generator=generator) if initial else None
    options = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    want, end = theirs[PROMPT](q, k, v, initial_state=state, **options)
    got, last = rule(q, k, v, initial_state=state, **options)
    torch.testing.assert_close(last, end, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


@torch.no_grad()
def test_a_model_generates_the_same(tmp_path: Path) -> None:
    model = load(save("qwen3_next", tmp_path / "floats"))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    want = model.generate(prompts(), **options)
    use_gated_delta_rule(model)
    calls = 0
    rule = getattr(modeling_qwen3_next, NAME)
    with pytest.MonkeyPatch.context() as patch:

        def never(*_: Any, **__: Any) -> Any:
            nonlocal calls
            calls += 1

        patch.setattr(rule, "known", never)
        assert torch.equal(model.generate(prompts(), **options), want)
    assert calls == 0
    with pytest.raises(ArgumentError, match="model: got LlamaForCausalLM"):
        use_gated_delta_rule(load(save("llama", tmp_path / "llama")))
