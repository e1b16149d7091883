"""Golden sources: the generated text of every specialisation, committed so that a review sees what a template does.

One file for each specialisation and each of GOLDEN_ARCHS: ``<family>/<spec>.<arch>.cu`` below ``tests/golden``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jitfp4.families  # noqa: F401 - registers every family
from jitfp4.arch import Arch
from jitfp4.registry import Family, families
from jitfp4.spec import KernelSpec

GOLDEN_ARCHS = ("sm_90a", "sm_100a")
"""Without and with the FP4 instructions: what the others generate differs from one of these in the header only."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A golden file that is not what the templates generate. ``kind`` is changed, missing or extra."""

    path: str
    kind: str
    diff: str


def golden_path(family: Family, spec: KernelSpec, arch: Arch) -> str:
    """Where a specialisation's golden file lies, such as ``quantize/vector/bf16-layout_8x4.sm_90a.cu``."""
    return f"{family.name}/{'-'.join(_words(spec))}.{arch.name}.cu"


def generate(archs: Sequence[Arch], pattern: str | None = None) -> dict[str, str]:
    """Golden path to generated source of every specialisation of the families that ``pattern`` names (of all: None).

    Raises ArgumentError when ``pattern`` names none.
    """
    return {
        golden_path(family, spec, arch): family.render(spec, arch)
        for family in families(pattern)
        for arch in archs
        for spec in family.specs(arch)
    }


def drift(root: Path, pattern: str | None = None) -> Iterator[Drift]:
    """What ``root`` holds beside, without or other than the generated sources, in path order."""
    generated = generate([Arch.of(name) for name in GOLDEN_ARCHS], pattern)
    committed = _read(root, pattern)
    for path in sorted(generated.keys() | committed.keys()):
        old, new = committed.get(path), generated.get(path)
        if old != new:
            kind = "missing" if old is None else "extra" if new is None else "changed"
            yield Drift(path, kind, _diff(path, old or "", new or ""))


def update(root: Path, pattern: str | None = None) -> list[Drift]:
    """Make ``root`` hold exactly the generated sources. Returns what had drifted."""
    drifted = list(drift(root, pattern))
    generated = generate([Arch.of(name) for name in GOLDEN_ARCHS], pattern)
    for item in drifted:
        file = root / item.path
        if item.kind == "extra":
            file.unlink()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(generated[item.path])
    return drifted


def _words(spec: KernelSpec) -> Iterator[str]:
    """A spec as short words, in field order: enum values as they are, numbers and flags with their name."""
    for name, value in spec.fields().items():
        match value:
            case bool():
                yield name if value else f"no_{name}"
            case int():
                yield f"{name}{value}"
            case _:
                yield value


def _read(root: Path, pattern: str | None) -> dict[str, str]:
    return {
        file.relative_to(root).as_posix(): file.read_text()
        for file in (root / (pattern or "")).rglob("*")
        if file.is_file()
    }


def _diff(path: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"golden/{path}", f"generated/{path}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
