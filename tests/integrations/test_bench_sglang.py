"""The benchmark of SGLang: what it makes of a run, and what the guide says of its results. SGLang is not needed."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.engines import check_sglang, forks, sglang_decode
from jitfp4.reference.formats import decode_e2m1, decode_e4m3, unpack_e2m1

safetensors = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results/h200"
SECTIONS = {
    "Llama-3.1-8B in SGLang": ("sglang", "llama-3.1-8b"),
    "Qwen3-30B-A3B in SGLang": ("sglang_experts", "qwen3-30b-a3b"),
}
LABELS = {"bf16": "bf16", "own": "FP4, SGLang's own kernels", "plugin": "FP4, plugin"}


@pytest.mark.parametrize("model", check_sglang.CHECKED)
def test_small_checkpoints_hold_the_same_values(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = check_sglang.CHECKED[model] | {"num_hidden_layers": 1, "vocab_size": 32, "num_experts": 2}
    if "moe" not in model:
        del config["num_experts"]
    monkeypatch.setitem(check_sglang.CHECKED, model, config)
    check_sglang.write_checkpoints(model, tmp_path)
    floats = safetensors.load_file(tmp_path / "bf16/model.safetensors")
    for form, codes, scale in (
        ("modelopt", "weight", "weight_scale_2"),
        ("compressed-tensors", "weight_packed", "weight_global_scale"),
    ):
        tensors = safetensors.load_file(tmp_path / form / "model.safetensors")
        assert json.loads((tmp_path / form / "config.json").read_text())["quantization_config"]["quant_method"] == form
        names = [name for name, _, _ in check_sglang.matrices(config)]
        for name in names:
            blocks = decode_e4m3(tensors[f"{name}.weight_scale"].view(torch.uint8)).unsqueeze(-1)
            values = decode_e2m1(unpack_e2m1(tensors[f"{name}.{codes}"])).unflatten(-1, (-1, 16))
            whole = tensors[f"{name}.{scale}"] if form == "modelopt" else 1 / tensors[f"{name}.{scale}"]
            assert torch.equal((values * blocks).flatten(1) * whole, floats[f"{name}.weight"].float())
        kept = floats.keys() - {f"{name}.weight" for name in names}
        assert all(torch.equal(tensors[name], floats[name]) for name in kept)
        assert "model.norm.weight" in kept and "lm_head.weight" in kept


def test_logits_are_in_the_order_of_tokens() -> None:
    given = [[(-1.0, 44, None), (-2.0, 7, None)], [(-3.0, 7, None), (-4.0, 44, None)]]
    assert check_sglang.logits(given).tolist() == [[-2.0, -1.0], [-3.0, -4.0]]


def test_what_was_generated_is_compared_with_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [torch.randn(3, 16), torch.randn(3, 16)]
    torch.save({"name": "plugin", "tokens": [], "logits": own}, tmp_path / "modelopt.pt")
    torch.save([own[0] + 7, own[1]], tmp_path / "modelopt.read")  # softmax does not see the difference
    check_sglang.compared("a model", tmp_path)
    torch.save([-side for side in own], tmp_path / "modelopt.read")
    check_sglang.compared("a model", tmp_path)
    line, opposite = capsys.readouterr().out.splitlines()
    assert "least -1.00000 mean -1.00000, largest of 0 of 6" in opposite
    assert line == "COSINE a model plugin modelopt to bf16: least 1.00000 mean 1.00000, largest of 6 of 6"


def test_forks_report_how_they_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        sys.stderr = sys.__stderr__  # not what pytest put there
        raise ValueError("no such luck")

    def writes() -> None:
        os.write(1, b"READY at once\nand more\n")

    def ended(run: Callable[[], None], name: str) -> int:
        return forks.finished(forks.begun(run, tmp_path / name), tmp_path / name, 60)

    assert ended(writes, "good.log") == 0
    assert ended(fails, "bad.log") == 1
    assert ended(lambda: os.kill(os.getpid(), 15), "ended.log") == -15
    out = capsys.readouterr().out
    assert re.search(r"good: status 0 after \d s\nREADY at once\nbad: status 1", out)
    assert "ValueError: no such luck" in out and "ended: status -15" in out


def test_a_recorded_gpu_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"name": "a GPU", "major": 9, "minor": 0, "multi_processor_count": 132}
    monkeypatch.setattr(forks, "_in_fork", lambda _: facts)
    for name in ("is_available", "device_count", "current_device", "set_device", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))  # and back
    for name in ("get_device_capability", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    forks.use_recorded_gpu()
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 132


def test_engines_start_at_once_and_work_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = os.open(tmp_path / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def works(name: str, wait: Callable[[], None]) -> None:
        os.write(told, b"start ")
        wait()
        os.write(told, f"{name} {os.environ['SGLANG_PLUGINS']} ".encode())

    def fails(wait: Callable[[], None]) -> None:
        raise ValueError(wait)

    runs = [
        sglang_decode.Run("first", "plugin", partial(works, "first"), tmp_path),
        sglang_decode.Run("bad", "own", fails, tmp_path),
        sglang_decode.Run("last", "own", partial(works, "last"), tmp_path),
    ]
    done: list[str] = []
    failed = sglang_decode.run(runs, tmp_path, 60, lambda one: done.append(one.name))
    assert (failed, done) == (["bad"], ["first", "last"])
    assert (tmp_path / "told").read_text() == "start start first seeded,jitfp4 last seeded "
    assert "bad: status 1" in capsys.readouterr().out


def test_an_engine_that_does_not_get_ready_is_not_waited_for(tmp_path: Path) -> None:
    child = forks.begun(lambda: os.kill(os.getpid(), 19), tmp_path / "slow.log")  # it stops
    forks.wait_for(tmp_path / "slow.ready", child, 0.2)
    assert forks.finished(child, tmp_path / "slow.log", 0.1) == -9


@pytest.mark.parametrize("section", SECTIONS)
def test_the_guide_names_the_figures_of_the_run(section: str) -> None:
    """A row for each variant and attention that was run: milliseconds and tokens a second at each batch."""
    (file, model), guide = SECTIONS[section], (ROOT / "docs/engines.md").read_text()
    (text,) = re.findall(rf"^#### {re.escape(section)}\n(.*?)^##", guide, re.MULTILINE | re.DOTALL)
    rows = list(csv.DictReader((RESULTS / f"{file}.csv").open(newline="")))
    assert {row["model"] for row in rows} == {model} and {row["loaded_after_ready"] for row in rows} == {"0"}
    for variant, attention in dict.fromkeys((row["variant"], row["attention"]) for row in rows):
        (line,) = re.findall(rf"^\| {re.escape(LABELS[variant])} \| {attention} \| (.*) \|$", text, re.MULTILINE)
        own = [row for row in rows if (row["variant"], row["attention"]) == (variant, attention)]
        assert line.split(" | ") == [f"{float(row['ms_per_step']):.2f} ({row['tokens_per_s']})" for row in own]
