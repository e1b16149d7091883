"""P4, P6: no child, forked at any moment, keeps a lock of its parent: of a build, an eviction or a staging."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jitfp4.cache import Built, Cache, Catalog, Limits, Loaded
from jitfp4.cache import evict as evict_module
from jitfp4.cache import publish as publish_module
from jitfp4.cache.evict import PRUNE_LOCK, enforce_now_and_then
from jitfp4.cache.lock import open_lock, stripe, try_lock
from jitfp4.cache.publish import open_root
from jitfp4.config import Config
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import end_child, keep_orphans, sandboxed, start_child

RECIPE = make_recipe()


def is_free(root: Path, path: str) -> bool:
    with open_root(root) as folder, open_lock(folder, path) as file:
        return try_lock(file.fd)


def worker() -> int:
    """A forked child that lives on and does nothing. It runs when this returns: what a child does at first is done."""
    runs, says = os.pipe()
    child = start_child(lambda: (os.write(says, b"1"), time.sleep(60)))
    os.close(says)
    assert os.read(runs, 1)
    os.close(runs)
    return child


def fork_during(moment: str, root: Path) -> int:
    """Process id of a child that was forked while this process held locks, which it holds no more."""
    children: list[int] = []
    cache = Cache(Config(cache_dir=root))
    if moment == "a build":

        def build() -> Built:
            children.append(worker())
            return make_built()

        cache.get_or_build(RECIPE, TOOLCHAIN, build)
    elif moment == "an eviction":
        enforce = evict_module.enforce
        evict_module.enforce = lambda *a, **k: (children.append(worker()), enforce(*a, **k))[1]
        with open_root(root) as folder:
            enforce_now_and_then(folder, Catalog(root).layer, Limits(), at_once=True)
        evict_module.enforce = enforce
    else:
        write = publish_module._write_files
        publish_module._write_files = lambda *a: (children.append(worker()), write(*a))[1]
        cache.get_or_build(RECIPE, TOOLCHAIN, make_built)
        publish_module._write_files = write
    return children[0]


LOCKS = {"a build": stripe(RECIPE.digest), "an eviction": PRUNE_LOCK, "a publish": stripe(RECIPE.digest)}


@pytest.mark.parametrize("moment", LOCKS)
def test_a_child_that_lives_on_holds_no_lock(tmp_path: Path, moment: str) -> None:
    assert sandboxed("tests.faults.test_forks:locks_after_a_fork", base=str(tmp_path), moment=moment) is True


def locks_after_a_fork(base: str, moment: str) -> bool:
    root = Path(base) / "cache"
    child = fork_during(moment, root)
    free = is_free(root, LOCKS[moment])
    end_child(child, signal.SIGKILL)
    return free


@pytest.mark.parametrize("moment", LOCKS)
def test_the_child_of_a_killed_process_is_in_nobodys_way(tmp_path: Path, moment: str) -> None:
    """The parent is killed in the middle; its child lives on. The next process waits for nothing and sweeps all."""
    seen = sandboxed("tests.faults.test_forks:after_a_killed_parent", base=str(tmp_path), moment=moment)
    assert seen == {"waited": False, "published": True, "litter": []}


def after_a_killed_parent(base: str, moment: str) -> dict[str, object]:
    root, pids = Path(base) / "cache", Path(base) / "pids"
    Cache(Config(cache_dir=root)).get_or_build(make_recipe(9), TOOLCHAIN, lambda: make_built(9))

    def killed_after_forking(*_: object, **__: object) -> object:
        pids.write_text(str(worker()))
        os.kill(os.getpid(), signal.SIGKILL)

    def parent() -> None:
        if moment == "a build":
            Cache(Config(cache_dir=root)).get_or_build(RECIPE, TOOLCHAIN, killed_after_forking)
        elif moment == "an eviction":
            evict_module.enforce = killed_after_forking
            with open_root(root) as folder:
                enforce_now_and_then(folder, Catalog(root).layer, Limits(), at_once=True)
        else:
            publish_module._write_files = killed_after_forking
            Cache(Config(cache_dir=root)).get_or_build(RECIPE, TOOLCHAIN, make_built)

    keep_orphans()
    assert end_child(start_child(parent)) == -signal.SIGKILL
    try:
        cache = Cache(Config(cache_dir=root, lock_timeout=5.0, cache_max_bytes=1))
        loaded = cache.get_or_build(RECIPE, TOOLCHAIN, make_built)
        with open_root(root) as folder:
            enforce_now_and_then(folder, Catalog(root).layer, Limits(), at_once=True)
        free = is_free(root, LOCKS[moment])
    finally:
        end_child(int(pids.read_text()), signal.SIGKILL)
    litter = [path.name for path in (root / "tmp").iterdir()]
    waited = cache.info().lock_timeouts > 0 or not free
    return {"waited": waited, "published": loaded.path is not None, "litter": litter}


def test_a_child_that_goes_on_inside_the_build_harms_no_lock(tmp_path: Path) -> None:
    """Both return from the build. The child must not unlock what its parent still holds, nor close a strange file."""
    seen = sandboxed("tests.faults.test_forks:both_go_on", base=str(tmp_path))
    assert seen == {"held while the parent builds": True, "child": 0, "parent": True}


def both_go_on(base: str) -> dict[str, object]:
    root = Path(base) / "cache"
    held, child = [], 0

    def build() -> Built:
        nonlocal child
        child = os.fork()
        if child:
            status = end_child(child)
            held.append((status, not is_free(root, stripe(RECIPE.digest))))
        return make_built()

    try:
        loaded = Cache(Config(cache_dir=root)).get_or_build(RECIPE, TOOLCHAIN, build)
    except BaseException:
        os._exit(3)
    if child == 0:
        for _ in range(20):
            os.close(os.open("/dev/null", os.O_RDONLY))
        os._exit(0 if isinstance(loaded, Loaded) else 1)
    status, was_held = held[0]
    return {"held while the parent builds": was_held, "child": status, "parent": loaded.cubin == make_built().cubin}


def test_forks_from_other_threads_at_any_moment(tmp_path: Path) -> None:
    """A thread forks children as fast as it can while others build, evict and publish; then every lock is free."""
    assert sandboxed("tests.faults.test_forks:fork_storm", base=str(tmp_path)) == []


def fork_storm(base: str) -> list[str]:
    root = Path(base) / "cache"
    children: list[int] = []
    stop = threading.Event()

    def fork() -> None:
        while not stop.is_set() and len(children) < 150:
            children.append(worker())
            time.sleep(0.005)

    def work(first: int) -> None:
        for seed in range(first, first + 15):
            Cache(Config(cache_dir=root)).get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed))
            Catalog(root).prune(Limits(max_entries=5))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200)]
    forker = threading.Thread(target=fork)
    for thread in (*threads, forker):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    forker.join()
    assert children, "no child was forked: the test proves nothing"
    held = [f"locks/{path.name}" for path in (root / "locks").iterdir() if not is_free(root, f"locks/{path.name}")]
    for child in children:
        end_child(child, signal.SIGKILL)
    return held


def test_multiprocessing_workers_hold_nothing(tmp_path: Path) -> None:
    """What a data loader does: fork workers inside the build, and leave them running."""
    code = f"""
import multiprocessing, time
from pathlib import Path
from jitfp4.cache import Cache
from jitfp4.config import Config
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.test_forks import is_free, stripe
root = Path({str(tmp_path)!r}) / "cache"
workers = []
def build():
    for _ in range(3):
        workers.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)))
        workers[-1].start()
    return make_built()
Cache(Config(cache_dir=root)).get_or_build(make_recipe(), TOOLCHAIN, build)
print(is_free(root, stripe(make_recipe().digest)))
for worker in workers:
    worker.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900)
    assert done.stdout == "True\n"
