"""Options that several commands take, and the parsers of their values."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jitfp4.arch import ARCHS, Arch
from jitfp4.config import Config, read_config, read_path, read_sha256
from jitfp4.errors import ArgumentError

if TYPE_CHECKING:
    from jitfp4.warmup import Task

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", metavar="DIR", readable=False, help="The cache to use, instead of JITFP4_CACHE_DIR."),
]


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell completes a list of names with, which commas separate."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _kernels() -> Iterable[str]:
    """Families and their kernels."""
    import jitfp4.families  # noqa: F401 - registers every kernel
    from jitfp4.kernel import kernels

    names = [kernel.name for kernel in kernels()]
    return (*dict.fromkeys(name.split("/")[0] for name in names), *names)


def _operations() -> Iterable[str]:
    import jitfp4.families  # noqa: F401 - registers every operation
    from jitfp4.operation import operations

    return (operation.name for operation in operations())


complete_arch, complete_archs = completing(lambda: ARCHS), completing(lambda: (*ARCHS, "all"))
complete_kernels, complete_operation = completing(_kernels), completing(_operations)


def _check_archs(text: str | None) -> str | None:
    """Refuse a wrong name before the command imports torch, which takes seconds."""
    if text is not None:
        read_archs(text)
    return text


ArchNames = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="NAMES",
        callback=_check_archs,
        autocompletion=complete_archs,
        help=f"Comma-separated: {', '.join(ARCHS)}; or all.",
    ),
]

KernelNames = Annotated[
    str | None,
    typer.Option(
        "--kernel",
        "--family",
        metavar="NAMES",
        autocompletion=completing(lambda: (*_kernels(), *_operations())),
        help="Comma-separated: kernels, families of them, or operations.",
    ),
]

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def configure(cache_dir: Path | None) -> Config:
    """The environment's configuration, with ``--cache-dir`` in place of JITFP4_CACHE_DIR for this whole process."""
    if cache_dir is not None:
        os.environ["JITFP4_CACHE_DIR"] = str(read_path("--cache-dir", str(cache_dir)))
    return read_config()


def examples(*lines: str) -> str:
    """The examples at the end of a ``--help`` text."""
    return "\n\n".join(("Examples:", *lines))


def split(text: str | None) -> tuple[str, ...]:
    """The parts of ``a,b``, without repetitions; () for None."""
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def read_archs(text: str) -> tuple[Arch, ...]:
    """The architectures that ``--arch`` names. Raises ArgumentError for an unknown or an empty one."""
    if text == "all":
        return tuple(ARCHS.values())
    names = split(text)
    for name in names or (text,):
        if name not in ARCHS:
            like = difflib.get_close_matches(name, ARCHS, n=1, cutoff=0.8)
            hint = f"; did you mean {like[0]}?" if like else ""
            raise ArgumentError("--arch", repr(name), f"{', '.join(ARCHS)}, or all{hint}")
    return tuple(ARCHS[name] for name in names)


def read_kernels(text: str | None) -> tuple[str, ...]:
    """The kernels and families that ``--kernel`` names, () for None. Raises ArgumentError when the text names none."""
    if text is not None and not split(text):
        raise ArgumentError("--kernel", repr(text), "kernels, or families of them, separated by commas")
    return split(text)


def read_digest(text: str | None, config: Config) -> str | None:
    """The digest of ``--digest``, or else of JITFP4_BUNDLE_SHA256. Raises ArgumentError for other text."""
    return read_sha256("--digest", text) if text is not None else config.bundle_sha256


def read_plan(path: Path) -> tuple[Task, ...]:
    """The tasks of a plan file. Raises ArgumentError for another file, OSError when it cannot be read."""
    from jitfp4 import warmup

    try:
        return warmup.read_plan(path.read_text(encoding="utf-8", errors="replace"))
    except ArgumentError as error:
        raise ArgumentError("plan", f"{path}: {error.args[1]}", error.args[2]) from None


def read_shard(text: str) -> tuple[int, int]:
    """I and N of ``I/N``. Raises ArgumentError."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if not found:
        raise ArgumentError("--shard", repr(text[:40]), "I/N with 0 <= I < N")
    return int(found[1]), int(found[2])


def read_bytes(name: str, text: str | None) -> float | None:
    """A size such as ``500M`` or ``2GiB``, in bytes; units are powers of 1024."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise ArgumentError(name, repr(text), "a size such as 500M or 2GiB")
    return float(found[1]) * _BYTES[found[2].upper()]


def read_seconds(name: str, text: str | None) -> float | None:
    """A time such as ``12h`` or ``30d``, in seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    if not found:
        raise ArgumentError(name, repr(text), "a time such as 90s, 45m, 12h, 30d or 2w")
    return float(found[1]) * _SECONDS[found[2]]
