"""jitfp4 families, tactics and tune: what they print, what they refuse, and their exit statuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jitfp4 import nvrtc, sim, tactics, tuning
from jitfp4.arch import Arch
from jitfp4.cli import app
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.operation import Observed, Operation, operations
from jitfp4.spec import fields_of
from jitfp4.tactics import Choice, TacticsFile
from jitfp4.tuning import Measure
from jitfp4.version import version
from jitfp4.warmup import read_plan

PROBLEM = "m=16,n=8192,k=8192"
SCRIPT = """
import sys
import torch
import jitfp4
from jitfp4 import sim

assert __name__ == "__main__"
print("not JSON")
with sim.device("sm_90a"):
    jitfp4.nvfp4_quantize(torch.ones(int(sys.argv[1]), 64).bfloat16(), 1.0)
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def document(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def write_choice(path: Path, tactic: Any, **problem: int) -> None:
    like = MM_BF16_FP4.problems(Arch.of("sm_90a"))[0]._replace(**problem)
    kernel = next(kernel for kernel in MM_BF16_FP4.kernels if kernel.tactic is type(tactic))
    choice = Choice(
        operation="mm_bf16_fp4",
        problem=fields_of(MM_BF16_FP4.bucket(like)),
        kernel=kernel.name,
        tactic=fields_of(tactic),
        us=2.0,
        measured=9,
        finished=True,
    )
    toolchain = nvrtc.toolchain()
    assert toolchain is not None
    tactics.write(TacticsFile("NVIDIA H200", "sm_90a", toolchain.name, {choice.key: choice}), path)


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"jitfp4 {version()}\n")


def test_families_lists_every_operation() -> None:
    listed = {one["operation"]: one for one in document("operations")["operations"]}
    assert listed.keys() == {one.name for one in operations()}
    assert listed["mm_bf16_fp4"]["kernels"] == ["gemm/narrow", "gemm/wide"]
    assert listed["mm_bf16_fp4"]["problem"] == ["dtype", "out_dtype", "format", "m", "n", "k", "gated"]
    assert "gemm/narrow, gemm/wide" in run("operations").stdout == run("families").stdout


# ---- tactics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.name)
def test_every_tactic_is_legal_with_its_spec_or_rejected_with_a_reason(operation: Operation[Any, Any]) -> None:
    arch = Arch.of("sm_90a")
    found = document("tactics", operation.name, "--arch", "sm_90a")
    problem = operation.problems(arch)[0]
    assert found["problem"] == fields_of(problem)
    assert [one["tactic"] for one in found["tactics"]] == [fields_of(t) for t in operation.candidates(problem, arch)]
    assert len(found["tactics"]) + len(found["rejected"]) == sum(len(kernel.tactics) for kernel in operation.kernels)
    assert all(one["why"] for one in found["rejected"]) and all(one["spec"] is not None for one in found["tactics"])
    (selected,) = [one["tactic"] for one in found["tactics"] if one["selected"]]
    assert selected == found["selected"] == fields_of(operation.select(problem, arch))
    assert found["by"].startswith("table: row ")


def test_what_selected_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "tactics", "mm_bf16_fp4", "--problem", PROBLEM, "--arch", "sm_90a"
    by = document(*command)["by"]
    assert re.fullmatch(r"table: row 13 of \d+, read from bench/results/h200/gemm_wide_search.csv", by)
    wide = document("tactics", "mm_bf16_fp4", "--problem", "m=512,n=8192,k=8192", "--arch", "sm_90a")["by"]
    assert wide.endswith("read from bench/results/h200/gemm_wide_search.csv")
    tuned = NarrowTactic(16, 4, 2, 4, 2, 2)
    write_choice(tmp_path / "tactics.json", tuned, m=13, n=8192, k=8192)
    found = document(*command, "--tactics", tmp_path / "tactics.json")
    assert found["by"] == f"tuned: {tmp_path / 'tactics.json'}" and found["selected"] == fields_of(tuned)
    monkeypatch.setenv("JITFP4_TACTICS", str(tmp_path / "tactics.json"))
    assert document(*command)["selected"] == fields_of(tuned)
    (tmp_path / "tactics.json").write_text("{}")
    refused = run(*command)
    assert refused.exit_code == 2 and "no tactics file" in refused.stderr
    with MM_BF16_FP4.forced(WideTactic(64, 1, 2)):
        monkeypatch.delenv("JITFP4_TACTICS")
        assert document(*command)["by"] == "forced"


