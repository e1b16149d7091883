"""``jitfp4 render``: print generated sources, and compare them with the committed golden files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from jitfp4.cli.options import ArchNames, AsJson, complete_kernels, examples, read_archs
from jitfp4.cli.output import plural, put, put_json, say
from jitfp4.errors import ArgumentError

EXAMPLES = examples(
    "jitfp4 render quantize/vector --arch sm_100a",
    "jitfp4 render --arch all --out generated/",
    "jitfp4 render --check",
    "jitfp4 render --update",
)


def render(
    kernel: Annotated[
        str | None,
        typer.Argument(metavar="KERNEL", autocompletion=complete_kernels, help="A kernel, or a family of them."),
    ] = None,
    arch: ArchNames = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write files to DIR, not to stdout.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Print differences to the golden files.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Rewrite the golden files.")] = False,
    golden: Annotated[Path, typer.Option(metavar="DIR", help="Where the golden files are.")] = Path("tests/golden"),
    as_json: AsJson = False,
) -> None:
    """Generate CUDA C++ sources; needs neither a compiler nor a GPU.

    Without --arch it generates for the architectures of the golden files. Exit status: 0; 1 when --check finds a golden
    file that differs, is missing or belongs to no kernel; 2 an error.
    """
    if check or update:
        if (check and update) or out is not None or arch is not None:
            raise ArgumentError("render", "contradicting options", "one of --check, --update, or --arch and --out")
        (_check if check else _update)(golden, kernel, as_json)
    else:
        _generate(kernel, arch, out, as_json)


def _generate(kernel: str | None, arch: str | None, out: Path | None, as_json: bool) -> None:
    from jitfp4.golden import GOLDEN_ARCHS, sources

    generated = sources(read_archs(arch if arch is not None else ",".join(GOLDEN_ARCHS)), kernel)
    if out is not None:
        for path, source in generated.items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_text(source)
    if as_json:
        put_json("render", sources=[_fields(path, source) for path, source in generated.items()])
    else:
        for path, source in generated.items():
            put(source if out is None else str(out / path))
    say(plural(len(generated), "source"))


def _check(golden: Path, kernel: str | None, as_json: bool) -> None:
    from jitfp4.golden import drift

    if not golden.is_dir():
        raise ArgumentError("--golden", str(golden), "the folder of the golden files; run this in a checkout")
    drifted = list(drift(golden, kernel))
    if as_json:
        put_json("render", drift=[{"path": d.path, "kind": d.kind, "diff": d.diff} for d in drifted])
    else:
        for item in drifted:
            put(item.diff)
            say(f"{item.kind}: {golden / item.path}")
    if drifted:
        say(f"{plural(len(drifted), 'golden file')} drifted; after a review: jitfp4 render --update")
        raise typer.Exit(1)
    say("the golden files are what the templates generate")


def _update(golden: Path, kernel: str | None, as_json: bool) -> None:
    from jitfp4.golden import update

    done = {"changed": "rewritten", "missing": "added", "extra": "removed"}
    drifted = update(golden, kernel)
    if as_json:
        put_json("render", updated=[{"path": d.path, "kind": done[d.kind]} for d in drifted])
    else:
        for item in drifted:
            put(f"{done[item.kind]} {golden / item.path}")
    say(f"{plural(len(drifted), 'golden file')} updated")


def _fields(path: str, source: str) -> dict[str, str]:
    return {"path": path, "sha256": hashlib.sha256(source.encode()).hexdigest(), "source": source}
