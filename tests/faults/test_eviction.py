"""P12: bounded by default, least recently used first, whatever the clock says and whoever is writing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jitfp4.cache import Cache, Catalog, Limits, Loaded
from jitfp4.cache.layer import entry_path
from jitfp4.config import Config, read_config
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import sandboxed

YEAR = 365 * 86400


def fill(root: Path, count: int, *, size: int = 3000) -> None:
    cache = Cache(Config(cache_dir=root))
    for seed in range(count):
        cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed, size=size))


def stamp(root: Path, seed: int, when: float) -> None:
    os.utime(root / entry_path(make_recipe(seed).digest, TOOLCHAIN) / "entry.json", (when, when))


def present(root: Path, count: int) -> list[int]:
    cache = Cache(Config(cache_dir=root, cache_mode="ro"))
    return [seed for seed in range(count) if isinstance(cache.lookup(make_recipe(seed), TOOLCHAIN), Loaded)]


def test_there_is_a_limit_by_default() -> None:
    config = read_config({"HOME": "/nowhere"})
    assert 0 < config.cache_max_bytes < 1 << 40
    assert 0 < config.cache_max_entries < 1 << 20


def test_eight_writers_cannot_outgrow_the_limit(tmp_path: Path) -> None:
    """Of ten times the limit, less than half is on disk when they are done, and the limit after one pass without them.

    While one process evicts the others go on: how far they get is the scheduler's affair.
    """
    limit, entry = 2_000_000, 20_000
    seen = sandboxed(
        "tests.faults.growth:overfill", store="cache", root=str(tmp_path), writers=8, limit=limit, entry_bytes=entry
    )
    assert (seen["failed"], seen["refused"]) == (0, 0)
    assert seen["after writers"] < 5 * limit
    assert seen["in the end"] <= limit


def test_the_naive_store_grows_without_limit(tmp_path: Path) -> None:
    limit, entry = 1_000_000, 20_000
    seen = sandboxed(
        "tests.faults.growth:overfill", store="naive", root=str(tmp_path), writers=8, limit=limit, entry_bytes=entry
    )
    assert seen["after writers"] > 5 * limit


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    fill(tmp_path, 6)
    now = time.time()
    for seed, age in enumerate((5, 2, 9, 3, 7, 4)):
        stamp(tmp_path, seed, now - age * 86400)
    gone = Catalog(tmp_path).prune(Limits(max_entries=3))
    assert [use.digest for use in gone] == [make_recipe(seed).digest for seed in (2, 4, 0)]
    assert present(tmp_path, 6) == [1, 3, 5]


def test_a_use_protects_an_entry(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    for seed in range(3):
        stamp(tmp_path, seed, time.time() - (10 - seed) * 86400)
    assert isinstance(Cache(Config(cache_dir=tmp_path)).lookup(make_recipe(0), TOOLCHAIN), Loaded)
    Catalog(tmp_path).prune(Limits(max_entries=2))
    assert present(tmp_path, 3) == [0, 2]


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_jumped_does_not_pin_or_lose_entries(tmp_path: Path, years: int) -> None:
    """Stamps of another decade: the next use repairs them, and the limit holds all the same."""
    fill(tmp_path, 4)
    for seed in range(4):
        stamp(tmp_path, seed, time.time() + years * YEAR)
    assert isinstance(Cache(Config(cache_dir=tmp_path)).lookup(make_recipe(2), TOOLCHAIN), Loaded)
    if years < 0:
        Catalog(tmp_path).prune(Limits(max_age=YEAR))
        assert present(tmp_path, 4) == [2]
    else:
        assert len(Catalog(tmp_path).prune(Limits(max_entries=1))) == 3
        assert len(present(tmp_path, 4)) == 1


def test_age_and_dry_run(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    stamp(tmp_path, 1, time.time() - 40 * 86400)
    catalog = Catalog(tmp_path)
    assert [use.digest for use in catalog.prune(Limits(max_age=30 * 86400), dry_run=True)] == [make_recipe(1).digest]
    assert present(tmp_path, 3) == [0, 1, 2]
    assert len(catalog.prune(Limits(max_age=30 * 86400))) == 1
    assert present(tmp_path, 3) == [0, 2]


def test_size_counts_blocks_not_bytes(tmp_path: Path) -> None:
    """3 small files and the folders above them: a limit on their bytes would miss most of what is on disk."""
    fill(tmp_path, 10, size=200)
    size = Catalog(tmp_path).size()
    contents = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size.entries == 10
    assert size.disk_bytes > 1.5 * contents
    assert size.inodes == 1 + sum(1 for _ in tmp_path.rglob("*"))
    Catalog(tmp_path).prune(Limits(max_bytes=size.disk_bytes / 2))
    assert 0 < Catalog(tmp_path).size().disk_bytes <= size.disk_bytes / 2


def test_evidence_goes_before_entries(tmp_path: Path) -> None:
    fill(tmp_path, 2, size=100_000)
    (tmp_path / entry_path(make_recipe(0).digest, TOOLCHAIN) / "entry.json").write_bytes(b"")
    fill(tmp_path, 2, size=100_000)
    size = Catalog(tmp_path).size()
    assert size.quarantined == 1
    assert Catalog(tmp_path).prune(Limits(max_bytes=size.disk_bytes - 50_000)) == []
    assert Catalog(tmp_path).size().quarantined == 0
    assert present(tmp_path, 2) == [0, 1]


def test_staging_in_use_survives_a_sweep(tmp_path: Path) -> None:
    """A folder that its owner has locked stays; one whose owner is gone goes, however new or old it looks."""
    import fcntl

    fill(tmp_path, 1)
    for name, when in (("live", 0), ("dead", 0), ("future", time.time() + 10 * YEAR)):
        (tmp_path / "tmp" / name).mkdir(mode=0o700)
        (tmp_path / "tmp" / name / "kernel.cubin").write_bytes(b"half")
        os.utime(tmp_path / "tmp" / name, (when, when))
    live = os.open(tmp_path / "tmp" / "live", os.O_RDONLY)
    fcntl.flock(live, fcntl.LOCK_EX)
    Catalog(tmp_path).prune(Limits())
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["live"]
    os.close(live)
    Catalog(tmp_path).prune(Limits())
    assert list((tmp_path / "tmp").iterdir()) == []
