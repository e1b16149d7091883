"""``jitfp4 tactics``: the tactics that can run a problem, and the selected one; ``jitfp4 tune``: measure them."""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stdout
from enum import EnumType
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from jitfp4.arch import ARCHS, Arch
from jitfp4.cli.gpus import cuda_driver
from jitfp4.cli.options import AsJson, CacheDir, complete_arch, complete_operation, configure, examples, split
from jitfp4.cli.output import plural, put, put_json, put_table, say
from jitfp4.config import read_config
from jitfp4.errors import ArgumentError, UnsupportedArchError

if TYPE_CHECKING:
    from jitfp4.operation import Operation
    from jitfp4.tactics import TacticsFile

OPERATIONS_EXAMPLES = examples("jitfp4 operations", "jitfp4 operations --json")
EXAMPLES = examples(
    "jitfp4 tactics quantize --arch sm_100a",
    "jitfp4 tactics mm_bf16_fp4 --problem m=16,n=8192,k=8192 --arch sm_90a --why",
)
TUNE_EXAMPLES = examples(
    "jitfp4 tune serve_once.py --out h200.tactics.json",
    "jitfp4 tune --out h200.tactics.json --seconds 20 -- serve_once.py --batch 16",
)
_BOOLS = {"true": True, "false": False}


def list_operations(as_json: AsJson = False) -> None:
    """List the operations, their kernels, and the fields of the problems that selection sees."""
    import jitfp4.families  # noqa: F401 - registers every operation
    from jitfp4.operation import operations

    found = [
        (one.name, [kernel.name for kernel in one.kernels], list(get_type_hints(one.problem_type)))
        for one in operations()
    ]
    if as_json:
        rows = [{"operation": name, "kernels": kernels, "problem": fields} for name, kernels, fields in found]
        put_json("operations", operations=rows)
    else:
        put_table(["operation", "kernels", "problem"], [[name, *map(", ".join, rest)] for name, *rest in found])


