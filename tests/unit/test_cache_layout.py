"""cache_layout.md says what the code does: its example is executed, from the document's own grammar."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from jitfp4.cache.layer import VERSION, entry_path
from jitfp4.keys import SCHEMA, Recipe

TEXT = (Path(__file__).parents[2] / "cache_layout.md").read_text()


def example(name: str) -> str:
    match = re.search(rf"<!-- example: {name} -->\n```\w*\n(.*?)```", TEXT, re.DOTALL)
    assert match, name
    return match[1]


def test_the_digest_follows_from_the_documented_grammar() -> None:
    fields, source = json.loads(example("recipe")), example("source")
    options = [("option", option) for option in fields["options"]]
    parts = [
        ("schema", str(fields["schema"])),
        ("family", fields["family"]),
        ("arch", fields["arch"]),
        *options,
        ("source", source),
    ]
    preimage = b"".join(
        label.encode() + b"\0" + len(payload.encode()).to_bytes(8, "big") + payload.encode() for label, payload in parts
    )
    assert hashlib.sha256(preimage).hexdigest() == example("digest").strip()
    assert f"that line with its line feed, {len(source)} bytes. The preimage is {len(preimage)} bytes" in TEXT


def test_the_code_gives_the_documented_digest_and_folder() -> None:
    fields = json.loads(example("recipe"))
    recipe = Recipe(
        family=fields["family"], arch=fields["arch"], options=tuple(fields["options"]), source=example("source")
    )
    assert (fields["schema"], VERSION) == (SCHEMA, f"v{SCHEMA}")
    assert recipe.digest == example("digest").strip()
    folder = example("folder").strip()
    assert f"{entry_path(recipe.digest, folder.split('/')[3])}/" == folder
