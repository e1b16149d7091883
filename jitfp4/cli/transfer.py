"""``jitfp4 cache export``, ``wheel``, ``import``, ``push`` and ``pull``: moving kernels to other machines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jitfp4.cache import Cache, Catalog, EntryFiles
from jitfp4.cli.cache import app
from jitfp4.cli.options import ArchNames, AsJson, CacheDir, configure, examples, read_archs, read_digest, read_plan
from jitfp4.cli.output import plural, put, put_json, say
from jitfp4.config import Config
from jitfp4.errors import ArgumentError, BundleError, CacheError

if TYPE_CHECKING:
    from jitfp4.bundle import Imported
    from jitfp4.remote import Remote

Plan = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Only the kernels of this plan file.")]
Digest = Annotated[
    str | None,
    typer.Option(metavar="SHA256", help="The digest that the bundle must have; by default JITFP4_BUNDLE_SHA256."),
]
Shared = Annotated[bool, typer.Option("--world-readable", help="Let every user read the files, as an image needs.")]


@app.command(
    "export",
    epilog=examples("jitfp4 cache export plan.json --out kernels.tar.zst", "jitfp4 cache export --out all.tar.zst"),
)
def export(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The bundle to write.")],
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="A plan file; without one, every kernel.")] = None,
    arch: ArchNames = None,
    tactics: Annotated[
        Path | None, typer.Option("--tactics", metavar="FILE", help="A tactics file to put into the bundle.")
    ] = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Write kernels from the cache as one reproducible file, and print the digest of its index, which pins it.

    Exit status: 0, 1 when a kernel of the plan is not in the cache, 2 an error, such as a cache without kernels.
    """
    from jitfp4.bundle import export_bundle
    from jitfp4.files import check_out

    check_out(out)
    entries = _entries(configure(cache_dir), plan, arch)
    digest = export_bundle(entries, out, _read_tactics(tactics) if tactics is not None else None)
    own = hashlib.sha256(out.read_bytes()).hexdigest()
    _put_digest("cache export", digest, len(entries), str(out), as_json, sha256=own)
    say(f"the digest of its index, {digest[:12]}..., is what --digest and JITFP4_BUNDLE_SHA256 take")
    say(f"sha256sum of the file itself: {own}")


@app.command("wheel", epilog=examples("jitfp4 cache wheel plan.json --out dist", "pip install dist/*.whl"))
def wheel(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write the wheel into.")],
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="A plan file; without one, every kernel.")] = None,
    arch: ArchNames = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Write kernels from the cache as a wheel that pip installs, and print the digest of its bundle.

    Once installed, its kernels are a read-only layer of the cache, pinned by the digest in the wheel's metadata. Exit
    status: 0, 1 when a kernel of the plan is not in the cache, 2 an error, such as a cache without kernels.
    """
    from jitfp4.version import version
    from jitfp4.wheel import export_wheel

    entries = _entries(configure(cache_dir), plan, arch)
    path, digest = export_wheel(entries, out, version())
    _put_digest("cache wheel", digest, len(entries), str(path), as_json)


@app.command("import", epilog=examples("jitfp4 cache import kernels.tar.zst --digest 3f2a91c0..."))
def import_(
    bundle: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle that export wrote.")],
    digest: Digest = None,
    tactics: Annotated[
        Path | None, typer.Option("--tactics", metavar="FILE", help="Where to write the tactics file of the bundle.")
    ] = None,
    shared: Shared = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Put the kernels of a bundle into the cache, after the whole bundle was verified.

    Checksums in the bundle only find damage; who made it, you know from a digest from a place that you trust. Exit
    status: 0, 2 when the bundle is damaged or has another digest, or JITFP4_CACHE forbids writing.
    """
    from jitfp4.bundle import import_bundle

    config = configure(cache_dir)
    wanted = read_digest(digest, config)
    done = import_bundle(bundle, Cache(config, world_readable=shared), wanted)
    if tactics is not None:
        _write_tactics(bundle, done, tactics)
    _put_imported("cache import", done, wanted is not None, as_json)


