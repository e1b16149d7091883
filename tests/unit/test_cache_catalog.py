"""cache/catalog.py: what the `jitfp4 cache` commands show and do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jitfp4.cache import Cache, Catalog, Limits, Manifest, Verdict
from jitfp4.cache.layer import entry_path
from jitfp4.config import Config
from jitfp4.keys import Recipe
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe


@pytest.fixture
def root(tmp_path: Path) -> Path:
    cache = Cache(Config(cache_dir=tmp_path / "cache"))
    for seed in range(4):
        cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed))
    return tmp_path / "cache"


def folder(root: Path, seed: int) -> Path:
    return root / entry_path(make_recipe(seed).digest, TOOLCHAIN)


def test_entries_with_their_manifests(root: Path) -> None:
    (folder(root, 2) / "entry.json").write_bytes(b"{}")
    entries = {entry.use.digest: entry for entry in Catalog(root).entries()}
    assert len(entries) == 4
    good, bad = entries[make_recipe(0).digest], entries[make_recipe(2).digest]
    assert good.manifest is not None
    assert (good.manifest.family, good.manifest.provenance["spec"]) == ("toy", {"seed": 0})
    assert bad.manifest is None
    assert "seal" in bad.problem


def test_find_by_prefix_and_read(root: Path) -> None:
    digest = make_recipe(1).digest
    (entry,) = Catalog(root).find(digest[:12])
    manifest, recipe, files = Catalog(root).read(entry.use)
    assert (manifest.digest, recipe, files.cubin) == (digest, make_recipe(1), make_built(1).cubin)
    assert Catalog(root).find("no such") == []


def test_verify_tells_corrupt_untrusted_and_unreproducible_apart(root: Path) -> None:
    (folder(root, 0) / "kernel.cu").write_text("// not what was compiled")
    (folder(root, 1) / "entry.json").chmod(0o666)

    def recompile(recipe: Recipe, manifest: Manifest) -> bytes | None:
        assert manifest.toolchain == TOOLCHAIN
        return {make_recipe(2): make_built(2).cubin + b"!", make_recipe(3): None}[recipe]

    verdicts = {checked.use.digest: checked for checked in Catalog(root).verify(recompile=recompile)}
    assert [verdicts[make_recipe(seed).digest].verdict for seed in range(4)] == [
        Verdict.CORRUPT,
        Verdict.UNTRUSTED,
        Verdict.NOT_REPRODUCIBLE,
        Verdict.OK,
    ]
    assert "hash to" in verdicts[make_recipe(0).digest].reason
    assert [int(verdict) for verdict in Verdict] == [1, 2, 4, 8]
    assert (folder(root, 0) / "kernel.cu").exists(), "verify changes nothing"


def test_clear_leaves_no_entry(root: Path) -> None:
    assert len(Catalog(root).clear(dry_run=True)) == 4
    assert Catalog(root).size().entries == 4
    assert len(Catalog(root).clear()) == 4
    size = Catalog(root).size()
    assert (size.entries, size.quarantined) == (0, 0)
    assert list((root / "v1").iterdir()) == []


def test_a_root_that_does_not_exist_is_empty_and_stays_away(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "missing")
    assert list(catalog.entries()) == list(catalog.verify()) == catalog.clear() == catalog.prune(Limits()) == []
    assert catalog.size().entries == 0
    assert not (tmp_path / "missing").exists()


def test_clear_does_not_follow_links(root: Path, tmp_path: Path) -> None:
    shutil.copytree(folder(root, 0), tmp_path / "outside")
    shutil.rmtree(folder(root, 0))
    folder(root, 0).symlink_to(tmp_path / "outside")
    Catalog(root).clear()
    assert len(list((tmp_path / "outside").iterdir())) == 3
    assert Catalog(root).size().entries == 0
