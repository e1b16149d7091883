"""jitfp4 doctor: a healthy machine, and each thing that can be wrong with one."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jitfp4 import nvrtc, tactics
from jitfp4.arch import ARCHS, Arch
from jitfp4.cli import app, doctor
from jitfp4.cli.gpus import Driver, Gpu
from jitfp4.errors import ToolchainError
from jitfp4.tactics import TacticsFile

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
_PR_CAPBSET_DROP, _DAC_OVERRIDE, _DAC_READ_SEARCH = 24, 1, 2  # prctl(2), capabilities(7)


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
    assert found["compiler"]["archs"] == [name for name, arch in ARCHS.items() if nvrtc.supports(arch)]
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
    known = " ".join(name for name, arch in ARCHS.items() if nvrtc.supports(arch))
    assert f"  archs        {known}" in lines
    assert result.stderr == "0 problems found\n"


def test_a_cache_that_does_not_exist_yet_is_not_made(tmp_path: Path) -> None:
    absent = tmp_path / "a" / "b"
    result = run("--json", "--cache-dir", absent)
    assert result.exit_code == 0
    assert findings(result)["cache"]["exists"] is False
    assert not absent.parent.exists()


# ---- compiler and packages -------------------------------------------------------------------------------------------


def find(monkeypatch: pytest.MonkeyPatch, found: nvrtc.Toolchain | ToolchainError | None) -> None:
    """Lets the compiler be another, damaged, or none."""

    def find_toolchain() -> nvrtc.Toolchain | None:
        if isinstance(found, ToolchainError):
            raise found
        return found

    monkeypatch.setattr(nvrtc, "find_toolchain", find_toolchain)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, r"NVRTC is not installed: install jitfp4[cu12] or jitfp4[cu13]"),
        (ToolchainError("NVRTC is damaged or cannot be read: /x"), "NVRTC is damaged or cannot be read: /x"),
    ],
    ids=["none", "damaged"],
)
def test_nvrtc_is_missed_unless_offline(
    found: ToolchainError | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(monkeypatch, found)
    result = run("--json")
    assert result.exit_code == 1
    assert problems(result) == [f"{text}; only kernels that are in the cache can run"]
    monkeypatch.setenv("JITFP4_OFFLINE", "1")
    result = run("--json")
    assert result.exit_code == 0
    assert findings(result)["compiler"]["unusable"] == text


def test_offline_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bytes:
        raise AssertionError("compiled")

    monkeypatch.setattr(nvrtc, "compile_cubin", refuse)
    monkeypatch.setenv("JITFP4_OFFLINE", "1")
    result = run("--json")
    assert result.exit_code == 0, result.stdout
    assert findings(result)["compiler"]["toolchain"].startswith("nvrtc-")


@pytest.mark.parametrize("content", [b"", b"damaged", b"\x7fELF" + bytes(200)], ids=["empty", "text", "header"])
def test_a_damaged_libnvrtc_is_a_problem_and_no_traceback(content: bytes, tmp_path: Path) -> None:
    package = tmp_path / "nvidia_cuda_nvrtc-13.0.88.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cuda-nvrtc\nVersion: 13.0.88\n")
    (package / "RECORD").write_text("lib/libnvrtc.so.99,,\n")
    bindings = tmp_path / "cuda_bindings-99.dist-info"
    bindings.mkdir()
    (bindings / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda-bindings\nVersion: 99\n")
    (tmp_path / "lib").mkdir()
    for name in ("libnvrtc.so.99", "libnvrtc-builtins.so.13.0"):
        (tmp_path / "lib" / name).write_bytes(content)
    done = doctor_in_a_process("", PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))
    assert done.returncode == 1 and done.stderr == ""
    (problem,) = [p for finding in json.loads(done.stdout)["findings"] for p in finding["problems"]]
    assert str(tmp_path / "lib/libnvrtc.so.99") in problem


def test_without_torch_it_says_so() -> None:
    hide = """