def tactics(
    operation: Annotated[
        str,
        typer.Argument(
            metavar="OPERATION",
            autocompletion=complete_operation,
            help="An operation that jitfp4 operations lists.",
        ),
    ],
    problem: Annotated[
        str | None, typer.Option(metavar="FIELDS", help="NAME=VALUE,...; other fields are those of a typical problem.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_arch,
            help="Architecture; by default that of this machine's GPU.",
        ),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Also list the tactics that cannot run it, with reasons.")] = False,
    file: Annotated[
        Path | None, typer.Option("--tactics", metavar="FILE", help="A tactics file, instead of JITFP4_TACTICS.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the tactics that can run a problem, and mark the one that a call uses.

    A tactic of a tactics file goes before one of the committed tables; the line with * says which of them it is.
    """
    import jitfp4.families  # noqa: F401 - registers every operation
    from jitfp4.operation import operations

    (found,) = operations(operation)
    target = Arch.of(arch) if arch is not None else _arch_here()
    if not (typical := found.problems(target)):
        raise UnsupportedArchError(f"{operation} has no kernel for {target.name}")
    asked = _read_problem(typical[0], problem)
    found.check(asked, target)
    _put_tactics(found, asked, target, _tuned(file), why, as_json)


def tune(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python program, which is run once.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The tactics file to write. An existing one is continued.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARG]...", help="Arguments of the program, after --.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Longest time to spend on one problem.")] = 60.0,
    again: Annotated[bool, typer.Option("--again", help="Also measure the problems that the file has.")] = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Run a program, and measure every tactic for each problem that it launches, on this machine's GPU.

    The fastest tactics are written to a file; JITFP4_TACTICS=FILE uses it. The file is written after each problem, so
    Ctrl-C keeps what is measured, and the next run continues. Exit status: 0, 2 an error, 130 Ctrl-C.
    """
    configure(cache_dir)
    from jitfp4.tuning import tune as measure

    try:
        file = measure(lambda: _run(script, args or []), out, seconds=seconds, again=again)
    except KeyboardInterrupt:
        say(f"interrupted: {out} has what is measured; the same command goes on from there")
        raise typer.Exit(130) from None
    choices = sorted(file.choices.values(), key=lambda choice: choice.key)
    if as_json:
        fields = [{name: getattr(choice, name) for name in choice.__dataclass_fields__} for choice in choices]
        put_json("tune", path=str(out), gpu=file.gpu, toolchain=file.toolchain, choices=fields)
    else:
        rows = [
            [choice.operation, _text(choice.problem), choice.kernel, _text(choice.tactic), choice.us, choice.measured]
            for choice in choices
        ]
        put_table(["operation", "problem", "kernel", "tactic", "us", "measured"], rows)
    say(f"{out}: {plural(len(choices), 'problem')} on {file.gpu}; use it: JITFP4_TACTICS={out}")


def _run(script: Path, args: list[str]) -> None:
    """Run the program as ``python SCRIPT ARGS`` would; its output goes to stderr."""
    before, path = sys.argv, sys.path[:]
    sys.argv, sys.path = [str(script), *args], [str(script.resolve().parent), *path]
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as done:
        if done.code not in (None, 0):
            raise ArgumentError(
                "SCRIPT", f"{script}, which ended with {done.code!r}", "a program that succeeds"
            ) from None
    finally:
        sys.argv, sys.path = before, path


# ---- arguments -------------------------------------------------------------------------------------------------------


def _arch_here() -> Arch:
    driver = cuda_driver()
    if driver is None or not driver.gpus:
        raise ArgumentError("--arch", "none, on a machine without a GPU", f"--arch with one of {', '.join(ARCHS)}")
    return Arch.of_capability(*driver.gpus[0].capability)


def _read_problem(like: Any, text: str | None) -> Any:
    """``like`` with the fields of NAME=VALUE,... replaced. Raises ArgumentError."""
    kinds, given = get_type_hints(type(like)), {}
    for part in split(text):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ArgumentError("--problem", repr(part), f"NAME=VALUE with a NAME of {', '.join(kinds)}")
        given[name] = _read_field(name, value, kinds[name])
    return like._replace(**given)


def _read_field(name: str, text: str, kind: Any) -> Any:
    known: dict[str, Any] = {}
    if isinstance(kind, EnumType):
        known = {key: member for member in kind for key in (member.name, str(member.value))}  # type: ignore[var-annotated]
    elif kind is bool:
        known = _BOOLS
    elif text.isdecimal():
        return int(text)
    if text not in known:
        raise ArgumentError("--problem", f"{name}={text}", ", ".join(known) if known else f"{name}=a number")
    return known[text]


def _tuned(path: Path | None) -> TacticsFile | None:
    """The file of ``--tactics``, or else of JITFP4_TACTICS. It may have been measured on another machine."""
    from jitfp4.tactics import read

    path = path or read_config().tactics
    return read(path) if path is not None else None


# ---- output ----------------------------------------------------------------------------------------------------------


def _put_tactics(
    operation: Operation[Any, Any], problem: Any, arch: Arch, tuned: TacticsFile | None, why: bool, as_json: bool
) -> None:
    from jitfp4.spec import fields_of

    selection = operation.selection(problem, arch, tuned)
    legal, rejected = [], []
    for kernel in operation.kernels:
        for tactic in kernel.tactics:
            reason = kernel.rejects(problem, tactic, arch)
            if reason is None:
                legal.append((kernel, tactic, kernel.specialise(problem, tactic)))
            else:
                rejected.append((kernel, tactic, reason))
    if as_json:
        put_json(
            "tactics",
            operation=operation.name,
            arch=arch.name,
            problem=fields_of(problem),
            selected=fields_of(selection.tactic),
            by=selection.by,
            tactics=[
                {"kernel": k.name, "tactic": fields_of(t), "spec": s.fields(), "selected": t == selection.tactic}
                for k, t, s in legal
            ],
            rejected=[{"kernel": k.name, "tactic": fields_of(t), "why": reason} for k, t, reason in rejected],
        )
        return
    put(f"{operation.name} {_text(fields_of(problem))} on {arch.name}")
    rows = []
    for kernel, tactic, spec in legal:
        fields = fields_of(tactic)
        rest = {name: value for name, value in spec.fields().items() if name not in fields}
        rows.append(["*" if tactic == selection.tactic else "", kernel.name, _text(fields), _text(rest)])
    put_table(["", "kernel", "tactic", "other fields of the spec"], rows)
    put(f"* {selection.by}")
    if why:
        put_table(["", "rejected", "tactic", "why"], [["-", k.name, _text(fields_of(t)), r] for k, t, r in rejected])
    say(f"{plural(len(legal), 'tactic')} can run it, {len(rejected)} cannot{'' if why else '; --why says why'}")


def _text(fields: Any) -> str:
    return ",".join(f"{name}={str(value).lower()}" for name, value in fields.items())
