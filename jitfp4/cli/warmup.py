"""``jitfp4 warmup``: compile the kernels of a plan into the cache before a process needs them."""

from __future__ import annotations

import enum
import itertools
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jitfp4.arch import Arch
from jitfp4.cache import Catalog
from jitfp4.cli.gpus import cuda_driver
from jitfp4.cli.options import (
    ArchNames,
    AsJson,
    CacheDir,
    KernelNames,
    completing,
    configure,
    examples,
    read_archs,
    read_kernels,
    read_plan,
    read_shard,
    split,
)
from jitfp4.cli.output import plural, put, put_json, put_table, say
from jitfp4.errors import ArgumentError
from jitfp4.formats import DType

if TYPE_CHECKING:
    from jitfp4.warmup import Outcome, Task

EXAMPLES = examples(
    "jitfp4 warmup --arch sm_90a,sm_100a --kernel quantize --dtype bf16",
    "jitfp4 warmup --arch all --write-plan plan.json",
    "jitfp4 warmup plan.json --shard 0/8 --jobs 4",
    "jitfp4 warmup plan.json --check",
)

_FIELDS = ("dtype", "in_dtype", "q_dtype", "out_dtype")
"""Fields of specs that hold the dtype of activations."""

_MOST_ENTRIES = 2000  # of the cache, the least recently used first, are read for the estimate: half a second
_SECONDS_PER_KERNEL = 2.0  # on one core, for a cache without entries: 332 took 374 s on 2 cores, 2,777 took 300 s on 16
_BYTES_PER_JOB = 1 << 30  # more than needed: NVRTC takes 300 MiB, and compiling quantize/vector 30 MiB more


class State(enum.StrEnum):
    """The result for one kernel. UNSAVED: it was compiled, but could not be stored."""

    BUILT = "built"
    CACHED = "cached"
    UNSAVED = "unsaved"
    FAILED = "failed"


