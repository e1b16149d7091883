"""How much of the package and of the templates stands twice, by commit; bench/README.md has the counts.

Run anywhere: ``python -m bench.passages COMMIT ...``.
A passage is at least six lines that follow each other and stand elsewhere too, but for indentation, comments, and lines
without a word, such as brackets. Imports, includes and lists of names are not counted: parameters of functions that
engines call with the same arguments, fields of specs, and lines that a spec renders.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from typing import NamedTuple

PARTS = {"jitfp4": (".py", "#"), "templates": (".j2", "//")}
LEAST = 6
_NAMES = re.compile(
    r"(from|import|//% include)\b|\*?\"?\w+\"?(: [^=]+)?( ?= ?[\w.\"]+)?,\Z|\w+: [\w.\[\], |]+\Z|.*\$\{spec\."
)


class Count(NamedTuple):
    """What a part has: files, lines, passages that stand twice, and lines of them."""

    files: int
    lines: int
    passages: int
    repeated: int


def count(texts: dict[str, str], comment: str) -> Count:
    """Count in files, by name."""
    files = {name: _code(text, comment) for name, text in texts.items()}
    places = defaultdict[tuple[str, ...], list[tuple[str, int]]](list)
    for name, lines in files.items():
        for i in range(len(lines) - LEAST + 1):
            places[tuple(lines[i : i + LEAST])].append((name, i))
    starts = defaultdict[str, set[int]](set)
    for found in places.values():
        for name, i in found if len(found) > 1 else ():
            starts[name].add(i)
    passages = sum(i - 1 not in of for of in starts.values() for i in of)
    repeated = sum(len({i + j for i in of for j in range(LEAST)}) for of in starts.values())
    return Count(len(texts), sum(text.count("\n") for text in texts.values()), passages, repeated)


def _code(text: str, comment: str) -> list[str]:
    lines = [line.split(f" {comment} ")[0].strip() for line in text.splitlines()]
    return [
        line
        for line in lines
        if re.search(r"\w", line)
        and not _NAMES.match(line)
        and (not line.startswith(comment) or line.startswith("//%"))
    ]


def of_commit(commit: str, part: str) -> Count:
    """Count in a part of the tree of a commit."""
    suffix, comment = PARTS[part]
    names = _git("ls-tree", "-r", "--name-only", commit, part).splitlines()
    return count({name: _git("show", f"{commit}:{name}") for name in names if name.endswith(suffix)}, comment)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+")
    for commit in parser.parse_args().commits:
        for part in PARTS:
            files, lines, passages, repeated = of_commit(commit, part)
            print(f"| {commit} | {part} | {files} | {lines:,} | {passages} | {repeated} |")


if __name__ == "__main__":
    main()
