"""Every benchmark that needs a GPU runs to its end in a rehearsal; those that need none give what is committed."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jitfp4 import sim
from jitfp4.arch import Arch
from jitfp4.spec import Geometry
from tests.support.programs import FILES, ROOT, load, run_main
from tests.support.rehearsal import rehearsal

RESULTS = ROOT / "bench/results"
NEED_VALUES = (  # good calls that look at values or addresses
    "mxfp4_dequantize_host",
    "block_scale_interleave",
    "make_nvfp4_global_scale",
    "silu_and_mul",
    "nvfp4_quantize_paged_kv_cache",
    "Fp4Weight.from_tensors",
    "Fp4Experts.from_tensors",
)
# A program and its arguments; constants that leave less to do; the files that it writes.
RUNS: dict[str, tuple[dict[str, object], set[str]]] = {
    "bench_attention": ({"READ_BYTES": 1 << 24}, {"attention"}),
    "bench_conv": ({}, {"conv"}),
    "bench_conv --part search": ({}, {"conv_search"}),
    "bench_dependent": ({"PRODUCTS": (), "FIRST": (1,), "PAIRS": 1, "REPLAYS": 2, "FILLS": 0}, {"dependent"}),
    "bench_experts": ({}, {"experts"}),
    "bench_experts --part search": ({"SEARCHED_TOKENS": (8, 64)}, {"experts_search"}),
    "bench_fp8": ({"PAUSE_S": 0}, {"fp8"}),
    "bench_fp8 --part search": ({"LAYERS": ((8192, 8192),)}, {"fp8_search"}),
    "bench_gdn": ({}, {"gdn"}),
    "bench_gdn_prefill": ({"CELLS": ((1, 128),), "ERROR_TOKENS": 64}, {"gdn_prefill", "gdn_prefill_errors"}),
    "bench_gemm": ({}, {"gemm"}),
    "bench_gemm --part search": ({"LAYERS": ((8192, 8192),)}, {"gemm_search"}),
    "bench_gemm --part tuner": ({"TUNED_LAYERS": ((8192, 8192),), "TUNED_ROWS": (16, 2048)}, {"tuner"}),
    "bench_gemm_wide": ({"PAUSE_S": 0}, {"gemm_wide"}),
    "bench_gemm_wide --part search": ({"LAYERS": ((8192, 8192),)}, {"gemm_wide_search"}),
    "bench_head_dims": ({"HEAD_DIMS": (64, 96)}, {"attention_head_dims"}),
    "bench_kv": ({}, {"kv", "kv_tactics"}),
    "bench_launch": ({"CALLS": 1, "ROUNDS": 1, "LEFT_OUT": NEED_VALUES}, {"launch"}),
    "bench_mm_fp4": ({}, {"mm_fp4"}),
    "bench_mm_fp4 --part kernels": ({}, {"mm_fp4_kernels"}),
    "bench_mm_fp4 --part search": ({"LAYERS": ((8192, 8192),)}, {"mm_fp4_search"}),
    "bench_norm": ({"BATCHES": (1000, 32768)}, {"norm", "norm_small"}),
    "bench_prefill": ({}, {"prefill"}),
    "bench_routing": ({"HOST_CALLS": 1}, {"routing", "route_tokens"}),
    "bench_quantize": ({}, {f"quantize_{part}" for part in ("grid", "others", "variants", "better", "peers")}),
    "bench_step --model 8b --step separate fused persistent": (
        {"READ_BYTES": 1 << 24, "CELLS": ((1, 64), (64, 64))},
        {"step", "step_launches"},
    ),
    "ceiling_gdn": ({}, {"gdn_ceiling"}),
    "search_attention": (
        {"LOADS": ((1, 1024), (64, 8192))},
        {"attention_search", "prefill_search", "prefill_search_widths"},
    ),
    "search_step --model 8b --batch 8": ({"MOST": 2}, {"step_search"}),
    "search_gdn": ({"BATCHES": (64,)}, {"gdn_search"}),
    "search_gdn --part final": ({"BATCHES": (64,)}, {"gdn_search_final"}),
    "search_gdn --part kv": ({"BATCHES": (64,)}, {"gdn_search_kv"}),
    "search_norm": ({"ROWS": (1, 1000)}, {"norm_shapes"}),
}
NEVER_FILLED = {
    *(("gdn_prefill", column) for column in ("fla_us", "flashinfer_us", "speedup")),
    *(("gdn_prefill_errors", "output"), ("gdn_prefill_errors", "state")),
    *(("gdn_search", "bulk"), ("gdn_search_kv", "bulk")),
    *(("launch", "triton_launches"), ("quantize_peers", "wrote")),
}  # the peers are not here, nor a kernel that the column is of


@pytest.mark.complete
def test_every_bench_of_a_gpu_is_run_here() -> None:
    wanted = {name for name, file in FILES.items() if "Run on a GPU: ``python" in file.read_text()}
    assert wanted == {command.split()[0] for command in RUNS}, "RUNS of tests/unit/test_benches.py"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def clean_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go where those of a clean tree go."""
    monkeypatch.setenv("BENCH_COMMIT", "a rehearsal")


