"""jitfp4 cache: every command on a small cache of real kernels, and every exit status."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jitfp4 import engine, nvrtc
from jitfp4.arch import Arch
from jitfp4.cache import Cache
from jitfp4.cache.layer import Layer
from jitfp4.cli import app
from jitfp4.config import Config
from jitfp4.keys import Recipe
from jitfp4.warmup import plan

pytestmark = pytest.mark.compile

KERNELS = 3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two kernels for sm_90a and one for sm_89. Not to be changed."""
    root = tmp_path_factory.mktemp("built") / "cache"
    tasks = [plan([Arch.of(arch)], ["quantize/vector"])[i] for arch, i in (("sm_90a", 0), ("sm_90a", 1), ("sm_89", 0))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JITFP4_CACHE_DIR", str(root))
        engine.reset()
        for task in tasks:
            engine.build(task.kernel, task.spec, task.arch)
    engine.reset()
    return root


@pytest.fixture
def cache(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that cache, which JITFP4_CACHE_DIR names."""
    shutil.copytree(built, tmp_path / "cache")
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)], input=stdin)


def document(result: Result) -> dict[str, Any]:
    parsed = json.loads(result.stdout)
    assert parsed["schema_version"] == 1
    return parsed


def cubins(cache: Path) -> list[Path]:
    return sorted(cache.glob("v1/*/*/*/kernel.cubin"))


def digest_of(cubin: Path) -> str:
    return cubin.parents[2].name + cubin.parents[1].name


# ---- dir, size, ls ---------------------------------------------------------------------------------------------------


def test_dir_prints_the_folder_and_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "from-variable"))
    assert run("dir").stdout == f"{tmp_path}/from-variable\n"
    assert run("dir", "--cache-dir", tmp_path / "from-option").stdout == f"{tmp_path}/from-option\n"
    assert list(tmp_path.iterdir()) == []


def test_dir_as_json(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITFP4_CACHE", "ro")
    monkeypatch.setenv("JITFP4_CACHE_RO", "/opt/a:/opt/b")
    fields = document(run("dir", "--json"))
    assert (fields["path"], fields["exists"], fields["mode"]) == (str(cache), True, "ro")
    assert fields["read_only"] == ["/opt/a", "/opt/b"]


def test_no_home_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "JITFP4_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    result = run("dir")
    assert result.exit_code == 2
    assert "JITFP4_CACHE_DIR" in result.stderr


def test_size_counts_entries_and_blocks(cache: Path) -> None:
    fields = document(run("size", "--json"))
    assert fields["entries"] == KERNELS
    assert fields["bytes"] >= sum(cubin.stat().st_size for cubin in cubins(cache))
    assert fields["inodes"] == 1 + sum(1 for _ in cache.rglob("*"))
    assert fields["quarantined"] == 0
    shown = run("size").stdout.split()
    assert shown[:3] == ["entries", str(KERNELS), "bytes"] and shown[4] in ("KiB", "MiB")


def test_an_absent_cache_is_an_empty_one(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert document(run("size", "--json", "--cache-dir", absent))["entries"] == 0
    assert document(run("ls", "--json", "--cache-dir", absent))["entries"] == []
    assert run("verify", "--cache-dir", absent).exit_code == 0
    assert run("clear", "-y", "--cache-dir", absent).exit_code == 0
    assert not absent.exists()


def test_ls_filters_sorts_and_limits(cache: Path) -> None:
    everything = document(run("ls", "--json"))["entries"]
    assert {entry["digest"] for entry in everything} == {digest_of(cubin) for cubin in cubins(cache)}
    assert len(document(run("ls", "--json", "--arch", "sm_90a"))["entries"]) == 2
    assert len(document(run("ls", "--json", "--arch", "sm_80,sm_89"))["entries"]) == 1
    assert len(document(run("ls", "--json", "--family", "quantize"))["entries"]) == KERNELS
    assert document(run("ls", "--json", "--kernel", "quant"))["entries"] == []
    sizes = [entry["disk_bytes"] for entry in document(run("ls", "--json", "--sort", "size"))["entries"]]
    assert sizes == sorted(sizes, reverse=True)
    names = [entry["arch"] for entry in document(run("ls", "--json", "--sort", "kernel"))["entries"]]
    assert names == ["sm_89", "sm_90a", "sm_90a"]
    assert len(run("ls", "--quiet", "--limit", 1).stdout.split()) == 1


def test_ls_puts_the_last_used_first(cache: Path) -> None:
    for age, cubin in enumerate(cubins(cache)):
        stamp = time.time() - 3600 * (1 + age)
        os.utime(cubin.with_name("entry.json"), (stamp, stamp))
    assert run("ls", "-q").stdout.split() == [digest_of(cubin) for cubin in cubins(cache)]


def test_ls_as_a_table(cache: Path) -> None:
    lines = run("ls").stdout.splitlines()
    assert lines[0].split() == ["recipe", "kernel", "arch", "size", "last", "used"]
    assert len(lines) == 1 + KERNELS
    assert all("quantize/vector" in line and " KiB " in line and len(line) <= 80 for line in lines[1:])
    long = run("ls", "--long").stdout.splitlines()
    assert all("nvrtc-" in line and "in_dtype=bf16" in line for line in long[1:])


def test_ls_shows_a_damaged_entry_with_its_problem(cache: Path) -> None:
    cubins(cache)[0].with_name("entry.json").write_text("{}")
    (bad,) = [entry for entry in document(run("ls", "--json"))["entries"] if "problem" in entry]
    assert "seal" in bad["problem"]
    assert "seal" in run("ls").stdout
    assert len(document(run("ls", "--json", "--family", "quantize"))["entries"]) == KERNELS - 1


# ---- show ------------------------------------------------------------------------------------------------------------


def test_show_prints_the_manifest(cache: Path) -> None:
    cubin = cubins(cache)[0]
    lines = dict(line.split(maxsplit=1) for line in run("show", digest_of(cubin)[:10]).stdout.splitlines())
    assert lines["digest"] == digest_of(cubin)
    assert lines["cubin.bytes"] == str(cubin.stat().st_size)
    assert lines["provenance.spec.in_dtype"] == "bf16"
    assert "--fmad=false" in lines["recipe.options"]


def test_show_prints_the_source_byte_for_byte(cache: Path) -> None:
    cubin = cubins(cache)[0]
    assert run("show", digest_of(cubin), "--source").stdout == cubin.with_name("kernel.cu").read_text()


def test_show_explains_the_digest(cache: Path) -> None:
    digest = digest_of(cubins(cache)[0])
    lines = run("show", digest, "--explain").stdout.splitlines()
    assert lines[0] == f"recipe {digest}"
    assert lines[2].split() == ["family", "15", "quantize/vector"]


def test_show_as_json_is_enough_to_build_the_same_bytes(cache: Path) -> None:
    cubin = cubins(cache)[0]
    fields = document(run("show", digest_of(cubin), "--json"))
    (entry,) = fields["entries"]
    recipe = Recipe.from_json(entry["recipe"], fields["source"])
    assert nvrtc.compile_cubin(recipe.source, Arch.of(recipe.arch), symbol=entry["symbol"]) == cubin.read_bytes()


def test_show_disassembles(cache: Path) -> None:
    result = run("show", digest_of(cubins(cache)[0]), "--sass")
    if "nvdisasm is not installed" in result.stderr:
        pytest.skip("nvdisasm is not installed")
    assert result.exit_code == 0, result.stderr
    assert ".text.quantize_vector" in result.stdout
    assert "EXIT" in result.stdout


def test_an_unknown_and_an_ambiguous_key_are_status_1(cache: Path) -> None:
    unknown = run("show", "x")
    assert (unknown.exit_code, unknown.stderr) == (1, "x: no such kernel\n")
    ambiguous = run("show", "")
    assert ambiguous.exit_code == 1
    assert all(digest_of(cubin) in ambiguous.stderr for cubin in cubins(cache))


def test_a_damaged_entry_is_not_shown(cache: Path) -> None:
    cubin = cubins(cache)[0]
    flip_a_bit(cubin)
    result = run("show", digest_of(cubin))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "kernel.cubin" in result.stderr


# ---- verify ----------------------------------------------------------------------------------------------------------


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_sound_cache_is_status_0_and_is_not_changed(cache: Path) -> None:
    before = {path: path.lstat() for path in cache.rglob("*")}
    result = run("verify", "--json", "--recompile")
    assert result.exit_code == 0, result.stderr
    fields = document(result)
    assert (fields["status"], fields["recompiled"], len(fields["entries"])) == (0, KERNELS, KERNELS)
    assert {entry["verdict"] for entry in fields["entries"]} == {"ok"}
    after = {path: path.lstat() for path in cache.rglob("*")}
    assert {path: (s.st_mtime_ns, s.st_ino) for path, s in before.items()} == {
        path: (s.st_mtime_ns, s.st_ino) for path, s in after.items()
    }


def make_untrusted(cubin: Path) -> None:
    cubin.chmod(0o666)


@pytest.mark.parametrize(("damage", "status", "word"), [(flip_a_bit, 1, "corrupt"), (make_untrusted, 2, "untrusted")])
def test_a_damaged_entry_has_its_status(cache: Path, damage: Callable[[Path], None], status: int, word: str) -> None:
    damage(cubins(cache)[0])
    result = run("verify")
    assert result.exit_code == status
    assert result.stdout.startswith(f"{word} {cubins(cache)[0].parent}: ")
    assert result.stderr == f"{KERNELS} kernels verified, 1 bad\n"


def test_an_unreadable_entry_is_status_4(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_files = Layer.read_files

    def fail(layer: Layer, digest: str, toolchain: str) -> object:
        if digest == digest_of(cubins(cache)[0]):
            raise OSError(errno.EIO, "a bad disk")
        return read_files(layer, digest, toolchain)

    monkeypatch.setattr(Layer, "read_files", fail)
    result = run("verify", "--json")
    assert result.exit_code == 4
    assert [entry["verdict"] for entry in document(result)["entries"]].count("unreadable") == 1


def test_a_cubin_that_cannot_be_reproduced_is_status_8(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_, **__: b"other bytes")
    assert run("verify").exit_code == 0
    result = run("verify", digest_of(cubins(cache)[0]), "--recompile", "--json")
    assert result.exit_code == 8
    assert [entry["verdict"] for entry in document(result)["entries"]] == ["not reproducible"]


def test_another_compiler_is_no_fault(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nvrtc, "toolchain", lambda: nvrtc.Toolchain(version="99.0", build="0" * 64, library=Path("/nowhere"))
    )
    result = run("verify", "--recompile")
    assert result.exit_code == 0
    assert f"{KERNELS} not compiled again" in result.stderr


def test_statuses_add_up_and_an_unknown_key_is_16(cache: Path) -> None:
    first, second, _ = cubins(cache)
    flip_a_bit(first)
    make_untrusted(second)
    assert run("verify").exit_code == 1 | 2
    result = run("verify", digest_of(first), "x")
    assert result.exit_code == 1 | 16
    assert "x: no such kernel\n" in result.stderr


# ---- prune, clear ----------------------------------------------------------------------------------------------------


def test_prune_removes_the_least_recently_used(cache: Path) -> None:
    old, *kept = cubins(cache)
    stamp = time.time() - 3600
    os.utime(old.with_name("entry.json"), (stamp, stamp))
    dry = run("prune", "--max-entries", KERNELS - 1, "--dry-run")
    assert dry.stdout.split()[0] == digest_of(old)
    assert "would remove 1 kernel" in dry.stderr
    assert len(cubins(cache)) == KERNELS
    fields = document(run("prune", "--max-entries", KERNELS - 1, "--json"))
    assert [use["digest"] for use in fields["removed"]] == [digest_of(old)]
    assert cubins(cache) == kept


def test_prune_by_age_and_by_size(cache: Path) -> None:
    assert len(document(run("prune", "--max-age", "1h", "--json"))["removed"]) == 0
    for cubin in cubins(cache)[:2]:
        os.utime(cubin.with_name("entry.json"), (0, 0))
    assert len(document(run("prune", "--max-age", "1h", "--json"))["removed"]) == 2
    assert len(document(run("prune", "--max-size", "0", "--json"))["removed"]) == 1
    assert cubins(cache) == []


def test_prune_takes_its_limits_from_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert document(run("prune", "--json"))["removed"] == []
    monkeypatch.setenv("JITFP4_CACHE_MAX_ENTRIES", "1")
    assert len(document(run("prune", "--json"))["removed"]) == KERNELS - 1


@pytest.mark.parametrize("option", [("--max-size", "big"), ("--max-age", "old")])
def test_a_bad_limit_is_status_2(cache: Path, option: tuple[str, str]) -> None:
    result = run("prune", *option)
    assert result.exit_code == 2
    assert option[0] in result.stderr
    assert len(cubins(cache)) == KERNELS


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_clear_asks_and_takes_no_for_an_answer(cache: Path, answer: str) -> None:
    result = run("clear", stdin=answer)
    assert result.exit_code == 1
    assert f"Remove {KERNELS} kernels from {cache}?" in result.stderr
    assert len(cubins(cache)) == KERNELS


@pytest.mark.parametrize(("option", "answer"), [("--yes", None), ("-y", None), ("--json", "y\n")])
def test_clear_removes_everything(cache: Path, option: str, answer: str | None) -> None:
    assert run("clear", "--dry-run").exit_code == 0
    assert len(cubins(cache)) == KERNELS
    result = run("clear", option, stdin=answer)
    assert result.exit_code == 0
    assert cubins(cache) == []
    assert document(run("size", "--json"))["entries"] == 0


def test_a_cleared_cache_works_on(cache: Path) -> None:
    run("clear", "-y")
    info = Cache(Config(cache_dir=cache)).info()
    assert info.hits == 0
    engine.reset()
    task = plan([Arch.of("sm_90a")], ["quantize/vector"])[0]
    assert engine.build(task.kernel, task.spec, task.arch).missed is not None
    assert run("verify").exit_code == 0
    assert len(cubins(cache)) == 1
