"""Printing: JSON documents and tables on stdout, messages on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence

import typer

SCHEMA_VERSION = 1
"""Version of every ``--json`` document. It changes when a member is renamed or removed."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def say(message: str) -> None:
    """A message for the user, on stderr."""
    typer.echo(visible(message, keep="\n\t"), err=True)


def put(text: str) -> None:
    """Data, on stdout, with a line end unless it has one. On a terminal, unprintable characters are escaped."""
    shown = visible(text, keep="\n\t") if sys.stdout.isatty() else text
    typer.echo(
        shown, nl=not text.endswith("\n"), color=True
    )  # without color=True typer drops text that looks like a colour code


def visible(text: str, keep: str = "") -> str:
    """``text`` with escapes, such as ``\\x1b``, for unprintable characters but those in ``keep``.

    So no text from a cache entry can control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def put_json(command: str, **members: object) -> None:
    """The one JSON document of a command, on stdout."""
    put(json.dumps({"schema_version": SCHEMA_VERSION, "command": command, **members}, indent=2))


def put_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns on stdout, numbers to the right. A terminal gets wrapped lines, but never within a word."""
    from rich.console import Console
    from rich.table import Table

    cells = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        numbers = all(isinstance(row[index], (int, float)) for row in cells)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(visible(str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 1000, markup=False, highlight=False)
    words = console.measure(table, options=console.options.update(width=1000)).minimum
    console.width = max(console.width, words)  # the terminal itself breaks lines that are longer
    console.print(table)


def put_facts(facts: Iterable[tuple[str, object]]) -> None:
    """``name  value`` lines on stdout."""
    lines = list(facts)
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        put(f"{visible(name):<{width}}  {visible(str(value))}")


def plural(count: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``, ``3 entries``."""
    many = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"


def human_bytes(count: int) -> str:
    """A size to read: ``512 B``, ``1.5 MiB``."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:.{min(power, 1)}f} {_UNITS[power]}"


def utc(seconds: float) -> str:
    """Seconds since 1970 as ``2026-01-31T12:00:00Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
