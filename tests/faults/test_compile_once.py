"""P6, P7, P8: N processes build a kernel once; locks are an optimisation; network file systems lie about renames."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jitfp4.cache import Cache
from jitfp4.cache.lock import stripe
from jitfp4.config import Config
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import sandboxed

CONTENTION = "tests.faults.contention"
NO_LOCKS = ["ENOLCK", "EOPNOTSUPP", "ENOSYS", "EIO", "EACCES"]


@pytest.mark.parametrize(("keys", "seconds"), [(1, 0.1), (20, 0.02)])
def test_sixty_four_cold_processes_build_each_key_once(tmp_path: Path, keys: int, seconds: float) -> None:
    seen = sandboxed(
        f"{CONTENTION}:cold_start", store="cache", root=str(tmp_path), processes=64, keys=keys, seconds=seconds
    )
    assert seen == {"builds": [1] * keys, "failed": 0}


def test_the_naive_store_builds_in_every_process(tmp_path: Path) -> None:
    seen = sandboxed(f"{CONTENTION}:cold_start", store="naive", root=str(tmp_path), processes=64, keys=1, seconds=0.1)
    assert seen["builds"][0] > 8


@pytest.mark.parametrize("err", NO_LOCKS)
def test_without_locks_everything_goes_on_with_one_warning(tmp_path: Path, shim: Path, err: str) -> None:
    seen = sandboxed(f"{CONTENTION}:with_failing_calls", shim=shim, root=str(tmp_path), name="flock", err=err, nth=0)
    assert seen["right"] == [True] * 3
    assert seen["published"] == 3
    assert seen["lock timeouts"] == 0
    locks = [text for text in seen["warnings"] if "lock" in text]
    assert len(locks) == 1, seen["warnings"]
    assert list(seen["store_errors"].values()) == [3]


@pytest.mark.parametrize("err", NO_LOCKS)
def test_strict_mode_raises_when_locks_do_not_work(tmp_path: Path, shim: Path, err: str) -> None:
    seen = sandboxed(
        f"{CONTENTION}:with_failing_calls",
        shim=shim,
        root=str(tmp_path),
        name="flock",
        err=err,
        nth=0,
        strict=True,
    )
    assert seen["raised"] == "CacheError"


def test_a_stopped_holder_is_waited_for_in_bounded_time(tmp_path: Path) -> None:
    seen = sandboxed(f"{CONTENTION}:stopped_holder", root=str(tmp_path / "cache"))
    assert seen["waited"] >= 1.2
    assert seen["lock timeouts"] == 1
    assert seen["private"]
    assert (seen["holder status"], seen["published by the holder"]) == (0, True)
    assert f"waiting for pid {seen['holder']}" in " ".join(seen["warnings"])
    assert "going on alone" in " ".join(seen["warnings"])


def test_a_killed_holder_is_not_waited_for(tmp_path: Path) -> None:
    seen = sandboxed(f"{CONTENTION}:killed_holder", root=str(tmp_path / "cache"))
    assert seen["published"]
    assert seen["lock timeouts"] == 0


@pytest.mark.parametrize("what", ["folder", "symbolic link", "FIFO", "unreadable text"])
def test_an_odd_lock_file_is_no_obstacle(tmp_path: Path, what: str) -> None:
    root, outside = tmp_path / "cache", tmp_path / "outside"
    (root / "locks").mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    outside.write_text("precious")
    lock = root / stripe(make_recipe().digest)
    if what == "folder":
        lock.mkdir()
    elif what == "symbolic link":
        lock.symlink_to(outside)
    elif what == "FIFO":
        os.mkfifo(lock)
    else:
        lock.write_bytes(b"\xff" * 5000)
    cache = Cache(Config(cache_dir=root, lock_timeout=2.0))
    loaded = cache.get_or_build(make_recipe(), TOOLCHAIN, make_built)
    assert loaded.path is not None
    assert outside.read_text() == "precious"
    assert sum(cache.info().store_errors.values()) == (0 if what == "unreadable text" else 1)


@pytest.mark.parametrize("err", ["ENOTEMPTY", "EEXIST", "ESTALE", "EBUSY", "EIO"])
def test_a_lost_rename_keeps_its_own_bytes(tmp_path: Path, shim: Path, err: str) -> None:
    """The winner cannot be seen (a negative entry in the client's cache): nothing is read back."""
    seen = sandboxed(f"{CONTENTION}:rename_lost", shim=shim, root=str(tmp_path / "cache"), err=err)
    assert seen == {"status": 0, "litter": []}


@pytest.mark.parametrize(
    ("name", "err", "nth"),
    [("open_read", "ESTALE", 1), ("open_read", "ESTALE", 3), ("read", "ESTALE", 1), ("rmdir", "EBUSY", 0),
     ("unlink", "EBUSY", 0), ("close", "EIO", 0), ("fsync", "EIO", 0),
     ("mkdir", "EIO", 0), ("rename", "EXDEV", 0), ("chmod", "EPERM", 0)],
)  # fmt: skip
def test_network_errors_never_reach_the_caller(tmp_path: Path, shim: Path, name: str, err: str, nth: int) -> None:
    seen = sandboxed(f"{CONTENTION}:with_failing_calls", shim=shim, root=str(tmp_path), name=name, err=err, nth=nth)
    assert seen["right"] == [True] * 3
    assert seen["raised"] == ""
    if name in ("open_read", "read", "rmdir", "unlink", "close"):
        assert seen["published"] == 3
