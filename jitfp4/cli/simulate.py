"""``jitfp4 sim``: execute a PTX file on the CPU and look for races, missing fences and bad accesses."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jitfp4.cli.options import AsJson, complete_arch, examples
from jitfp4.cli.output import plural, put, put_facts, put_json
from jitfp4.errors import ArgumentError, SimError, SimParseError

if TYPE_CHECKING:
    from jitfp4.spec import Dim3

EXAMPLES = examples(
    "jitfp4 sim saxpy.ptx --grid 4 --block 256 'f32[1024]=random' 'f32[1024]' 1024 2.5",
    "jitfp4 sim gemm.ptx --grid 2,3 --block 128 --shared 98304 a.npy b.npy 'f32[256,384]' --out after/",
)

_SIZE = re.compile("[1-9][0-9]{0,9}")
FAULT = 1
"""Exit status when the simulator finds an error of the kernel."""
_TYPES = {
    **{f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("float", "int") for bits in (16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "i8": "int8",
    "bf16": "uint16",
}
_ARRAY = re.compile(r"(\w+)\[(\d+(?:,\d+)*)\](?:=(.+))?")


def simulate(
    ptx: Annotated[Path, typer.Argument(help="PTX text, as NVRTC or nvcc --ptx writes it.", metavar="KERNEL.ptx")],
    args: Annotated[
        list[str] | None,
        typer.Argument(
            help="One per parameter: FILE.npy, TYPE[SIZES] (zeros), TYPE[SIZES]=NUMBER|arange|random, a number, null.",
            metavar="[ARG]...",
        ),
    ] = None,
    grid: Annotated[str, typer.Option(help="CTAs of the grid: X[,Y[,Z]].")] = "1",
    block: Annotated[str, typer.Option(help="Threads of a CTA: X[,Y[,Z]].")] = "32",
    cluster: Annotated[str, typer.Option(help="CTAs of a cluster: X[,Y[,Z]].")] = "1",
    shared: Annotated[int, typer.Option(min=0, help="Dynamic shared memory in bytes.")] = 0,
    entry: Annotated[str | None, typer.Option(help="Name of the kernel, where the file has several.")] = None,
    arch: Annotated[
        str | None,
        typer.Option(autocompletion=complete_arch, help="Architecture; by default the target of the PTX."),
    ] = None,
    races: Annotated[bool, typer.Option(help="Look for races and missing fences.")] = True,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Run CTAs and warps in an order drawn from this number.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stop a kernel that does not end, after about this many instructions. One that several threads "
            "execute together counts once.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each array after the run: DIR/arg0.npy, ...")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Execute a kernel on the CPU, without a GPU, and check every access.

    Exit status: 0 no error found, 1 the kernel has an error, 2 another error, such as a wrong argument, or text
    that is no PTX.
    """
    import numpy as np

    from jitfp4 import sim
    from jitfp4.spec import Geometry

    try:
        text = ptx.read_text()
    except UnicodeDecodeError as error:
        raise ArgumentError("KERNEL.ptx", f"{ptx}: {error}", "text") from None
    values = [_read(f"ARG {number}", arg) for number, arg in enumerate(args or ())]
    geometry = Geometry(_dim("--grid", grid), _dim("--block", block), _dim("--cluster", cluster), shared)
    fault = ""
    stats = None
    try:
        stats = sim.run(text, values, geometry, arch or _target(text), entry=entry, races=races, seed=seed, limit=limit)
    except SimParseError:
        raise  # it says nothing of the kernel
    except MemoryError as error:
        raise ArgumentError("KERNEL.ptx", f"{ptx}: {error}", "what fits into memory, with every thread's own") from None
    except SimError as error:
        fault = f"{type(error).__name__}: {error}"
    if out is not None and not fault:
        out.mkdir(parents=True, exist_ok=True)
        for number, value in enumerate(values):
            if isinstance(value, np.ndarray):
                np.save(out / f"arg{number}.npy", value)
    if as_json:
        instructions, issued = (None, None) if stats is None else (stats.instructions, stats.issued)
        put_json("sim", ok=not fault, fault=fault or None, instructions=instructions, issued=issued)
    elif stats is None:
        put(fault)
    else:
        executed = f"{plural(stats.instructions, 'thread-instruction')}, issued {stats.issued:,} times"
        put_facts((("executed", executed), ("seconds", f"{stats.seconds:.3f}")))
        put("nothing found" if races else "nothing found; races were not looked for")
    if fault:
        raise typer.Exit(FAULT)


def _target(text: str) -> str:
    found = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    if found is None:
        raise ArgumentError("KERNEL.ptx", "text without .target", "PTX")
    return found[1]


def _dim(name: str, text: str) -> Dim3:
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(_SIZE.fullmatch(part.strip()) for part in parts):
        raise ArgumentError(name, text[:40], "one to three positive sizes, such as 4,2")
    x, y, z = (*map(int, parts), 1, 1)[:3]
    return x, y, z


def _read(name: str, text: str) -> Any:
    """A kernel argument from its text. Raises ArgumentError for a file or a number that gives none."""
    try:
        return _value(name, text)
    except (ArithmeticError, EOFError, MemoryError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(name, f"{text[:60]} ({str(error)[:100]})", "what NumPy can hold") from None


def _value(name: str, text: str) -> Any:
    """A kernel argument from its text."""
    import numpy as np

    if text == "null":
        return None
    if text.endswith(".npy"):
        return np.ascontiguousarray(np.load(text))
    if (array := _ARRAY.fullmatch(text)) is not None and array[1] in _TYPES:
        shape, dtype = tuple(map(int, array[2].split(","))), np.dtype(_TYPES[array[1]])
        if array[3] == "arange":
            return np.arange(np.prod(shape)).astype(dtype).reshape(shape)
        if array[3] == "random":
            values = np.random.default_rng(0).standard_normal(shape)
            return values.astype(dtype) if dtype.kind == "f" else (values * 100).astype(np.int64).astype(dtype)
        with np.errstate(over="raise"):
            return np.full(shape, _number(name, array[3] or "0"), dtype)
    return _number(name, text)


def _number(name: str, text: str) -> int | float:
    for read in (lambda: int(text, 0), lambda: float(text)):
        try:
            value = read()
        except ValueError:
            continue
        if not (isinstance(value, float) and math.isinf(value)) or "inf" in text.lower():  # 1e999 is no number
            return value
    allowed = f"FILE.npy, TYPE[SIZES] with a type of {', '.join(_TYPES)}, a number, or null"
    raise ArgumentError(name, text[:60], allowed)
