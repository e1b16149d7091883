"""jitfp4 warmup: what it builds, what it reports, and its exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jitfp4 import nvrtc
from jitfp4.arch import ARCHS, Arch
from jitfp4.cache import Manifest
from jitfp4.cli import app
from jitfp4.cli import warmup as command
from jitfp4.cli.gpus import Driver, Gpu
from jitfp4.errors import CompileError, ToolchainError
from jitfp4.warmup import Task, plan, write_plan

pytestmark = pytest.mark.compile

KERNELS = 2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What still compiles when a command fails ends before the next test has its cache."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join()


@pytest.fixture
def small_plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(write_plan(plan([Arch.of("sm_90a")], ["quantize/vector"])[:KERNELS]))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["warmup", *map(str, arguments)])


def document(result: Result) -> dict[str, Any]:
    parsed = json.loads(result.stdout)
    assert parsed["schema_version"] == 1
    assert parsed["command"] == "warmup"
    return parsed


def test_check_build_check_again(cache: Path, small_plan: Path) -> None:
    before = run(small_plan, "--check")
    assert before.exit_code == 1
    assert len(before.stdout.splitlines()) == KERNELS
    assert not cache.exists()

    built = run(small_plan)
    assert built.exit_code == 0, built.stderr
    header, row = (line.split() for line in built.stdout.splitlines())
    assert header[:7] == ["kernel", "arch", "builds", "built", "cached", "unsaved", "failed"]
    assert row[:7] == ["quantize/vector", "sm_90a", "2", "2", "0", "0", "0"]

    after = run(small_plan, "--check")
    assert (after.exit_code, after.stdout) == (0, "")


def test_a_second_run_compiles_nothing(cache: Path, small_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = document(run(small_plan, "--json", "--jobs", 2))
    assert (first["built"], first["cached"], first["failed"]) == (KERNELS, 0, 0)
    assert {kernel["state"] for kernel in first["kernels"]} == {"built"}
    assert all(Path(kernel["path"]).is_relative_to(cache) for kernel in first["kernels"])

    def refuse(*_: object, **__: object) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "compile_cubin", refuse)
    second = run(small_plan, "--json")
    assert second.exit_code == 0
    assert document(second)["cached"] == KERNELS


def test_what_is_missing_as_json(cache: Path, small_plan: Path) -> None:
    result = run(small_plan, "--check", "--json")
    assert result.exit_code == 1
    missing = document(result)["missing"]
    assert missing == json.loads(small_plan.read_text())["kernels"]
    assert not cache.exists()


def test_a_kernel_that_does_not_compile_is_status_3_and_stops_no_other(
    cache: Path, small_plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_cubin = nvrtc.compile_cubin
    calls = iter(range(KERNELS))

    def fail_once(source: str, arch: Arch, *, symbol: str) -> bytes:
        if next(calls) == 0:
            raise CompileError("kernel.cu", arch.name, "kernel.cu(1): error: no", "> 1 | nonsense")
        return compile_cubin(source, arch, symbol=symbol)

    monkeypatch.setattr(nvrtc, "compile_cubin", fail_once)
    result = run(small_plan, "--json", "--jobs", 1)
    assert result.exit_code == 3
    assert "> 1 | nonsense" in result.stderr
    states = {kernel["state"] for kernel in document(result)["kernels"]}
    assert states == {"failed", "built"}


def test_an_architecture_that_nvrtc_does_not_know_stops_no_other(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_cubin = nvrtc.compile_cubin

    def too_old(source: str, arch: Arch, *, symbol: str) -> bytes:
        if arch.name == "sm_103a":
            raise ToolchainError("NVRTC 12.8.93 does not know sm_103a")
        return compile_cubin(source, arch, symbol=symbol)

    monkeypatch.setattr(nvrtc, "compile_cubin", too_old)
    tasks = [task for name in ("sm_90a", "sm_103a") for task in plan([Arch.of(name)], ["quantize/vector"])[:KERNELS]]
    (tmp_path / "plan.json").write_text(write_plan(tasks))
    result = run(tmp_path / "plan.json", "--json")
    assert result.exit_code == 3
    assert [kernel["state"] for kernel in document(result)["kernels"]] == ["built"] * KERNELS + ["failed"] * KERNELS
    assert f"{tasks[KERNELS]} and 1 more\nNVRTC 12.8.93 does not know sm_103a\n" in result.stderr


def test_a_kernel_that_cannot_be_stored_is_status_1(tmp_path: Path, small_plan: Path) -> None:
    (tmp_path / "file").write_text("where the cache should be")
    result = run(small_plan, "--json", "--cache-dir", tmp_path / "file")
    assert result.exit_code == 1
    assert document(result)["unsaved"] == KERNELS


def test_offline_a_missing_kernel_is_an_error_with_the_command_that_helps(
    cache: Path, small_plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITFP4_OFFLINE", "1")
    result = run(small_plan)
    assert result.exit_code == 2
    assert "jitfp4 warmup --arch sm_90a --kernel quantize/vector" in result.stderr
    assert not cache.exists()


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_written_plan_is_the_selection(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "written.json"
    tasks = plan([Arch.of("sm_90a"), Arch.of("sm_100a")], ["quantize"])
    result = run("--arch", "sm_90a,sm_100a", "--family", "quantize", "--write-plan", path, "--json")
    assert (result.exit_code, document(result)["total"]) == (0, len(tasks))
    assert path.read_text() == write_plan(tasks)
    assert not cache.exists()


def test_arch_and_family_narrow_a_plan(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(write_plan(plan(list(ARCHS.values()))))
    chosen = document(run(path, "--arch", "sm_89", "--family", "quantize/vector", "--check", "--json"))["missing"]
    assert chosen == [_fields(task) for task in plan([Arch.of("sm_89")], ["quantize/vector"])]
    assert not cache.exists()


@pytest.mark.parametrize("text", ["no json", '{"schema": 2}', '{"schema": 1, "kernels": [{"family": "none"}]}'])
def test_a_bad_plan_is_status_2(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    result = run(tmp_path / "plan.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("jitfp4: plan: ")


def test_shards_are_disjoint_and_complete(tmp_path: Path) -> None:
    parts = [
        document(run("--arch", "sm_90a", "--check", "--json", "--shard", f"{i}/3", "--cache-dir", tmp_path))["missing"]
        for i in range(3)
    ]
    whole = [_fields(task) for task in plan([Arch.of("sm_90a")])]
    together = [kernel for part in parts for kernel in part]
    assert sorted(map(str, together)) == sorted(map(str, whole))


@pytest.mark.parametrize("shard", ["3/3", "0/0", "-1/2", "1", "a/b", "0/"])
def test_a_bad_shard_is_status_2(shard: str) -> None:
    result = run("--arch", "sm_90a", "--check", f"--shard={shard}")
    assert result.exit_code == 2
    assert "I/N" in result.stderr


# ---- defaults --------------------------------------------------------------------------------------------------------


def test_without_arch_it_takes_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu("H200", (9, 0)), Gpu("B200", (10, 0)), Gpu("H200", (9, 0)))
    monkeypatch.setattr(command, "cuda_driver", lambda: Driver("13.0", gpus))
    missing = document(run("--check", "--json", "--family", "quantize/vector"))["missing"]
    assert list(dict.fromkeys(kernel["arch"] for kernel in missing)) == ["sm_90a", "sm_100a"]


@pytest.mark.parametrize("driver", [None, Driver("13.0", ())])
def test_without_arch_and_gpu_it_asks_for_arch(driver: Driver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "cuda_driver", lambda: driver)
    result = run("--check")
    assert result.exit_code == 2
    assert "--arch" in result.stderr


@pytest.mark.parametrize(
    ("command", "arch", "hint"),
    [
        ("warmup", "sm_90", "; did you mean sm_90a?"),
        ("render", "sm_90a,sm_100", "; did you mean sm_100a?"),
        ("warmup", "hopper", ""),
        ("warmup", ",", ""),
    ],
)
def test_a_wrong_architecture_is_refused_before_torch_is_imported(command: str, arch: str, hint: str) -> None:
    call = f"try: app([{command!r}, '--arch', {arch!r}])\nfinally: print('torch' in sys.modules)"
    code = f"import sys\nfrom jitfp4.cli import app\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    wrong = arch.split(",")[-1] or arch
    assert done.stderr == f"jitfp4: --arch: got '{wrong}'; allowed: {', '.join(ARCHS)}, or all{hint}\n"


def test_jobs_are_limited_by_cores_and_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10_000)))
    by_memory = command.default_jobs()
    assert 1 <= by_memory < 10_000
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert command.default_jobs() == 1


def _fields(task: Task) -> dict[str, object]:
    return {"family": task.kernel.name, "arch": task.arch.name, "spec": task.spec.fields()}


def test_dtype_keeps_the_kernels_of_these_activations(cache: Path, tmp_path: Path) -> None:
    def planned(*options: str) -> list[dict[str, Any]]:
        path = tmp_path / "out.json"
        assert run("--arch", "sm_90a", *options, "--write-plan", path).exit_code == 0
        return [kernel["spec"] for kernel in json.loads(path.read_text())["kernels"]]

    everything, half = planned(), planned("--dtype", "bf16")
    assert 0 < len(half) < 0.6 * len(everything)
    assert all(spec[name] == "bf16" for spec in half for name in ("dtype", "in_dtype", "out_dtype") if name in spec)
    refused = run("--arch", "sm_90a", "--dtype", "bf17", "--write-plan", tmp_path / "none.json")
    assert refused.exit_code == 2
    assert "--dtype" in refused.stderr and "bf16" in refused.stderr


def test_it_says_how_long_it_will_take(cache: Path, small_plan: Path) -> None:
    assert f"{KERNELS} kernels, {KERNELS} to compile: about " in run(small_plan, "--jobs", 1).stderr
    assert f"{KERNELS} kernels, 0 to compile\n" in run(small_plan, "--jobs", 1).stderr


def test_it_learns_from_the_cache_how_long_a_kernel_takes(cache: Path, small_plan: Path, tmp_path: Path) -> None:
    run(small_plan, "--jobs", 1)
    for path in cache.rglob("entry.json"):
        manifest = Manifest.decode(path.read_bytes())
        provenance = {**manifest.provenance, "compile_ms": 50_000.0}
        path.write_bytes(replace(manifest, provenance=provenance).encode())
    (tmp_path / "more.json").write_text(write_plan(plan([Arch.of("sm_80")], ["quantize/grouped"])[:2]))
    assert "2 kernels, 2 to compile: about 100 s with 1 job" in run(tmp_path / "more.json", "--jobs", 1).stderr


def test_an_operation_names_its_kernels(cache: Path, tmp_path: Path) -> None:
    assert run("--arch", "sm_90a", "--kernel", "mm_bf16_fp4", "--write-plan", tmp_path / "plan").exit_code == 0
    plan = json.loads((tmp_path / "plan").read_text())
    assert {entry["family"] for entry in plan["kernels"]} == {"gemm/narrow", "gemm/wide"}
    refused = run("--arch", "sm_90a", "--kernel", "mm_bf17_fp4", "--check")
    assert refused.exit_code == 2 and "gemm/narrow" in refused.stderr