def test_the_selected_one_is_marked_and_reasons_are_shown_when_they_are_asked_for() -> None:
    command = "tactics", "mm_bf16_fp4", "--problem", PROBLEM, "--arch", "sm_100a"
    brief, full = run(*command), run(*command, "--why")
    (marked,) = [line for line in brief.stdout.splitlines() if line.startswith("*  ")]
    assert "gemm/narrow" in marked and "tile_m=16," in marked and "dtype=bf16," in marked
    assert "its products are instructions of sm_90a" not in brief.stdout and "--why" in brief.stderr
    assert "its products are instructions of sm_90a" in full.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "--arch", "sm_90a"], "operation: got 'none'; allowed: attention,"),
        (["quantize", "--arch", "sm_1"], "arch: got 'sm_1'"),
        (["quantize", "--arch", "sm_90a", "--problem", "size=3"], "--problem: got 'size=3'; allowed: NAME=VALUE with"),
        (["quantize", "--arch", "sm_90a", "--problem", "m=x"], "--problem: got m=x; allowed: m=a number"),
        (["quantize", "--arch", "sm_90a", "--problem", "silu=2"], "--problem: got silu=2; allowed: true, false"),
        (["decode_step", "--arch", "sm_90a", "--problem", "kv_heads=0"], "allowed: sizes that a call has"),
        (["quantize", "--arch", "sm_90a", "--problem", "sf_layout=9"], "allowed: layout_128x4, 0, layout_8x4"),
    ],
)
def test_what_is_unknown_is_an_error_that_says_what_is_allowed(arguments: list[str], message: str) -> None:
    result = run("tactics", *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_an_architecture_without_a_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MM_BF16_FP4, "problems", lambda _: ())
    result = run("tactics", "mm_bf16_fp4", "--arch", "sm_80")
    assert result.exit_code == 2 and result.stderr == "jitfp4: mm_bf16_fp4 has no kernel for sm_80\n"


def test_fields_are_given_by_name_or_value() -> None:
    fields = "block_format=nvfp4,sf_layout=layout_linear,silu=true,m=7"
    problem = document("tactics", "quantize", "--arch", "sm_90a", "--problem", fields)["problem"]
    assert problem.items() >= {"block_format": "nvfp4", "sf_layout": "layout_linear", "silu": True, "m": 7}.items()


# ---- tune ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program; the last of the candidates that its calls have is measured as the fastest."""

    @contextmanager
    def measurer(_call: Observed, candidates: Sequence[Any]) -> Iterator[Measure]:
        order = list(candidates)
        yield lambda tactic, _: 100.0 - order.index(tactic)

    tune = tuning.tune
    monkeypatch.setattr(tuning, "tune", lambda *args, **options: tune(*args, **options, measurer=measurer))
    monkeypatch.setattr("jitfp4.engine.launch", lambda *_, **__: None)
    (tmp_path / "program.py").write_text(SCRIPT)
    return tmp_path / "program.py"


