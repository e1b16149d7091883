"""Remote stores: bundles as content-addressed objects under a URL, through fsspec.

    <url>/blobs/<sha256>            one file of an entry: a cubin, a source or a manifest
    <url>/bundles/<digest>.json     the index of a bundle, written after everything that it lists

Any URL that fsspec knows will do (file, memory, s3, gs, http for pulls, ...); the drivers of cloud stores are packages
of their own. What arrives is checked: an index must hash to its name, a file to its listing, and an entry passes every
check before it is published into the user's root. Who made it, only a digest from a trusted place says.

Others may write a folder that serves as a store. Objects get their names there when they are whole, no link is followed
or written through, and what is no regular file is refused.
"""

from __future__ import annotations

import errno
import hashlib
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jitfp4.bundle import Imported, indexed
from jitfp4.cache import Cache, EntryFiles, Index
from jitfp4.cache.entry import CUBIN, MANIFEST, SOURCE, is_digest
from jitfp4.cache.index import MAX_INDEX_BYTES, Listed
from jitfp4.errors import BundleError, CacheCorruptError, CacheError
from jitfp4.files import read_regular, replacing

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Remote:
    """A store at ``url``. ``jobs`` objects are in flight at a time.

    Raises:
        CacheError: fsspec or the driver of this kind of URL is not installed, or the store cannot be reached.
    """

    def __init__(self, url: str, *, jobs: int = 8, **options: Any) -> None:
        self.url, self.jobs = url, jobs
        try:
            import fsspec
            from fsspec.implementations.local import LocalFileSystem

            self._files, self._path = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            raise CacheError(f"{url}: {error}. Try: pip install 'jitfp4[remote]' and the driver of this URL") from None
        except Exception as error:  # drivers raise what they like
            raise CacheError(f"{url}: {type(error).__name__}: {error}") from error
        self._folder = Path(self._path) if type(self._files) is LocalFileSystem else None

    def push(self, entries: Iterable[EntryFiles]) -> str:
        """Store entries as one bundle and return its digest. Objects that are there and whole are not sent again.

        Raises:
            ArgumentError: there are no entries.
            CacheCorruptError: an entry is not what its manifest says.
            CacheError: the store refused.
        """
        index, kept = indexed(entries)
        contents = (data for files in kept.values() for data in files.by_name().values())
        blobs = {hashlib.sha256(data).hexdigest(): data for data in contents}
        with ThreadPoolExecutor(self.jobs) as pool:
            for _ in pool.map(lambda item: self._put(f"blobs/{item[0]}", item[1]), blobs.items()):
                pass
        self._put(f"bundles/{index.digest}.json", index.encode())
        return index.digest

    def pull(self, digest: str, cache: Cache) -> Imported:
        """Put the entries of a bundle into the user's root; those that are there already are not fetched.

        Raises:
            BundleError: an object is missing, or is not what its name or the index says; also when another bundle is
                pinned, or it holds more than the cache may.
            CacheError, OSError: the store cannot be reached, or the root cannot be written.
        """
        cache.config.check_writable()
        index = Index.decode(self._get(f"bundles/{digest}.json", MAX_INDEX_BYTES), digest)
        cache.check_bundle(index)
        missing = [entry for entry in index.entries if not cache.holds(entry.recipe, entry.toolchain)]
        with ThreadPoolExecutor(self.jobs) as pool:
            added = sum(cache.adopt(files) for files in pool.map(self._fetch, missing))
        cache.adopt_index(index)
        return Imported(digest=digest, added=added, present=len(index.entries) - added)

    def digests(self) -> list[str]:
        """Digests of the bundles in the store, as far as it can be listed. Raises CacheError."""
        try:
            names = self._call(self._bundles)
        except FileNotFoundError:
            return []
        stems = (name.rsplit("/", 1)[-1].removesuffix(".json") for name in names)
        return sorted(stem for stem in stems if is_digest(stem))

    def _bundles(self) -> list[str]:
        if self._folder is not None:
            return [path.name for path in _real(self._folder, "bundles").iterdir()]
        return [str(name) for name in self._files.ls(f"{self._path}/bundles", detail=False)]

    def _fetch(self, entry: Listed) -> EntryFiles:
        """One entry, verified. Runs in a worker thread."""
        manifest, source, cubin = (self._fetch_file(*entry.files[name]) for name in (MANIFEST, SOURCE, CUBIN))
        files = EntryFiles(cubin=cubin, source=source, manifest=manifest)
        try:
            entry.check(files)
        except CacheCorruptError as error:
            raise BundleError(f"{self.url}: {error}") from None
        return files

    def _fetch_file(self, size: int, sha256: str) -> bytes:
        data = self._get(f"blobs/{sha256}", size)
        if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
            raise BundleError(f"{self.url}/blobs/{sha256}: {len(data)} bytes that are not the ones of this name")
        return data

    def _get(self, name: str, limit: int) -> bytes:
        """At most one byte more than ``limit``, so that an object of any size cannot fill the memory."""

        def read() -> bytes:
            if self._folder is not None:
                return read_regular(_real(self._folder, name), limit + 1, follow=False)
            with self._files.open(f"{self._path}/{name}", "rb") as stream:
                return bytes(stream.read(limit + 1))

        try:
            return self._call(read)
        except FileNotFoundError:
            raise BundleError(f"{self.url}/{name}: there is no such object") from None

    def _put(self, name: str, data: bytes) -> None:
        path = f"{self._path}/{name}"

        def write() -> None:
            if self._folder is not None:
                _write(self._folder, name, data)
                return
            if self._files.exists(path) and self._files.size(path) == len(data) and self._get(name, len(data)) == data:
                return
            self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            self._files.pipe_file(path, data)

        self._call(write)

    def _call(self, work: Callable[[], T]) -> T:
        """Drivers raise what they like; the caller gets FileNotFoundError or CacheError."""
        try:
            return work()
        except FileNotFoundError:
            raise
        except Exception as error:
            raise CacheError(f"{self.url}: {type(error).__name__}: {error}") from error


# ---- a store in a folder of this machine -----------------------------------------------------------------------------


def _real(store: Path, name: str) -> Path:
    """The path of an object, or of a folder of the store, which must be no link. Raises OSError."""
    folder = store / name.partition("/")[0]
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise OSError(errno.ENOTDIR, "a link or a file where a folder of the store belongs", str(folder))
    return store / name


def _write(store: Path, name: str, data: bytes) -> None:
    """Put an object in place unless it is there and whole. Raises OSError for what is no regular file in its place."""
    store.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
    path = _real(store, name)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        if read_regular(path, len(data) + 1, follow=False) == data:
            return
    with replacing(path) as raw:
        raw.write(data)
