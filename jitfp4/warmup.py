"""Prebuilding: which kernels a deployment needs, and building them in parallel without a GPU."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jitfp4.families  # noqa: F401 - registers every family
from jitfp4 import engine
from jitfp4.arch import Arch
from jitfp4.cache import Loaded
from jitfp4.errors import ArgumentError, CompileError, ToolchainError
from jitfp4.kernel import AnyKernel, kernels, lookup
from jitfp4.operation import Operation, operations
from jitfp4.spec import KernelSpec
from jitfp4.tactics import TacticsFile

PLAN_SCHEMA = 1
_RECORDED = '{"family"'  # how each line of a record begins

_log = logging.getLogger("jitfp4.warmup")


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel to have: a specialisation of a template for an architecture."""

    kernel: AnyKernel
    spec: KernelSpec
    arch: Arch

    def __str__(self) -> str:
        return f"{self.kernel.name}[{self.spec}] {self.arch.name}"

    def entry(self) -> dict[str, object]:
        """The kernel as plans name it."""
        return engine.plan_entry(self.kernel, self.spec, self.arch)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task: a loaded kernel, or the error that kept it from being built."""

    task: Task
    loaded: Loaded | None
    error: Exception | None = None


def plan(archs: Sequence[Arch], patterns: Sequence[str] = ()) -> tuple[Task, ...]:
    """Every specialisation of the kernels that ``patterns`` name (of all, when empty) on each of ``archs``."""
    chosen = [kernel for pattern in patterns for kernel in kernels(pattern)] or kernels()
    return tuple(
        Task(kernel, spec, arch) for arch in archs for kernel in dict.fromkeys(chosen) for spec in kernel.specs(arch)
    )


def tuned(file: TacticsFile) -> tuple[Task, ...]:
    """The kernels that the choices of a tactics file need. Raises ArgumentError for one of another version, or with a
    problem that its kernel cannot run.
    """
    arch, tasks = Arch.of(file.arch), list[Task]()
    for choice in file.choices.values():
        (operation,) = operations(choice.operation)
        problem, tactic = operation.chosen(choice)
        operation.check(problem, arch)
        kernel = lookup(choice.kernel)
        if why := kernel.rejects(problem, tactic, arch):
            raise ArgumentError("tactic", tactic, f"one that can run {problem} on {arch.name}: {why}")
        kernel.check_spec(spec := kernel.specialise(problem, tactic))
        tasks.append(Task(kernel, spec, arch))
    return tuple(dict.fromkeys(tasks))


def needed(
    operation: Operation[Any, Any], problems: Iterable[Any], arch: Arch, file: TacticsFile | None = None
) -> tuple[Task, ...]:
    """The kernels that calls with these problems launch: by the choices of ``file``, else by the tables."""
    kernel_of = {kernel.tactic: kernel for kernel in operation.kernels}
    tasks: dict[Task, None] = {}
    for problem in problems:
        tactic = operation.select(problem, arch, file)
        kernel = kernel_of[type(tactic)]
        tasks[Task(kernel, kernel.specialise(problem, tactic), arch)] = None
    return tuple(tasks)


def load(tasks: Sequence[Task], target: engine.Target, *, jobs: int) -> None:
    """Have every task loaded on a CUDA device, ``jobs`` at a time: their first launch then builds and loads nothing.

    Raises:
        OfflineError, CompileError, ArgumentTypeError: as engine.load(), for the first that fails.
    """
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for done in [pool.submit(engine.load, task.kernel, task.spec, target) for task in tasks]:
            done.result()


def write_plan(tasks: Iterable[Task]) -> str:
    """A plan as JSON text: what ``read_plan`` takes."""
    kernels = [task.entry() for task in tasks]
    return json.dumps({"schema": PLAN_SCHEMA, "kernels": kernels}, indent=2) + "\n"


def read_plan(text: str) -> tuple[Task, ...]:
    """The tasks of a JSON plan, or of what JITFP4_RECORD recorded: a kernel a line, each taken once.

    Lines of a record that were cut, as a full disk or a power cut leaves them, are left out with a warning.

    Raises:
        ArgumentError: it is neither, or names a kernel that does not exist.
    """
    document, what = None, "another document"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # also of a record, whose second line is too many
        what = f"text that is not JSON ({error})"
    match document:
        case {"schema": int(schema), "kernels": list(entries)} if schema == PLAN_SCHEMA:
            return tuple(_read_task(entry) for entry in entries)
    if recorded := _read_record(text):
        return recorded
    raise ArgumentError("plan", what, f'{{"schema": {PLAN_SCHEMA}, "kernels": [...]}}, or lines of JITFP4_RECORD')


def _read_record(text: str) -> tuple[Task, ...]:
    """The tasks of a record; none if no line is one of a record. Raises ArgumentError, which names the line."""
    tasks, cut = dict[Task, None](), list[int]()
    for number, line in enumerate(text.replace("\0", "").split("\n"), 1):
        if not line.startswith(_RECORDED) or not line.endswith("}"):
            cut += [number] if line.strip() else []
            continue
        try:
            tasks[_read_task(json.loads(line))] = None
        except ArgumentError as error:
            raise ArgumentError("plan", f"in line {number} {error.args[1]}", error.args[2]) from None
        except (ValueError, RecursionError):
            cut.append(number)
    if tasks and cut:
        _log.warning("record: line %s was cut and is left out", ", ".join(map(str, cut)))
    return tuple(tasks)


def _read_task(entry: Mapping[str, object]) -> Task:
    match entry:
        case {"family": str(name), "arch": str(arch), "spec": dict(fields)}:
            kernel = lookup(name)
            return Task(kernel, kernel.read_spec(fields), Arch.of(arch))
    raise ArgumentError("plan", entry, '{"family": ..., "arch": ..., "spec": {...}}')


def shard(tasks: Sequence[Task], index: int, count: int) -> tuple[Task, ...]:
    """The ``index``-th (from 0) of ``count`` disjoint parts of ``tasks``, the same for every process that asks.

    Tasks go by the hash of what they are, so that adding a kernel to a plan moves no other between shards.
    """
    if not 0 <= index < count:
        raise ArgumentError("shard", f"{index}/{count}", "I/N with 0 <= I < N")
    return tuple(task for task in tasks if int(hashlib.sha256(str(task).encode()).hexdigest(), 16) % count == index)


def warm_up(tasks: Sequence[Task], *, jobs: int, on_done: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
    """Have every task in the cache, ``jobs`` at a time (NVRTC releases the GIL, so threads scale).

    A kernel that does not compile is reported in its Outcome and does not stop the others. An exception, such as
    KeyboardInterrupt, leaves at once: what has not begun is dropped, and what compiles ends in its thread.
    """
    outcomes = []
    pool = ThreadPoolExecutor(max_workers=jobs)
    try:
        for future in as_completed([pool.submit(_build, task) for task in tasks]):
            outcomes.append(future.result())
            on_done(outcomes[-1])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return outcomes


def missing(tasks: Iterable[Task]) -> list[Task]:
    """The tasks whose kernel is in no layer of the cache; builds nothing."""
    return [task for task in tasks if not engine.is_cached(task.kernel, task.spec, task.arch)]


def _build(task: Task) -> Outcome:
    try:
        return Outcome(task, engine.build(task.kernel, task.spec, task.arch))
    except (CompileError, ToolchainError) as error:  # an old NVRTC does not know every architecture
        return Outcome(task, None, error)
