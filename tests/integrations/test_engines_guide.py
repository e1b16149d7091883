"""The guide of engines: its messages are those of the code, its extras and programs are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/engines.md").read_text()


def test_messages_are_those_of_the_code() -> None:
    text = "\n".join(file.read_text() for file in (ROOT / "jitfp4/integrations").rglob("*.py"))
    source = re.sub(r"\s+", " ", text).replace('" "', "")
    named = re.findall(r"^\| `(.+?)`", GUIDE.partition("## When something is wrong")[2].partition("\n## ")[0], re.M)
    assert len(named) > 3
    for message in named:
        for part in re.split(r"\.\.\.|; allowed: ", message):
            words = part.strip().removesuffix(" ALiBi")
            assert words in source, message


def test_extras_and_programs_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"'jitfp4\[(.+?)\]'", GUIDE):
        assert set(named.split(",")) <= set(extras), named
    programs = re.findall(r"python (?:-m )?((?:examples/|bench\.)[\w./]+)", GUIDE)
    assert programs
    for program in programs:
        path = program if program.endswith(".py") else f"{program.replace('.', '/')}.py"
        assert (ROOT / path).exists(), program
