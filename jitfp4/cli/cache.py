"""``jitfp4 cache``: where the kernel cache is, what is in it, whether it is damaged, and how to make it smaller."""

from __future__ import annotations

import enum
import functools
import operator
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from jitfp4.arch import ARCHS, Arch
from jitfp4.cache import Catalog, Checked, Entry, Limits, Manifest, Use
from jitfp4.cli.options import (
    ArchNames,
    AsJson,
    CacheDir,
    KernelNames,
    configure,
    examples,
    read_archs,
    read_bytes,
    read_kernels,
    read_seconds,
)
from jitfp4.cli.output import human_bytes, plural, put, put_facts, put_json, put_table, say, utc, visible
from jitfp4.config import Config
from jitfp4.errors import CacheError, OfflineError, ToolchainError
from jitfp4.keys import Recipe

app = typer.Typer(name="cache", help="List the kernel cache, verify it, make it smaller.", no_args_is_help=True)

UNKNOWN_KEY = 16
"""Exit status bit of ``verify``, beside those of Verdict: a KEY named no entry."""

_SHORT_DIGEST = 12

DryRun = Annotated[bool, typer.Option("--dry-run", help="Remove nothing; list what would be removed.")]


class Order(enum.StrEnum):
    """The orders of ``ls --sort``."""

    USED = "used"
    SIZE = "size"
    KERNEL = "kernel"
    FAMILY = "family"  # the same


# ---- look ------------------------------------------------------------------------------------------------------------


@app.command("dir", epilog=examples("cd $(jitfp4 cache dir)"))
def show_dir(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Print the path of the cache. The folder need not exist."""
    config = configure(cache_dir)
    root = _root(config)
    if as_json:
        layers = [str(path) for path in config.cache_ro]
        put_json("cache dir", path=str(root), exists=root.is_dir(), mode=config.cache_mode, read_only=layers)
    else:
        put(str(root))


@app.command("size", epilog=examples("jitfp4 cache size --json"))
def show_size(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Print how many kernels the cache holds, and its size on disk.

    Exit status: 0, or added up 2 when a folder of the cache is not trusted, 4 when one cannot be read.
    """
    catalog = Catalog(_root(configure(cache_dir)))
    size = catalog.size()
    facts = {"entries": size.entries, "bytes": size.disk_bytes, "inodes": size.inodes, "quarantined": size.quarantined}
    if as_json:
        put_json("cache size", **facts, findings=[_verdict(item) for item in catalog.findings])
    else:
        put_facts((name, human_bytes(size.disk_bytes) if name == "bytes" else fact) for name, fact in facts.items())
    _exit_with_findings(catalog)


@app.command("ls", epilog=examples("jitfp4 cache ls --arch sm_90a --sort size --limit 10", "jitfp4 cache ls --long"))
def list_entries(
    arch: ArchNames = None,
    kernel: KernelNames = None,
    sort: Annotated[Order, typer.Option(help="Latest use first, largest first, or by name.")] = Order.USED,
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="List at most N kernels.")] = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="List parameters and compiler too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="List digests only.")] = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """List the kernels in the cache.

    Damaged entries are listed too, with the damage in place of the kernel. Exit status: 0, or added up 2 when a folder
    of the cache is not trusted, 4 when one cannot be read; then kernels may be missing from the list.
    """
    archs = {a.name for a in read_archs(arch)} if arch is not None else None
    names = read_kernels(kernel)
    catalog = Catalog(_root(configure(cache_dir)))
    found = (entry for entry in catalog.entries() if _is_wanted(entry, archs, names))
    entries = sorted(found, key=lambda entry: _sort_key(entry, sort))[:limit]
    if as_json:
        findings = [_verdict(item) for item in catalog.findings]
        put_json("cache ls", entries=[_summary(entry) for entry in entries], findings=findings)
    elif quiet:
        for entry in entries:
            put(entry.use.digest)
    else:
        columns = ["recipe", "kernel", "arch", "size", "last used", *(("toolchain", "spec") if long else ())]
        put_table(columns, [_row(entry)[: len(columns)] for entry in entries])
        say(plural(len(entries), "kernel"))
    _exit_with_findings(catalog)


@app.command(epilog=examples("jitfp4 cache show 3f2a91c0", "jitfp4 cache show 3f2a91c0 --source > kernel.cu"))
def show(
    key: Annotated[str, typer.Argument(help="The first digits of a recipe's digest, as ls prints them.")],
    source: Annotated[bool, typer.Option("--source", help="Print the generated source.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Print the machine code; needs nvdisasm.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print what the digest is computed from.")] = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Print everything about one kernel: parameters, compiler, checksums, provenance.

    Exit status: 0, 1 when no kernel or more than one has this KEY, 2 when the entry is damaged.
    """
    catalog = Catalog(_root(configure(cache_dir)))
    entries = catalog.find(key)
    digests = sorted({entry.use.digest for entry in entries})
    if len(digests) != 1:
        say("\n  ".join([f"{key}: {'one of these?' if digests else 'no such kernel'}", *digests]))
        raise typer.Exit(1)
    checked = [(entry, *catalog.read(entry.use)) for entry in entries]  # one for each toolchain
    recipe = checked[0][2]
    if as_json:
        details = [_details(entry, manifest) for entry, manifest, *_ in checked]
        put_json("cache show", source=recipe.source, entries=details)
    elif source:
        put(recipe.source)
    elif explain:
        put(recipe.explain())
    elif sass:
        put(_disassemble(entries[-1].path / "kernel.cubin"))
    else:
        for entry, manifest, *_ in checked:
            put_facts(_flat(_details(entry, manifest)))


