"""The key of a kernel: SHA-256 over framed parts, so that two different recipes never hash the same bytes.

    preimage = part+                    in the order schema, family, arch, option*, source
    part     = label NUL length payload
    length   = 8 bytes, big-endian, of the payload alone

Nothing else enters the key: no path, time, host, environment or compiler. The source is one file without ``#include``
and the compiler is the folder below the recipe, see cache_layout.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

SCHEMA = 1
"""Version of this preimage and of the folder layout. A change of either is a new number, hence a new digest."""


def frame(parts: Iterable[tuple[str, bytes]]) -> bytes:
    """The bytes that are hashed for ``parts``. Injective: no two part lists have the same frame."""
    return b"".join(label.encode() + b"\0" + len(payload).to_bytes(8, "big") + payload for label, payload in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides what a kernel is, apart from the compiler build.

    ``family`` is the name of the kernel: the label is part of what is hashed, so another word would be another SCHEMA.
    ``options`` are the compiler's, in order. ``source`` is the complete generated file. ``digest`` is 64 hex digits.
    """

    family: str
    arch: str
    options: tuple[str, ...]
    source: str
    schema: int = SCHEMA
    digest: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha256(frame(self.parts())).hexdigest())

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """The labelled payloads, in the order in which they are hashed."""
        yield "schema", str(self.schema).encode()
        yield "family", self.family.encode()
        yield "arch", self.arch.encode()
        for option in self.options:
            yield "option", option.encode()
        yield "source", self.source.encode()

    def explain(self) -> str:
        """What was hashed, as text: the digest, then one line per part with its length in bytes, the source last."""
        lines = [f"recipe {self.digest}"]
        for label, payload in self.parts():
            text = "" if label == "source" else f"  {payload.decode()}"
            lines.append(f"{label:<7}{len(payload):>8}{text}")
        return "\n".join(lines) + "\n\n" + self.source

    def to_json(self) -> dict[str, object]:
        """The preimage without the source text, which is stored beside it and named by its SHA-256."""
        return {
            "digest": self.digest,
            "schema": self.schema,
            "family": self.family,
            "arch": self.arch,
            "options": list(self.options),
            "source_sha256": hashlib.sha256(self.source.encode()).hexdigest(),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, object], source: str) -> Recipe:
        """The recipe that to_json() described. Raises ValueError when ``fields`` and ``source`` hash differently."""
        match fields:
            case {"schema": int(schema), "family": str(family), "arch": str(arch), "options": list(options)}:
                texts = tuple(option for option in options if isinstance(option, str))
                recipe = cls(schema=schema, family=family, arch=arch, options=texts, source=source)
            case _:
                raise ValueError("recipe: schema, family, arch or options missing or of the wrong type")
        if recipe.to_json() != dict(fields):
            raise ValueError(f"recipe: these parts hash to {recipe.digest}, not to {fields.get('digest')}")
        return recipe
