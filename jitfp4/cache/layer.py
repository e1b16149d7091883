"""One cache root as a reader sees it: which folders and files may be believed, and the checks of a load in their order.

Writes nothing, except the use stamp of an entry in the user's own root.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from jitfp4.cache.entry import CUBIN, MANIFEST, MAX_BYTES, SOURCE, EntryFiles, Manifest, is_digest, is_toolchain
from jitfp4.cache.index import MAX_INDEX_BYTES, Index
from jitfp4.errors import BundleError, CacheCorruptError, CacheUntrustedError
from jitfp4.keys import Recipe

VERSION = "v1"
INDEXES = "bundles"
"""Folder of bundle indexes, each named by its own SHA-256. See bundle.py."""

STAMP_SECONDS = 3600
"""A use is stamped when the last stamp is at least this old, so that a hot entry costs one write an hour."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # not blocking: a FIFO must not hang the reader

P = ParamSpec("P")
T = TypeVar("T")


def entry_path(digest: str, toolchain: str) -> str:
    """Folder of an entry, relative to its root."""
    return f"{VERSION}/{digest[:2]}/{digest[2:]}/{toolchain}"


def check_trusted(status: os.stat_result, what: str) -> None:
    """Nobody but this user or root could have written it. Raises CacheUntrustedError."""
    if status.st_uid != 0 and status.st_uid != os.geteuid():
        raise CacheUntrustedError(f"{what}: belongs to uid {status.st_uid}, not to uid {os.geteuid()} or root")
    if status.st_mode & 0o022:
        raise CacheUntrustedError(f"{what}: group or others may write it (mode {stat.S_IMODE(status.st_mode):04o})")


def check_folder(status: os.stat_result, what: str) -> None:
    """``status``, of a path whose last link was not followed, is a folder's. Raises CacheUntrustedError."""
    if not stat.S_ISDIR(status.st_mode):
        raise CacheUntrustedError(f"{what}: a symbolic link or a file where a folder belongs")