def test_a_program_is_tuned_and_a_second_run_goes_on(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "tactics.json"
    first = run("tune", "--out", out, "--", script, 4)
    assert first.exit_code == 0, first.stderr
    assert f"1 problem on simulated sm_90a; use it: JITFP4_TACTICS={out}" in first.stderr
    assert "quantize/tma" in first.stdout
    second = document("tune", script, 100, "--out", out)
    assert [choice["problem"]["m"] for choice in second["choices"]] == [128, 4]
    assert tactics.read(out).choices.keys() == {f"{c['operation']} {_key(c['problem'])}" for c in second["choices"]}


def _key(problem: dict[str, Any]) -> str:
    return json.dumps(problem, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("arguments", [[], ["--w4a4"]])
def test_the_example_of_shapes_is_tuned(script: Path, tmp_path: Path, arguments: list[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "linear_shapes.py"
    shapes = ["128x256", "64x128", "--rows", "3", "40", "--device", "cpu"]
    with sim.device("sm_90a"):
        tuned = run("tune", "--out", tmp_path / "tactics.json", "--", example, *shapes, *arguments)
    assert tuned.exit_code == 0, tuned.stderr
    choices = [c for c in tactics.read(tmp_path / "tactics.json").choices.values() if c.operation.startswith("mm_")]
    problems = {(c.problem["n"], c.problem["k"], c.problem["m"]) for c in choices}
    assert problems == {(n, k, m) for n, k in ((128, 256), (64, 128)) for m in (4, 64)}
    assert {choice.operation for choice in choices} == {"mm_fp4" if arguments else "mm_bf16_fp4"}


@pytest.mark.parametrize("routing", ["uniform", "zipf", "few"])
def test_the_example_of_layers_of_experts_is_tuned(script: Path, tmp_path: Path, routing: str) -> None:
    """Three tokens without a list of items, forty with one: every step of both layers has a choice."""
    example = Path(__file__).parents[2] / "examples" / "expert_layers.py"
    layer = ["16x4x64x96", "--tokens", "3", "40", "--routing", routing, "--device", "cpu"]
    with sim.device("sm_90a"):
        tuned = run("tune", "--out", tmp_path / "tactics.json", "--", example, *layer)
    assert tuned.exit_code == 0, tuned.stderr
    choices = tactics.read(tmp_path / "tactics.json").choices.values()
    assert {(choice.operation, choice.problem["tokens"]) for choice in choices} == {
        *((operation, tokens) for operation in ("experts_topk", "experts_up", "experts_down") for tokens in (4, 64)),
        ("experts_gather", 64),
        *((operation, 64) for operation in ("experts_route", "experts_results")),
    }
    up = [choice.problem for choice in choices if choice.operation == "experts_up"]
    assert {(problem["experts"], problem["slots"], problem["n"], problem["k"]) for problem in up} == {(16, 4, 192, 64)}


def test_ctrl_c_is_status_130(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", interrupted)
    result = run("tune", script, "--out", tmp_path / "tactics.json")
    assert result.exit_code == 130 and "goes on from there" in result.stderr


def test_a_program_that_fails_or_launches_nothing_is_an_error(script: Path, tmp_path: Path) -> None:
    for text, message in (
        ("import sys\nsys.exit(3)", "which ended with 3"),
        ("import sys\nsys.exit(0)", "kernels on 0 GPUs"),
    ):
        script.write_text(text)
        result = run("tune", script, "--out", tmp_path / "tactics.json")
        assert result.exit_code == 2 and message in result.stderr
    assert not (tmp_path / "tactics.json").exists()


def test_warmup_also_builds_what_a_file_selects(tmp_path: Path) -> None:
    tuned = NarrowTactic(8, 2, 2, 12, 2, 1)
    write_choice(tmp_path / "tactics.json", tuned, m=4, n=8192, k=8192)
    command = "warmup", "--arch", "sm_90a", "--family", "gemm/narrow", "--write-plan"
    assert run(*command, tmp_path / "less.json").exit_code == 0
    assert run(*command, tmp_path / "more.json", "--tactics", tmp_path / "tactics.json").exit_code == 0
    less, more = (read_plan((tmp_path / name).read_text()) for name in ("less.json", "more.json"))
    (added,) = set(more) - set(less)
    assert added.spec.fields().items() >= {"tile_m": 8, "groups": 12, "dtype": "bf16"}.items()
