"""Processes that die: at every system call, at random, and with the machine. Run inside the sandbox."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jitfp4.cache import Built, Cache, Catalog, Index, Limits, Loaded, Verdict
from jitfp4.cache.index import Listed
from jitfp4.config import Config
from jitfp4.keys import Recipe
from tests.faults.kernels import SYMBOL, TOOLCHAIN, make_built, make_cubin, make_recipe
from tests.faults.naive import NaiveStore
from tests.faults.sandbox import EXIT, EXITED, TEAR, TRACE, Shim, end_child, in_child, start_child

STORES = {"cache": Cache, "naive": NaiveStore}
TARGET, OTHER = 0, 1
_BIG = make_cubin(size=400_000)


def open_store(kind: str, root: Path) -> Cache | NaiveStore:
    return STORES[kind](Config(cache_dir=root, lock_timeout=10.0))


def have(kind: str, root: Path, seed: int) -> bytes:
    return open_store(kind, root).get_or_build(make_recipe(seed), TOOLCHAIN, lambda: make_built(seed)).cubin


def corrupt_entry(root: Path) -> None:
    have("cache", root, TARGET)
    for path in root.rglob("kernel.cubin"):
        path.write_bytes(path.read_bytes()[:-9])


def three_entries(root: Path) -> None:
    for seed in range(3):
        have("cache", root, seed)


def store_index(root: Path) -> None:
    cache, recipe = Cache(Config(cache_dir=root)), make_recipe(TARGET)
    cache.adopt_index(Index.of([Listed.of(cache.read(recipe.digest, TOOLCHAIN))]))


SCENARIOS: dict[str, tuple[Callable[[Path], object], Callable[[Path, str], object]]] = {
    "publish": (lambda _: None, lambda root, kind: have(kind, root, TARGET)),
    "rebuild": (corrupt_entry, lambda root, kind: have(kind, root, TARGET)),
    "prune": (three_entries, lambda root, _: Catalog(root).prune(Limits(max_entries=1))),
    "clear": (three_entries, lambda root, _: Catalog(root).clear()),
    "index": (three_entries, lambda root, _: store_index(root)),
}


def exit_everywhere(store: str, root: str, scenario: str) -> dict[str, object]:
    """Run a scenario again and again, each time ending the process at another write-side call, or inside a write.

    After each death another process works in the same root: what it finds wrong is returned.
    """
    shim, points, problems = Shim(), 0, []
    prepare, act = SCENARIOS[scenario]
    for action, name in ((EXIT, "*"), (TEAR, "write")):
        for nth in itertools.count(1):
            folder = Path(root) / f"{action}-{nth}"
            folder.mkdir()
            prepare(folder / "cache")

            def die(folder: Path = folder, nth: int = nth, action: int = action, name: str = name) -> None:
                shim.arm(name, nth, action)
                act(folder / "cache", store)

            status = in_child(die)
            problems += [f"{action} {nth}: {problem}" for problem in aftermath(store, folder / "cache", scenario)]
            if status != EXITED:
                problems += [f"{action} {nth}: exit status {status}"] if status else []
                break
            points += 1
            shutil.rmtree(folder)
    return {"points": points, "problems": problems}


def aftermath(kind: str, root: Path, scenario: str) -> Iterator[str]:
    """What is wrong with a root after a process died in it, as the next process sees it."""
    opened, truth = open_store(kind, root), make_built(TARGET)
    if opened.get_or_build(make_recipe(TARGET), TOOLCHAIN, lambda: truth).cubin != truth.cubin:
        yield "wrong bytes are served"
    if kind == "naive":
        return
    later = open_store(kind, root)
    later.get_or_build(make_recipe(99), TOOLCHAIN, lambda: make_built(99))  # a first publish sweeps
    if opened.info().lock_timeouts or later.info().lock_timeouts:
        yield "a lock is stuck"
    if litter := list((root / "tmp").iterdir()):
        yield f"litter: {litter}"
    if bad := [checked for checked in Catalog(root).verify() if checked.verdict is not Verdict.OK]:
        yield f"bad entry: {bad}"
    if scenario != "rebuild" and (root / "bad").exists():
        yield f"quarantined: {list((root / 'bad').iterdir())}"


def kill_at_random(store: str, root: str, kills: int) -> dict[str, int]:
    """SIGKILL a process that publishes big kernels as fast as it can, ``kills`` times; count what is left.

    ``orphans`` are the kills after which an unfinished entry was there.
    """
    rng = random.Random(kills)
    folder, orphans = Path(root), 0
    for kill in range(kills):
        ready, started = os.pipe()
        first = (kill + 1) * 1000
        child = start_child(lambda first=first, started=started: publish_forever(store, folder, first, started))
        os.close(started)
        for _ in range(rng.randrange(1, 5)):  # it began, and published so many
            os.read(ready, 1)
        time.sleep(rng.uniform(0, 0.002))
        end_child(child, signal.SIGKILL)
        os.close(ready)
        orphans += any((folder / "tmp").glob("*"))
    entries = list(folder.rglob("kernel.cubin"))
    torn = sum(path.read_bytes() != _BIG for path in entries if path.parent.parent.parent.parent.name == "v1")
    problems = list(aftermath(store, folder, "publish"))
    return {"entries": len(entries), "torn": torn, "orphans": orphans, "problems": len(problems)}


def publish_forever(store: str, root: Path, first: int, started: int) -> None:
    opened = open_store(store, root)
    os.write(started, b".")
    for seed in itertools.count(first):
        opened.get_or_build(make_recipe(seed), TOOLCHAIN, lambda: Built(cubin=_BIG, symbol=SYMBOL, provenance={}))
        os.write(started, b".")


def trace_publish(store: str, root: str) -> list[list[str]]:
    """The write-side calls of one cold publish, in order."""
    shim = Shim()
    opened = open_store(store, Path(root))
    shim.arm("*", 0, TRACE)
    opened.get_or_build(make_recipe(TARGET), TOOLCHAIN, make_built)
    return shim.trace()


def read_against_writers(store: str, root: str, reads: int) -> dict[str, int]:
    """Read four keys at full speed while eight writers remove and publish them; the naive store until one is torn."""
    folder, recipes = Path(root), [make_recipe(seed) for seed in range(4)]
    truth = [make_built(seed).cubin for seed in range(4)]
    writers = [start_child(lambda: rewrite_forever(store, folder, recipes)) for _ in range(8)]
    opened = open_store(store, folder)
    counts = dict.fromkeys(("reads", "torn", "bad", "hits"), 0)
    try:
        while counts["reads"] < reads and not (store == "naive" and counts["torn"]):
            for seed, recipe in enumerate(recipes):
                counts["reads"] += 1
                found = opened.lookup(recipe, TOOLCHAIN)
                if found is not None and hasattr(found, "cubin"):
                    counts["hits"] += 1
                    counts["torn"] += found.cubin != truth[seed]
                elif found is not None:
                    counts["bad"] += found.reason.value != "absent"
    finally:
        statuses = [end_child(child, signal.SIGKILL) for child in writers]
    counts["writers that failed"] = sum(status != -signal.SIGKILL for status in statuses)
    return counts


def rewrite_forever(store: str, root: Path, recipes: list[Recipe]) -> None:
    """Each writer publishes the keys that are missing and takes one away, each its own way."""
    rng = random.Random(os.getpid())
    while True:
        seed = rng.randrange(len(recipes))
        have(store, root, seed)
        if store == "cache":
            Catalog(root).prune(Limits(max_entries=rng.randrange(4)))
        else:
            NaiveStore(Config(cache_dir=root)).remove(make_recipe(seed), TOOLCHAIN)


def power_cuts(store: str, root: str) -> dict[str, int]:
    """Every state in which a power cut can leave a traced publish, under the rules of POSIX and no more.

    A file's data is sure to be on disk once the file was synced after its last write; before, the file may be missing,
    empty, half or whole. A rename is sure once the folder it went into was synced; before, it may have happened or not,
    whatever was synced in between.
    """
    base = Path(root)
    trace = trace_publish(store, str(base / "traced"))
    files = {path.name: path.read_bytes() for path in (base / "traced").rglob("*/nvrtc-*/*")}
    target = next(path.parent for path in (base / "traced").rglob("*/nvrtc-*/kernel.cubin"))
    counts = dict.fromkeys(("states", "wrong", "corrupt", "whole", "absent"), 0)
    seen = set()
    for cut in range(len(trace) + 1):
        for state in states_after(trace[:cut], target, files):
            if state in seen:
                continue
            seen.add(state)
            counts["states"] += 1
            counts[
                judge(store, base / f"state-{len(seen)}", target.relative_to(base / "traced"), dict(state or ()))
            ] += 1
    return counts


State = tuple[tuple[str, bytes], ...] | None


def states_after(trace: list[list[str]], target: Path, files: dict[str, bytes]) -> Iterator[State]:
    """Contents of the entry's folder that a cut after ``trace`` may leave; None when the folder is not there."""
    written, synced, renamed, rename_synced = set(), set(), str(target.parent) == "", False
    in_place = not any(call[0] == "rename" for call in trace) and any(
        call[0] == "open" and Path(call[1]).parent == target for call in trace
    )
    for call in trace:
        name = Path(call[1]).name
        if call[0] in ("open", "write") and name in files:
            written.add(name)
            synced.discard(name)
        elif call[0] == "fsync" and name in files:
            synced.add(name)
        elif call[0] == "rename" and call[2] == str(target):
            renamed = True
        elif call[0] == "fsync" and renamed and call[1] == str(target.parent):
            rename_synced = True
    if not rename_synced:
        yield None
    if renamed or in_place:
        choices = []
        for name in sorted(written):
            data = files[name]
            sure = [(name, data)]
            choices.append(sure if name in synced else [None, (name, b""), (name, data[: len(data) // 2]), *sure])
        for combination in itertools.product(*choices):
            yield tuple(item for item in combination if item is not None)


def judge(store: str, root: Path, target: Path, contents: dict[str, bytes]) -> str:
    """What a store makes of an entry's folder with these files."""
    if contents:
        (root / target).mkdir(parents=True, mode=0o700)
        for name, data in contents.items():
            (root / target / name).write_bytes(data)
    found = open_store(store, root).lookup(make_recipe(TARGET), TOOLCHAIN)
    if isinstance(found, Loaded) or (found is not None and store == "naive"):
        return "whole" if found.cubin == make_built(TARGET).cubin else "wrong"
    return "corrupt" if found is not None and found.reason.value == "corrupt" else "absent"
