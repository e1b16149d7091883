"""The example of generation with a paged cache, on a small model, by the reference."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch

from tests.support.programs import load, run_main


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("paged_generation")


def test_it_prints_agreement_and_memory(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    run_main(example, "--device", "cpu", "--layers", 1, "--new", 3)
    said = capsys.readouterr().out
    bf16, nvfp4 = (int(size) for size in re.findall(r"cache: (\d+) bytes", said))
    assert bf16 == 2 * 9 * 16 * 2 * 64 * 2  # sides, pages, tokens, heads, dimensions
    assert bf16 * 36 == nvfp4 * 128
    assert float(re.findall(r"least (0\.\d+)", said)[0]) > 0.98


def test_caches_that_differ_are_an_error(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example.Nvfp4Cache, "append", lambda *_: None)
    with pytest.raises(SystemExit, match="cosine"):
        run_main(example, "--device", "cpu", "--layers", 1, "--new", 1)


def test_chunks_of_a_prompt_add_up(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tables = example.make_model(1, "cpu"), torch.arange(4, dtype=torch.int32).view(2, 2)
    prompts = [torch.arange(20), torch.arange(7)]
    logits = []
    for chunk in (32, 6):
        monkeypatch.setattr(example, "CHUNK", chunk)
        engine = example.Engine(model, example.Bf16Cache(1, 4, "cpu"), tables)
        with torch.no_grad():
            logits.append(example.generate(engine, prompts, 1)[1])
    assert torch.allclose(*logits, atol=0.1, rtol=0.02)
