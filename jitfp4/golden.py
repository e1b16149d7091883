"""Golden sources: what the templates generate, committed so that a review sees what a change of a template does.

Files of each kernel below ``tests/golden``: ``<kernel>/<arch>.cu`` is the source of its first specialisation on the
first of its architectures in GOLDEN_ARCHS, or the first that it has. On another one ``<kernel>/<arch>.diff`` says how
the source of the same specialisation differs; if it has no such, another is whole. ``<kernel>/<arch>.csv`` has a line
for each specialisation with its fields and the digest of its source.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jitfp4.families  # noqa: F401 - registers every family
from jitfp4.arch import ARCHS, Arch
from jitfp4.kernel import AnyKernel, kernels
from jitfp4.spec import KernelSpec

GOLDEN_ARCHS = ("sm_90a", "sm_100a")
"""Without and with the FP4 instructions: what the others generate differs from one of these in the header only."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A golden file that is not what the templates generate. ``kind`` is changed, missing or extra."""

    path: str
    kind: str
    diff: str


def source_path(kernel: AnyKernel, spec: KernelSpec, arch: Arch) -> str:
    """A file name for one generated source, such as ``quantize/vector/nvfp4-bf16-layout_8x4-no_silu.sm_90a.cu``."""
    return f"{kernel.name}/{'-'.join(_words(spec))}.{arch.name}.cu"


def sources(archs: Sequence[Arch], pattern: str | None = None) -> dict[str, str]:
    """Path to generated source of every specialisation of the kernels that ``pattern`` names (of all: None).

    Raises ArgumentError when ``pattern`` names none.
    """
    return {
        source_path(kernel, spec, arch): kernel.render(spec, arch)
        for kernel in kernels(pattern)
        for arch in archs
        for spec in kernel.specs(arch)
    }


def goldens(pattern: str | None = None) -> dict[str, str]:
    """Golden path to text of the kernels that ``pattern`` names (of all: None)."""
    texts = {}
    for kernel in kernels(pattern):
        having = [arch for arch in ARCHS.values() if kernel.specs(arch)]
        shown: tuple[KernelSpec, Arch, str] | None = None
        for arch in [arch for arch in having if arch.name in GOLDEN_ARCHS] or having[:1]:
            rendered = {spec: kernel.render(spec, arch) for spec in kernel.specs(arch)}
            texts[f"{kernel.name}/{arch.name}.csv"] = _table(rendered)
            if shown is not None and shown[0] in rendered:
                spec, whole, text = shown
                texts[f"{kernel.name}/{arch.name}.diff"] = _diff(
                    f"{whole.name}.cu", f"{arch.name}.cu", text, rendered[spec]
                )
            else:
                spec, text = next(iter(rendered.items()))
                texts[f"{kernel.name}/{arch.name}.cu"] = text
                shown = shown or (spec, arch, text)
    return texts


def drift(root: Path, pattern: str | None = None) -> Iterator[Drift]:
    """What ``root`` holds beside, without or other than the generated sources, in path order."""
    generated = goldens(pattern)
    committed = _read(root, pattern)
    for path in sorted(generated.keys() | committed.keys()):
        old, new = committed.get(path), generated.get(path)
        if old != new:
            kind = "missing" if old is None else "extra" if new is None else "changed"
            yield Drift(path, kind, _diff(f"golden/{path}", f"generated/{path}", old or "", new or ""))


def update(root: Path, pattern: str | None = None) -> list[Drift]:
    """Make ``root`` hold exactly the generated sources. Returns what had drifted."""
    drifted = list(drift(root, pattern))
    generated = goldens(pattern)
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


def digest(source: str) -> str:
    """The digest of a source in tables: the first half of its SHA-256."""
    return hashlib.sha256(source.encode()).hexdigest()[:32]


def _table(rendered: Mapping[KernelSpec, str]) -> str:
    """A line for each specialisation, sorted, so that a new one moves no other."""
    names = next(iter(rendered)).fields()
    lines = sorted(",".join([*map(_cell, spec.fields().values()), digest(text)]) for spec, text in rendered.items())
    return "\n".join([",".join([*names, "source"]), *lines, ""])


def _cell(value: str | int | bool) -> str:
    return str(value).lower()


def _read(root: Path, pattern: str | None) -> dict[str, str]:
    return {
        file.relative_to(root).as_posix(): file.read_text()
        for file in (root / (pattern or "")).rglob("*")
        if file.is_file()
    }


def _diff(left: str, right: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), left, right)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
