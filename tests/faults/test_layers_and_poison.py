"""P10, P11: read-only layers work and stay untouched; what another user could have written is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jitfp4.cache import Cache, Loaded, Miss
from jitfp4.cache.layer import entry_path
from jitfp4.config import Config
from jitfp4.errors import CacheUntrustedError
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.naive import NaiveStore
from tests.faults.sandbox import sandboxed

RECIPE = make_recipe()
OUTSIDE_TEXT = "precious"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


class Poisoned:
    """A cache with one entry, and a folder outside it that nothing may change. ``evil`` is a complete planted entry."""

    def __init__(self, base: Path) -> None:
        self.root, self.outside = base / "cache", base / "outside"
        path = Cache(Config(cache_dir=self.root)).get_or_build(RECIPE, TOOLCHAIN, make_built).path
        assert path is not None
        self.entry = path
        self.outside.mkdir(mode=0o700)
        (self.outside / "file").write_text(OUTSIDE_TEXT)
        self.evil = self.outside / "evil"
        shutil.copytree(self.entry, self.evil)

    def outside_is_untouched(self) -> bool:
        names = sorted(str(path.relative_to(self.outside)) for path in self.outside.rglob("*"))
        evil = ["evil", "evil/entry.json", "evil/kernel.cu", "evil/kernel.cubin"]
        return names == [*evil, "file"] and (self.outside / "file").read_text() == OUTSIDE_TEXT


def link_file(name: str) -> Callable[[Poisoned], None]:
    def plant(victim: Poisoned) -> None:
        (victim.entry / name).unlink()
        (victim.entry / name).symlink_to(victim.evil / name)

    return plant


def link_level(depth: int) -> Callable[[Poisoned], None]:
    """The folder ``depth`` levels above the files becomes a link to a copy outside."""

    def plant(victim: Poisoned) -> None:
        level = victim.entry if depth == 0 else victim.entry.parents[depth - 1]
        moved = victim.outside.parent / "moved"
        shutil.move(level, moved)
        level.symlink_to(moved)

    return plant


def hard_link(victim: Poisoned) -> None:
    cubin = victim.entry / "kernel.cubin"
    cubin.unlink()
    os.link(victim.evil / "kernel.cubin", cubin)


def fifo(victim: Poisoned) -> None:
    (victim.entry / "entry.json").unlink()
    os.mkfifo(victim.entry / "entry.json")


def file_as_folder(victim: Poisoned) -> None:
    shutil.rmtree(victim.entry)
    victim.entry.write_bytes(b"not a folder")


def folder_as_file(victim: Poisoned) -> None:
    (victim.entry / "kernel.cubin").unlink()
    (victim.entry / "kernel.cubin").mkdir()


def writable_folder(victim: Poisoned) -> None:
    victim.entry.chmod(0o777)


def writable_file(victim: Poisoned) -> None:
    (victim.entry / "kernel.cubin").chmod(0o666)


def huge_manifest(victim: Poisoned) -> None:
    """10 GB, sparse: read whole it would fill the memory."""
    os.truncate(victim.entry / "entry.json", 10 << 30)


def deep_manifest(victim: Poisoned) -> None:
    (victim.entry / "entry.json").write_bytes(b"[" * 500_000)


def foreign_file(victim: Poisoned) -> None:
    os.chown(victim.entry / "kernel.cubin", 65534, 65534)


def foreign_folder(victim: Poisoned) -> None:
    os.chown(victim.entry, 65534, 65534)


PLANTS: dict[str, Callable[[Poisoned], None]] = {
    "link for the cubin": link_file("kernel.cubin"),
    "link for the manifest": link_file("entry.json"),
    "link for the entry": link_level(0),
    "link for the recipe": link_level(1),
    "link for the fan": link_level(2),
    "hard link": hard_link,
    "FIFO": fifo,
    "file for the entry": file_as_folder,
    "folder for the cubin": folder_as_file,
    "folder that others may write": writable_folder,
    "file that others may write": writable_file,
    "10 GB manifest": huge_manifest,
    "deep manifest": deep_manifest,
}
FOREIGN: dict[str, Callable[[Poisoned], None]] = {"foreign file": foreign_file, "foreign folder": foreign_folder}


def check_refused_and_healed(tmp_path: Path, plant: Callable[[Poisoned], None]) -> None:
    victim = Poisoned(tmp_path)
    plant(victim)
    cache = Cache(Config(cache_dir=victim.root))
    loaded = cache.get_or_build(RECIPE, TOOLCHAIN, make_built)
    assert loaded.missed is not None
    assert loaded.missed.reason in (Miss.UNTRUSTED, Miss.CORRUPT)
    assert loaded.cubin == make_built().cubin
    assert cache.info().quarantines == 1
    assert victim.outside_is_untouched()
    assert isinstance(cache.lookup(RECIPE, TOOLCHAIN), Loaded), "rebuilt in place"


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_object_is_refused_moved_aside_and_rebuilt(tmp_path: Path, plant: str) -> None:
    check_refused_and_healed(tmp_path, PLANTS[plant])


@as_root
@pytest.mark.parametrize("plant", FOREIGN)
def test_a_foreign_object_is_refused_moved_aside_and_rebuilt(tmp_path: Path, plant: str) -> None:
    check_refused_and_healed(tmp_path, FOREIGN[plant])


@pytest.mark.parametrize(
    "plant", ["link for the cubin", "link for the entry", "hard link", "file that others may write"]
)
def test_the_naive_store_follows_what_is_planted(tmp_path: Path, plant: str) -> None:
    victim = Poisoned(tmp_path)
    (victim.evil / "kernel.cubin").write_bytes(b"evil")
    PLANTS[plant](victim)
    if plant == "link for the entry":
        (victim.outside.parent / "moved" / "kernel.cubin").write_bytes(b"evil")
    elif plant == "file that others may write":
        (victim.entry / "kernel.cubin").write_bytes(b"evil")
    found = NaiveStore(Config(cache_dir=victim.root)).lookup(RECIPE, TOOLCHAIN)
    assert found is not None
    assert found.cubin == b"evil"


@pytest.mark.parametrize("what", ["link", "others may write", "v1 is a link", "tmp is a link"])
def test_an_untrusted_root_is_not_written(tmp_path: Path, what: str) -> None:
    root, target = tmp_path / "cache", tmp_path / "target"
    target.mkdir(mode=0o700)
    if what == "link":
        root.symlink_to(target)
    else:
        root.mkdir(mode=0o777 if what == "others may write" else 0o700)
        root.chmod(0o777 if what == "others may write" else 0o700)
        if what != "others may write":
            (root / what.split()[0]).symlink_to(target)
    cache = Cache(Config(cache_dir=root))
    loaded = cache.get_or_build(RECIPE, TOOLCHAIN, make_built)
    assert loaded.path is None
    assert list(target.iterdir()) == []
    assert sum(cache.info().store_errors.values()) == 1
    with pytest.raises(CacheUntrustedError):
        Cache(Config(cache_dir=root, strict=True)).get_or_build(RECIPE, TOOLCHAIN, make_built)


def test_a_layer_may_be_deduplicated_by_hard_links(tmp_path: Path) -> None:
    victim = Poisoned(tmp_path)
    hard_link(victim)
    cache = Cache(Config(cache_dir=None, cache_ro=(victim.root,)))
    assert isinstance(cache.lookup(RECIPE, TOOLCHAIN), Loaded)


def test_layers_are_searched_without_a_write_or_a_lock(tmp_path: Path, shim: Path) -> None:
    """Traced: a hit and a miss in a layer call nothing that writes below it."""
    layer = tmp_path / "layer"
    Cache(Config(cache_dir=layer)).get_or_build(RECIPE, TOOLCHAIN, make_built)
    os.utime(layer / entry_path(RECIPE.digest, TOOLCHAIN) / "entry.json", (0, 0))  # a user's own would be stamped
    calls = sandboxed(
        "tests.faults.trouble:calls_below_a_layer", shim=shim, layer=str(layer), own=str(tmp_path / "own")
    )
    assert {call[0] for call in calls if any(str(layer) in path for path in call[1:])} <= {"open_read", "read"}
    assert any(call[0] == "open_read" and str(layer) in call[1] for call in calls)


@as_root
@pytest.mark.parametrize(
    ("plant", "pinned", "expected"),
    [
        (False, None, {"layer": "hit", "root": "hit"}),  # root's cache, used by another user
        (True, None, {"layer": "untrusted", "root": "untrusted"}),  # another user's, used by root
        (True, "right", {"layer": "hit", "root": "untrusted"}),
        (True, "wrong", {"layer": "untrusted", "root": "untrusted"}),
    ],
)
def test_whose_layer_is_believed(plant: bool, pinned: str | None, expected: dict[str, str]) -> None:
    seen = sandboxed("tests.faults.trouble:foreign_layer", pinned=pinned, plant=plant)
    assert seen == {**expected, "untouched": True}


def test_a_pin_catches_an_entry_that_was_replaced_whole(tmp_path: Path) -> None:
    """Sealed, in its place, right owner: only the pinned index tells."""
    from jitfp4.bundle import export_bundle, import_bundle

    cache = Cache(Config(cache_dir=tmp_path / "built"))
    cache.get_or_build(RECIPE, TOOLCHAIN, make_built)
    digest = export_bundle([cache.read(RECIPE.digest, TOOLCHAIN)], tmp_path / "bundle")
    layer = Config(cache_dir=tmp_path / "layer")
    import_bundle(tmp_path / "bundle", Cache(layer), digest)
    pinned = Cache(Config(cache_dir=None, cache_ro=(tmp_path / "layer",), bundle_sha256=digest))
    assert isinstance(pinned.lookup(RECIPE, TOOLCHAIN), Loaded)
    folder = tmp_path / "layer" / entry_path(RECIPE.digest, TOOLCHAIN)
    shutil.rmtree(folder)
    Cache(layer).get_or_build(RECIPE, TOOLCHAIN, lambda: replace(make_built(), cubin=make_built(7).cubin))
    assert json.loads((folder / "entry.json").read_text())["recipe"]["digest"] == RECIPE.digest
    assert isinstance(Cache(layer).lookup(RECIPE, TOOLCHAIN), Loaded)
    found = pinned.lookup(RECIPE, TOOLCHAIN)
    assert not isinstance(found, Loaded)
    assert found.reason is Miss.UNTRUSTED
