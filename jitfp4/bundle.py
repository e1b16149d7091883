"""Bundles: a set of cache entries as one reproducible file, and the digest of its index that a deployment pins.

    bundle = zstd(tar(bundle.json, tactics.json?, (entry.json, kernel.cu, kernel.cubin)*))      as bundle.json lists it

The digest of a bundle is the SHA-256 of its index: it fixes every byte of every file and does not hang on the
compressor. Provenance that differs between two builds of a kernel is left out, so that two machines that build the same
plan with the same NVRTC write the same bundle, byte for byte.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import zstandard

from jitfp4.cache import Cache, EntryFiles, Manifest
from jitfp4.cache.entry import CUBIN, MANIFEST, SOURCE
from jitfp4.cache.index import MAX_INDEX_BYTES, Index, Listed
from jitfp4.cache.layer import entry_path
from jitfp4.errors import ArgumentError, BundleError, CacheCorruptError
from jitfp4.files import check_out, regular, replacing

INDEX = "bundle.json"
TACTICS = "tactics.json"
VOLATILE = ("compile_ms", "created")
"""Members of an entry's provenance that a bundle leaves out."""

_ORDER = (MANIFEST, SOURCE, CUBIN)
_ZSTD_LEVEL = 12
_MAX_WINDOW_BYTES = 1 << 25  # what a hostile frame may make the decompressor allocate; our level needs 4 MiB
_SIZE = slice(124, 136)  # of a tar header: octal digits and a NUL


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of an import: the digest, and how many entries were new to the cache or there already.

    ``tactics`` is the tactics file that came with them, verified; None without one.
    """

    digest: str
    added: int
    present: int
    tactics: bytes | None = None


def normalized(files: EntryFiles) -> EntryFiles:
    """The entry without volatile provenance, sealed anew and checked. Raises CacheCorruptError."""
    manifest = Manifest.decode(files.manifest)
    files.check(manifest.digest, manifest.toolchain)
    provenance = {name: value for name, value in manifest.provenance.items() if name not in VOLATILE}
    return replace(files, manifest=replace(manifest, provenance=provenance).encode())


def indexed(
    entries: Iterable[EntryFiles], tactics: bytes | None = None
) -> tuple[Index, dict[tuple[str, str], EntryFiles]]:
    """The index of these entries and a tactics file, and each entry, normalized, by recipe and toolchain.

    Raises:
        ArgumentError: there are no entries.
        CacheCorruptError: an entry is not what its manifest says.
    """
    listed, kept = [], {}
    for files in map(normalized, entries):
        listed.append(Listed.of(files))
        kept[listed[-1].recipe, listed[-1].toolchain] = files
    if not kept:
        raise ArgumentError("entries", "none", "at least one: a bundle without kernels is of no use")
    listing = None if tactics is None else (len(tactics), hashlib.sha256(tactics).hexdigest())
    return Index.of({(entry.recipe, entry.toolchain): entry for entry in listed}.values(), listing), kept


def export_bundle(entries: Iterable[EntryFiles], out: Path, tactics: bytes | None = None) -> str:
    """Write a bundle and return its digest. The same entries give the same bytes, in whatever order they come.

    ``tactics`` is a tactics file that goes with them. ``out`` appears complete or not at all, also when several
    processes write it.

    Raises:
        ArgumentError: there are no entries, or ``out`` is there and is no regular file.
        CacheCorruptError: an entry is not what its manifest says.
    """
    check_out(out)
    index, kept = indexed(entries, tactics)
    with (
        replacing(out) as raw,
        zstandard.ZstdCompressor(level=_ZSTD_LEVEL).stream_writer(raw, closefd=False) as packed,
    ):
        written = _write(packed, INDEX, index.encode())
        if tactics is not None:
            written += _write(packed, TACTICS, tactics)
        for entry in index.entries:
            contents = kept[entry.recipe, entry.toolchain].by_name()
            for name in _ORDER:
                written += _write(packed, f"{entry_path(entry.recipe, entry.toolchain)}/{name}", contents[name])
        packed.write(_end(written))
    return index.digest


def verify_bundle(path: Path, digest: str | None = None, *, check: Callable[[Index], None] = lambda _: None) -> Index:
    """Check every byte of a bundle, write nothing, and return its index.

    Args:
        digest: what it must be; compared before the index is parsed, and before anything behind it is read.
        check: is called with the index before a file is read, and may raise.
    Raises:
        BundleError: the bundle is damaged, has another digest, or breaks the grammar.
    """
    with _reading(path, digest) as (index, _, entries):
        check(index)
        for _ in entries:
            pass
    return index


def import_bundle(path: Path, cache: Cache, digest: str | None = None) -> Imported:
    """Put the entries of a bundle into the user's root, after all of it was verified.

    Without a ``digest`` from a place that is trusted, that finds damage and nothing else: whoever wrote the bundle
    could have put any machine code into it and computed its checksums anew. The index is stored too, so that the root
    can serve others as a read-only layer that is pinned by its digest.

    Raises:
        BundleError: before anything is written; also when another is pinned, or it holds more than the cache may.
        CacheError, OSError: the root cannot be written, or JITFP4_CACHE forbids it.
    """
    cache.config.check_writable()
    verified = verify_bundle(path, digest, check=cache.check_bundle)
    with _reading(path, verified.digest) as (index, tactics, entries):
        added = sum(cache.adopt(files) for files in entries)
    cache.adopt_index(index)
    return Imported(digest=index.digest, added=added, present=len(index.entries) - added, tactics=tactics)


# ---- tar -------------------------------------------------------------------------------------------------------------
# A member says nothing about when, where and by whom it was written, so its header follows from its name and size. The
# reader knows both and compares: no header is parsed, whatever kind it claims to be.


def _header(name: str, size: int) -> bytes:
    """The tar header of a file; where the name is longer than 100 bytes, after an extended one that holds it."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int, unit: int = tarfile.BLOCKSIZE) -> bytes:
    return bytes(-size % unit)