# ---- verify ----------------------------------------------------------------------------------------------------------


@app.command(epilog=examples("jitfp4 cache verify", "jitfp4 cache verify 3f2a91c0 --recompile"))
def verify(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Only kernels whose digest starts with KEY.")
    ] = None,
    recompile: Annotated[bool, typer.Option("--recompile", help="Also compile again and compare the bytes.")] = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of the cache: checksums, keys, owners, architectures. Changes nothing.

    Checksums find damage. They do not say whether a compiler made a kernel from its source: that takes --recompile, or
    a digest from a place that you trust. With JITFP4_BUNDLE_SHA256 every kernel that this bundle does not list is
    untrusted. Exit status, added up: 1 corrupt, 2 untrusted, 4 unreadable, 8 not reproducible, 16 unknown KEY.
    """
    config = configure(cache_dir)
    if recompile and config.offline:
        raise OfflineError("--recompile: JITFP4_OFFLINE forbids compiling")
    catalog = Catalog(_root(config), pin=config.bundle_sha256)
    compiled: list[bool] = []

    def compile_again(recipe: Recipe, manifest: Manifest) -> bytes | None:
        cubin = _recompile(recipe, manifest)
        compiled.append(cubin is not None)
        return cubin

    status, checked = 0, list[Checked]()
    for key in keys or [""]:
        found = list(catalog.verify(key, recompile=compile_again if recompile else None))
        checked += found
        if key and not found:
            say(f"{key}: no such kernel")
            status |= UNKNOWN_KEY
    for item in checked:
        status |= int(item.verdict)
    bad = [item for item in checked if item.verdict]
    if as_json:
        put_json("cache verify", status=status, recompiled=sum(compiled), entries=[_verdict(item) for item in checked])
    else:
        for item in bad:
            put(_line(item))
    say(f"{plural(sum(item.use is not None for item in checked), 'kernel')} verified, {len(bad)} bad")
    if not all(compiled):
        say(f"{compiled.count(False)} not compiled again: another compiler or other options made them")
    if status:
        raise typer.Exit(status)


# ---- remove ----------------------------------------------------------------------------------------------------------


@app.command(epilog=examples("jitfp4 cache prune --max-size 500M --max-age 30d", "jitfp4 cache prune --dry-run"))
def prune(
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size on disk to keep at most, such as 500M or 2GiB.")
    ] = None,
    max_entries: Annotated[int | None, typer.Option(min=0, metavar="N", help="Kernels to keep at most.")] = None,
    max_age: Annotated[
        str | None, typer.Option(metavar="TIME", help="Longest time since the last use, such as 12h or 30d.")
    ] = None,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used kernels until the limits hold.

    Without an option the limits are those of the environment, JITFP4_CACHE_MAX_BYTES and JITFP4_CACHE_MAX_ENTRIES. Exit
    status: 0, or added up 2 when a folder of the cache is not trusted, 4 when one cannot be read; such folders stay.
    """
    config = configure(cache_dir)
    limits = Limits(
        max_bytes=read_bytes("--max-size", max_size),
        max_entries=max_entries,
        max_age=read_seconds("--max-age", max_age),
    )
    if limits == Limits():
        limits = Limits(max_bytes=config.cache_max_bytes, max_entries=config.cache_max_entries)
    if not dry_run:
        config.check_writable()
    catalog = Catalog(_root(config), pin=config.bundle_sha256)
    _put_removed("prune", catalog.prune(limits, dry_run=dry_run), dry_run, as_json)
    _exit_with_findings(catalog)


