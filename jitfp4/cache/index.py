"""The index of a set of entries: which files it has, and their SHA-256. Its own digest fixes all of them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jitfp4.cache.entry import FILES, MAX_BYTES, EntryFiles, Manifest, is_digest, is_toolchain
from jitfp4.errors import BundleError

SCHEMA = 1
MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One entry of an index. ``files`` maps each file name to its size in bytes and its SHA-256."""

    recipe: str
    toolchain: str
    family: str
    arch: str
    files: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, files: EntryFiles) -> Listed:
        """The listing of an entry. Raises CacheCorruptError when its manifest is damaged."""
        manifest = Manifest.decode(files.manifest)
        sums = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.by_name().items()}
        return cls(
            recipe=manifest.digest,
            toolchain=manifest.toolchain,
            family=manifest.family,
            arch=manifest.arch,
            files=sums,
        )

    def check(self, files: EntryFiles) -> None:
        """``files`` are the listed ones, and a valid entry. Raises BundleError or CacheCorruptError."""
        if Listed.of(files) != self:
            raise BundleError(f"{self.recipe}/{self.toolchain}: not the files that the index lists")
        files.check(self.recipe, self.toolchain)


@dataclass(frozen=True)
class Index:
    """Listed entries, by recipe and toolchain, without duplicates."""

    entries: tuple[Listed, ...]

    @classmethod
    def of(cls, entries: Iterable[Listed]) -> Index:
        """The index of ``entries`` in whatever order they come."""
        by_place = {(entry.recipe, entry.toolchain): entry for entry in entries}
        return cls(tuple(by_place[place] for place in sorted(by_place)))

    def encode(self) -> bytes:
        """The text that is hashed: the same entries always give the same bytes."""
        entries = [
            {
                "recipe": entry.recipe,
                "toolchain": entry.toolchain,
                "family": entry.family,
                "arch": entry.arch,
                **{name: {"bytes": entry.files[name][0], "sha256": entry.files[name][1]} for name in FILES},
            }
            for entry in self.entries
        ]
        return (json.dumps({"schema": SCHEMA, "entries": entries}, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, digest: str | None = None) -> Index:
        """Parse an index; with ``digest``, only after it was found to hash to that. Raises BundleError."""
        found = hashlib.sha256(data).hexdigest()
        if digest is not None and digest != found:
            raise BundleError(f"the index hashes to {found}, not to the digest {digest}")
        try:
            index = cls(tuple(_parse(item) for item in json.loads(data)["entries"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BundleError(f"not an index: {error!r}") from None
        if index.encode() != data:
            raise BundleError("the index is not in canonical form")
        return index

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the text, 64 hex digits: what a deployment pins."""
        return hashlib.sha256(self.encode()).hexdigest()


def _parse(item: Mapping[str, object]) -> Listed:
    match item:
        case {"recipe": str(recipe), "toolchain": str(toolchain), "family": str(family), "arch": str(arch)}:
            if not is_digest(recipe) or not is_toolchain(toolchain):
                raise ValueError(f"{recipe!r}/{toolchain!r} cannot be a folder")
            files = {name: _parse_sum(name, item[name]) for name in FILES}
            return Listed(recipe=recipe, toolchain=toolchain, family=family, arch=arch, files=files)
    raise ValueError(f"{item!r} is no entry")


def _parse_sum(name: str, value: object) -> tuple[int, str]:
    match value:
        case {"bytes": int(size), "sha256": str(sha256)} if 0 <= size <= MAX_BYTES[name] and is_digest(sha256):
            return size, sha256
    raise ValueError(f"{name}: {value!r} is no size and SHA-256")