def _end(written: int) -> bytes:
    """What is behind the last member, when ``written`` bytes are before it."""
    blocks = bytes(2 * tarfile.BLOCKSIZE)
    return blocks + _padding(written + len(blocks), tarfile.RECORDSIZE)


def _write(packed: IO[bytes], name: str, data: bytes) -> int:
    """Write one member; the bytes that it takes."""
    return sum(packed.write(part) for part in (_header(name, len(data)), data, _padding(len(data))) if part)


class _Reader:
    """A stream of members whose names and sizes are known."""

    def __init__(self, unpacked: IO[bytes]) -> None:
        self._unpacked = unpacked
        self._done = 0

    def read_index(self) -> bytes:
        """The first member, whose size only its header tells."""
        header = self._take(tarfile.BLOCKSIZE)
        try:
            size = int(header[_SIZE].rstrip(b"\0"), 8)
        except ValueError:
            size = -1
        if not 0 <= size <= MAX_INDEX_BYTES:
            raise BundleError(f"does not begin with an index, a file {INDEX} of at most {MAX_INDEX_BYTES} bytes")
        self._expect(_header(INDEX, size), header, INDEX)
        return self._contents(size)

    def read(self, name: str, size: int) -> bytes:
        """The next member, which must be the file ``name`` of ``size`` bytes."""
        header = _header(name, size)
        self._expect(header, self._take(len(header)), name)
        return self._contents(size)

    def finish(self) -> None:
        """Nothing but the end may follow."""
        end = _end(self._done)
        if self._take(len(end)) != end or self._unpacked.read(1):
            raise BundleError("holds more than its index lists")

    def _contents(self, size: int) -> bytes:
        data, padding = self._take(size), _padding(size)
        if self._take(len(padding)) != padding:
            raise BundleError("holds more than its index lists")
        return data

    def _expect(self, wanted: bytes, found: bytes, name: str) -> None:
        if wanted != found:
            raise BundleError(f"the header of {name}, of the size that the index lists, is missing")

    def _take(self, size: int) -> bytes:
        """Exactly so many bytes of the unpacked stream."""
        parts, missing = [], size
        while missing:
            part = self._unpacked.read(missing)
            if not part:
                raise BundleError("ends too early")
            parts.append(part)
            missing -= len(part)
        self._done += size
        return b"".join(parts)


@contextmanager
def _reading(path: Path, digest: str | None) -> Iterator[tuple[Index, bytes | None, Iterator[EntryFiles]]]:
    """The index, checked against ``digest``, the tactics, and the entries, each verified before it is handed out."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    try:
        with regular(path) as raw, decompressor.stream_reader(raw, read_across_frames=True) as unpacked:
            reader = _Reader(unpacked)
            index = Index.decode(reader.read_index(), digest)
            yield index, _tactics(reader, index), _entries(reader, index)
    except (zstandard.ZstdError, BundleError, CacheCorruptError) as error:
        raise BundleError(f"{path}: {error}") from None


def _tactics(reader: _Reader, index: Index) -> bytes | None:
    if index.tactics is None:
        return None
    size, sha256 = index.tactics
    data = reader.read(TACTICS, size)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleError(f"{TACTICS}: not the file that the index lists")
    return data


def _entries(reader: _Reader, index: Index) -> Iterator[EntryFiles]:
    for entry in index.entries:
        folder = entry_path(entry.recipe, entry.toolchain)
        manifest, source, cubin = (reader.read(f"{folder}/{name}", entry.files[name][0]) for name in _ORDER)
        files = EntryFiles(cubin=cubin, source=source, manifest=manifest)
        entry.check(files)
        yield files
    reader.finish()
