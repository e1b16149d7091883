"""JITFP4_BUNDLE_SHA256 at run time: nothing that the pinned bundle does not list reaches the driver from a disk.

Every way to put something else into a root, times read-only layer and user's root, times strict and not.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jitfp4.bundle import export_bundle, import_bundle
from jitfp4.cache import Built, Cache, Catalog, EntryFiles, Index, Loaded, Manifest, Miss, Verdict
from jitfp4.cache.index import Listed
from jitfp4.cache.layer import entry_path, pinned_entries
from jitfp4.cli import app
from jitfp4.config import Config, read_config
from jitfp4.errors import ArgumentError, BundleError, CacheError, CacheUntrustedError
from jitfp4.remote import Remote
from tests.faults.kernels import SYMBOL, TOOLCHAIN, make_built, make_cubin, make_recipe

RECIPE, OTHER = make_recipe(0), make_recipe(1)
FORGED = Built(cubin=make_cubin(seed=666), symbol=SYMBOL, provenance={"jitfp4": "evil"})
ENTRY = entry_path(RECIPE.digest, TOOLCHAIN)


def files_of(built: Built) -> EntryFiles:
    manifest = Manifest.of(RECIPE, TOOLCHAIN, built).encode()
    return EntryFiles(cubin=built.cubin, source=RECIPE.source.encode(), manifest=manifest)


def store(root: Path, built: Built) -> None:
    """In place of what is there: sealed, in its place, of the right owner. Only the cubin is another."""
    shutil.rmtree(root / ENTRY, ignore_errors=True)
    Cache(Config(cache_dir=root), world_readable=True).get_or_build(RECIPE, TOOLCHAIN, lambda: built)


class Deployment:
    """A root with one imported bundle of one kernel, and its digest."""

    def __init__(self, base: Path) -> None:
        self.base, self.root = base, base / "image"
        self.pin = export_bundle([files_of(make_built())], base / "bundle")
        import_bundle(base / "bundle", Cache(Config(cache_dir=self.root), world_readable=True), self.pin)
        self.index = self.root / "bundles" / f"{self.pin}.json"

    def config(self, role: str, **changes: object) -> Config:
        config = Config(cache_dir=self.base / "own", cache_ro=(self.root,), bundle_sha256=self.pin, lock_timeout=5.0)
        if role == "own":
            config = replace(config, cache_dir=self.root, cache_ro=())
        return replace(config, **changes)


def forge_entry(at: Deployment) -> None:
    store(at.root, FORGED)


def forge_entry_and_delete_index(at: Deployment) -> None:
    store(at.root, FORGED)
    at.index.unlink()


def forge_entry_and_index(at: Deployment) -> None:
    """The index lists the forged entry, under the pinned name."""
    store(at.root, FORGED)
    at.index.write_bytes(Index.of([Listed.of(files_of(FORGED))]).encode())


def forge_whole_bundle(at: Deployment) -> None:
    """A bundle of its own, well formed, under its own digest."""
    shutil.rmtree(at.root)
    export_bundle([files_of(FORGED)], at.base / "evil")
    import_bundle(at.base / "evil", Cache(Config(cache_dir=at.root), world_readable=True))


def delete_index(at: Deployment) -> None:
    at.index.unlink()


def delete_index_folder(at: Deployment) -> None:
    shutil.rmtree(at.index.parent)


def cut_index(at: Deployment) -> None:
    at.index.write_bytes(at.index.read_bytes()[:-1])


def empty_index(at: Deployment) -> None:
    at.index.write_bytes(b"")


def index_without_it(at: Deployment) -> None:
    at.index.write_bytes(Index(()).encode())


def link_for_index(at: Deployment) -> None:
    at.index.unlink()
    at.index.symlink_to("/dev/zero")


def fifo_for_index(at: Deployment) -> None:
    at.index.unlink()
    os.mkfifo(at.index)


def folder_for_index(at: Deployment) -> None:
    at.index.unlink()
    at.index.mkdir()


ATTACKS: dict[str, Callable[[Deployment], None]] = {
    work.__name__: work
    for work in (
        forge_entry, forge_entry_and_delete_index, forge_entry_and_index, forge_whole_bundle, delete_index,
        delete_index_folder, cut_index, empty_index, index_without_it, link_for_index, fifo_for_index, folder_for_index,
    )
}  # fmt: skip


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    pinned_entries.cache_clear()
    return Deployment(tmp_path)


@pytest.mark.parametrize("role", ["layer", "own"])
def test_the_pinned_bundle_is_served(deployment: Deployment, role: str) -> None:
    found = Cache(deployment.config(role, strict=True)).lookup(RECIPE, TOOLCHAIN)
    assert isinstance(found, Loaded)
    assert found.cubin == make_built().cubin
    assert Cache(deployment.config(role, offline=True)).get_or_build(RECIPE, None, make_built).missed is None


@pytest.mark.parametrize("role", ["layer", "own"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_everything_else_is_refused_with_a_reason(
    deployment: Deployment, attack: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    ATTACKS[attack](deployment)
    with pytest.raises(CacheError, match=deployment.pin):
        Cache(deployment.config(role, strict=True)).lookup(RECIPE, TOOLCHAIN)
    cache = Cache(deployment.config(role))
    loaded = cache.get_or_build(RECIPE, TOOLCHAIN, make_built)
    assert loaded.missed is not None
    assert loaded.missed.reason in (Miss.UNTRUSTED, Miss.UNREADABLE)
    assert deployment.pin in loaded.missed.detail
    assert deployment.pin in caplog.text
    assert loaded.cubin == make_built().cubin


@pytest.mark.parametrize("role", ["layer", "own"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_doctor_and_verify_agree_with_the_loader(
    deployment: Deployment, attack: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = deployment.config(role)
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(config.cache_dir))
    monkeypatch.setenv("JITFP4_CACHE_RO", os.pathsep.join(map(str, config.cache_ro)))
    monkeypatch.setenv("JITFP4_BUNDLE_SHA256", deployment.pin)
    monkeypatch.setenv("JITFP4_OFFLINE", "1")
    before = doctor_problems()
    assert before == []
    assert {item.verdict for item in Catalog(deployment.root, pin=deployment.pin).verify()} == {Verdict.OK}
    pinned_entries.cache_clear()
    ATTACKS[attack](deployment)
    (checked,) = Catalog(deployment.root, pin=deployment.pin).verify()
    assert checked.verdict in (Verdict.UNTRUSTED, Verdict.UNREADABLE)
    if attack != "forge_entry":  # that one only verify can find: doctor reads no entry
        assert any(deployment.pin in problem for problem in doctor_problems())


def doctor_problems() -> list[str]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    findings = json.loads(result.stdout)["findings"]
    return [problem for finding in findings if "cache" in finding["topic"] or "layer" in finding["topic"]
            for problem in finding["problems"]]  # fmt: skip


@pytest.mark.parametrize("role", ["layer", "own"])
def test_an_entry_that_the_index_does_not_list_is_refused(deployment: Deployment, role: str) -> None:
    Cache(Config(cache_dir=deployment.root)).get_or_build(OTHER, TOOLCHAIN, lambda: make_built(1))
    cache = Cache(deployment.config(role))
    found = cache.lookup(OTHER, TOOLCHAIN)
    assert not isinstance(found, Loaded)
    assert found.reason is Miss.UNTRUSTED
    assert "does not list" in found.detail


def test_what_the_pin_does_not_list_is_compiled_and_stays_in_memory(deployment: Deployment) -> None:
    """Nobody could load it from the disk, so it is not written, and nothing is moved aside."""
    config = deployment.config("own")
    before = sorted(map(str, deployment.root.rglob("*")))
    loaded = Cache(config).get_or_build(OTHER, TOOLCHAIN, lambda: make_built(1))
    assert (loaded.cubin, loaded.path) == (make_built(1).cubin, None)
    assert sorted(map(str, deployment.root.rglob("*"))) == before


def test_the_users_root_may_have_built_the_listed_kernel_itself(deployment: Deployment) -> None:
    """The listed cubin, with provenance of its own."""
    shutil.rmtree(deployment.root / ENTRY)
    mine = replace(make_built(), provenance={"jitfp4": "mine", "compile_ms": 7})
    config = deployment.config("own")
    assert Cache(config).get_or_build(RECIPE, TOOLCHAIN, lambda: mine).path is not None
    assert isinstance(Cache(config).lookup(RECIPE, TOOLCHAIN), Loaded)
    as_layer = Cache(deployment.config("layer")).lookup(RECIPE, TOOLCHAIN)
    assert not isinstance(as_layer, Loaded), "a layer is the bundle, byte for byte"


def test_a_build_that_is_not_the_listed_one_is_not_stored(deployment: Deployment) -> None:
    shutil.rmtree(deployment.root / ENTRY)
    cache = Cache(deployment.config("own"))
    loaded = cache.get_or_build(RECIPE, TOOLCHAIN, lambda: FORGED)
    assert (loaded.cubin, loaded.path) == (FORGED.cubin, None)
    assert cache.info().store_errors == {"publish: CacheUntrustedError": 1}


def test_eviction_keeps_the_pinned_index(deployment: Deployment) -> None:
    from jitfp4.cache import Limits

    for number in range(30):
        other = deployment.index.with_name(f"{number:064x}.json")
        other.write_bytes(b"x")
    os.utime(deployment.index, (0, 0))
    Catalog(deployment.root, pin=deployment.pin).prune(Limits())
    left = list(deployment.index.parent.iterdir())
    assert deployment.index in left
    assert len(left) == 17


BAD_PINS = ["banana", "0" * 63, "0" * 65, "g" * 64, " " + "0" * 64, "0" * 64 + "\n", "../" + "0" * 61, "٠" * 64]


def test_no_other_bundle_is_brought_in(tmp_path: Path) -> None:
    """Not even one whose digest is given: the environment of a deployment is not to be talked out of its pin."""
    good = export_bundle([files_of(make_built())], tmp_path / "good")
    evil = export_bundle([files_of(FORGED)], tmp_path / "evil")
    Remote(f"file://{tmp_path}/remote").push([files_of(FORGED)])
    cache = Cache(Config(cache_dir=tmp_path / "cache", bundle_sha256=good))
    for digest in (None, evil):
        with pytest.raises(BundleError, match=good):
            import_bundle(tmp_path / "evil", cache, digest)
    with pytest.raises(BundleError, match=good):
        Remote(f"file://{tmp_path}/remote").pull(evil, cache)
    assert not (tmp_path / "cache").exists()
    assert import_bundle(tmp_path / "good", cache).added == 1


@pytest.mark.parametrize("pin", BAD_PINS)
def test_a_pin_is_64_hex_digits(tmp_path: Path, pin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="JITFP4_BUNDLE_SHA256"):
        read_config({"HOME": "/home/me", "JITFP4_BUNDLE_SHA256": pin})
    for command in (["import", str(tmp_path / "none")], ["pull", f"file://{tmp_path}"]):
        result = CliRunner().invoke(app, ["cache", *command, "--digest", pin])
        assert result.exit_code == 2
        assert "--digest: got" in result.stderr
    monkeypatch.setenv("JITFP4_BUNDLE_SHA256", pin)
    result = CliRunner().invoke(app, ["cache", "ls"])
    assert result.exit_code == 2
    assert "64 hex digits" in result.stderr


def test_a_pin_in_capitals_is_the_same(tmp_path: Path) -> None:
    assert read_config({"HOME": "/", "JITFP4_BUNDLE_SHA256": "AB" * 32}).bundle_sha256 == "ab" * 32
    assert read_config({"HOME": "/", "JITFP4_BUNDLE_SHA256": ""}).bundle_sha256 is None


def test_checksums_do_not_authenticate_and_only_a_digest_does(tmp_path: Path) -> None:
    """What the documents say: machine code of another kernel, sealed anew, passes every check but a pinned digest."""
    good = export_bundle([files_of(make_built())], tmp_path / "good")
    export_bundle([files_of(FORGED)], tmp_path / "evil")
    with pytest.raises(BundleError, match=good):
        import_bundle(tmp_path / "evil", Cache(Config(cache_dir=tmp_path / "pinned")), good)
    root = tmp_path / "unpinned"
    result = CliRunner().invoke(app, ["cache", "import", str(tmp_path / "evil"), "--cache-dir", str(root)])
    assert result.exit_code == 0
    assert "warning: no digest was given" in result.stderr
    assert {item.verdict for item in Catalog(root).verify()} == {Verdict.OK}
    result = CliRunner().invoke(
        app, ["cache", "import", str(tmp_path / "good"), "--cache-dir", str(tmp_path / "other"), "--digest", good]
    )
    assert "warning" not in result.stderr
    with pytest.raises(CacheUntrustedError):
        Cache(Config(cache_dir=None, cache_ro=(root,), bundle_sha256=good, strict=True)).lookup(RECIPE, TOOLCHAIN)
