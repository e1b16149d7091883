"""Export, import, push, pull, prune: what they may replace, what they leave behind, and when they may not write."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from jitfp4 import bundle as bundle_module
from jitfp4.bundle import export_bundle, import_bundle, verify_bundle
from jitfp4.cache import Cache, EntryFiles
from jitfp4.cli import app
from jitfp4.config import Config
from jitfp4.errors import ArgumentError, CacheError
from jitfp4.remote import Remote
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import end_child, sandboxed, start_child
from tests.unit.test_bundle import entry


def run(*arguments: object, **env: str) -> Result:
    return CliRunner(env=env).invoke(app, ["cache", *map(str, arguments)])


def times(top: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_ctime_ns) for path in [top, *top.rglob("*")]}


# ---- export ----------------------------------------------------------------------------------------------------------


def test_exports_to_one_name_do_not_mix(tmp_path: Path) -> None:
    """Eight processes, four sets of kernels: the file is one of them, whole, and each reports the digest of its own."""
    assert sandboxed("tests.faults.test_transfer:export_together", base=str(tmp_path), rounds=12) == []


def export_together(base: str, rounds: int) -> list[str]:
    folder, problems = Path(base), []
    sets = [[entry(seed, size=200_000) for seed in range(first, first + 3)] for first in range(0, 12, 3)]
    digests = [export_bundle(entries, folder / f"alone{i}") for i, entries in enumerate(sets)]
    for number in range(rounds):
        out = folder / f"out{number}"

        def work(rank: int, out: Path = out) -> None:
            assert export_bundle(sets[rank % 4], out) == digests[rank % 4]

        children = [start_child(lambda rank=rank: work(rank)) for rank in range(8)]
        problems += [f"round {number}: a failure" for child in children if end_child(child) != 0]
        if verify_bundle(out).digest not in digests:
            problems.append(f"round {number}: a mixture")
    problems += [f"left: {path.name}" for path in folder.iterdir() if "partial" in path.name]
    return problems


class Interrupted(BaseException):
    """Like KeyboardInterrupt."""


def broken(entries: list[EntryFiles], error: BaseException) -> Iterator[EntryFiles]:
    yield from entries
    raise error


@pytest.mark.parametrize("error", [OSError(28, "no space"), KeyboardInterrupt(), Interrupted(), MemoryError()])
@pytest.mark.parametrize("where", ["entries", "write", "replace"])
def test_a_failed_export_leaves_nothing_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    out = tmp_path / "out"
    before = export_bundle([entry(0)], out)

    def fail(*_: object) -> None:
        raise error

    entries: Iterator[EntryFiles] = iter([entry(1), entry(2)])
    if where == "entries":
        entries = broken([entry(1)], error)
    elif where == "write":
        calls = iter(range(3))
        write = bundle_module._write
        monkeypatch.setattr(bundle_module, "_write", lambda *a: write(*a) if next(calls) < 2 else fail())
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(type(error)):
        export_bundle(entries, out)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert verify_bundle(out).digest == before


# The machine's own devices are never named here: where the code is wrong and runs as root, it would replace them.
ODD: dict[str, Callable[[Path], object]] = {
    "a link to a file": lambda path: ((path.parent / "target").write_text("precious"), path.symlink_to("target")),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to a device": lambda path: path.symlink_to("/dev/null"),
    "a link to standard output, as /dev/stdout is": lambda path: path.symlink_to("/proc/self/fd/1"),
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3)),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_export_replaces_regular_files_only(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    try:
        ODD[kind](out)
    except PermissionError:
        pytest.skip("only root can make a device")
    before = out.lstat()
    with pytest.raises(ArgumentError, match="no regular file"):
        export_bundle([entry(0)], out)
    Cache(Config(cache_dir=tmp_path / "cache")).adopt(entry(0))
    result = run("export", "--out", out, "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 2
    assert "no regular file" in result.stderr
    after = out.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    if kind == "a link to a file":
        assert out.read_text() == "precious"


@pytest.mark.parametrize("out", ["", ".", ".."])
def test_an_export_to_a_folder_is_one_line_and_status_2(
    tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cache(Config(cache_dir=tmp_path / "cache")).adopt(entry(0))
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    result = run("export", "--out", out, "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert len(result.stderr.splitlines()) == 1
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["b"]


def test_an_empty_export_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema": 1, "kernels": []}')
    Cache(Config(cache_dir=tmp_path / "cache")).adopt(entry(0))
    for arguments in (
        ["export", "--out", tmp_path / "out", "--cache-dir", tmp_path / "none"],
        ["export", "--out", tmp_path / "out", "--arch", "sm_80", "--cache-dir", tmp_path / "cache"],
        ["export", tmp_path / "plan.json", "--out", tmp_path / "out", "--cache-dir", tmp_path / "cache"],
        ["push", f"file://{tmp_path}/remote", "--cache-dir", tmp_path / "none"],
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "kernel" in result.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "remote").exists()
    with pytest.raises(ArgumentError, match="entries"):
        export_bundle([], tmp_path / "out")
    with pytest.raises(ArgumentError, match="entries"):
        Remote(f"file://{tmp_path}/remote").push([])


# ---- JITFP4_CACHE ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ro", "off"])
def test_nothing_is_written_where_the_mode_forbids_it(tmp_path: Path, mode: str) -> None:
    root, path = tmp_path / "cache", tmp_path / "bundle"
    Cache(Config(cache_dir=root)).adopt(entry(0))
    digest = export_bundle([entry(1)], path)
    Remote(f"file://{tmp_path}/remote").push([entry(1)])
    before = times(root)
    for arguments in (
        ["import", path, "--digest", digest],
        ["pull", f"file://{tmp_path}/remote", "--digest", digest],
        ["prune", "--max-entries", 0],
        ["clear", "-y"],
    ):
        result = run(*arguments, "--cache-dir", root, JITFP4_CACHE=mode)
        assert result.exit_code == 2
        assert result.stderr == f"jitfp4: JITFP4_CACHE is {mode}: the cache is not written\n"
    for arguments in (["prune", "--max-entries", 0, "--dry-run"], ["clear", "--dry-run"], ["verify"], ["ls"], ["size"]):
        assert run(*arguments, "--cache-dir", root, JITFP4_CACHE=mode).exit_code == 0
    cache = Cache(Config(cache_dir=root, cache_mode=mode))
    for write in (
        lambda: cache.adopt(entry(1)),
        lambda: cache.adopt_index(verify_bundle(path)),
        lambda: import_bundle(path, cache, digest),
        lambda: Remote(f"file://{tmp_path}/remote").pull(digest, cache),
    ):
        with pytest.raises(CacheError, match=f"JITFP4_CACHE is {mode}"):
            write()
    assert times(root) == before


def test_offline_verify_compiles_nothing(tmp_path: Path) -> None:
    Cache(Config(cache_dir=tmp_path / "cache")).adopt(entry(0))
    result = run("verify", "--recompile", "--cache-dir", tmp_path / "cache", JITFP4_OFFLINE="1")
    assert result.exit_code == 2
    assert "JITFP4_OFFLINE" in result.stderr


@pytest.mark.compile
def test_offline_the_simulator_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import jitfp4
    from jitfp4 import engine, nvrtc, sim
    from jitfp4.errors import OfflineError

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("compiled")

    monkeypatch.setenv("JITFP4_OFFLINE", "1")
    monkeypatch.setattr(nvrtc, "compile_ptx", refuse)
    engine.reset()
    with sim.device("sm_90a"), pytest.raises(OfflineError, match="JITFP4_OFFLINE"):
        jitfp4.nvfp4_quantize(torch.zeros(1, 16, dtype=torch.bfloat16), torch.ones(1))


# ---- remote ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["{base}/none", "file://{base}/none", "memory://nothing-here", "file://{base}/empty"])
def test_a_missing_store_is_said_to_be_empty(tmp_path: Path, url: str) -> None:
    (tmp_path / "empty").mkdir()
    url = url.format(base=tmp_path)
    result = run("pull", url, "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 2
    assert result.stderr == f"jitfp4: {url}: there is no bundle here; push fills a store\n"
    result = run("pull", url, "--digest", "0" * 64, "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 2
    assert "there is no such object" in result.stderr
    assert not (tmp_path / "cache").exists()


def test_a_pull_without_a_digest_warns(tmp_path: Path) -> None:
    digest = Remote(f"file://{tmp_path}/remote").push([entry(0)])
    result = run("pull", f"file://{tmp_path}/remote", "--cache-dir", tmp_path / "one")
    assert (result.exit_code, "warning: no digest" in result.stderr) == (0, True)
    for extra, env in ((["--digest", digest.upper()], {}), ([], {"JITFP4_BUNDLE_SHA256": digest})):
        result = run("pull", f"file://{tmp_path}/remote", *extra, "--cache-dir", tmp_path / "two", **env)
        assert (result.exit_code, "warning" in result.stderr) == (0, False)


@pytest.mark.parametrize("damage", [bytes.swapcase, lambda data: bytes(len(data)), lambda data: data[::-1]])
def test_a_push_mends_a_damaged_object_of_the_same_size(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    remote = Remote(f"file://{tmp_path}/remote")
    digest = remote.push([entry(0)])
    for path in (tmp_path / "remote").rglob("*"):
        if path.is_file():
            path.write_bytes(damage(path.read_bytes()))
    assert remote.push([entry(0)]) == digest
    assert remote.pull(digest, Cache(Config(cache_dir=tmp_path / "cache"))).added == 1


@pytest.mark.parametrize("name", ["blobs", "bundles"])
def test_a_push_does_not_write_through_a_planted_folder(tmp_path: Path, name: str) -> None:
    store, outside = tmp_path / "remote", tmp_path / "outside"
    store.mkdir()
    outside.mkdir()
    (store / name).symlink_to(outside)
    with pytest.raises(CacheError, match="a link or a file where a folder of the store belongs"):
        Remote(f"file://{store}").push([entry(0)])
    assert not list(outside.iterdir())


def test_a_push_replaces_a_hard_link_and_not_what_it_links_to(tmp_path: Path) -> None:
    remote, outside = Remote(f"file://{tmp_path}/remote"), tmp_path / "outside"
    digest = remote.push([entry(0)])
    outside.write_text("precious")
    for path in [path for path in (tmp_path / "remote").rglob("*") if path.is_file()]:
        path.unlink()
        path.hardlink_to(outside)
    assert remote.push([entry(0)]) == digest
    assert outside.read_text() == "precious"
    assert remote.pull(digest, Cache(Config(cache_dir=tmp_path / "cache"))).added == 1


@pytest.mark.parametrize("url", ["reference://x", "nothing://x", "file://", "github://x", "zip://x"])
def test_a_store_of_another_kind_is_a_message(tmp_path: Path, url: str) -> None:
    result = run("pull", url, "--digest", "0" * 64, "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 2
    assert result.stderr.startswith("jitfp4: ")
    assert "Traceback" not in result.output


def test_a_push_sends_nothing_that_is_there_and_whole(tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/remote")
    remote.push([entry(0)])
    before = times(tmp_path / "remote")
    remote.push([entry(0)])
    assert times(tmp_path / "remote") == before


# ---- what goes meanwhile ---------------------------------------------------------------------------------------------


def test_entries_evicted_during_a_walk_are_no_findings(tmp_path: Path) -> None:
    assert sandboxed("tests.faults.test_transfer:walk_against_evictions", base=str(tmp_path)) == []


def walk_against_evictions(base: str) -> list[str]:
    from jitfp4.cache import Catalog, Limits

    root = Path(base) / "cache"

    def churn() -> None:
        cache = Cache(Config(cache_dir=root))
        while True:
            for seed in range(12):
                cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed))
            Catalog(root).prune(Limits(max_entries=0))

    child = start_child(churn)
    problems, seen = [], 0
    catalog = Catalog(root)
    while seen < 2000:
        for item in catalog.entries():
            seen += 1
            problems += [item.problem] * (item.manifest is None)
        for checked in catalog.verify():
            seen += 1
            problems += [checked.reason] * bool(checked.verdict)
    end_child(child, signal.SIGKILL)
    return problems[:5]


def test_findings_are_in_the_json_documents(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    Cache(Config(cache_dir=root)).adopt(entry(0))
    (root / "v1" / "zz").mkdir()
    (root / "v1" / "00").write_text("in the way")
    for command in ("ls", "size", "verify"):
        result = run(command, "--json", "--cache-dir", root)
        assert result.exit_code == 2
        document = json.loads(result.stdout)
        found = [item for item in document["findings" if command != "verify" else "entries"] if "digest" not in item]
        assert [(item["verdict"], item["path"]) for item in found] == [("untrusted", str(root / "v1" / "00"))]
