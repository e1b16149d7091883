"""docs/cli.md from the command line's own help: ``python -m tests.support.cli_page`` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from jitfp4.cli import app

PAGE = Path(__file__).parents[2] / "docs/cli.md"
HEAD = """# Command line

Data goes to stdout, messages to stderr. `--json` prints one JSON document instead of text, and `--help` what stands
here. An error of jitfp4 or of the file system is a message and exit status 2. `jitfp4 --install-completion` completes
options and their values, such as architectures, kernels and operations, in shells.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_sections("jitfp4", typer.main.get_command(app))])


def _sections(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for child, inner in command.commands.items():
            if not inner.hidden:
                yield from _sections(f"{name} {child}", inner)
        return
    yield f"## {name}\n"
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    usage = " ".join([name, "[OPTIONS]", *map(_metavar, arguments)])
    yield f"```\n{usage}\n```\n"
    yield re.sub(r"\s*\n\s*", " ", (command.help or "").replace("\n\n", "\0")).replace("\0", "\n\n") + "\n"
    rows = [(_names(param), param.help or "") for param in command.params if param.name != "help"]
    yield "| | |\n|---|---|\n" + "".join(f"| {names} | {' '.join(text.split())} |\n" for names, text in rows)
    if examples := [line for line in (command.epilog or "").split("\n\n")[1:] if line]:
        yield "```\n" + "\n".join(examples) + "\n```\n"


def _metavar(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    return name if param.required or name.startswith("[") else f"[{name}]"


def _names(param: Any) -> str:
    names = [f"`{name}`" for name in (*param.opts, *param.secondary_opts)]
    return ", ".join(names) if param.param_type_name == "option" else f"`{_metavar(param)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