import importlib.metadata, sys
version = importlib.metadata.version
def without_torch(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = without_torch
sys.modules["torch"] = None  # an import of it fails
"""
    done = doctor_in_a_process(hide)
    assert done.returncode == 1, done.stderr
    assert [p for f in json.loads(done.stdout)["findings"] for p in f["problems"]] == ["torch is not installed"]


def doctor_in_a_process(before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"{before}\nfrom jitfp4.cli import app\napp(['doctor', '--json'])"
    env = os.environ | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    summary = re.compile(r"\d+ problems? found\n")
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, summary.sub("", done.stderr))


def test_an_architecture_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_cubin = nvrtc.compile_cubin

    def refuse_sm_120a(source: str, arch: Arch, *, symbol: str) -> bytes:
        if arch.name == "sm_120a":
            raise ToolchainError("it fails\nmore")
        return compile_cubin(source, arch, symbol=symbol)

    monkeypatch.setattr(nvrtc, "compile_cubin", refuse_sm_120a)
    result = run("--json")
    assert result.exit_code == 1
    assert problems(result) == ["NVRTC does not compile for sm_120a: it fails"]
    assert "sm_120a" not in findings(result)["compiler"]["archs"]


def test_an_old_nvrtc_lacks_architectures_which_matters_to_their_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    supports = nvrtc.supports
    monkeypatch.setattr(nvrtc, "supports", lambda arch: arch.name != "sm_103a" and supports(arch))
    result = run("--json")
    assert result.exit_code == 0, result.stdout
    compiler = findings(result)["compiler"]
    assert "sm_103a" in compiler["too_old_for"]
    assert sorted(compiler["archs"] + compiler["too_old_for"]) == sorted(ARCHS)

    gpus = (Gpu("NVIDIA B300", (10, 3)), Gpu("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(doctor, "cuda_driver", lambda: Driver("99.0", gpus))
    result = run("--json")
    assert result.exit_code == 1
    assert problems(result) == [f"NVRTC {compiler['nvrtc']} is too old for the GPU's sm_103a"]


@pytest.mark.parametrize(("driver", "newer"), [("12.4", True), ("9.9", True), ("same", False), ("99.0", False)])
def test_an_nvrtc_that_is_newer_than_the_driver(driver: str, newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain = nvrtc.toolchain()
    assert toolchain is not None
    own = ".".join(toolchain.version.split(".")[:2])
    monkeypatch.setattr(doctor, "cuda_driver", lambda: Driver(own if driver == "same" else driver, ()))
    result = run("--json")
    assert result.exit_code == int(newer)
    if newer:
        (problem,) = problems(result)
        assert problem.startswith(f"NVRTC {toolchain.version} is newer than the driver, which is for CUDA {driver}")
        monkeypatch.setenv("JITFP4_OFFLINE", "1")
        assert run().exit_code == 0


# ---- cache -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("where", ["cache", "layer"])
def test_a_cache_below_a_folder_that_cannot_be_searched(where: str, tmp_path: Path) -> None:
    """For a user who must ask: root without the capabilities by which it searches every folder."""
    closed = tmp_path / "closed"
    (closed / "cache").mkdir(parents=True)
    closed.chmod(0)
    variable = {"cache": "JITFP4_CACHE_DIR", "layer": "JITFP4_CACHE_RO"}[where]
    drop = f"""
import ctypes
for capability in {_DAC_OVERRIDE}, {_DAC_READ_SEARCH}:
    ctypes.CDLL(None).prctl({_PR_CAPBSET_DROP}, capability, 0, 0, 0)
"""
    program = [sys.executable, "-c", "from jitfp4.cli import app; app(['doctor', '--json'])"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{drop}\nimport os\nos.execv({sys.executable!r}, {program!r})"],
            cwd=ROOT, env=os.environ | {variable: str(closed / "cache")}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        closed.chmod(0o700)
    assert (done.returncode, done.stderr) == (1, "1 problem found\n")
    found = [problem for finding in json.loads(done.stdout)["findings"] for problem in finding["problems"]]
    assert found == [f"{closed / 'cache'}: Permission denied"]


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
    monkeypatch.setattr(doctor, "cuda_driver", lambda: Driver("99.0", gpus))
    result = run("--json")
    assert result.exit_code == 1
    gpu = findings(result)["gpu"]
    assert gpu["driver_cuda"] == "99.0"
    assert gpu["devices"] == [{"name": "NVIDIA H200", "arch": "sm_90a"}, {"name": "Tesla V100", "arch": None}]
    assert problems(result)[0].startswith("Tesla V100: compute capability 7.0")


def test_the_tactics_file_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain = nvrtc.toolchain()
    assert toolchain is not None
    monkeypatch.setattr(doctor, "cuda_driver", lambda: Driver("13.9", (Gpu("NVIDIA H200", (9, 0)),)))
    monkeypatch.setenv("JITFP4_TACTICS", str(tmp_path / "tactics.json"))
    (problem,) = problems(run("--json"))
    assert "No such file" in problem and "the committed tables select" in problem
    tactics.write(TacticsFile("NVIDIA H200", "sm_90a", toolchain.name, {}), tmp_path / "tactics.json")
    healthy = run("--json")
    assert healthy.exit_code == 0 and findings(healthy)["tactics"]["gpu"] == "NVIDIA H200"
    tactics.write(TacticsFile("NVIDIA B200", "sm_100a", toolchain.name, {}), tmp_path / "tactics.json")
    (problem,) = problems(run("--json"))
    assert "tuned on 'NVIDIA B200'; here is 'NVIDIA H200'" in problem
