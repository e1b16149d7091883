"""Many processes and one key; locks that do not work; network file systems. Run inside the sandbox."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from jitfp4.cache import Built, Cache, Loaded
from jitfp4.cache.lock import stripe
from jitfp4.config import Config
from tests.faults.crashes import open_store
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import FAIL, Shim, end_child, in_child, start_child


def marked_build(folder: Path, seed: int, seconds: float) -> Callable[[], Built]:
    """A build that takes a while and leaves a file per call."""

    def build() -> Built:
        (folder / f"built-{seed}-{os.getpid()}").touch()
        time.sleep(seconds)
        return make_built(seed)

    return build


def cold_start(store: str, root: str, processes: int, keys: int, seconds: float) -> dict[str, object]:
    """``processes`` start together on an empty root, each wanting all ``keys`` in an order of its own."""
    folder = Path(root)
    marks = folder / "marks"
    marks.mkdir(parents=True)
    gate, open_gate = os.pipe()

    def work(rank: int) -> None:
        os.read(gate, 1)
        opened = open_store(store, folder / "cache")
        order = list(range(keys))
        random.Random(rank).shuffle(order)
        for seed in order:
            loaded = opened.get_or_build(make_recipe(seed), TOOLCHAIN, marked_build(marks, seed, seconds))
            assert loaded.cubin == make_built(seed).cubin

    children = [start_child(lambda rank=rank: work(rank)) for rank in range(processes)]
    os.write(open_gate, b"." * processes)
    statuses = [end_child(child) for child in children]
    builds = [len(list(marks.glob(f"built-{seed}-*"))) for seed in range(keys)]
    return {"builds": builds, "failed": sum(status != 0 for status in statuses)}


class Warnings(logging.Handler):
    """Collects what the cache warns about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("jitfp4.cache").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def with_failing_calls(root: str, name: str, err: str, nth: int, strict: bool = False) -> dict[str, object]:
    """Three kernels while every (or the ``nth``) call of that name fails with ``err``; then again without the fault."""
    shim, warnings = Shim(), Warnings()
    cache = Cache(Config(cache_dir=Path(root), lock_timeout=3.0, strict=strict))
    cache.get_or_build(make_recipe(99), TOOLCHAIN, lambda: make_built(99))  # modules and folders are there
    shim.arm(name, nth, FAIL, getattr(errno, err))
    right, raised = [], ""
    try:
        for seed in range(3):
            loaded = cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed))
            right.append(loaded.cubin == make_built(seed).cubin)
    except Exception as error:
        raised = type(error).__name__
    shim.arm("*", 10**6, FAIL)
    later = Cache(Config(cache_dir=Path(root)))
    published = sum(isinstance(later.lookup(make_recipe(seed), TOOLCHAIN), Loaded) for seed in range(3))
    return {
        "right": right,
        "raised": raised,
        "lock timeouts": cache.info().lock_timeouts,
        "published": published,
        "warnings": warnings.texts,
        "store_errors": dict(cache.info().store_errors),
    }


def stopped_holder(root: str) -> dict[str, object]:
    """A process stops (SIGSTOP) while it holds the lock; another wants the same kernel. Then the first goes on."""
    folder = Path(root)

    def stop() -> Built:
        os.kill(os.getpid(), signal.SIGSTOP)
        return make_built()

    holder = start_child(lambda: Cache(Config(cache_dir=folder)).get_or_build(make_recipe(), TOOLCHAIN, stop))
    os.waitpid(holder, os.WUNTRACED)
    warnings = Warnings()
    waiter = Cache(Config(cache_dir=folder, lock_timeout=1.2))
    start = time.monotonic()
    loaded = waiter.get_or_build(make_recipe(), TOOLCHAIN, make_built)
    waited = time.monotonic() - start
    os.kill(holder, signal.SIGCONT)
    status = end_child(holder)
    after = Cache(Config(cache_dir=folder)).lookup(make_recipe(), TOOLCHAIN)
    return {
        "waited": waited,
        "lock timeouts": waiter.info().lock_timeouts,
        "private": loaded.path is None and loaded.cubin == make_built().cubin,
        "holder": holder,
        "holder status": status,
        "published by the holder": isinstance(after, Loaded),
        "warnings": warnings.texts,
    }


def killed_holder(root: str) -> dict[str, object]:
    """A process is killed while it holds the lock."""
    folder = Path(root)
    holder = start_child(
        lambda: Cache(Config(cache_dir=folder)).get_or_build(make_recipe(), TOOLCHAIN, lambda: time.sleep(60))
    )
    lock = folder / stripe(make_recipe().digest)
    for _ in itertools.takewhile(lambda _: not (lock.exists() and lock.stat().st_size), range(6000)):
        time.sleep(0.01)
    end_child(holder, signal.SIGKILL)
    cache = Cache(Config(cache_dir=folder, lock_timeout=5.0))
    loaded = cache.get_or_build(make_recipe(), TOOLCHAIN, make_built)
    return {"lock timeouts": cache.info().lock_timeouts, "published": loaded.path is not None}


def rename_lost(root: str, err: str) -> dict[str, object]:
    """NFS: a rename fails as if another had won, and the winner is not visible to us."""
    shim, folder = Shim(), Path(root)
    cache = Cache(Config(cache_dir=folder))

    def build() -> Built:
        shim.arm("rename", 0, FAIL, getattr(errno, err))
        return make_built()

    status = in_child(lambda: _check_private(cache, build))
    return {"status": status, "litter": [path.name for path in (folder / "tmp").iterdir()]}


def _check_private(cache: Cache, build: Callable[[], Built]) -> None:
    loaded = cache.get_or_build(make_recipe(), TOOLCHAIN, build)
    assert loaded.cubin == make_built().cubin
    assert loaded.path is None
