"""cache/store.py: the order of layers, what is a miss and why, building once, modes, counters."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jitfp4.cache import Built, Cache, Loaded, Miss
from jitfp4.cache.layer import STAMP_SECONDS, entry_path
from jitfp4.config import Config
from jitfp4.errors import ArgumentError, CacheCorruptError, CacheError, CompileError
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe

OLDER = "nvrtc-12.8.1-ffffffffffff"
RECIPE = make_recipe()


class Builder:
    """A build callback that counts its calls."""

    def __init__(self, seed: int = 0) -> None:
        self.calls, self.seed = 0, seed

    def __call__(self) -> Built:
        self.calls += 1
        return make_built(self.seed)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache_dir=tmp_path / "cache")


def fill(root: Path, *toolchains: str) -> None:
    for toolchain in toolchains:
        Cache(Config(cache_dir=root)).get_or_build(RECIPE, toolchain, Builder())


def refuse() -> Built:
    raise AssertionError("must not build")


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    paths = [root, *root.rglob("*")]
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_ctime_ns, path.lstat().st_mode) for path in paths}


def test_miss_builds_and_publishes_then_hits(config: Config) -> None:
    build = Builder()
    first = Cache(config).get_or_build(RECIPE, TOOLCHAIN, build)
    assert first.missed is not None
    assert first.missed.reason is Miss.ABSENT
    assert first.path == config.cache_dir / entry_path(RECIPE.digest, TOOLCHAIN)
    second = Cache(config).get_or_build(RECIPE, TOOLCHAIN, refuse)
    assert (second.cubin, second.symbol, second.path) == (make_built().cubin, first.symbol, first.path)
    assert second.missed is None
    assert build.calls == 1


def test_nothing_is_touched_before_a_build(config: Config, tmp_path: Path) -> None:
    cache = Cache(config)
    assert cache.lookup(RECIPE, TOOLCHAIN).reason is Miss.ABSENT
    with pytest.raises(CompileError):
        Cache(replace(config, offline=True)).get_or_build(RECIPE, TOOLCHAIN, failing_build)
    assert list(tmp_path.iterdir()) == []


def failing_build() -> Built:
    raise CompileError("toy", "sm_90a", "error: no", "1 | x")


def test_build_errors_pass_unchanged_and_publish_nothing(config: Config) -> None:
    cache = Cache(config)
    for error in (CompileError("toy", "sm_90a", "log", "1 | x"), OSError(28, "no space"), KeyboardInterrupt()):

        def build(error: BaseException = error) -> Built:
            raise error

        with pytest.raises(type(error)) as caught:
            cache.get_or_build(RECIPE, TOOLCHAIN, build)
        assert caught.value is error
    assert not list(config.cache_dir.rglob("entry.json"))
    assert not list((config.cache_dir / "tmp").iterdir())
    assert cache.info().store_errors == {}
    assert cache.get_or_build(RECIPE, TOOLCHAIN, Builder()).path is not None


def test_everything_is_for_the_user_only(config: Config) -> None:
    old = os.umask(0)
    try:
        Cache(config).get_or_build(RECIPE, TOOLCHAIN, Builder())
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in config.cache_dir.rglob("*") if path.is_file()}
    assert modes == {0o600}
    folders = [config.cache_dir, *(path for path in config.cache_dir.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_world_readable_whatever_the_umask(config: Config) -> None:
    old = os.umask(0o077)
    try:
        path = Cache(config, world_readable=True).get_or_build(RECIPE, TOOLCHAIN, Builder()).path
    finally:
        os.umask(old)
    while path != config.cache_dir.parent:
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o644 for file in path.iterdir() if file.is_file())
        path = path.parent


def test_another_toolchain_in_the_users_root_is_a_miss_that_says_so(config: Config) -> None:
    fill(config.cache_dir, OLDER)
    loaded = Cache(config).get_or_build(RECIPE, TOOLCHAIN, Builder())
    assert loaded.missed.reason is Miss.TOOLCHAIN
    assert OLDER in loaded.missed.detail


@pytest.mark.parametrize("how", ["offline", "no compiler"])
def test_any_toolchain_will_do_without_a_compiler(config: Config, how: str) -> None:
    fill(config.cache_dir, OLDER, "nvrtc-12.10.1-0")
    cache = Cache(replace(config, offline=how == "offline"))
    loaded = cache.get_or_build(RECIPE, TOOLCHAIN if how == "offline" else None, refuse)
    assert loaded.toolchain == "nvrtc-12.10.1-0"


def test_read_only_layers_in_order_exact_toolchain_first(config: Config, tmp_path: Path) -> None:
    layers = tuple(tmp_path / name for name in ("a", "b", "c"))
    fill(layers[0], OLDER)
    fill(layers[1], TOOLCHAIN)
    fill(layers[2], TOOLCHAIN, "nvrtc-13.1-0")
    before = {layer: snapshot(layer) for layer in layers}
    cache = Cache(replace(config, cache_ro=(tmp_path / "missing", *layers)))
    assert cache.get_or_build(RECIPE, TOOLCHAIN, refuse).path.is_relative_to(layers[1])
    shutil.rmtree(layers[1] / "v1")
    assert cache.get_or_build(RECIPE, TOOLCHAIN, refuse).path.is_relative_to(layers[2])
    shutil.rmtree(layers[2] / entry_path(RECIPE.digest, TOOLCHAIN))
    assert cache.get_or_build(RECIPE, TOOLCHAIN, refuse).toolchain == OLDER  # the first layer's, before a newer one's
    assert not config.cache_dir.exists()
    assert snapshot(layers[0]) == before[layers[0]]


def test_the_users_root_comes_before_the_layers(config: Config, tmp_path: Path) -> None:
    fill(tmp_path / "layer", TOOLCHAIN)
    fill(config.cache_dir, TOOLCHAIN)
    found = Cache(replace(config, cache_ro=(tmp_path / "layer",))).lookup(RECIPE, TOOLCHAIN)
    assert found.path.is_relative_to(config.cache_dir)


def test_a_bad_entry_is_a_logged_miss_moved_aside_and_rebuilt(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(config)
    cubin = cache.get_or_build(RECIPE, TOOLCHAIN, Builder()).path / "kernel.cubin"
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"!")
    assert cache.lookup(RECIPE, TOOLCHAIN).reason is Miss.CORRUPT
    assert cubin.exists(), "a reader removes nothing"
    loaded = cache.get_or_build(RECIPE, TOOLCHAIN, Builder())
    assert loaded.missed.reason is Miss.CORRUPT
    assert loaded.cubin == make_built().cubin
    assert cache.info().quarantines == 1
    assert "kernel.cubin: SHA-256" in caplog.text
    (evidence,) = (config.cache_dir / "bad").iterdir()
    assert (evidence / "kernel.cubin").read_bytes().endswith(b"!")
    assert Cache(config).get_or_build(RECIPE, TOOLCHAIN, refuse).missed is None


def test_quarantine_keeps_the_newest_sixteen(config: Config) -> None:
    for _ in range(20):
        path = Cache(config).get_or_build(RECIPE, TOOLCHAIN, Builder()).path
        (path / "entry.json").write_bytes(b"")
    assert len(list((config.cache_dir / "bad").iterdir())) == 16


def test_a_bad_entry_in_a_layer_is_named_and_the_kernel_is_built(config: Config, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    fill(layer, TOOLCHAIN)
    next(layer.rglob("kernel.cubin")).write_bytes(b"")
    before = snapshot(layer)
    loaded = Cache(replace(config, cache_ro=(layer,))).get_or_build(RECIPE, TOOLCHAIN, Builder())
    assert loaded.missed.reason is Miss.CORRUPT
    assert str(layer) in loaded.missed.detail
    assert loaded.path.is_relative_to(config.cache_dir)
    assert snapshot(layer) == before


def test_strict_raises_what_would_be_logged(config: Config, tmp_path: Path) -> None:
    strict = replace(config, strict=True)
    path = Cache(strict).get_or_build(RECIPE, TOOLCHAIN, Builder()).path
    (path / "entry.json").write_bytes(b"")
    with pytest.raises(CacheCorruptError, match="seal"):
        Cache(strict).get_or_build(RECIPE, TOOLCHAIN, refuse)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError):
        Cache(replace(strict, cache_dir=tmp_path / "file" / "cache")).get_or_build(RECIPE, TOOLCHAIN, Builder())
    with pytest.raises(CacheError, match="JITFP4_CACHE_DIR"):
        Cache(replace(strict, cache_dir=None)).get_or_build(RECIPE, TOOLCHAIN, Builder())


def test_store_trouble_is_counted_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = Cache(Config(cache_dir=tmp_path / "file" / "cache"))
    for seed in range(3):
        assert cache.get_or_build(make_recipe(seed), TOOLCHAIN, Builder(seed)).cubin == make_built(seed).cubin
    (count,) = cache.info().store_errors.values()
    assert count == 3
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, "one for looking, one for publishing"


def test_no_home_means_memory_only(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(Config(cache_dir=None))
    for _ in range(2):
        assert cache.get_or_build(RECIPE, TOOLCHAIN, Builder()).path is None
    assert caplog.text.count("JITFP4_CACHE_DIR") == 1


def test_a_cubin_for_another_architecture_is_not_published(config: Config) -> None:
    cache = Cache(config)
    loaded = cache.get_or_build(RECIPE, TOOLCHAIN, lambda: make_built(arch="sm_100a"))
    assert loaded.path is None
    assert cache.info().store_errors == {"publish: CacheCorruptError": 1}
    assert not list(config.cache_dir.rglob("entry.json"))


def test_mode_off_neither_reads_nor_writes(config: Config) -> None:
    fill(config.cache_dir, TOOLCHAIN)
    before = snapshot(config.cache_dir)
    build = Builder()
    loaded = Cache(replace(config, cache_mode="off")).get_or_build(RECIPE, TOOLCHAIN, build)
    assert (build.calls, loaded.missed.reason) == (1, Miss.OFF)
    assert snapshot(config.cache_dir) == before


def test_mode_ro_reads_and_never_writes(config: Config) -> None:
    fill(config.cache_dir, TOOLCHAIN)
    manifest = config.cache_dir / entry_path(RECIPE.digest, TOOLCHAIN) / "entry.json"
    os.utime(manifest, (0, 0))
    before = snapshot(config.cache_dir)
    cache = Cache(replace(config, cache_mode="ro"))
    assert cache.get_or_build(RECIPE, TOOLCHAIN, refuse).missed is None
    assert cache.get_or_build(make_recipe(1), TOOLCHAIN, Builder(1)).path is None
    assert snapshot(config.cache_dir) == before


def test_a_use_is_stamped_at_most_hourly(config: Config) -> None:
    fill(config.cache_dir, TOOLCHAIN)
    manifest = config.cache_dir / entry_path(RECIPE.digest, TOOLCHAIN) / "entry.json"
    now = time.time()
    for age, stamped in ((STAMP_SECONDS / 2, False), (2 * STAMP_SECONDS, True), (-(10 * 365 * 86400), True)):
        os.utime(manifest, (now - age, now - age))
        Cache(config).get_or_build(RECIPE, TOOLCHAIN, refuse)
        assert (abs(manifest.stat().st_mtime - now) < 60) == stamped


def test_toolchain_names_that_are_paths_are_refused(config: Config) -> None:
    for name in ("..", "../x", "a/b", ""):
        with pytest.raises(ArgumentError, match="toolchain"):
            Cache(config).get_or_build(RECIPE, name, refuse)


def test_threads_build_once(config: Config) -> None:
    cache, build = Cache(config), Builder()
    barrier, results = threading.Barrier(8), []

    def slow_build() -> Built:
        time.sleep(0.05)
        return build()

    def work() -> None:
        barrier.wait()
        results.append(cache.get_or_build(RECIPE, TOOLCHAIN, slow_build))

    run_threads(work, 8)
    assert build.calls == 1
    assert {loaded.cubin for loaded in results} == {make_built().cubin}
    info = cache.info()
    assert (info.builds, info.publishes, info.joins + info.hits) == (1, 1, 7)


def test_a_held_lock_is_waited_for_in_bounded_time_and_named(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    """The waiter builds for itself and publishes nothing; it says whom it waited for."""
    holding, release = threading.Event(), threading.Event()

    def stuck_build() -> Built:
        holding.set()
        assert release.wait(600)
        return make_built()

    def hold() -> None:
        Cache(config).get_or_build(RECIPE, TOOLCHAIN, stuck_build)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(600)
    try:
        waiter = Cache(replace(config, lock_timeout=1.5))
        start = time.monotonic()
        loaded = waiter.get_or_build(RECIPE, TOOLCHAIN, Builder())
        waited = time.monotonic() - start
    finally:
        release.set()
        holder.join()
    assert waited >= 1.5
    assert loaded.cubin == make_built().cubin
    assert loaded.path is None
    assert waiter.info().lock_timeouts == 1
    assert f"waiting for pid {os.getpid()}" in caplog.text
    assert "toy for sm_90a" in caplog.text


def test_counters(config: Config) -> None:
    cache = Cache(config)
    cache.get_or_build(RECIPE, TOOLCHAIN, Builder())
    cache.get_or_build(RECIPE, TOOLCHAIN, refuse)
    assert isinstance(cache.lookup(RECIPE, TOOLCHAIN), Loaded)
    info = cache.info()
    assert (info.hits, info.misses, info.builds, info.publishes) == (2, {"absent": 1}, 1, 1)
    assert (info.quarantines, info.evictions, info.store_errors) == (0, 0, {})


def run_threads(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


CHANGED = {
    "family": replace(RECIPE, family="toy2"),
    "arch": replace(RECIPE, arch="sm_90"),
    "an option": replace(RECIPE, options=(*RECIPE.options[:-1], "--std=c++20")),
    "the order of options": replace(RECIPE, options=RECIPE.options[::-1]),
    "one more option": replace(RECIPE, options=(*RECIPE.options, "")),
    "source": replace(RECIPE, source=RECIPE.source + " "),
    "schema": replace(RECIPE, schema=RECIPE.schema + 1),
}


@pytest.mark.parametrize("what", [*CHANGED, "toolchain"])
def test_whatever_decides_the_cubin_changes_the_key(config: Config, what: str) -> None:
    fill(config.cache_dir, TOOLCHAIN)
    found = Cache(config).lookup(CHANGED.get(what, RECIPE), f"{TOOLCHAIN}0" if what == "toolchain" else TOOLCHAIN)
    assert not isinstance(found, Loaded)


def test_nothing_else_is_part_of_the_key(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another place, other times, another environment: still a hit."""
    fill(config.cache_dir, TOOLCHAIN)
    moved = tmp_path / "moved" / "elsewhere"
    moved.parent.mkdir()
    config.cache_dir.rename(moved)
    for number, path in enumerate(moved.rglob("*")):
        os.utime(path, (number * 1000, number * 1000))
    for name, value in {"HOME": "/nowhere", "TZ": "Asia/Tokyo", "LANG": "tr_TR.UTF-8", "USER": "other"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir("/")
    old = os.umask(0)
    try:
        assert isinstance(Cache(replace(config, cache_dir=moved)).lookup(RECIPE, TOOLCHAIN), Loaded)
    finally:
        os.umask(old)
