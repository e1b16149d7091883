"""The benchmark of whole models runs to its end on the CPU, on tiny ones."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from bench.models import MODELS
from tests.support.programs import load, run_main


def test_every_variant_takes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")
    program = load("bench_model")
    arguments = ("--model", "tiny", "--device", "cpu", "--case", "2:60", "--glue", "plain")
    run_main(program, *arguments, "--variant", *program.VARIANTS, "--out", tmp_path)
    rows = {row["variant"]: row for row in read(tmp_path / "model.csv")}
    assert list(rows) == list(program.VARIANTS)
    bounds = [float(rows[variant]["bound_ms"]) for variant in ("bf16", "w4", "w4-kv4", "w4-kv4-head4")]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > 2.5 * bounds[3]
    assert float(rows["transformers"]["bound_ms"]) == pytest.approx(bounds[0], rel=1e-2)
    assert all(float(row["tokens_per_s"]) > 0 for row in rows.values())


# What is small of the published models: all else of their configurations stays.
SMALL = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
LEAST = {"qwen3-next-80b-a3b": 1.5}
"""How often the bytes of a step in FP4 those in bf16 are, if not twice: states of linear attention are in 32 bits."""


@pytest.mark.parametrize("model", [name for name in MODELS if name != "tiny"])
def test_every_model_takes_a_step_and_reads_a_prompt(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")
    monkeypatch.setitem(MODELS, model, MODELS[model]._replace(config=partial(small, MODELS[model].config)))
    layers = 4 if "next" in model else 2  # the fourth is the first with attention
    arguments = ("--model", model, "--device", "cpu", "--case", "3:60", "--prefill", 70, "--glue", "plain")
    run_main(load("bench_model"), *arguments, "--layers", layers, "--variant", "bf16", "w4-kv4", "--out", tmp_path)
    lines, prompts = read(tmp_path / "model.csv"), read(tmp_path / "model_prefill.csv")
    bounds = [float(row["bound_ms"]) for row in lines]
    assert bounds[0] > LEAST.get(model, 2.0) * bounds[1]  # both are rounded to a microsecond
    assert [(row["variant"], row["tokens"]) for row in prompts] == [("bf16", "70"), ("w4-kv4", "70")]
    assert {row["model"] for row in lines} == {f"{model.removesuffix('-80b-a3b')}-{layers}-layers"}
    assert len((*lines, *prompts)) == 4


def test_what_does_not_fit_has_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")
    program = load("bench_model")
    cache_of = program.cache_of

    def in_small_memory(model: Any, variant: str, batch: int, context: int, device: str) -> Any:
        if batch == 8:
            raise torch.OutOfMemoryError
        return cache_of(model, variant, batch, context, device)

    monkeypatch.setattr(program, "cache_of", in_small_memory)
    arguments = ("--model", "tiny", "--device", "cpu", "--glue", "plain", "--variant", "w4-kv4", "--name", "small")
    run_main(program, *arguments, "--case", "1:60", "8:60", "2:60", "--out", tmp_path)
    assert [row["batch"] for row in read(tmp_path / "small.csv")] == ["1", "2"]
    assert "batch=8 context=60 memory=too little" in capsys.readouterr().out


def small(config: Callable[[], Any]) -> Any:
    """The configuration in small."""
    made = config()
    for name, value in SMALL.items():
        if hasattr(made, name):
            setattr(made, name, value)
    return made


def read(file: Path) -> list[dict[str, str]]:
    """The lines of a result."""
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_prompts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")
    program = load("bench_model")
    arguments = ("--model", "tiny", "--device", "cpu", "--case", "--prefill", 20, 70, "--glue", "plain")
    run_main(program, *arguments, "--variant", *program.VARIANTS, "--out", tmp_path)
    rows = read(tmp_path / "model_prefill.csv")
    assert [(row["variant"], row["tokens"]) for row in rows] == [(v, t) for v in program.VARIANTS for t in ("20", "70")]
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)


def test_a_checkpoint_is_written_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")
    arguments = ("--model", "tiny", "--device", "cpu", "--shards", 1, 3, "--folder", tmp_path, "--out", tmp_path)
    run_main(load("bench_load"), *arguments)
    rows = read(tmp_path / "load.csv")
    assert [row["shards"] for row in rows] == ["1", "3"] and all(float(row["seconds"]) > 0 for row in rows)
