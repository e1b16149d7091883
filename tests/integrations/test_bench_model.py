"""The benchmark of whole models runs to its end on the CPU, on a tiny one."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tests.support.programs import load, run_main


def test_every_variant_takes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")
    program = load("bench_model")
    arguments = ("--model", "tiny", "--device", "cpu", "--case", "2:60", "--glue", "plain")
    run_main(program, *arguments, "--variant", *program.VARIANTS, "--out", tmp_path)
    with (tmp_path / "model.csv").open(newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(program.VARIANTS)
    bounds = [float(rows[variant]["bound_ms"]) for variant in ("bf16", "w4", "w4-kv4", "w4-kv4-head4")]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > 2.5 * bounds[3]
    assert float(rows["transformers"]["bound_ms"]) == pytest.approx(bounds[0], rel=1e-2)
    assert all(float(row["tokens_per_s"]) > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("model", "least"),
    [("tiny-experts", 2.0), ("tiny-gpt-oss", 2.0), ("tiny-next", 1.5)],  # states of the last are in 32 bits
)
def test_experts_take_a_step(model: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")
    arguments = ("--model", model, "--device", "cpu", "--case", "3:60", "--glue", "plain")
    run_main(load("bench_model"), *arguments, "--variant", "bf16", "w4-kv4", "--out", tmp_path)
    with (tmp_path / "model.csv").open(newline="") as file:
        bounds = [float(row["bound_ms"]) for row in csv.DictReader(file)]
    assert bounds[0] > least * bounds[1]  # both are rounded to a microsecond


def test_prompts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")
    program = load("bench_model")
    arguments = ("--model", "tiny", "--device", "cpu", "--case", "--prefill", 20, 70, "--glue", "plain")
    run_main(program, *arguments, "--variant", *program.VARIANTS, "--out", tmp_path)
    with (tmp_path / "model_prefill.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["tokens"]) for row in rows] == [(v, t) for v in program.VARIANTS for t in ("20", "70")]
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)


def test_a_checkpoint_is_written_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")
    arguments = ("--model", "tiny", "--device", "cpu", "--shards", 1, 3, "--folder", tmp_path, "--out", tmp_path)
    run_main(load("bench_load"), *arguments)
    with (tmp_path / "load.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["shards"] for row in rows] == ["1", "3"] and all(float(row["seconds"]) > 0 for row in rows)
