"""FP4 models on a GPU: the CPU's logits, and a CUDA graph of a step that goes on where it was captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from jitfp4 import engine
from jitfp4.integrations.transformers import Jitfp4Config, Nvfp4Cache, calibrate, load_kernels, register
from tests.support.tiny_models import load, prompts, save

register()
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "gpt_oss", "qwen3_next"])
@torch.no_grad()
def test_a_gpu_gives_the_logits_of_the_cpu(kind: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path / "floats")
    model = load(folder, quantization_config=Jitfp4Config(), attn_implementation="jitfp4")
    tokens = prompts(3, 40)
    scales = None if kind == "qwen3_next" else calibrate(model, tokens)
    parts = (tokens[:, :30], tokens[:, 30:33], tokens[:, 33:34], tokens[:, 34:35])
    cache = Nvfp4Cache(model.config, 64, scales)
    want = [model(part, past_key_values=cache).logits for part in parts]
    model.to("cuda")
    cache = Nvfp4Cache(model.config, 64, scales)
    got = [model(part.cuda(), past_key_values=cache).logits.cpu() for part in parts]
    for ours, theirs in zip(got, want, strict=True):
        error = (ours - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1)
        assert error.median() < 0.05


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_a_captured_step_goes_on(kind: str, tmp_path: Path) -> None:
    model = load(save(kind, tmp_path / "floats"), quantization_config=Jitfp4Config(), attn_implementation="jitfp4")
    model.to("cuda")
    tokens = prompts(2, 12).cuda()
    want = model.generate(
        tokens, past_key_values=Nvfp4Cache(model.config, 64), max_new_tokens=10, do_sample=False, eos_token_id=None
    )
    cache = Nvfp4Cache(model.config, 64)
    new = model(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
    position = torch.full((2, 1), 12, device="cuda")

    def step() -> None:
        logits: Any = model(new, position_ids=position, past_key_values=cache).logits
        new.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    stream, found = torch.cuda.Stream(), [new.clone()]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
            found.append(new.clone())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(6):
        graph.replay()
        found.append(new.clone())
    assert torch.equal(torch.cat(found, 1), want[:, 12:])


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "qwen3_next"])
@torch.no_grad()
def test_nothing_is_loaded_after_the_start(kind: str, tmp_path: Path) -> None:
    model = load(save(kind, tmp_path / "floats"), quantization_config=Jitfp4Config(), attn_implementation="jitfp4")
    model.to("cuda")
    load_kernels(model, requests=4, max_cache_len=256, max_tokens=4 * 100)
    before = engine.loaded(), engine.cache_info().builds
    assert before[0] > 0
    for rows, length in ((1, 5), (3, 100), (4, 17)):
        cache = Nvfp4Cache(model.config, 256)
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        model.generate(prompts(rows, length).cuda(), past_key_values=cache, **options)
    assert (engine.loaded(), engine.cache_info().builds) == before