def warmup(
    plan: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN", help="A plan file, or a file that JITFP4_RECORD wrote; without one, every kernel."
        ),
    ] = None,
    arch: ArchNames = None,
    kernel: KernelNames = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            autocompletion=completing(lambda: map(str, DType)),
            help="Comma-separated: only kernels for activations of these dtypes, such as bf16.",
        ),
    ] = None,
    tactics: Annotated[
        Path | None,
        typer.Option("--tactics", metavar="FILE", help="Also build the kernels that a tactics file selects."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Compilations at a time; 0: as many as cores and memory allow.")] = 0,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Only the I-th (from 0) of N parts.")] = "0/1",
    check: Annotated[bool, typer.Option("--check", help="Build nothing; list what is missing.")] = False,
    write_plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan to FILE; build nothing.")
    ] = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Compile kernels into the cache, without a GPU.

    Without --arch and PLAN it builds for the GPUs of this machine. Exit status: 0 complete, 1 a kernel is missing (with
    --check) or could not be stored, 2 an error, 3 a kernel does not compile, 130 Ctrl-C (finished kernels are kept).
    """
    configure(cache_dir)
    tasks = _select(plan, arch, read_kernels(kernel), split(dtype), shard, tactics)
    if write_plan is not None:
        _write_plan(tasks, write_plan, as_json)
    elif check:
        _check(tasks, as_json)
    else:
        _build(tasks, jobs or default_jobs(), as_json)


def default_jobs() -> int:
    """One compilation for each core, but no more than fit into the available memory."""
    with Path("/proc/meminfo").open() as lines:
        fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) << 10
    return max(1, min(len(os.sched_getaffinity(0)), available // _BYTES_PER_JOB))


def _select(
    path: Path | None,
    arch: str | None,
    patterns: Sequence[str],
    dtypes: Sequence[str],
    shard: str,
    tactics: Path | None,
) -> tuple[Task, ...]:
    from jitfp4 import warmup
    from jitfp4.kernel import kernels
    from jitfp4.tactics import read

    patterns = [name for pattern in patterns for name in _kernels_of(pattern)]

    if path is not None:
        archs = read_archs("all" if arch is None else arch)
        chosen = {kernel for pattern in patterns or (None,) for kernel in kernels(pattern)}
        tasks = tuple(t for t in read_plan(path) if t.arch in archs and t.kernel in chosen)
    else:
        tasks = warmup.plan(read_archs(arch) if arch is not None else _archs_of_this_machine(), patterns)
    tasks = tuple(_of_dtypes(tasks, dtypes))
    if tactics is not None:
        tasks = tuple(dict.fromkeys((*tasks, *warmup.tuned(read(tactics)))))
    return warmup.shard(tasks, *read_shard(shard))


def _kernels_of(pattern: str) -> list[str]:
    """A kernel or a family as it is; for an operation its kernels. Raises ArgumentError for another name."""
    from jitfp4.kernel import kernels
    from jitfp4.operation import operations

    try:
        kernels(pattern)
    except ArgumentError as error:
        found = [one for one in operations() if one.name == pattern]
        if not found:
            families = dict.fromkeys(kernel.name.split("/")[0] for kernel in kernels())
            raise ArgumentError("--kernel", repr(pattern), f"{', '.join(families)}, {error.args[2]}") from None
        return [kernel.name for kernel in found[0].kernels]
    return [pattern]


def _of_dtypes(tasks: Sequence[Task], dtypes: Sequence[str]) -> Sequence[Task]:
    """The tasks whose inputs and outputs have one of ``dtypes``; all tasks where ``dtypes`` is empty."""
    needed = {task: {str(value) for name, value in task.spec.fields().items() if name in _FIELDS} for task in tasks}
    known = set().union(*needed.values())
    for dtype in dtypes:
        if dtype not in known:
            raise ArgumentError("--dtype", repr(dtype), ", ".join(sorted(known)))
    return [task for task in tasks if needed[task] <= set(dtypes)] if dtypes else tasks


def _archs_of_this_machine() -> tuple[Arch, ...]:
    driver = cuda_driver()
    if driver is None or not driver.gpus:
        raise ArgumentError("--arch", "none, on a machine without a GPU", "--arch sm_90a (see --help), or --arch all")
    return tuple(dict.fromkeys(Arch.of_capability(*gpu.capability) for gpu in driver.gpus))


def _write_plan(tasks: Sequence[Task], path: Path, as_json: bool) -> None:
    from jitfp4.warmup import write_plan

    path.write_text(write_plan(tasks))
    if as_json:
        put_json("warmup", plan=str(path), total=len(tasks))
    say(f"{path}: {plural(len(tasks), 'kernel')}")


def _check(tasks: Sequence[Task], as_json: bool) -> None:
    from jitfp4.warmup import missing

    absent = missing(tasks)
    if as_json:
        put_json("warmup", total=len(tasks), missing=[task.entry() for task in absent])
    else:
        for task in absent:
            put(str(task))
    say(f"{len(absent)} of {plural(len(tasks), 'kernel')} missing")
    if absent:
        raise typer.Exit(1)


def _build(tasks: Sequence[Task], jobs: int, as_json: bool) -> None:
    from jitfp4.warmup import missing

    absent = missing(tasks)
    often = f"about {_seconds(absent) / jobs:.0f} s with {plural(jobs, 'job')}"
    say(f"{plural(len(tasks), 'kernel')}, {len(absent)} to compile{': ' + often if absent else ''}")
    start = time.monotonic()
    finished: dict[Task, Outcome] = {}
    try:
        _build_with_progress(tasks, jobs, finished)
    except KeyboardInterrupt:
        try:
            outcomes = [finished[task] for task in tasks if task in finished]
            _put_outcomes(outcomes, jobs, time.monotonic() - start, as_json, interrupted=True)
            rest = len(tasks) - len(outcomes)
            say(f"interrupted: {plural(rest, 'kernel')} of {len(tasks)} not built; what is finished is kept")
            sys.stdout.flush()
        finally:
            os._exit(130)  # the interpreter would wait for the compilations that still run
    outcomes = [finished[task] for task in tasks]
    counts = _put_outcomes(outcomes, jobs, time.monotonic() - start, as_json)
    if counts[State.FAILED]:
        raise typer.Exit(3)
    if counts[State.UNSAVED]:
        raise typer.Exit(1)


def _seconds(tasks: Sequence[Task]) -> float:
    """How long compiling takes on one core, by what the cache's entries say of theirs."""
    from jitfp4 import engine

    taken: dict[str, list[float]] = {}
    root = engine.cache().config.cache_dir if tasks else None
    for entry in itertools.islice(Catalog(root).entries(), _MOST_ENTRIES) if root is not None else ():
        match entry.manifest and entry.manifest.provenance.get("compile_ms"):
            case int(ms) | float(ms) if entry.manifest is not None:
                taken.setdefault(entry.manifest.family, []).append(ms / 1e3)
    known = {kernel: statistics.fmean(seconds) for kernel, seconds in taken.items()}
    others = statistics.fmean(known.values()) if known else _SECONDS_PER_KERNEL
    return sum(known.get(task.kernel.name, others) for task in tasks)


