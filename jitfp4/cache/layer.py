"""Reading one cache root: which folders and files are trusted, and the checks of a load in their order.

Writes nothing, except the time of the last use of an entry in the user's own root.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from jitfp4.cache.entry import CUBIN, MANIFEST, MAX_BYTES, SOURCE, EntryFiles, Manifest, is_toolchain
from jitfp4.cache.index import MAX_INDEX_BYTES, Index, Listed
from jitfp4.cache.tree import check_folder, check_trusted, close, folder_descriptor, names, open_below, open_folder
from jitfp4.errors import BundleError, CacheCorruptError, CacheUntrustedError
from jitfp4.keys import Recipe

VERSION = "v1"
INDEXES = "bundles"
"""Folder of bundle indexes, each named by its own SHA-256. See bundle.py."""

STAMP_SECONDS = 3600
"""How old the recorded time of the last use must be to be renewed. So a busy entry costs one write an hour."""

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO must not hang the reader

P = ParamSpec("P")
T = TypeVar("T")


def entry_path(digest: str, toolchain: str) -> str:
    """Folder of an entry, relative to its root."""
    return f"{VERSION}/{digest[:2]}/{digest[2:]}/{toolchain}"


def _again_if_stale(read: Callable[P, T]) -> Callable[P, T]:
    """Read again after ESTALE, which a network file system reports for a file that was just replaced."""

    @functools.wraps(read)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return read(*args, **kwargs)

    return wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A cache root.

    ``own`` marks the user's root: its files must have exactly one hard link. ``stamps`` says that the time of each use
    is recorded. ``pin`` is the SHA-256 of a bundle index in the root: only entries that this index lists are used. In a
    read-only layer ``entry.json`` must be the listed one, and owners do not matter; in the user's root the cubin must
    be the listed one, which this user may have built.
    """

    path: Path
    own: bool = False
    stamps: bool = False
    pin: str | None = None

    @_again_if_stale
    def load(self, recipe: Recipe, toolchain: str) -> tuple[Manifest, bytes]:
        """The manifest and the cubin of one entry, checked in the order of cache_layout.md.

        Raises:
            FileNotFoundError: no such entry.
            CacheCorruptError, CacheUntrustedError: an entry that must not be used.
            OSError: it could not be read.
        """
        digest = recipe.digest
        listed, pinned = self._listed(digest, toolchain)
        folder = self._open_entry(digest, toolchain, pinned)
        try:
            manifest = Manifest.decode(self._read(folder, MANIFEST, pinned))
            manifest.check_place(digest, toolchain)
            manifest.check_asked(recipe)
            self._check_listed(manifest, listed)
            cubin = self._read(folder, CUBIN, pinned, manifest.cubin_bytes)
        except FileNotFoundError as error:
            raise self._missing(error, folder, digest, toolchain) from None
        finally:
            close(folder)
        manifest.check_cubin(cubin)
        return manifest, cubin

    def read_manifest(self, digest: str, toolchain: str) -> bytes:
        """entry.json from trusted folders; its contents are not checked. Raises like load()."""
        return self._read_each(digest, toolchain, (MANIFEST,))[0]

    def read_files(self, digest: str, toolchain: str) -> EntryFiles:
        """All three files from trusted folders; their contents are not checked. Raises like load()."""
        manifest, source, cubin = self._read_each(digest, toolchain, (MANIFEST, SOURCE, CUBIN))
        return EntryFiles(manifest=manifest, source=source, cubin=cubin)

    def toolchains(self, digest: str) -> list[str]:
        """Names of the toolchain folders of a recipe, an empty list where the recipe has no folder."""
        with (
            suppress(OSError, CacheUntrustedError),
            open_folder(self.path) as root,
            open_below(root, f"{VERSION}/{digest[:2]}/{digest[2:]}", trusted=False) as folder,
        ):
            return [name for name in names(folder) if is_toolchain(name)]
        return []

    def check_pin(self) -> None:
        """Check that this root holds the pinned index, if one is pinned. Raises CacheUntrustedError."""
        if self.pin is None:
            return
        try:
            pinned_entries(self.path, self.pin)
        except FileNotFoundError:
            missing = f"{INDEXES}/{self.pin}.json, the bundle that JITFP4_BUNDLE_SHA256 pins"
            raise CacheUntrustedError(f"{self.path}: does not hold {missing}") from None

    def is_pinned(self) -> bool:
        """Whether a bundle is pinned, and this root holds its index."""
        try:
            self.check_pin()
        except (OSError, CacheUntrustedError):
            return False
        return self.pin is not None

    def check_new(self, manifest: Manifest) -> None:
        """Check that a new entry with this manifest could be loaded from here. Raises CacheUntrustedError."""
        self._check_listed(manifest, self._find_listed(manifest.digest, manifest.toolchain))

    def believes(self, digest: str, toolchain: str) -> bool:
        """Whether this entry may be used: nothing is pinned, or the pinned index lists it."""
        return self.pin is None or (self.is_pinned() and self._find_listed(digest, toolchain) is not None)

    @_again_if_stale
    def _read_each(self, digest: str, toolchain: str, files: Sequence[str]) -> list[bytes]:
        listed, pinned = self._listed(digest, toolchain)
        folder = self._open_entry(digest, toolchain, pinned)
        try:
            contents = [self._read(folder, name, pinned) for name in files]
        except FileNotFoundError as error:
            raise self._missing(error, folder, digest, toolchain) from None
        finally:
            close(folder)
        if listed is not None:
            self._check_listed(Manifest.decode(contents[files.index(MANIFEST)]), listed)
        return contents

    def _open_entry(self, digest: str, toolchain: str, pinned: str | None) -> int:
        """A descriptor of the entry's folder. All files are opened below it, so they were published together."""
        root = folder_descriptor(self.path)
        try:
            if pinned is None:
                check_trusted(os.fstat(root), str(self.path))
            fan = f"{VERSION}/{digest[:2]}"
            for level in (VERSION, fan, f"{fan}/{digest[2:]}"):
                status = os.stat(level, dir_fd=root, follow_symlinks=False)
                check_folder(status, level)
                if pinned is None:
                    check_trusted(status, level)
            folder = folder_descriptor(f"{fan}/{digest[2:]}/{toolchain}", at=root)
        finally:
            close(root)
        try:
            if pinned is None:
                check_trusted(os.fstat(folder), toolchain)
        except CacheUntrustedError:
            close(folder)
            raise
        return folder

    def _read(self, folder: int, name: str, pinned: str | None, size: int | None = None) -> bytes:
        """One file. Before it is read, it must be regular, trusted, and of an acceptable size.

        With ``pinned``, the SHA-256 that entry.json must have, owner and mode do not matter: the hash is checked.
        """
        try:
            fd = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise CacheUntrustedError(f"{name}: a symbolic link or a socket") from None
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CacheUntrustedError(f"{name}: not a regular file")
            if pinned is None:
                check_trusted(status, name)
                if self.own and status.st_nlink > 1:  # 0: it was evicted after it was opened, and is complete
                    raise CacheUntrustedError(f"{name}: has {status.st_nlink} hard links")
            if status.st_size > MAX_BYTES[name] or (size is not None and status.st_size != size):
                raise CacheCorruptError(f"{name}: {status.st_size} bytes, not the published size")
            data = read_all(fd, status.st_size)
            if name == MANIFEST and self.stamps and abs(time.time() - status.st_mtime) >= STAMP_SECONDS:
                with suppress(OSError):  # a read-only mount: the use is not recorded
                    os.utime(fd)
        finally:
            close(fd)
        if pinned is not None and name == MANIFEST and hashlib.sha256(data).hexdigest() != pinned:
            raise CacheUntrustedError(f"{name}: not the one that the pinned bundle index {self.pin} lists")
        return data

    def _missing(self, error: FileNotFoundError, folder: int, digest: str, toolchain: str) -> Exception:
        """The error for a file that is missing in an entry: damage, unless the entry was evicted meanwhile."""
        with suppress(OSError):
            now = (self.path / entry_path(digest, toolchain)).lstat()
            if os.path.samestat(now, os.fstat(folder)):
                return CacheCorruptError(f"{error.filename}: missing")
        return error

    def _listed(self, digest: str, toolchain: str) -> tuple[Listed | None, str | None]:
        """What the pinned index lists for an entry, and the SHA-256 that its entry.json must have, if any.

        Both are None where nothing is pinned. Raises CacheUntrustedError when this root has such an entry but no valid
        pinned index.
        """
        if self.pin is None:
            return None, None
        try:
            self.check_pin()
            listed = self._find_listed(digest, toolchain)
        except CacheUntrustedError:
            (self.path / entry_path(digest, toolchain)).lstat()  # FileNotFoundError where there is no such entry
            raise
        return listed, None if self.own or listed is None else listed.files[MANIFEST][1]

    def _find_listed(self, digest: str, toolchain: str) -> Listed | None:
        return pinned_entries(self.path, self.pin).get(f"{digest}/{toolchain}") if self.pin else None

    def _check_listed(self, manifest: Manifest, listed: Listed | None) -> None:
        """Check that the cubin is the one that the pinned index lists. Raises CacheUntrustedError."""
        if self.pin is None:
            return
        if listed is None:
            raise CacheUntrustedError(f"the pinned bundle {self.pin} does not list this entry")
        if (manifest.cubin_bytes, manifest.cubin_sha256) != listed.files[CUBIN]:
            raise CacheUntrustedError(f"{CUBIN}: not the one that the pinned bundle {self.pin} lists")


@functools.cache
def pinned_entries(root: Path, pin: str) -> Mapping[str, Listed]:
    """The entries that ``bundles/<pin>.json`` below ``root`` lists, by ``recipe/toolchain``.

    The file may belong to anybody, because it must hash to ``pin``. Raises FileNotFoundError where there is none, and
    CacheUntrustedError where it is another.
    """
    path = root / INDEXES / f"{pin}.json"
    fd = os.open(path, _FILE)
    try:
        status = os.fstat(fd)
        readable = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_INDEX_BYTES
        data = read_all(fd, status.st_size) if readable else b""
    finally:
        close(fd)
    try:
        index = Index.decode(data, pin)
    except BundleError as error:
        raise CacheUntrustedError(f"{root}: {INDEXES}/{pin}.json: {error}") from None
    return {f"{entry.recipe}/{entry.toolchain}": entry for entry in index.entries}


def read_all(fd: int, size: int) -> bytes:
    """The first ``size`` bytes of a file; fewer when the file is shorter."""
    data = os.read(fd, size)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data
