"""The user's root as its owner sees it: list, verify, prune, clear. What `jitfp4 cache` commands are made of."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jitfp4.cache.entry import EntryFiles, Manifest
from jitfp4.cache.evict import Limits, Use, disk_bytes, enforce, survey
from jitfp4.cache.layer import Layer, entry_path
from jitfp4.cache.publish import BAD, evict, open_root, remove_tree, sweep
from jitfp4.errors import CacheCorruptError, CacheUntrustedError
from jitfp4.keys import Recipe


class Verdict(enum.IntFlag):
    """What verify() found out about an entry; the exit status of ``jitfp4 cache verify`` is their union."""

    OK = 0
    CORRUPT = 1
    UNTRUSTED = 2
    UNREADABLE = 4
    NOT_REPRODUCIBLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry. ``manifest`` is None when it cannot be read or believed; ``problem`` says why then."""

    use: Use
    path: Path
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The verdict on one entry, and the reason in words."""

    use: Use
    path: Path
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a root takes on disk. ``disk_bytes`` counts blocks and ``inodes`` counts folders too."""

    entries: int
    disk_bytes: int
    inodes: int
    quarantined: int


class Catalog:
    """A cache root, usually the user's. A root that does not exist is an empty one."""

    def __init__(self, root: Path) -> None:
        self.layer = Layer(path=root, own=True)

    def entries(self) -> Iterator[Entry]:
        """Every entry, least recently used first. Manifests are checked, cubins are not read."""
        for use in survey(self.layer):
            path = self._path(use)
            try:
                manifest = Manifest.decode(self.layer.read_manifest(use.digest, use.toolchain))
                manifest.check_place(use.digest, use.toolchain)
            except (OSError, CacheCorruptError, CacheUntrustedError) as error:
                yield Entry(use=use, path=path, manifest=None, problem=str(error))
            else:
                yield Entry(use=use, path=path, manifest=manifest)

    def find(self, prefix: str) -> list[Entry]:
        """The entries whose recipe digest starts with ``prefix``."""
        return [entry for entry in self.entries() if entry.use.digest.startswith(prefix)]

    def read(self, use: Use) -> tuple[Manifest, Recipe, EntryFiles]:
        """Everything about one entry, all of it checked. Raises CacheCorruptError, CacheUntrustedError or OSError."""
        files = self.layer.read_files(use.digest, use.toolchain)
        manifest = files.check(use.digest, use.toolchain)
        return manifest, manifest.check_source(files.source), files

    def size(self) -> Size:
        """Disk use of the whole root."""
        total, inodes = disk_bytes(self.layer.path)
        quarantined = len(list((self.layer.path / BAD).iterdir())) if (self.layer.path / BAD).is_dir() else 0
        entries = sum(1 for _ in self.layer.places())
        return Size(entries=entries, disk_bytes=total, inodes=inodes, quarantined=quarantined)

    def verify(
        self, prefix: str = "", *, recompile: Callable[[Recipe, Manifest], bytes | None] | None = None
    ) -> Iterator[Checked]:
        """Check entries completely, the recipe recomputed from kernel.cu included. Changes nothing.

        Args:
            prefix: only recipes whose digest starts with it.
            recompile: builds a recipe anew; its bytes must equal the stored cubin. None from it means that this
                machine cannot (another toolchain), which is no fault.
        """
        for use in survey(self.layer):
            if use.digest.startswith(prefix):
                verdict, reason = self._verdict(use, recompile)
                yield Checked(use=use, path=self._path(use), verdict=verdict, reason=reason)

    def prune(self, limits: Limits, *, dry_run: bool = False) -> list[Use]:
        """Remove entries until ``limits`` hold, and what killed processes left. Returns what went, or would go."""
        if not self.layer.path.is_dir():
            return []
        with open_root(self.layer.path) as root:
            return enforce(root, self.layer, limits, dry_run=dry_run)

    def clear(self, *, dry_run: bool = False) -> list[Use]:
        """Remove every entry, the quarantine, and abandoned staging folders. Locks and running builds stay."""
        if not self.layer.path.is_dir():
            return []
        uses = survey(self.layer)
        if dry_run:
            return uses
        with open_root(self.layer.path) as root:
            remove_tree(root, BAD)
            sweep(root)
            return [use for use in uses if evict(root, entry_path(use.digest, use.toolchain))]

    def _verdict(self, use: Use, recompile: Callable[[Recipe, Manifest], bytes | None] | None) -> tuple[Verdict, str]:
        try:
            manifest, recipe, files = self.read(use)
        except CacheCorruptError as error:
            return Verdict.CORRUPT, str(error)
        except CacheUntrustedError as error:
            return Verdict.UNTRUSTED, str(error)
        except OSError as error:
            return Verdict.UNREADABLE, str(error)
        fresh = recompile(recipe, manifest) if recompile else None
        if fresh is not None and fresh != files.cubin:
            return Verdict.NOT_REPRODUCIBLE, "a new compilation gives other bytes"
        return Verdict.OK, ""

    def _path(self, use: Use) -> Path:
        return self.layer.path / entry_path(use.digest, use.toolchain)