@app.command(epilog=examples("jitfp4 cache push s3://bucket/kernels --plan plan.json"))
def push(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder in any storage that fsspec knows.")],
    plan: Plan = None,
    arch: ArchNames = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Send kernels from the cache to a remote store, and print the digest for pull."""
    from jitfp4.remote import Remote

    entries = _entries(configure(cache_dir), plan, arch)
    _put_digest("cache push", Remote(url).push(entries), len(entries), url, as_json)


@app.command(epilog=examples("jitfp4 cache pull s3://bucket/kernels --digest 3f2a91c0..."))
def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder that push has filled.")],
    digest: Digest = None,
    shared: Shared = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the kernels of a bundle from a remote store, and verify each before it is stored.

    Without a digest the store must hold exactly one bundle, and its origin is unknown. Exit status: 0, 2 an error.
    """
    from jitfp4.remote import Remote

    config = configure(cache_dir)
    config.check_writable()
    remote, wanted = Remote(url), read_digest(digest, config)
    chosen = wanted or _only_digest(remote)
    done = remote.pull(chosen, Cache(config, world_readable=shared))
    _put_imported("cache pull", done, wanted is not None, as_json)


def _read_tactics(path: Path) -> bytes:
    """The contents of a tactics file, after its checks."""
    from jitfp4.tactics import read

    return read(path).encode()


def _write_tactics(bundle: Path, done: Imported, path: Path) -> None:
    from jitfp4.tactics import TacticsFile, write

    if done.tactics is None:
        raise BundleError(f"{bundle}: has no tactics file; export it with --tactics")
    write(TacticsFile.decode(done.tactics), path)


def _only_digest(remote: Remote) -> str:
    found = remote.digests()
    if not found:
        raise CacheError(f"{remote.url}: there is no bundle here; push fills a store")
    if len(found) > 1:
        raise ArgumentError("--digest", "none", f"one of {', '.join(found)}")
    return found[0]


def _entries(config: Config, plan: Path | None, arch: str | None) -> list[EntryFiles]:
    """The entries of a plan, from any layer; without a plan, all entries of the user's root."""
    if config.cache_dir is None:
        raise ArgumentError("--cache-dir", "none", "a folder, because neither HOME nor JITFP4_CACHE_DIR is set")
    archs = {a.name for a in read_archs(arch or "all")}
    if plan is not None:
        return list(_planned(plan, archs))
    catalog = Catalog(config.cache_dir)
    kept = [entry for entry in catalog.entries() if entry.manifest is None or entry.manifest.arch in archs]
    for item in catalog.findings:
        raise CacheError(f"{item.path}: {item.reason}; what is behind it would be missing")
    if not kept:
        names = ", ".join(sorted(archs))
        raise CacheError(f"{config.cache_dir}: nothing to export: no kernels for {names}; jitfp4 warmup builds them")
    return [catalog.read(entry.use)[2] for entry in kept]


def _planned(plan: Path, archs: set[str]) -> Iterable[EntryFiles]:
    from jitfp4 import engine, warmup

    tasks = [task for task in read_plan(plan) if task.arch.name in archs]
    if not tasks:
        raise ArgumentError("plan", f"{plan}, without a kernel for {', '.join(sorted(archs))}", "one with kernels")
    if missing := warmup.missing(tasks):
        for task in missing:
            say(f"not in the cache: {task}")
        say(f"{plural(len(missing), 'kernel')} missing; build them: jitfp4 warmup {plan}")
        raise typer.Exit(1)
    for task in tasks:
        loaded = engine.build(task.kernel, task.spec, task.arch)
        assert loaded.toolchain is not None  # noqa: S101 - it was found in the cache
        yield engine.cache().read(loaded.digest, loaded.toolchain)


def _put_digest(command: str, digest: str, count: int, where: str, as_json: bool, **more: str) -> None:
    if as_json:
        put_json(command, digest=digest, kernels=count, to=where, **more)
    else:
        put(digest)
    say(f"{where}: {plural(count, 'kernel')}")


def _put_imported(command: str, done: Imported, pinned: bool, as_json: bool) -> None:
    if not pinned:
        say("warning: no digest was given, so nothing says who made this bundle; its checksums only find damage")
    if as_json:
        put_json(command, digest=done.digest, added=done.added, present=done.present)
    else:
        put(done.digest)
    say(f"{plural(done.added, 'kernel')} added, {done.present} there already")
