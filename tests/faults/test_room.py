"""P9, P12: what makes room works where there is none: on a full disk, without inodes, with few descriptors."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jitfp4.cache import Cache, Catalog, Limits
from jitfp4.config import Config
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import FAIL, Shim, sandboxed
from tests.faults.trouble import in_world, mount

KERNELS = 6


def fill_disk(root: Path) -> None:
    with (root.parent / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def fill_inodes(root: Path) -> None:
    try:
        for number in range(10_000):
            (root.parent / f"ballast{number}").touch()
    except OSError:
        return


def few_descriptors(root: Path) -> None:
    next_free = os.dup(0)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free + 8, next_free + 8))


def small_files(root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


SHORTAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "bytes": ("size=600k", fill_disk),
    "inodes": ("size=10m,nr_inodes=90", fill_inodes),
    "descriptors": ("size=10m", few_descriptors),
    "file sizes": ("size=10m", small_files),
}


def prune(root: Path) -> int:
    return len(Catalog(root).prune(Limits(max_entries=2)))


def clear(root: Path) -> int:
    return len(Catalog(root).clear())


ACTIONS = {"prune": (prune, 4), "clear": (clear, KERNELS)}


@pytest.mark.parametrize("without", ["", "tmp", "tmp locks bad bundles"])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("shortage", SHORTAGES)
def test_room_is_made_where_there_is_none(shortage: str, action: str, without: str) -> None:
    """Also when the folders for it are missing and cannot be made."""
    seen = sandboxed("tests.faults.test_room:make_room", shortage=shortage, action=action, without=without)
    if "skip" in seen:
        pytest.skip(f"{shortage}: {seen['skip']}")
    assert seen == {"gone": ACTIONS[action][1], "left": KERNELS - ACTIONS[action][1], "good": True, "more room": True}


def make_room(shortage: str, action: str, without: str) -> dict[str, object]:
    options, shorten = SHORTAGES[shortage]

    def work(folder: Path) -> dict[str, object]:
        mount(folder, options.encode())
        root = folder / "cache"
        cache = Cache(Config(cache_dir=root))
        for seed in range(KERNELS):
            path = cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed)).path
            assert path is not None
        for name in without.split():
            shutil.rmtree(root / name, ignore_errors=True)
        used = os.statvfs(folder)
        shorten(root)
        gone = ACTIONS[action][0](root)
        now = os.statvfs(folder)
        reader = Cache(Config(cache_dir=root, cache_mode="ro"))
        found = [reader.lookup(make_recipe(seed), TOOLCHAIN) for seed in range(KERNELS)]
        good = all(getattr(item, "cubin", None) == make_built(seed).cubin or item.reason.value == "absent"
                   for seed, item in enumerate(found))  # fmt: skip
        left = sum(hasattr(item, "cubin") for item in found)
        more = now.f_bfree > 0 and now.f_ffree > 0 and (shortage in ("bytes", "inodes") or now.f_bfree > used.f_bfree)
        return {"gone": gone, "left": left, "good": good, "more room": more}

    return in_world(work)


def test_the_next_publish_after_a_prune_works() -> None:
    """A disk that was full, a prune by hand, and the cache works again."""
    seen = sandboxed("tests.faults.test_room:recover")
    if "skip" in seen:
        pytest.skip(seen["skip"])
    assert seen == {"while full": False, "after the prune": True}


def recover() -> dict[str, object]:
    def work(folder: Path) -> dict[str, object]:
        mount(folder, b"size=600k")
        root = folder / "cache"
        cache = Cache(Config(cache_dir=root))
        for seed in range(KERNELS):
            cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed))
        fill_disk(root)
        while_full = cache.get_or_build(make_recipe(50), TOOLCHAIN, lambda: make_built(50)).path is not None
        prune(root)
        after = cache.get_or_build(make_recipe(51), TOOLCHAIN, lambda: make_built(51)).path is not None
        return {"while full": while_full, "after the prune": after}

    return in_world(work)


CALLS = ["mkdir", "rename", "open", "pwrite", "write", "chmod", "fchmod", "fsync"]


@pytest.mark.parametrize("err", ["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("action", ACTIONS)
def test_no_call_that_takes_a_block_is_needed(tmp_path: Path, shim: Path, action: str, err: str) -> None:
    """A full ext4 refuses a new folder and a new name; some file systems refuse other calls as well."""
    seen = sandboxed("tests.faults.test_room:act_without", shim=shim, base=str(tmp_path), action=action, err=err)
    gone = ACTIONS[action][1]
    assert seen == {call: {"gone": gone, "left": KERNELS - gone} for call in CALLS}


def act_without(base: str, action: str, err: str) -> dict[str, object]:
    return {call: _act_without(Path(base) / call, action, call, err) for call in CALLS}


def _act_without(folder: Path, action: str, call: str, err: str) -> dict[str, object]:
    shim = Shim()
    cache = Cache(Config(cache_dir=folder))
    for seed in range(KERNELS):
        cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed))
    shim.arm(call, 0, FAIL, getattr(errno, err))
    gone = ACTIONS[action][0](folder)
    shim.arm("*", 10**6, FAIL)
    return {"gone": gone, "left": len(list(folder.glob("v1/*/*/*/entry.json")))}
