"""jitfp4 doctor: a healthy machine, and each thing that can be wrong with one."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jitfp4 import nvrtc
from jitfp4.arch import ARCHS, Arch
from jitfp4.cli import app, doctor
from jitfp4.cli.gpus import Driver, Gpu
from jitfp4.errors import ToolchainError

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(root))
    return root


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def findings(result: Result) -> dict[str, dict[str, Any]]:
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["ok"] == (result.exit_code == 0)
    return {finding["topic"]: finding for finding in document["findings"]}


def problems(result: Result) -> list[str]:
    return [problem for finding in findings(result).values() for problem in finding["problems"]]


def test_all_is_well(cache: Path) -> None:
    result = run("--json")
    assert result.exit_code == 0, result.stdout
    found = findings(result)
    assert found["compiler"]["archs"] == list(ARCHS)
    toolchain = nvrtc.toolchain()
    assert toolchain is not None
    assert found["compiler"]["toolchain"] == toolchain.name
    assert found["cache"]["path"] == str(cache)
    assert (found["cache"]["permissions"], found["cache"]["writable"], found["cache"]["locks"]) == ("0700", True, True)
    assert found["cache"]["free_bytes"] > 0
    assert found["cache"]["file_system"] in Path("/proc/mounts").read_text()
    assert list(cache.iterdir()) == []


def test_the_same_as_text() -> None:
    result = run()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["versions", "compiler", "cache", "gpu"]
    assert f"  archs      {' '.join(ARCHS)}" in lines
    assert result.stderr == "0 problems found\n"


def test_a_cache_that_does_not_exist_yet_is_not_made(tmp_path: Path) -> None:
    absent = tmp_path / "a" / "b"
    result = run("--json", "--cache-dir", absent)
    assert result.exit_code == 0
    assert findings(result)["cache"]["exists"] is False
    assert not absent.parent.exists()


def test_nvrtc_is_missed_unless_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "toolchain", lambda: None)
    result = run("--json")
    assert result.exit_code == 1
    assert "NVRTC" in problems(result)[0]
    monkeypatch.setenv("JITFP4_OFFLINE", "1")
    assert run().exit_code == 0


def test_an_old_nvrtc_that_lacks_an_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_cubin = nvrtc.compile_cubin

    def refuse_sm_121a(source: str, arch: Arch, *, symbol: str) -> bytes:
        if arch.name == "sm_121a":
            raise ToolchainError("invalid value for --gpu-architecture\nmore")
        return compile_cubin(source, arch, symbol=symbol)

    monkeypatch.setattr(nvrtc, "compile_cubin", refuse_sm_121a)
    result = run("--json")
    assert result.exit_code == 1
    assert problems(result) == ["NVRTC does not compile for sm_121a: invalid value for --gpu-architecture"]
    assert findings(result)["compiler"]["archs"] == [name for name in ARCHS if name != "sm_121a"]


def test_a_cache_that_others_may_write(cache: Path) -> None:
    cache.chmod(0o777)
    result = run()
    assert result.exit_code == 1
    assert "  PROBLEM: " in result.stdout
    assert "group or others may write it" in result.stdout


@pytest.mark.parametrize("kind", ["file", "symbolic link"])
def test_a_cache_that_is_no_folder(tmp_path: Path, kind: str) -> None:
    odd = tmp_path / "odd"
    odd.write_text("") if kind == "file" else odd.symlink_to(tmp_path)
    result = run("--json", "--cache-dir", odd)
    assert result.exit_code == 1
    assert "where a folder belongs" in problems(result)[0]


def test_a_cache_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(doctor, "try_lock", refuse)
    result = run("--json")
    assert result.exit_code == 1
    assert "locks do not work: No locks available" in problems(result)[0]


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    result = run("--json")
    assert result.exit_code == 1
    assert "cannot be written: Read-only file system" in problems(result)[0]
    monkeypatch.setenv("JITFP4_CACHE", "ro")
    assert run().exit_code == 0


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LEAST_FREE_BYTES", 1 << 80)
    result = run("--json")
    assert result.exit_code == 1
    assert problems(result)[0].endswith(" free")


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "JITFP4_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    result = run("--json")
    assert result.exit_code == 1
    assert "JITFP4_CACHE_DIR" in problems(result)[0]


def test_read_only_layers_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tmp_path / "layer"
    layer.mkdir(mode=0o755)
    monkeypatch.setenv("JITFP4_CACHE_RO", str(layer))
    result = run("--json")
    assert result.exit_code == 0
    assert findings(result)["read-only layer"]["entries"] == 0
    monkeypatch.setenv("JITFP4_CACHE_RO", f"{layer}:{tmp_path / 'absent'}")
    result = run("--json")
    assert result.exit_code == 1
    assert problems(result) == [f"{tmp_path / 'absent'}: does not exist"]


def test_the_gpus_are_named_with_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu("NVIDIA H200", (9, 0)), Gpu("Tesla V100", (7, 0)))
    monkeypatch.setattr(doctor, "cuda_driver", lambda: Driver("13.0", gpus))
    result = run("--json")
    assert result.exit_code == 1
    gpu = findings(result)["gpu"]
    assert gpu["driver_cuda"] == "13.0"
    assert gpu["devices"] == [{"name": "NVIDIA H200", "arch": "sm_90a"}, {"name": "Tesla V100", "arch": None}]
    assert problems(result)[0].startswith("Tesla V100: compute capability 7.0")
