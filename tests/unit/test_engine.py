"""From spec to cubin: cached or compiled, offline or without a compiler, in one process and in many."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import jitfp4
import jitfp4.families
from jitfp4 import OfflineError, engine, nvrtc, warmup
from jitfp4.arch import ARCHS, Arch
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.kernel import AnyKernel, kernels, lookup

pytestmark = pytest.mark.compile

KERNEL, ARCH = lookup("quantize/vector"), ARCHS["sm_90a"]
SPEC = next(iter(KERNEL.specs(ARCH)))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "cache"))
    engine.reset()
    return tmp_path / "cache"


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    compile_cubin = nvrtc.compile_cubin

    def counted(source: str, arch: Arch, *, symbol: str) -> bytes:
        calls.append(symbol)
        return compile_cubin(source, arch, symbol=symbol)

    monkeypatch.setattr(nvrtc, "compile_cubin", counted)
    return calls


def test_built_once_then_served_from_disk(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = count_compiles(monkeypatch)
    with caplog.at_level(logging.INFO, "jitfp4.engine"):
        first = engine.build(KERNEL, SPEC, ARCH)
        engine.reset()
        second = engine.build(KERNEL, SPEC, ARCH)
    assert len(calls) == 1
    assert first.cubin == second.cubin and second.missed is None
    lines = [record.getMessage() for record in caplog.records if record.name == "jitfp4.engine"]
    assert len(lines) == 1 and KERNEL.name in lines[0] and " ms (absent)" in lines[0]
    assert jitfp4.cache_info().hits == 1


def test_threads_compile_a_kernel_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_compiles(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        cubins = {loaded.cubin for loaded in pool.map(lambda _: engine.build(KERNEL, SPEC, ARCH), range(8))}
    assert len(cubins) == 1 and len(calls) == 1


def test_offline_miss_names_the_spec_and_the_command(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITFP4_OFFLINE", "1")
    engine.reset()
    with pytest.raises(OfflineError) as caught:
        engine.build(KERNEL, SPEC, ARCH)
    assert str(SPEC) in str(caught.value)
    assert "jitfp4 warmup --arch sm_90a --kernel quantize/vector" in str(caught.value)
    assert not empty_cache.exists()


def test_prebuilt_kernels_need_no_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine.build(KERNEL, SPEC, ARCH)
    monkeypatch.setattr(nvrtc, "toolchain", lambda: None)
    engine.reset()
    assert engine.build(KERNEL, SPEC, ARCH).cubin == built.cubin
    other = next(spec for spec in KERNEL.specs(ARCH) if spec != SPEC)
    with pytest.raises(OfflineError, match="NVRTC is not installed"):
        engine.build(KERNEL, other, ARCH)


@pytest.mark.parametrize("where", ["file in the way", "no home"])
def test_without_a_cache_folder_the_kernel_is_built_in_memory(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "no home":
        for name in ("JITFP4_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "file" / "cache"))
    engine.reset()
    loaded = engine.build(KERNEL, SPEC, ARCH)
    assert loaded.cubin and loaded.path is None
    assert any(record.levelno == logging.WARNING for record in caplog.records)


def test_warm_up_builds_what_is_missing_and_then_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_compiles(monkeypatch)
    tasks = warmup.plan([ARCH], ["quantize/vector"])[:6]
    assert warmup.missing(tasks) == list(tasks) and tasks
    outcomes = warmup.warm_up(tasks, jobs=2)
    assert all(outcome.loaded and outcome.loaded.missed for outcome in outcomes) and len(calls) == len(tasks)
    assert warmup.missing(tasks) == []
    engine.reset()
    assert all(outcome.loaded and not outcome.loaded.missed for outcome in warmup.warm_up(tasks, jobs=2))
    assert len(calls) == len(tasks)


def test_plans_survive_json_and_shards_are_a_partition() -> None:
    tasks = warmup.plan(list(ARCHS.values()))
    assert warmup.read_plan(warmup.write_plan(tasks)) == tasks
    shards = [warmup.shard(tasks, index, 5) for index in range(5)]
    assert sorted(map(str, sum(shards, ()))) == sorted(map(str, tasks))
    assert all(shards)
    fewer = warmup.shard(tasks[1:], 2, 5)
    assert set(fewer) == set(shards[2]) - {tasks[0]}
    for index, count in ((5, 5), (-1, 5), (0, 0)):
        with pytest.raises(ArgumentError, match="shard"):
            warmup.shard(tasks, index, count)


def test_a_process_records_what_it_uses(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each process; the plan has each kernel once, and nothing else."""
    monkeypatch.setenv("JITFP4_RECORD", str(tmp_path / "used"))
    for _ in range(2):
        engine.reset()
        with jitfp4.sim.device("sm_90a"):
            for _ in range(2):
                jitfp4.nvfp4_quantize(torch.ones(8, 32, dtype=torch.bfloat16), torch.ones(1), backend="cuda")
    assert len((tmp_path / "used").read_text().splitlines()) == 2
    (task,) = warmup.read_plan((tmp_path / "used").read_text())
    assert (task.kernel, task.arch) == (KERNEL, ARCH) and task.spec in KERNEL.specs(ARCH)