@pytest.mark.usefixtures("clean_stamp")
@pytest.mark.parametrize("command", RUNS)
def test_it_runs_to_its_end_on_tensors_without_data(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *arguments = command.split()
    program, (constants, files) = load(name), RUNS[command]
    for constant, value in constants.items():
        monkeypatch.setattr(program, constant, value)
    with rehearsal():
        run_main(program, *arguments, "--out", tmp_path)
    written = {path.stem: read(path) for path in tmp_path.glob("*.csv")}
    assert written.keys() == files
    empty = {(file, column) for file, rows in written.items() for column in rows[0] if not any(r[column] for r in rows)}
    assert empty <= NEVER_FILLED


@pytest.mark.usefixtures("clean_stamp")
@pytest.mark.parametrize(
    ("name", "file"),
    [("accuracy_fp8", "fp8_accuracy"), ("accuracy_kv", "kv_accuracy"), ("model_mm_fp4", "mm_fp4_model")],
)
def test_committed_results_of_no_gpu_are_what_it_computes(name: str, file: str, tmp_path: Path) -> None:
    run_main(load(name), "--out", tmp_path)
    computed, committed = read(tmp_path / f"{file}.csv"), read(RESULTS / f"cpu/{file}.csv")
    assert len(computed) == len(committed)
    for ours, theirs in zip(computed, committed, strict=True):
        assert ours.keys() == theirs.keys()
        for column, value in ours.items():
            same = value == theirs[column] or float(value) == pytest.approx(float(theirs[column]), rel=1e-2)
            assert same, (column, value, theirs[column])


def test_no_committed_result_is_of_a_tree_that_differed_from_its_commit() -> None:
    assert not [path.name for path in RESULTS.rglob("*.json") if '"dirty": true' in path.read_text()]


def test_pictures_are_drawn_from_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in (RESULTS / "h200").iterdir():
        if path.suffix in (".csv", ".json"):  # figures, and their stamps
            shutil.copy(path, tmp_path)
    run_main(load("plots"), "--out", tmp_path)
    drawn, committed = ({path.name for path in folder.glob("*.png")} for folder in (tmp_path, RESULTS / "h200"))
    assert drawn == committed


def test_the_table_of_decode_steps_is_that_of_the_records() -> None:
    models, folder = load("plots_models"), RESULTS / "h200"
    text = (RESULTS.parents[1] / "docs/benchmarks.md").read_text()
    lines = [line.strip("| ").split(" | ")[1:] for line in text.splitlines() if re.match(r"\| (8B|70B/4), \d", line)]
    before, after = models.rows(folder, "step_before"), models.steps(folder)
    for line, row in zip(lines, before, strict=True):
        now = models.best_step(after, row)
        recorded = [
            row["bf16_ms"],
            row["weights_ms"],
            row["ms"],
            now["ms"],
            now["bound_ms"],
            row["of_roof"],
            now["of_roof"],
        ]
        assert [float(value) for value in line] == [pytest.approx(float(value), rel=0.02) for value in recorded]


MODELS = {
    "Llama-3.1-8B": "llama-3.1-8b",
    "Llama-3.1-70B": "llama-3.1-70b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "gpt-oss-120b": "gpt-oss-120b",
    "Qwen3-Next-80B-A3B": "qwen3-next-80b-a3b",
}


def test_the_tables_of_whole_models_are_those_of_the_records() -> None:
    text = (RESULTS.parents[1] / "docs/benchmarks.md").read_text()
    recorded: dict[tuple[str, ...], float] = {}
    for path in sorted((RESULTS / "h200").glob("models*.csv")):
        for row in read(path):
            sizes = (row["batch"], row["context"]) if "batch" in row else (row["tokens"],)
            recorded[row["model"], row["variant"], *sizes] = float(row["ms"])
    steps = [(batch, context) for batch in ("1", "8", "64") for context in ("2048", "8192", "32768")]
    named = [line.split("|")[1:-1] for line in text.splitlines() if re.match(rf"\| ({'|'.join(MODELS)}) \|", line)]
    found = {}
    for name, kind, *values in ([value.strip() for value in line] for line in named):
        sizes = steps if len(values) > 3 else [("2048",), ("8192",), ("32768",)]
        of = MODELS[name], "bf16" if kind == "bf16" else "w4-kv4"
        found |= {(*of, *size): float(value) for size, value in zip(sizes, values, strict=True) if value}
    assert found == {key: pytest.approx(ms, rel=5e-3) for key, ms in recorded.items()}


def test_what_was_chosen_from_a_search_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_main(load("bench_gemm"), "--part", "choose")
    buckets = [line for line in capsys.readouterr().out.splitlines() if line.startswith("m <= ")]
    assert len(buckets) == len(set(buckets)) >= 20


@pytest.mark.usefixtures("clean_stamp")
@pytest.mark.sim
def test_faults_are_counted_on_a_simulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load("faults_on_gpu")

    def run(ptx: str, given: list[Any], geometry: Geometry) -> list[Any]:
        sim.run(ptx, given, geometry, "sm_90a")
        return [value for value in given if isinstance(value, np.ndarray)]

    monkeypatch.setattr(program, "run_on_gpu", run)
    monkeypatch.setattr(program, "device_arch", lambda _: Arch.of("sm_90a"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for cases in ("PROXIES", "GLOBAL", "MATRIX"):
        monkeypatch.setattr(program, cases, [case for case in getattr(program, cases) if case.ends][:2])
    run_main(program, "--launches", 1, "--out", tmp_path)
    rows = read(tmp_path / "sim_faults.csv")
    assert rows and {row["wrong_with_the_piece"] for row in rows} == {"0"}
