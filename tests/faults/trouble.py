"""Disks that are full, folders that cannot be written, limits, other users. Run inside the sandbox."""

from __future__ import annotations

import ast
import ctypes
import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from jitfp4.cache import Cache, EntryFiles, Index
from jitfp4.cache.entry import FILES
from jitfp4.cache.index import Listed
from jitfp4.cache.layer import entry_path
from jitfp4.config import Config, read_config
from tests.faults.contention import Warnings
from tests.faults.crashes import open_store
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import TRACE, Shim, end_child, start_child

NOBODY = 65534
_NEW_MOUNTS, _READ_ONLY, _REMOUNT, _PRIVATE = 0x20000, 1, 32, 1 << 18 | 16384


def full_disk(folder: Path) -> None:
    """A tmpfs of 300 KB with 290 KB in use."""
    mount(folder, b"size=300k")
    (folder / "ballast").write_bytes(bytes(290_000))


def no_inodes(folder: Path) -> None:
    mount(folder, b"size=10m,nr_inodes=6")


def read_only_mount(folder: Path) -> None:
    mount(folder, b"size=1m")
    _call("mount", b"none", bytes(folder), None, _REMOUNT | _READ_ONLY, None)


def small_files(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))


def no_descriptors(folder: Path) -> None:
    """Not one is left."""
    next_free = os.dup(0)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, next_free))


def another_user(folder: Path) -> None:
    """The process may not write the folder: it becomes nobody if it was root, which may write everything."""
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.setuid(NOBODY)


def a_file_in_the_way(folder: Path) -> None:
    folder.rmdir()
    folder.touch()


TROUBLES = {
    work.__name__: work
    for work in (
        full_disk,
        no_inodes,
        read_only_mount,
        small_files,
        no_descriptors,
        another_user,
        a_file_in_the_way,
    )
}


def survive(trouble: str, store: str, strict: bool) -> dict[str, object]:
    """Five kernels wanted under a trouble: how many came out right, what was raised, and what was said."""
    return in_world(lambda folder: _survive(TROUBLES[trouble], folder, store, strict))


def _survive(trouble: Callable[[Path], None], folder: Path, store: str, strict: bool) -> dict[str, object]:
    trouble(folder)
    warnings = Warnings()
    if store == "naive":
        opened = open_store(store, folder / "cache")
    else:
        opened = Cache(Config(cache_dir=folder / "cache", strict=strict, lock_timeout=2.0))
    right, raised = 0, ""
    try:
        for seed in range(5):
            loaded = opened.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed, size=20_000))
            right += loaded.cubin == make_built(seed, size=20_000).cubin
    except Exception as error:
        raised = type(error).__name__
    errors = dict(opened.info().store_errors) if isinstance(opened, Cache) else {}
    return {"right": right, "raised": raised, "warnings": warnings.texts, "causes": len(errors)}


def no_home(home: str | None) -> dict[str, object]:
    """The default folder with HOME unset, or pointing somewhere that cannot be made."""
    cache = Cache(read_config({} if home is None else {"HOME": home}))
    warnings = Warnings()
    for seed in range(3):
        loaded = cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed))
        assert loaded.cubin == make_built(seed).cubin
        assert loaded.path is None
    return {"warnings": warnings.texts}


def foreign_layer(pinned: str | None, plant: bool) -> dict[str, object]:
    """A cache that root made (or nobody, when ``plant``), used as a layer and as the root by the other of the two."""

    def work(folder: Path) -> dict[str, object]:
        folder.chmod(0o777)
        made = folder / "made"

        def make() -> None:
            if plant:
                os.setuid(NOBODY)
            cache = Cache(Config(cache_dir=made), world_readable=True)
            cache.get_or_build(make_recipe(), TOOLCHAIN, make_built)

        assert end_child(start_child(make)) == 0
        if pinned:
            _pin(made)
        if not plant:
            os.setuid(NOBODY)
        pin = next((made / "bundles").iterdir()).stem if pinned == "right" else "0" * 64 if pinned else None
        before = _times(made)
        own = Config(cache_dir=folder / "own", cache_ro=(made,), bundle_sha256=pin)
        as_layer = Cache(own).get_or_build(make_recipe(), TOOLCHAIN, make_built)
        as_root = Cache(Config(cache_dir=made)).get_or_build(make_recipe(), TOOLCHAIN, make_built)
        return {
            "layer": as_layer.missed.reason.value if as_layer.missed else "hit",
            "root": as_root.missed.reason.value if as_root.missed else "hit",
            "untouched": _times(made) == before,
        }

    return in_world(work)


def _pin(made: Path) -> None:
    folder = made / entry_path(make_recipe().digest, TOOLCHAIN)
    cubin, source, manifest = ((folder / name).read_bytes() for name in FILES)
    index = Index.of([Listed.of(EntryFiles(cubin=cubin, source=source, manifest=manifest))])
    (made / "bundles").mkdir(mode=0o755)
    (made / "bundles" / f"{index.digest}.json").write_bytes(index.encode())


def _times(root: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_ctime_ns) for path in root.rglob("*"))


def in_world(work: Callable[[Path], dict[str, object]]) -> dict[str, object]:
    """``work`` in a child, because it may give up its rights, in a folder that others can reach."""
    folder = Path(tempfile.mkdtemp(prefix="jitfp4-world-"))
    folder.chmod(0o755)
    (folder / "place").mkdir()
    result, report = os.pipe()
    try:
        child = start_child(lambda: os.write(report, repr(work(folder / "place")).encode()))
        status = end_child(child)
        os.close(report)
        text = os.read(result, 1 << 20).decode()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if status != 0 or not text:
        return {"skip": f"this machine does not allow it (status {status})"} if status == 75 else {"status": status}
    value = ast.literal_eval(text)
    assert isinstance(value, dict)
    return value


def mount(folder: Path, options: bytes) -> None:
    """A tmpfs that only this process sees. Ends the process with status 75 where that is not allowed."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", b"none", b"/", None, _PRIVATE, None)
    _call("mount", b"tmpfs", bytes(folder), b"tmpfs", 0, options + b",mode=755")


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        os._exit(75)


def calls_below_a_layer(layer: str, own: str) -> list[list[str]]:
    """Every call that the shim sees during a hit in a read-only layer, and during a miss that is built."""
    cache, shim = Cache(Config(cache_dir=Path(own), cache_ro=(Path(layer),))), Shim()
    shim.arm("*", 0, TRACE)
    assert cache.get_or_build(make_recipe(), TOOLCHAIN, make_built).missed is None
    assert cache.get_or_build(make_recipe(1), TOOLCHAIN, lambda: make_built(1)).missed is not None
    return shim.trace()