def test_a_record_that_cannot_be_written_stops_nothing_but_strict(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JITFP4_RECORD", str(tmp_path / "missing" / "used"))

    def quantize() -> None:
        engine.reset()
        with jitfp4.sim.device("sm_90a"):
            jitfp4.nvfp4_quantize(torch.ones(8, 32, dtype=torch.bfloat16), torch.ones(1), backend="cuda")

    quantize()
    assert [record.getMessage() for record in caplog.records if "JITFP4_RECORD" in record.getMessage()]
    monkeypatch.setenv("JITFP4_STRICT", "1")
    with pytest.raises(OSError, match="missing"):
        quantize()


def test_jitfp4_log_shows_what_is_compiled(tmp_path: Path) -> None:
    code = "from tests.unit.test_engine import *; engine.build(KERNEL, SPEC, ARCH); engine.build(KERNEL, SPEC, ARCH)"
    environment = {
        "JITFP4_LOG": "info",
        "JITFP4_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"INFO jitfp4.engine: compiled quantize/vector\[.*\] for sm_90a in \d+ ms \(absent\)", line)


def test_what_a_full_disk_leaves_of_a_record_is_read(caplog: pytest.LogCaptureFixture) -> None:
    tasks = warmup.plan([ARCH], ["quantize/vector"])[:3]
    first, second, third = (json.dumps(task.entry()) for task in tasks)
    cut = second[:40]
    for text in (f"{first}\n\n{cut}\n{third}\n", f"{cut}{first}\n{first}\n{third}\n", f"{first}\n{third}\n{cut}"):
        assert warmup.read_plan(text) == (tasks[0], tasks[2])
    assert re.findall(r"line (\d+) was cut", caplog.text) == ["3", "1", "3"]
    caplog.clear()
    assert warmup.read_plan(f"{first}\n" + "\0" * 4000 + "\n\n") == (tasks[0],)
    assert not caplog.text
    with pytest.raises(ArgumentError, match="plan: got in line 2"):
        warmup.read_plan(f"{first}\n{second.replace('quantize/vector', 'quantize/nothing')}\n")
    document = f'{{"schema": 1, "kernels": [\n{first},\n{second}\n]}}'
    assert warmup.read_plan(document) == tasks[:2]  # a plan whose lines look like those of a record


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.name)
def test_a_plan_names_nothing_that_no_problem_gives(kernel: AnyKernel) -> None:
    """A template or NVRTC may never end with other numbers. What a problem gives is taken."""
    specs = [spec for arch in ("sm_90a", "sm_103a") for spec in kernel.specs(Arch.of(arch), "all")]
    for spec in specs[:: max(1, len(specs) // 50)]:
        kernel.check_spec(spec)
    fields = specs[0].fields()
    for name in [name for name, value in fields.items() if type(value) is int]:
        tuned = any(hasattr(tactic, name) for tactic in kernel.tactics)
        for wrong in (*([0] if tuned else []), -1, 10**4, 10**30):
            if not any(getattr(spec, name) == wrong for spec in specs):
                entry = {"family": kernel.name, "arch": "sm_90a", "spec": fields | {name: wrong}}
                with pytest.raises(ArgumentError, match=rf"spec: got .*{name}\W+{wrong}"):
                    warmup.read_plan(json.dumps({"schema": 1, "kernels": [entry]}))


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99, "kernels": []}', '{"schema": 1, "kernels": [{}]}'])
def test_documents_that_are_no_plan_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="plan"):
        warmup.read_plan(text)


def test_targets() -> None:
    with pytest.raises(ArgumentTypeError, match="sim"):
        engine.target_of(torch.zeros(1))
    with jitfp4.sim.device("sm_120a"):
        assert engine.target_of(torch.zeros(1)) == engine.Target(ARCHS["sm_120a"], None)