@contextmanager
def open_folder(path: str | Path, *, at: int | None = None) -> Iterator[int]:
    """A descriptor of a real folder, closed at the end. Raises CacheUntrustedError for a symbolic link or a file."""
    fd = _open_folder(path, at=at)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_folder(path: str | Path, *, at: int | None = None) -> int:
    try:
        return os.open(path, _FOLDER, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CacheUntrustedError(f"{path}: a symbolic link or a file where a folder belongs") from None
        raise


def _again_if_stale(read: Callable[P, T]) -> Callable[P, T]:
    """Read once more on ESTALE: a network file system's view of a file that was just replaced."""

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

    ``own`` marks the user's root: its files must have exactly one link. ``stamps`` says that uses are recorded.
    ``pin`` is the SHA-256 of a bundle index in the root; what that index lists is believed whoever owns it.
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
        pinned = self._pinned_manifest(digest, toolchain)
        folder = self._open_entry(digest, toolchain, pinned)
        try:
            manifest = Manifest.decode(self._read(folder, MANIFEST, pinned))
            manifest.check_place(digest, toolchain)
            manifest.check_asked(recipe)
            cubin = self._read(folder, CUBIN, pinned, manifest.cubin_bytes)
        except FileNotFoundError as error:
            raise self._missing(error, folder, digest, toolchain) from None
        finally:
            os.close(folder)
        manifest.check_cubin(cubin)
        return manifest, cubin

    def read_manifest(self, digest: str, toolchain: str) -> bytes:
        """entry.json as it is, from trusted folders. Raises like load()."""
        return self._read_each(digest, toolchain, (MANIFEST,))[0]

    def read_files(self, digest: str, toolchain: str) -> EntryFiles:
        """All three files from trusted folders; their contents are not checked. Raises like load()."""
        manifest, source, cubin = self._read_each(digest, toolchain, (MANIFEST, SOURCE, CUBIN))
        return EntryFiles(manifest=manifest, source=source, cubin=cubin)

    def toolchains(self, digest: str) -> list[str]:
        """Names of the toolchain folders of a recipe; none when there is no recipe folder."""
        return [name for name in _listing(self.path / VERSION / digest[:2] / digest[2:]) if is_toolchain(name)]

    def places(self) -> Iterator[tuple[str, str]]:
        """(recipe digest, toolchain) of every entry folder, in order."""
        top = self.path / VERSION
        for fan in _listing(top):
            for rest in _listing(top / fan):
                if is_digest(digest := fan + rest):
                    yield from ((digest, name) for name in self.toolchains(digest))

    @_again_if_stale
    def _read_each(self, digest: str, toolchain: str, names: Sequence[str]) -> list[bytes]:
        pinned = self._pinned_manifest(digest, toolchain)
        folder = self._open_entry(digest, toolchain, pinned)
        try:
            return [self._read(folder, name, pinned) for name in names]
        except FileNotFoundError as error:
            raise self._missing(error, folder, digest, toolchain) from None
        finally:
            os.close(folder)

    def _open_entry(self, digest: str, toolchain: str, pinned: str | None) -> int:
        """A descriptor of the entry's folder. All files are opened below it, so they belong to one generation."""
        root = _open_folder(self.path)
        try:
            if pinned is None:
                check_trusted(os.fstat(root), str(self.path))
            fan = f"{VERSION}/{digest[:2]}"
            for level in (VERSION, fan, f"{fan}/{digest[2:]}"):
                status = os.stat(level, dir_fd=root, follow_symlinks=False)
                check_folder(status, level)
                if pinned is None:
                    check_trusted(status, level)
            folder = _open_folder(f"{fan}/{digest[2:]}/{toolchain}", at=root)
        finally:
            os.close(root)
        try:
            if pinned is None:
                check_trusted(os.fstat(folder), toolchain)
        except CacheUntrustedError:
            os.close(folder)
            raise
        return folder

    def _read(self, folder: int, name: str, pinned: str | None, size: int | None = None) -> bytes:
        """One file, if it is regular, trusted and of an acceptable size, which is known before a byte is read.

        With ``pinned``, the SHA-256 of entry.json, neither owner nor mode counts: the contents are known.
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
                if self.own and status.st_nlink > 1:  # 0: evicted since it was opened, and whole
                    raise CacheUntrustedError(f"{name}: has {status.st_nlink} hard links")
            if status.st_size > MAX_BYTES[name] or (size is not None and status.st_size != size):
                raise CacheCorruptError(f"{name}: {status.st_size} bytes, not the published size")
            data = read_all(fd, status.st_size)
            if name == MANIFEST and self.stamps and abs(time.time() - status.st_mtime) >= STAMP_SECONDS:
                with suppress(OSError):  # on a read-only mount uses go unrecorded
                    os.utime(fd)
        finally:
            os.close(fd)
        if pinned is not None and name == MANIFEST and hashlib.sha256(data).hexdigest() != pinned:
            raise CacheUntrustedError(f"{name}: not the one that the pinned bundle index {self.pin} lists")
        return data

    def _missing(self, error: FileNotFoundError, folder: int, digest: str, toolchain: str) -> Exception:
        """A file that is not in an entry's folder: damage, unless the folder has left its place meanwhile."""
        with suppress(OSError):
            now = (self.path / entry_path(digest, toolchain)).lstat()
            if os.path.samestat(now, os.fstat(folder)):
                return CacheCorruptError(f"{error.filename}: missing")
        return error

    def _pinned_manifest(self, digest: str, toolchain: str) -> str | None:
        """SHA-256 that entry.json must have, if this layer holds the pinned index and the index lists the entry."""
        if self.pin is None:
            return None
        try:
            return pinned_manifests(self.path, self.pin).get(f"{digest}/{toolchain}")
        except FileNotFoundError:
            return None


@functools.cache
def pinned_manifests(root: Path, pin: str) -> Mapping[str, str]:
    """``recipe/toolchain`` to SHA-256 of entry.json, from ``bundles/<pin>.json`` below ``root``.

    The index may belong to anybody: it is believed because it hashes to ``pin``. Raises FileNotFoundError without one.
    """
    path = root / INDEXES / f"{pin}.json"
    fd = os.open(path, _FILE)
    try:
        size = os.fstat(fd).st_size
        data = read_all(fd, size) if size <= MAX_INDEX_BYTES else b""
    finally:
        os.close(fd)
    try:
        index = Index.decode(data, pin)
    except BundleError as error:
        raise CacheUntrustedError(f"{path}: {error}") from None
    return {f"{entry.recipe}/{entry.toolchain}": entry.files[MANIFEST][1] for entry in index.entries}


def read_all(fd: int, size: int) -> bytes:
    """The first ``size`` bytes of a file, fewer when it ends before."""
    data = os.read(fd, size)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def _listing(path: Path) -> list[str]:
    try:
        return sorted(item.name for item in path.iterdir())
    except OSError:
        return []
