"""The command line: ``jitfp4``, and ``python -m jitfp4``.

Data goes to stdout, messages to stderr, and every command takes ``--json``. An error of jitfp4 or of the file system
becomes a message and exit status 2. Commands import what they need when they run: ``jitfp4 cache dir`` loads neither
torch nor NVRTC.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jitfp4.cli import (
    cache,
    doctor,
    render,
    simulate,
    tactics,
    transfer,  # noqa: F401 - adds its commands to cache's
    warmup,
)
from jitfp4.cli.output import put, say
from jitfp4.errors import Jitfp4Error
from jitfp4.version import version

__all__ = ["app"]


class _Commands(TyperGroup):
    """Turns the package's errors, and those of the file system, into a message and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        if sys.stdout is None:  # closed: work all the same, and let no other file get the descriptor of stdout
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - open until the end
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # so that a failed write is reported here, and not when the interpreter ends
        except BrokenPipeError:
            raise
        except (Jitfp4Error, OSError) as error:
            say(f"jitfp4: {error}")
            _drop_what_cannot_be_written()
            raise typer.Exit(2) from None


def _drop_what_cannot_be_written() -> None:
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would try again, and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    name="jitfp4",
    cls=_Commands,
    help="FP4 GPU kernels: prebuild them, show their source, manage their cache.",
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _put_version(wanted: bool) -> None:
    if wanted:
        put(f"jitfp4 {version()}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_put_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command(epilog=warmup.EXAMPLES)(warmup.warmup)
app.command(epilog=render.EXAMPLES)(render.render)
app.add_typer(cache.app)
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("operations", epilog=tactics.OPERATIONS_EXAMPLES)(tactics.list_operations)
app.command("families", hidden=True, epilog=tactics.OPERATIONS_EXAMPLES)(tactics.list_operations)
app.command(epilog=tactics.EXAMPLES)(tactics.tactics)
app.command(epilog=tactics.TUNE_EXAMPLES)(tactics.tune)
app.command("sim", epilog=simulate.EXAMPLES)(simulate.simulate)
