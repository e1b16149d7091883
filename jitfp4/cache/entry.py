"""One entry of the cache as bytes: the contents of entry.json, and the checks of the three files against it.

Touches no file. Every check reads the bytes that the caller uses afterwards, so nothing can change in between.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from jitfp4.errors import CacheCorruptError
from jitfp4.keys import SCHEMA, Recipe

CUBIN, SOURCE, MANIFEST = "kernel.cubin", "kernel.cu", "entry.json"
FILES = (CUBIN, SOURCE, MANIFEST)
MAX_BYTES = {CUBIN: 256 << 20, SOURCE: 16 << 20, MANIFEST: 1 << 20}
"""The largest size at which each file is read."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TOOLCHAIN = re.compile(r"[a-z0-9][a-z0-9_+-]*(\.[a-z0-9_+-]+)*")
_RECIPE_TEXTS = ("digest", "family", "arch", "source_sha256")
_EM_CUDA = 190
_SEAL = ',\n  "seal": "%s"\n}\n'
_SEAL_BYTES = len(_SEAL % ("0" * 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a build callback returns.

    ``symbol`` is the ``extern "C"`` kernel in ``cubin``. ``provenance`` is a JSON object that says how the kernel was
    made (templates and their SHA-256, spec, compile milliseconds, time, jitfp4 version). It is stored, but is no part
    of the key.
    """

    cubin: bytes
    symbol: str
    provenance: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of entry.json."""

    recipe: Mapping[str, object]
    toolchain: str
    symbol: str
    cubin_bytes: int
    cubin_sha256: str
    source_bytes: int
    provenance: Mapping[str, object]

    @property
    def digest(self) -> str:
        return str(self.recipe["digest"])

    @property
    def arch(self) -> str:
        return str(self.recipe["arch"])

    @property
    def family(self) -> str:
        return str(self.recipe["family"])

    @classmethod
    def of(cls, recipe: Recipe, toolchain: str, built: Built) -> Manifest:
        """The manifest of a fresh build."""
        return cls(
            recipe=recipe.to_json(),
            toolchain=toolchain,
            symbol=built.symbol,
            cubin_bytes=len(built.cubin),
            cubin_sha256=hashlib.sha256(built.cubin).hexdigest(),
            source_bytes=len(recipe.source.encode()),
            provenance=built.provenance,
        )

    def encode(self) -> bytes:
        """entry.json: indented JSON whose last member, ``seal``, is the SHA-256 of every byte before it."""
        fields = {
            "schema": SCHEMA,
            "recipe": dict(self.recipe),
            "toolchain": self.toolchain,
            "symbol": self.symbol,
            "cubin": {"bytes": self.cubin_bytes, "sha256": self.cubin_sha256},
            "source": {"bytes": self.source_bytes},
            "provenance": dict(self.provenance),
        }
        body = json.dumps(fields, indent=2).removesuffix("\n}").encode()
        return body + (_SEAL % hashlib.sha256(body).hexdigest()).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Parse entry.json. The seal is checked before the parser sees a byte. Raises CacheCorruptError."""
        body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if seal != (_SEAL % hashlib.sha256(body).hexdigest()).encode():
            raise CacheCorruptError(f"{MANIFEST}: the seal does not match")
        try:
            fields = json.loads(body.decode() + "}")
        except (ValueError, RecursionError) as error:
            raise CacheCorruptError(f"{MANIFEST}: not JSON: {error}") from None
        try:
            manifest = cls(
                recipe=fields["recipe"],
                toolchain=fields["toolchain"],
                symbol=fields["symbol"],
                cubin_bytes=fields["cubin"]["bytes"],
                cubin_sha256=fields["cubin"]["sha256"],
                source_bytes=fields["source"]["bytes"],
                provenance=fields["provenance"],
            )
            schema = fields["schema"]
            texts = (*(manifest.recipe[name] for name in _RECIPE_TEXTS), manifest.toolchain, manifest.symbol)
        except (KeyError, TypeError) as error:
            raise CacheCorruptError(f"{MANIFEST}: a member is missing or of the wrong type: {error}") from None
        numbers = (manifest.cubin_bytes, manifest.source_bytes)
        if not (all(type(text) is str for text in texts) and all(type(number) is int for number in numbers)):
            raise CacheCorruptError(f"{MANIFEST}: a member is of the wrong type")
        if not all(text.isascii() for text in (manifest.arch, manifest.symbol)):
            raise CacheCorruptError(f"{MANIFEST}: no architecture or kernel is called so")
        if type(schema) is not int or schema != SCHEMA or type(manifest.provenance) is not dict:
            raise CacheCorruptError(f"{MANIFEST}: schema {schema!r}, or no provenance; this reader knows {SCHEMA}")
        return manifest

    def check_place(self, digest: str, toolchain: str) -> None:
        """Check that the entry lies in its own folder: finds swapped and copied entries. Raises CacheCorruptError."""
        if self.digest != digest:
            raise CacheCorruptError(f"{MANIFEST}: made for recipe {self.digest}, found under {digest}")
        if self.toolchain != toolchain:
            raise CacheCorruptError(f"{MANIFEST}: made by {self.toolchain}, found under {toolchain}")

    def check_asked(self, recipe: Recipe) -> None:
        """Check that this manifest is of ``recipe``; the source is not compared. Raises CacheCorruptError.

        Comparing digests would not be enough: check_cubin() relies on the ``arch`` of this manifest.
        """
        written = self.recipe
        if (
            written["arch"] != recipe.arch
            or written["family"] != recipe.family
            or written.get("options") != list(recipe.options)
        ):
            raise CacheCorruptError(f"{MANIFEST}: its family, arch and options are not those of recipe {self.digest}")

    def check_cubin(self, cubin: bytes) -> None:
        """Check the size, SHA-256, architecture and kernel of ``cubin``. Raises CacheCorruptError."""
        if len(cubin) != self.cubin_bytes or hashlib.sha256(cubin).hexdigest() != self.cubin_sha256:
            raise CacheCorruptError(f"{CUBIN}: SHA-256 or size is not the published one")
        check_elf(cubin, self.arch, self.symbol)

    def check_source(self, source: bytes) -> Recipe:
        """The recipe, recomputed from its preimage and ``source``. Raises CacheCorruptError when they do not fit."""
        try:
            recipe = Recipe.from_json(self.recipe, source.decode())
        except ValueError as error:
            raise CacheCorruptError(f"{SOURCE}: {error}") from None
        if len(source) != self.source_bytes:
            raise CacheCorruptError(f"{SOURCE}: {len(source)} bytes, not the published size")
        return recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFiles:
    """The three files of an entry, read whole."""

    cubin: bytes
    source: bytes
    manifest: bytes

    def check(self, digest: str, toolchain: str) -> Manifest:
        """Check everything, also that the recipe can be recomputed from the files. Raises CacheCorruptError."""
        manifest = Manifest.decode(self.manifest)
        manifest.check_place(digest, toolchain)
        manifest.check_source(self.source)
        manifest.check_cubin(self.cubin)
        return manifest

    def by_name(self) -> dict[str, bytes]:
        """File name to contents, in the order of writing: the manifest last."""
        return {CUBIN: self.cubin, SOURCE: self.source, MANIFEST: self.manifest}


def check_elf(cubin: bytes, arch: str, symbol: str) -> None:
    """Check that ``cubin`` is device code for ``arch`` with a section ``.text.<symbol>``. Raises CacheCorruptError.

    ELF ABI version 7 keeps the SM number in bits 0-7 of e_flags, version 8 in bits 8-23. NVRTC 12.9 marks arch-specific
    targets (``a``) in bit 11 of version 7 and bit 3 of version 8; NVRTC 13.5 never sets that bit. So a set bit
    requires an ``a``, and a clear bit says nothing. The recipe hashes the name with its suffix in any case.
    """
    if len(cubin) < 64 or cubin[:5] != b"\x7fELF\x02":
        raise CacheCorruptError(f"{CUBIN}: not a 64-bit ELF file")
    (machine,), (flags,) = struct.unpack_from("<H", cubin, 18), struct.unpack_from("<I", cubin, 48)
    old = cubin[8] < 8
    sm = flags & 0xFF if old else flags >> 8 & 0xFFFF
    specific = bool(flags & (0x800 if old else 0x8))
    named = arch.removeprefix("sm_")
    if machine != _EM_CUDA or str(sm) != named.rstrip("af") or (specific and not named.endswith("a")):
        raise CacheCorruptError(
            f"{CUBIN}: ELF machine {machine}, sm_{sm}{'a' * specific}; wanted device code for {arch}"
        )
    if b".text." + symbol.encode() + b"\0" not in cubin:
        raise CacheCorruptError(f"{CUBIN}: holds no kernel {symbol}")


def is_digest(name: str) -> bool:
    """Whether ``name`` is 64 lower-case hex digits."""
    return _DIGEST.fullmatch(name) is not None


@functools.lru_cache(64)
def is_toolchain(name: str) -> bool:
    """Whether ``name`` may name a toolchain folder: at most 100 of ``a-z 0-9 _ + -`` and single inner dots."""
    return len(name) <= 100 and _TOOLCHAIN.fullmatch(name) is not None


def newest_first(toolchains: list[str]) -> list[str]:
    """Toolchain names by descending version, numbers compared as numbers (12.10 before 12.9)."""
    return sorted(
        toolchains,
        key=lambda name: [
            (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)
        ],
        reverse=True,
    )
