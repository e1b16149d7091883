"""Bundles: a set of cache entries as one reproducible file, and the digest of its index that a deployment pins.

    bundle = zstd(tar(bundle.json, (entry.json, kernel.cu, kernel.cubin)*))      in the order of the index bundle.json

The digest of a bundle is the SHA-256 of its index: it fixes every byte of every file and does not hang on the
compressor. Provenance that differs between two builds of a kernel is left out, so that two machines that build the same
plan with the same NVRTC write the same bundle, byte for byte.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import zstandard

from jitfp4.cache import Cache, EntryFiles, Manifest
from jitfp4.cache.entry import CUBIN, MANIFEST, SOURCE
from jitfp4.cache.index import MAX_INDEX_BYTES, Index, Listed
from jitfp4.cache.layer import entry_path
from jitfp4.errors import BundleError, CacheCorruptError

INDEX = "bundle.json"
VOLATILE = ("compile_ms", "created")
"""Members of an entry's provenance that a bundle leaves out."""

_ORDER = (MANIFEST, SOURCE, CUBIN)
_ZSTD_LEVEL = 12
_MAX_WINDOW_BYTES = 1 << 27  # what a hostile frame may make the decompressor allocate


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of an import: the digest, and how many entries were new to the cache or there already."""

    digest: str
    added: int
    present: int


def normalized(files: EntryFiles) -> EntryFiles:
    """The entry without volatile provenance, sealed anew and checked. Raises CacheCorruptError."""
    manifest = Manifest.decode(files.manifest)
    files.check(manifest.digest, manifest.toolchain)
    provenance = {name: value for name, value in manifest.provenance.items() if name not in VOLATILE}
    return replace(files, manifest=replace(manifest, provenance=provenance).encode())


def export_bundle(entries: Iterable[EntryFiles], out: Path) -> str:
    """Write a bundle and return its digest. The same entries give the same bytes, in whatever order they come.

    ``out`` appears complete or not at all. Raises CacheCorruptError when an entry is not what its manifest says.
    """
    kept = {}
    for files in map(normalized, entries):
        listed = Listed.of(files)
        kept[listed.recipe, listed.toolchain] = listed, files
    index = Index.of(listed for listed, _ in kept.values())
    partial = out.with_name(f"{out.name}.partial")
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    with (
        partial.open("wb") as raw,
        compressor.stream_writer(raw) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        _add(archive, INDEX, index.encode())
        for entry in index.entries:
            contents = kept[entry.recipe, entry.toolchain][1].by_name()
            for name in _ORDER:
                _add(archive, f"{entry_path(entry.recipe, entry.toolchain)}/{name}", contents[name])
    partial.replace(out)
    return index.digest


def verify_bundle(path: Path, digest: str | None = None) -> Index:
    """Check every byte of a bundle, write nothing, and return its index.

    Args:
        digest: what it must be; compared before anything behind the index is read.
    Raises:
        BundleError: the bundle is damaged, has another digest, or breaks the grammar.
    """
    with _reading(path, digest) as (index, entries):
        for _ in entries:
            pass
    return index


def import_bundle(path: Path, cache: Cache, digest: str | None = None) -> Imported:
    """Put the entries of a bundle into the user's root, after all of it was verified.

    The index is stored too, so that the root can serve others as a read-only layer that is pinned by its digest.
    Raises BundleError before anything is written, CacheError or OSError when the root cannot be written.
    """
    verified = verify_bundle(path, digest)
    with _reading(path, verified.digest) as (index, entries):
        added = sum(cache.adopt(files) for files in entries)
    cache.adopt_index(index)
    return Imported(digest=index.digest, added=added, present=len(index.entries) - added)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """A member that says nothing about when, where and by whom it was written."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    archive.addfile(member, io.BytesIO(data))


@contextmanager
def _reading(path: Path, digest: str | None) -> Iterator[tuple[Index, Iterator[EntryFiles]]]:
    """The index, checked against ``digest``, and its entries, each verified before it is handed out."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    try:
        with (
            path.open("rb") as raw,
            decompressor.stream_reader(raw) as unpacked,
            tarfile.open(fileobj=unpacked, mode="r|") as archive,
        ):
            index = Index.decode(_next(archive, INDEX, None), digest)
            yield index, _entries(archive, index)
    except (zstandard.ZstdError, tarfile.TarError, EOFError, CacheCorruptError) as error:
        raise BundleError(f"{path}: {error}") from None


def _entries(archive: tarfile.TarFile, index: Index) -> Iterator[EntryFiles]:
    for entry in index.entries:
        folder = entry_path(entry.recipe, entry.toolchain)
        manifest, source, cubin = (_next(archive, f"{folder}/{name}", entry.files[name][0]) for name in _ORDER)
        files = EntryFiles(cubin=cubin, source=source, manifest=manifest)
        entry.check(files)
        yield files
    if archive.next() is not None:
        raise BundleError("the bundle holds more than its index lists")


def _next(archive: tarfile.TarFile, name: str, size: int | None) -> bytes:
    """The next member, which must be the regular file ``name`` of ``size`` bytes: known before it is read."""
    member = archive.next()
    if member is None or member.name != name or not member.isreg():
        raise BundleError(f"expected the file {name}, found {member.name if member else 'the end'}")
    if member.size > MAX_INDEX_BYTES if size is None else member.size != size:
        raise BundleError(f"{name}: {member.size} bytes, which is not what the index lists")
    stream: IO[bytes] | None = archive.extractfile(member)
    data = stream.read() if stream else b""
    if len(data) != member.size:
        raise BundleError(f"{name}: the bundle ends inside this file")
    return data
