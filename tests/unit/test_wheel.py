"""Wheels of kernels: reproducible, installed by pip, found by the cache, pinned by their own metadata."""

from __future__ import annotations

import hashlib
import importlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jitfp4 import engine
from jitfp4.arch import Arch
from jitfp4.cache import Loaded, Miss, Missed
from jitfp4.cli import app
from jitfp4.errors import ArgumentError
from jitfp4.warmup import Task, plan, warm_up
from jitfp4.wheel import export_wheel

pytestmark = pytest.mark.compile

TASKS = plan([Arch.of("sm_90a")], ["quantize/vector"])[:2]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of two kernels; the cache that they came from is out of sight then."""
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "built"))
    engine.reset()
    warm_up(TASKS, jobs=1)
    done = CliRunner().invoke(app, ["cache", "wheel", "--out", str(tmp_path / "dist")])
    assert done.exit_code == 0, done.stderr
    (path,) = (tmp_path / "dist").iterdir()
    assert done.stdout.strip()[:12] in path.name
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "empty"))
    engine.reset()
    return path


@pytest.fixture
def site(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip put it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(wheel)], check=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    engine.reset()
    return tmp_path / "site"


def look_up(task: Task) -> Loaded | Missed:
    recipe = engine._recipe(task.kernel, task.spec, task.arch)
    return engine.cache().lookup(recipe, None)


def test_two_exports_are_the_same_file(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "again"))
    engine.reset()
    warm_up(TASKS[::-1], jobs=1)
    assert CliRunner().invoke(app, ["cache", "wheel", "--out", str(tmp_path / "dist2")]).exit_code == 0
    assert (tmp_path / "dist2" / wheel.name).read_bytes() == wheel.read_bytes()
    assert wheel.name.startswith("jitfp4_kernels_sm90a_cu1")


def test_the_record_lists_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        record = next(name for name in packed.namelist() if name.endswith("/RECORD"))
        lines = [line.split(",") for line in packed.read(record).decode().splitlines()]
        assert {path for path, _, _ in lines} == set(packed.namelist())
        assert all(int(size) == len(packed.read(path)) for path, _, size in lines if size)


def test_the_cache_finds_what_was_installed(site: Path) -> None:
    for task in TASKS:
        loaded = look_up(task)
        assert isinstance(loaded, Loaded) and loaded.root is not None and loaded.root.is_relative_to(site)
    assert "read-only layer" in CliRunner().invoke(app, ["doctor"]).stdout


def test_a_kernel_that_was_replaced_is_refused(site: Path) -> None:
    """Also when whoever did it computed every checksum in the entry anew."""
    manifest, other = sorted(site.rglob("entry.json"))
    manifest.write_bytes(other.read_bytes())
    found = [look_up(task) for task in TASKS]
    assert sum(isinstance(item, Loaded) for item in found) == 1
    (missed,) = [item for item in found if isinstance(item, Missed)]
    assert missed.reason is Miss.UNTRUSTED


def test_an_index_that_was_replaced_disarms_nothing(site: Path) -> None:
    (index,) = site.rglob("bundles/*.json")
    data = index.read_bytes().replace(b"sm_90a", b"sm_90b")
    index.rename(index.with_name("old"))
    index.with_name(f"{hashlib.sha256(data).hexdigest()}.json").write_bytes(data)
    assert all(isinstance(look_up(task), Missed) for task in TASKS)


def test_another_bundle_is_pinned(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITFP4_BUNDLE_SHA256", "0" * 64)
    engine.reset()
    assert all(isinstance(look_up(task), Missed) for task in TASKS)


@pytest.mark.parametrize("data", [b"banana", b"", b"\xff\xfe\0", b"0" * 10_000, None])
def test_a_package_without_its_digest_is_left_out_with_one_warning(
    site: Path, caplog: pytest.LogCaptureFixture, data: bytes | None
) -> None:
    (digest,) = site.rglob("bundle.sha256")
    digest.unlink() if data is None else digest.write_bytes(data)
    assert all(isinstance(look_up(task), Missed) for task in TASKS)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "jitfp4.cache"]
    assert "no kernel is taken from it" in warning and "bundle.sha256" in warning


def test_a_folder_of_packages_that_cannot_be_listed_is_a_miss(
    site: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every call, not only for those that have a package; root could list the folder, so the error is pretended."""
    folder, listed = site / "jitfp4_kernels", Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert all(isinstance(look_up(task), Missed) for task in TASKS)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "jitfp4.cache"]
    assert "no kernel is taken from it" in warning and str(folder) in warning


def test_what_an_uninstallation_leaves_is_no_warning(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    (package,) = (site / "jitfp4_kernels").iterdir()
    shutil.rmtree(next(site.glob("*.dist-info")))
    shutil.rmtree(package / "bundles")
    (site / "jitfp4_kernels" / "__pycache__").mkdir()
    assert all(isinstance(look_up(task), Missed) for task in TASKS)
    assert not [record for record in caplog.records if record.name == "jitfp4.cache"]


def test_nothing_is_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="entries"):
        export_wheel([], tmp_path, "1.0")
    assert not any(tmp_path.iterdir())