def _put_outcomes(
    outcomes: Sequence[Outcome], jobs: int, seconds: float, as_json: bool, *, interrupted: bool = False
) -> Counter[State]:
    counts = Counter(map(_state, outcomes))
    if as_json:
        totals = {state.value: counts[state] for state in State}
        kernels = [_report(outcome) for outcome in outcomes]
        put_json("warmup", jobs=jobs, seconds=round(seconds, 3), interrupted=interrupted, **totals, kernels=kernels)
    else:
        _put_summary(outcomes)
    failed: dict[str, list[Task]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            failed.setdefault(str(outcome.error), []).append(outcome.task)
    for error, (task, *more) in failed.items():
        say(f"\n{task}{f' and {len(more)} more' if more else ''}\n{error}")
    say(f"{plural(len(outcomes), 'kernel')} in {seconds:.1f} s: {', '.join(f'{counts[s]} {s}' for s in State)}")
    return counts


def _build_with_progress(tasks: Sequence[Task], jobs: int, finished: dict[Task, Outcome]) -> None:
    """Build, and add each result to ``finished``, which stays valid when this is interrupted."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from jitfp4.warmup import warm_up

    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=len(tasks))

        def advance(outcome: Outcome) -> None:
            finished[outcome.task] = outcome
            progress.update(bar, advance=1, description=f"{outcome.task.kernel.name} {outcome.task.arch.name}")

        warm_up(tasks, jobs=jobs, on_done=advance)


def _put_summary(outcomes: Sequence[Outcome]) -> None:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.task.kernel.name, outcome.task.arch.name), []).append(outcome)
    rows = []
    for (kernel, arch), group in groups.items():
        counts = Counter(map(_state, group))
        compile_ms = sum(outcome.loaded.build_ms for outcome in group if outcome.loaded)
        rows.append([kernel, arch, len(group), *(counts[state] for state in State), round(compile_ms / 1e3, 2)])
    put_table(["kernel", "arch", "builds", *State, "compile s"], rows)


def _state(outcome: Outcome) -> State:
    if outcome.loaded is None:
        return State.FAILED
    if outcome.loaded.path is None:
        return State.UNSAVED
    return State.CACHED if outcome.loaded.missed is None else State.BUILT


def _report(outcome: Outcome) -> dict[str, object]:
    report = outcome.task.entry() | {"state": _state(outcome).value}
    if outcome.loaded is None:
        return report | {"error": str(outcome.error)}
    missed = outcome.loaded.missed
    return report | {
        "missed": missed and (missed.detail or missed.reason.value),
        "compile_ms": round(outcome.loaded.build_ms, 1),
        "cubin_bytes": len(outcome.loaded.cubin),
        "path": outcome.loaded.path and str(outcome.loaded.path),
    }
