"""The command line: ``jitfp4``, and ``python -m jitfp4``.

Data goes to stdout, messages to stderr, and every command takes ``--json``. An error that jitfp4 raises on purpose is a
message and exit status 2. Commands import what they need when they run: ``jitfp4 cache dir`` loads neither torch nor
NVRTC.
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
        if sys.stdout is None:  # closed: the work is done all the same, and no file of ours takes its number
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - open until the end
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (Jitfp4Error, OSError) as error:
            say(f"jitfp4: {error}")
            raise typer.Exit(2) from None


app = typer.Typer(
    name="jitfp4",
    cls=_Commands,
    help="FP4 GPU kernels: prebuild them, look at their source, look after their cache.",
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
        bool, typer.Option("--version", callback=_put_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


app.command(epilog=warmup.EXAMPLES)(warmup.warmup)
app.command(epilog=render.EXAMPLES)(render.render)
app.add_typer(cache.app)
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(epilog=tactics.FAMILIES_EXAMPLES)(tactics.families)
app.command(epilog=tactics.EXAMPLES)(tactics.tactics)
app.command(epilog=tactics.TUNE_EXAMPLES)(tactics.tune)
app.command("sim", epilog=simulate.EXAMPLES)(simulate.simulate)
