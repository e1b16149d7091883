"""The index of a set of entries: their files with sizes and SHA-256. The digest of the index fixes them all."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jitfp4.cache.entry import FILES, MAX_BYTES, EntryFiles, Manifest, is_toolchain
from jitfp4.errors import BundleError

SCHEMA = 1
MAX_INDEX_BYTES = 64 << 20
MAX_TACTICS_BYTES = 16 << 20


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
        """Check that ``files`` are the listed ones and a valid entry. Raises BundleError or CacheCorruptError."""
        if Listed.of(files) != self:
            raise BundleError(f"{self.recipe}/{self.toolchain}: not the files that the index lists")
        files.check(self.recipe, self.toolchain)


@dataclass(frozen=True)
class Index:
    """Listed entries, by recipe and toolchain, without duplicates.

    ``tactics`` is the size in bytes and the SHA-256 of the tactics file that goes with them, if one does.
    """

    entries: tuple[Listed, ...]
    tactics: tuple[int, str] | None = None

    @classmethod
    def of(cls, entries: Iterable[Listed], tactics: tuple[int, str] | None = None) -> Index:
        """The index of ``entries``, which may come in any order."""
        by_place = {(entry.recipe, entry.toolchain): entry for entry in entries}
        return cls(tuple(by_place[place] for place in sorted(by_place)), tactics)

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
        tactics = {"tactics": dict(zip(("bytes", "sha256"), self.tactics, strict=True))} if self.tactics else {}
        return (json.dumps({"schema": SCHEMA, **tactics, "entries": entries}, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, digest: str | None = None) -> Index:
        """Parse an index. With ``digest``, ``data`` must hash to it, which is checked first. Raises BundleError.

        ``data`` must be exactly what encode() writes. It is matched entry by entry and not parsed as JSON, where a text
        of the largest size could fill the memory.
        """
        found = hashlib.sha256(data).hexdigest()
        if digest is not None and digest != found:
            raise BundleError(f"the index hashes to {found}, not to the digest {digest}")
        if data == cls(()).encode():
            return cls(())
        head = _HEAD.match(data)
        if head is None or not data.endswith(_TAIL):
            raise BundleError("not an index, or not in canonical form")
        entries, at, end = list[Listed](), head.end(), len(data) - len(_TAIL)
        while at < end:
            match = _ENTRY.match(data, at, end)
            if match is None or (match.end() == end) == bool(match["more"]):
                raise BundleError(f"not an index in canonical form: byte {at}")
            entries.append(_parse(match))
            at = match.end()
        tactics = _check_size("tactics", int(head["bytes"]), head["sha256"].decode()) if head["bytes"] else None
        index = cls(tuple(entries), tactics)
        if index != cls.of(entries, tactics):
            raise BundleError("the index is not in canonical form: its entries are not in order")
        return index

    @property
    def total_bytes(self) -> int:
        """The size of all files together."""
        return sum(size for entry in self.entries for size, _ in entry.files.values())

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the text, 64 hex digits: what a deployment pins."""
        return hashlib.sha256(self.encode()).hexdigest()


_HEAD = re.compile(
    rb'\{\n "schema": %d,\n'
    rb'(?: "tactics": \{\n  "bytes": (?P<bytes>0|[1-9]\d{0,9}),\n  "sha256": "(?P<sha256>[0-9a-f]{64})"\n \},\n)?'
    rb' "entries": \[\n' % SCHEMA
)
_TAIL = b"\n ]\n}\n"
_FILE = rb',\n   "%s": \{\n    "bytes": (0|[1-9]\d{0,9}),\n    "sha256": "([0-9a-f]{64})"\n   \}'
_ENTRY = re.compile(
    rb'  \{\n   "recipe": "(?P<recipe>[0-9a-f]{64})"'
    rb',\n   "toolchain": "(?P<toolchain>[a-z0-9_+.-]{1,100})"'
    rb',\n   "family": "(?P<family>(?:[ !#-\[\]-~]|\\[\x21-~]){0,1000})"'
    rb',\n   "arch": "(?P<arch>[a-z0-9_]{0,100})"'
    + b"".join(_FILE % re.escape(name.encode()) for name in FILES)
    + rb"\n  \}(?P<more>,\n)?"
)


def _parse(match: re.Match[bytes]) -> Listed:
    recipe, toolchain, family, arch = (match[name].decode() for name in ("recipe", "toolchain", "family", "arch"))
    if not is_toolchain(toolchain):
        raise BundleError(f"{toolchain!r} cannot be a folder")
    sums = match.groups()[4:]
    files = {name: _check_size(name, int(sums[2 * i]), sums[2 * i + 1].decode()) for i, name in enumerate(FILES)}
    return Listed(recipe=recipe, toolchain=toolchain, family=_unescaped(family), arch=arch, files=files)


def _check_size(name: str, size: int, sha256: str) -> tuple[int, str]:
    most = MAX_BYTES.get(name, MAX_TACTICS_BYTES)
    if size > most:
        raise BundleError(f"{name}: {size} bytes, more than {most}")
    return size, sha256


def _unescaped(text: str) -> str:
    """The string that ``text`` stands for between JSON's quotes. Raises BundleError unless encode() writes it so."""
    try:
        value = json.loads(f'"{text}"')
    except ValueError as error:
        raise BundleError(f"the index is no JSON: {error}") from None
    if json.dumps(value) != f'"{text}"':
        raise BundleError("the index is not in canonical form: an escape")
    return str(value)