@app.command(epilog=examples("jitfp4 cache clear --dry-run", "jitfp4 cache clear -y"))
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove every kernel, and the quarantine. Asks first.

    Running processes keep the kernels that they have loaded. Exit status: 0, 1 when the answer is no, 2 an error; or
    added up 2 when a folder of the cache is not trusted, 4 when one cannot be read; such folders stay.
    """
    config = configure(cache_dir)
    root = _root(config)
    if not dry_run:
        config.check_writable()
    catalog = Catalog(root)
    if not (yes or dry_run):
        count = len(catalog.clear(dry_run=True))
        typer.confirm(f"Remove {plural(count, 'kernel')} from {root}?", abort=True, err=True)
    _put_removed("clear", catalog.clear(dry_run=dry_run), dry_run, as_json)
    _exit_with_findings(catalog)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _root(config: Config) -> Path:
    if config.cache_dir is None:
        raise CacheError("there is no cache folder: neither HOME nor JITFP4_CACHE_DIR is set")
    return config.cache_dir


def _exit_with_findings(catalog: Catalog) -> None:
    """Print which folders could not be walked, and exit with the status of verify."""
    for item in catalog.findings:
        say(_line(item))
    if status := functools.reduce(operator.or_, (item.verdict for item in catalog.findings), 0):
        raise typer.Exit(int(status))


def _is_wanted(entry: Entry, archs: set[str] | None, names: Sequence[str]) -> bool:
    if entry.manifest is None:
        return archs is None and not names
    kernel = f"{entry.manifest.family}/"
    is_named = not names or any(kernel.startswith(f"{name}/") for name in names)
    return is_named and (archs is None or entry.manifest.arch in archs)


def _sort_key(entry: Entry, order: Order) -> tuple[float, str]:
    match order:
        case Order.USED:
            return -entry.use.last_used, ""
        case Order.SIZE:
            return -entry.use.disk_bytes, ""
    return 0, " ".join(map(str, _row(entry)[1:]))


def _row(entry: Entry) -> list[object]:
    manifest, use = entry.manifest, entry.use
    what = [manifest.family, manifest.arch] if manifest else [entry.problem, "?"]
    spec = _spec_text(manifest) if manifest else ""
    return [use.digest[:_SHORT_DIGEST], *what, human_bytes(use.disk_bytes), utc(use.last_used), use.toolchain, spec]


def _spec_text(manifest: Manifest) -> str:
    match manifest.provenance.get("spec"):
        case dict(spec):
            return ",".join(f"{name}={value}" for name, value in spec.items())
    return ""


def _use(use: Use) -> dict[str, object]:
    return {
        "digest": use.digest,
        "toolchain": use.toolchain,
        "disk_bytes": use.disk_bytes,
        "last_used": utc(use.last_used),
    }


def _summary(entry: Entry) -> dict[str, object]:
    fields = _use(entry.use) | {"path": str(entry.path)}
    if entry.manifest is None:
        return fields | {"problem": entry.problem}
    spec = entry.manifest.provenance.get("spec")
    return fields | {"family": entry.manifest.family, "arch": entry.manifest.arch, "spec": spec}


def _details(entry: Entry, manifest: Manifest) -> dict[str, object]:
    return _use(entry.use) | {
        "path": str(entry.path),
        "symbol": manifest.symbol,
        "recipe": manifest.recipe,
        "cubin": {"bytes": manifest.cubin_bytes, "sha256": manifest.cubin_sha256},
        "source": {"bytes": manifest.source_bytes},
        "provenance": manifest.provenance,
    }


def _verdict(item: Checked) -> dict[str, object]:
    name = (item.verdict.name or "").lower().replace("_", " ")
    fields = _use(item.use) if item.use else {}
    return fields | {"path": str(item.path), "verdict": name, "reason": item.reason}


def _line(item: Checked) -> str:
    fields = _verdict(item)
    return visible(f"{fields['verdict']} {item.path}: {item.reason}")


def _flat(fields: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        match value:
            case dict():
                yield from _flat(value, f"{prefix}{name}.")
            case list():
                yield f"{prefix}{name}", " ".join(map(str, value))
            case _:
                yield f"{prefix}{name}", value


def _recompile(recipe: Recipe, manifest: Manifest) -> bytes | None:
    """The cubin of ``recipe``; None when the compiler or its options are no longer those that made the entry."""
    from jitfp4 import nvrtc

    toolchain = nvrtc.toolchain()
    if toolchain is None or toolchain.name != manifest.toolchain or recipe.arch not in ARCHS:
        return None
    arch = Arch.of(recipe.arch)
    if nvrtc.compile_options(arch) != recipe.options:
        return None
    return nvrtc.compile_cubin(recipe.source, arch, symbol=manifest.symbol)


def _disassemble(cubin: Path) -> str:
    from cuda.pathfinder import find_nvidia_binary_utility

    program = find_nvidia_binary_utility("nvdisasm")
    if program is None:
        raise ToolchainError("nvdisasm is not installed; the package nvidia-cuda-nvdisasm has it")
    done = subprocess.run([program, cubin], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"nvdisasm: {done.stderr.strip()}")
    return done.stdout


def _put_removed(command: str, uses: Sequence[Use], dry_run: bool, as_json: bool) -> None:
    disk_bytes = sum(use.disk_bytes for use in uses)
    if as_json:
        put_json(f"cache {command}", dry_run=dry_run, bytes=disk_bytes, removed=[_use(use) for use in uses])
    else:
        for use in uses:
            put(f"{use.digest} {use.toolchain}")
    say(f"{'would remove' if dry_run else 'removed'} {plural(len(uses), 'kernel')}, {human_bytes(disk_bytes)}")
