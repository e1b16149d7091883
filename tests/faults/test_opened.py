"""Every file that jitfp4 opens, found by tracing it, in every wrong form: nothing hangs, nothing else is written.

A launch goes on with the right kernel; a command may end, with a typed error.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import TRACE, Shim, end_child, sandboxed, start_child

PRECIOUS = b"precious"
_SECONDS = 20  # against hanging only


def test_no_opened_file_hangs_a_call_or_leads_out(tmp_path: Path, shim: Path, whole: bool) -> None:
    """A fifth of the cases; all with ``--all``."""
    seen = sandboxed("tests.faults.test_opened:spoil_all", shim=shim, base=str(tmp_path), share=1 if whole else 5)
    print(seen["counts"])  # noqa: T201
    assert seen["problems"] == []
    names = {Path(path).name for path in seen["opened"]}
    assert names >= {"entry.json", "kernel.cubin", "tactics.json", "used", "bundle.sha256", "bundle"}, names
    places = {path.split("/")[0] for path in seen["opened"]}
    assert places >= {"cache", "layer", "site", "store"}, places


# ---- in the sandbox --------------------------------------------------------------------------------------------------


def spoil_all(base: str, share: int) -> dict[str, Any]:
    """Every fault of every file that is opened, or one in ``share``, chosen by digest."""
    from jitfp4 import engine, remote, tactics, warmup  # noqa: F401 - what the children use is imported before the fork

    good, case, outside = (Path(base) / name for name in ("good", "case", "outside"))
    digest = make_world(good)
    opened = [path for path in traced(good, digest) if (good / path).exists()]
    counts, problems = Counter[str](), list[str]()
    for path in opened:
        for name, spoil in FAULTS.items():
            if zlib.crc32(f"{path} {name}".encode()) % share:
                continue
            shutil.rmtree(case, ignore_errors=True)
            shutil.copytree(good, case, symlinks=True)
            outside.write_bytes(PRECIOUS)
            spoil(case / path, outside)
            status = in_time(lambda: use(case, digest))
            counts[name] += 1
            if status:
                problems.append(f"{path} as {name}: status {status}")
            if path != "used" and outside.read_bytes() != PRECIOUS:  # JITFP4_RECORD may name a link
                problems.append(f"{path} as {name}: wrote outside")
    return {"opened": opened, "counts": dict(counts), "problems": problems}


def make_world(world: Path) -> str:
    """A cache, a read-only layer, an installed package, a store, a bundle, a tactics file and a record."""
    from jitfp4.bundle import export_bundle
    from jitfp4.cache import Cache
    from jitfp4.config import Config
    from jitfp4.nvrtc import toolchain
    from jitfp4.remote import Remote
    from jitfp4.tactics import TacticsFile, write
    from jitfp4.wheel import export_wheel

    def cached(folder: Path, seed: int) -> Any:
        cache = Cache(Config(cache_dir=folder))
        cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda: make_built(seed))
        return cache.read(make_recipe(seed).digest, TOOLCHAIN)

    cached(world / "cache", 0)
    cached(world / "layer", 1)
    wheel, _ = export_wheel([cached(world / "more", 2)], world / "dist", "1.0")
    shutil.unpack_archive(wheel, world / "site", "zip")
    entry = cached(world / "more", 3)
    export_bundle([entry], world / "bundle")
    found = toolchain()
    write(TacticsFile("a GPU", "sm_90a", found.name if found else "none", {}), world / "tactics.json")
    (world / "used").write_text("")
    return Remote(f"file://{world}/store").push([entry])


def use(world: Path, digest: str) -> None:
    """What a process opens: kernels of all layers, a build, the files of variables; then commands, which may refuse."""
    from jitfp4 import engine, tactics
    from jitfp4.arch import Arch
    from jitfp4.bundle import import_bundle
    from jitfp4.cache import Cache
    from jitfp4.config import read_config
    from jitfp4.errors import Jitfp4Error
    from jitfp4.kernel import kernels
    from jitfp4.remote import Remote

    environment = {"CACHE_DIR": "cache", "CACHE_RO": "layer", "TACTICS": "tactics.json", "RECORD": "used"}
    os.environ |= {f"JITFP4_{name}": str(world / place) for name, place in environment.items()}
    os.environ |= {"JITFP4_LOCK_TIMEOUT": "5"}
    sys.path.insert(0, str(world / "site"))
    engine.reset()
    cache = engine.cache()
    for seed in (0, 1, 2, 9):
        loaded = cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed))
        assert loaded.cubin == make_built(seed).cubin
    tactics.active(lambda: "a GPU")
    arch, (kernel,) = Arch.of("sm_90a"), kernels("quantize/grouped")
    engine._record(kernel, kernel.specs(arch)[0], arch)
    other, store = Cache(read_config(os.environ | {"JITFP4_CACHE_DIR": str(world / "new")})), f"file://{world}/store"
    files = Cache(read_config({"JITFP4_CACHE_DIR": str(world / "more")})).read(make_recipe(3).digest, TOOLCHAIN)
    for command in (
        lambda: import_bundle(world / "bundle", other),
        lambda: Remote(store).digests(),
        lambda: Remote(store).pull(digest, other),
        lambda: Remote(store).push([files]),
    ):
        try:
            command()
        except (Jitfp4Error, OSError):
            continue


def traced(world: Path, digest: str) -> list[str]:
    """The files and folders below ``world`` that a use opens, relative to it, each once."""
    copy = world.with_name("traced")
    shutil.copytree(world, copy)
    result, report = os.pipe()

    def trace() -> None:
        shim = Shim()
        shim.arm("*", 0, TRACE)
        use(copy, digest)
        calls = [call for call in shim.trace() if call[0] in ("open", "open_read")]
        paths = dict.fromkeys(str(Path(path).relative_to(copy)) for _, path in calls if Path(path).is_relative_to(copy))
        os.write(report, "\n".join(paths).encode())

    assert in_time(trace) == 0
    os.close(report)
    with os.fdopen(result) as lines:
        return [path for path in lines.read().splitlines() if not path.startswith(("more", "new", "tmp"))]


def in_time(work: Callable[[], None]) -> int:
    """Exit status of ``work`` in a child, -14 when it hangs."""

    def limited() -> None:
        signal.alarm(_SECONDS)
        work()

    return end_child(start_child(limited))


# ---- faults ----------------------------------------------------------------------------------------------------------


def _instead(make: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    """Put something else in the place of a file or folder; if it was removed with its folder, that is the fault."""

    def spoil(path: Path, outside: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        make(path, outside)

    return spoil


def _socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)


FAULTS: dict[str, Callable[[Path, Path], None]] = {
    "nothing": _instead(lambda *_: None),
    "an empty file": _instead(lambda path, _: path.touch(mode=0o600)),
    "bytes that are no text": _instead(lambda path, _: path.write_bytes(b"\xff\xfe\0" * 40)),
    "a folder": _instead(lambda path, _: path.mkdir(mode=0o700)),
    "a FIFO": _instead(lambda path, _: os.mkfifo(path, 0o600)),
    "a socket": _instead(_socket),
    "a link to nothing": _instead(lambda path, _: path.symlink_to("nowhere")),
    "a link to itself": _instead(lambda path, _: path.symlink_to(path.name)),
    "a link outside": _instead(lambda path, outside: path.symlink_to(outside)),
    "a hard link outside": _instead(lambda path, outside: path.hardlink_to(outside)),
}
if os.geteuid() != 0:  # who may read everything
    FAULTS["what nobody may open"] = lambda path, _: path.chmod(0)
