"""Looking after the user's root: list, verify, prune, clear. The `jitfp4 cache` commands call this."""

from __future__ import annotations

import enum
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from jitfp4.cache.entry import EntryFiles, Manifest
from jitfp4.cache.evict import Limits, enforce
from jitfp4.cache.layer import INDEXES, Layer, entry_path
from jitfp4.cache.publish import BAD, discard, evict, sweep
from jitfp4.cache.survey import Obstacle, Use, survey
from jitfp4.cache.tree import disk_bytes, names, open_below, open_folder, open_trusted
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
    """The verdict on one entry, and the reason. Where ``use`` is None the verdict is on a folder that holds entries."""

    use: Use | None
    path: Path
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The disk use of a root. ``disk_bytes`` counts blocks, and ``inodes`` counts folders too."""

    entries: int
    disk_bytes: int
    inodes: int
    quarantined: int


class Catalog:
    """A cache root, usually the user's. A root that does not exist is an empty one.

    ``own`` and ``pin`` are those of Layer, so that verify() trusts what a load would trust. ``findings`` are the
    folders that the last walk over the root could not read: entries in them were left out.
    """

    def __init__(self, root: Path, *, own: bool = True, pin: str | None = None) -> None:
        self.layer = Layer(path=root, own=own, pin=None if own else pin)
        self.findings: list[Checked] = []
        self._pinned = Layer(path=root, own=own, pin=pin)

    def entries(self) -> Iterator[Entry]:
        """Every entry, least recently used first. Manifests are checked, cubins are not read."""
        for use in self._walk():
            path = self._path(use)
            try:
                manifest = Manifest.decode(self.layer.read_manifest(use.digest, use.toolchain))
                manifest.check_place(use.digest, use.toolchain)
            except FileNotFoundError:
                continue  # evicted during the walk
            except (OSError, CacheCorruptError, CacheUntrustedError) as error:
                yield Entry(use=use, path=path, manifest=None, problem=str(error))
            else:
                yield Entry(use=use, path=path, manifest=manifest)

    def find(self, prefix: str) -> list[Entry]:
        """The entries whose recipe digest starts with ``prefix``."""
        return [entry for entry in self.entries() if entry.use.digest.startswith(prefix)]

    def read(self, use: Use) -> tuple[Manifest, Recipe, EntryFiles]:
        """One entry, checked completely. Raises CacheCorruptError, CacheUntrustedError or OSError."""
        files = self.layer.read_files(use.digest, use.toolchain)
        manifest = files.check(use.digest, use.toolchain)
        return manifest, manifest.check_source(files.source), files

    def size(self) -> Size:
        """Disk use of the whole root."""
        entries = len(self._walk())
        total, inodes = disk_bytes(self.layer.path)
        return Size(entries=entries, disk_bytes=total, inodes=inodes, quarantined=self._quarantined())

    def verify(
        self, prefix: str = "", *, recompile: Callable[[Recipe, Manifest], bytes | None] | None = None
    ) -> Iterator[Checked]:
        """Check entries completely, and recompute each recipe from kernel.cu. Changes nothing.

        Args:
            prefix: only recipes whose digest starts with it.
            recompile: compiles a recipe again; the result must equal the stored cubin. It returns None where this
                machine cannot compile it (another toolchain), which is no fault of the entry.
        """
        uses = self._walk(prefix)
        yield from self.findings
        for use in uses:
            if use.digest.startswith(prefix):
                with suppress(FileNotFoundError):  # evicted during the walk
                    verdict, reason = self._verdict(use, recompile)
                    yield Checked(use=use, path=self._path(use), verdict=verdict, reason=reason)

    def prune(self, limits: Limits, *, dry_run: bool = False) -> list[Use]:
        """Remove entries until ``limits`` hold, and files that killed processes left. Returns the removed entries.

        With ``dry_run`` it removes nothing and returns the entries that it would remove. It creates no file, so it
        works on a full disk. Raises CacheUntrustedError or OSError when the root cannot be trusted or opened.
        """
        if not os.path.lexists(self.layer.path):
            return []
        with open_trusted(self.layer.path) as root:
            gone = enforce(root, self._pinned, limits, dry_run=dry_run)
        self._walk()
        return gone

    def clear(self, *, dry_run: bool = False) -> list[Use]:
        """Remove every entry, the quarantine, indexes, and files that killed processes left. Returns like prune().

        Lock files and running builds stay. A link or a file in the place of a folder of entries is removed; the target
        of the link stays. Raises like prune().
        """
        if not os.path.lexists(self.layer.path):
            return []
        uses = self._walk()
        if dry_run:
            return uses
        with open_trusted(self.layer.path) as root:
            sweep(root)
            gone = [use for use in uses if evict(root, entry_path(use.digest, use.toolchain))]
            for name in (BAD, INDEXES):
                discard(root, root, name)
            for finding in self.findings:
                _discard_link(root, finding.path.relative_to(self.layer.path))
        self._walk()
        return gone

    def _walk(self, prefix: str = "") -> list[Use]:
        found = survey(self.layer)
        relevant = (item for item in found.obstacles if _may_hold(item, prefix))
        self.findings = [_finding(self.layer.path, item) for item in relevant]
        return found.uses

    def _quarantined(self) -> int:
        with (
            suppress(OSError, CacheUntrustedError),
            open_folder(self.layer.path) as root,
            open_folder(BAD, at=root) as bad,
        ):
            return len(names(bad))
        return 0

    def _verdict(self, use: Use, recompile: Callable[[Recipe, Manifest], bytes | None] | None) -> tuple[Verdict, str]:
        try:
            files = self._pinned.read_files(use.digest, use.toolchain)
            manifest = files.check(use.digest, use.toolchain)
            recipe = manifest.check_source(files.source)
        except CacheCorruptError as error:
            return Verdict.CORRUPT, str(error)
        except CacheUntrustedError as error:
            return Verdict.UNTRUSTED, str(error)
        except FileNotFoundError:
            raise
        except OSError as error:
            return Verdict.UNREADABLE, str(error)
        fresh = recompile(recipe, manifest) if recompile else None
        if fresh is not None and fresh != files.cubin:
            return Verdict.NOT_REPRODUCIBLE, "a new compilation gives other bytes"
        return Verdict.OK, ""

    def _path(self, use: Use) -> Path:
        return self.layer.path / entry_path(use.digest, use.toolchain)


def _finding(root: Path, item: Obstacle) -> Checked:
    verdict = Verdict.UNTRUSTED if isinstance(item.error, CacheUntrustedError) else Verdict.UNREADABLE
    reason = item.error.strerror if isinstance(item.error, OSError) else str(item.error)
    return Checked(use=None, path=root / item.path, verdict=verdict, reason=reason or "")


def _may_hold(item: Obstacle, prefix: str) -> bool:
    """Whether the folder that cannot be read may hold entries whose digest starts with ``prefix``."""
    return item.digest_prefix.startswith(prefix) or prefix.startswith(item.digest_prefix)


def _discard_link(root: int, path: Path) -> None:
    """Remove ``path`` if it is a link or a file. A folder stays."""
    with suppress(OSError, CacheUntrustedError), ExitStack() as stack:
        folder = stack.enter_context(open_below(root, str(path.parent))) if path.parent.name else root
        if not stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            discard(root, folder, path.name)
