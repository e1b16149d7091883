"""Tuning: measure the tactics of the calls that a program makes on its GPU, and keep the fastest in a file.

Calls are timed in a CUDA graph of several equal ones. Cold: each call has its own set of tensors, and the L2 cache is
overwritten before every replay, outside the timed region, so that no call finds its input there. Warm: all calls share
one set of tensors, and replays follow each other.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

import jitfp4.families  # noqa: F401 - registers every operation
from jitfp4 import engine, nvrtc, sim, tactics
from jitfp4.addresses import extent
from jitfp4.errors import ArgumentError, CompileError, LaunchError, TacticsError, ToolchainError
from jitfp4.files import check_out
from jitfp4.operation import Observed, observed, operations
from jitfp4.spec import fields_of
from jitfp4.tactics import Choice, TacticsFile
from jitfp4.tensors import device_name

__all__ = ["load_tactics", "tune"]

FLUSH_BYTES = 512 << 20  # several times any L2
GRAPH_BYTES = 2 << 30  # memory that the calls of one cold graph may touch together
MAX_CALLS, WARM_CALLS = 50, 10
REPLAYS, UNCOUNTED = 15, 2  # replays that are measured, after two that are not
WARM_UP_S = 0.03  # after a pause, the first replays are up to a tenth slower
ROUNDS = ((3, 10), (7, 4), (REPLAYS, 1))
"""The rounds of a search: replays of each tactic, and how many of the fastest tactics go on to the next round."""

Call = Callable[[], object]
L2 = Literal["cold", "warm"]
Measure = Callable[[Any, int], float]
"""Gives the microseconds of a call with a tactic: the median of a number of replays."""
Measurer = Callable[[Observed, Sequence[Any]], AbstractContextManager[Measure]]
"""Prepares to measure a call with several tactics."""


# ---- timing ----------------------------------------------------------------------------------------------------------


def calls_per_graph(bytes_per_call: int) -> int:
    """The number of calls in a cold graph, each with its own tensors."""
    return max(2, min(MAX_CALLS, GRAPH_BYTES // max(bytes_per_call, 1)))


def time_us(
    make_call: Callable[[], Call],
    bytes_per_call: int,
    *,
    l2: L2 = "cold",
    replays: int = REPLAYS,
    before: Call = lambda: None,
) -> float:
    """Median microseconds of one call.

    Args:
        make_call: allocates and fills the tensors of one call, and returns a function that makes the call.
        bytes_per_call: memory that one call touches; it bounds the number of calls in a cold graph.
        l2: see above.
        replays: replays of the graph that are measured.
        before: runs before each replay of a cold graph, outside the timed region.
    """
    if l2 == "cold":
        calls = [make_call() for _ in range(calls_per_graph(bytes_per_call))]
    else:
        calls = [make_call()] * WARM_CALLS
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # where the tensors were filled
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if l2 == "cold" else None
        if flush is None:
            until = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < until:
                graph.replay()
                stream.synchronize()
        times: list[float] = []
        for _ in range(replays + UNCOUNTED):
            if flush is not None:
                before()
                flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times[UNCOUNTED:])


@contextmanager
def on_gpu(call: Observed, candidates: Sequence[Any]) -> Iterator[Measure]:
    """Measure a call on its GPU. Meanwhile, kernels are compiled in parallel, in the order of ``candidates``."""
    if call.target.device is None:
        raise ArgumentError("call", "one on a simulated GPU", "one on a GPU, or another measurer")
    operation, arch = call.operation, call.target.arch
    plans = {tactic: operation.plan(call.problem, arch, tactic) for tactic in candidates}
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    specs = dict.fromkeys((plan.kernel, plan.spec) for plan in plans.values())
    built: dict[Any, Future[Any]] = {key: pool.submit(engine.build, *key, arch) for key in specs}
    size = sum(high - low for low, high in map(extent, _tensors(call.arguments).values()))
    copies = calls_per_graph(size) if 2 * size <= GRAPH_BYTES else 1
    sets = [_copied(call, everything=copies > 1) for _ in range(copies)]
    if operation.zeroed and copies == 1:  # the calls of a graph share the rest
        sets = [_with_own(sets[0], operation.zeroed) for _ in range(calls_per_graph(size))]

    def clear() -> None:
        for name, arguments in itertools.product(operation.zeroed, sets):
            getattr(arguments, name).zero_()

    def measure(tactic: Any, replays: int) -> float:
        built[plans[tactic].kernel, plans[tactic].spec].result()
        own = itertools.cycle(sets)
        with torch.cuda.device(call.target.device), operation.forced(tactic):
            return time_us(lambda: _bound(operation, next(own)), size, replays=replays, before=clear)

    try:
        yield measure
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _bound(operation: Any, arguments: Any) -> Call:
    return lambda: operation(arguments)


def _tensors(arguments: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments._asdict().items() if isinstance(value, torch.Tensor)}


def _copied(call: Observed, *, everything: bool) -> Any:
    """The arguments, with copies of all tensors, or of those that the call writes."""
    names = _tensors(call.arguments) if everything else call.operation.written
    return _with_own(call.arguments, names)


def _with_own(arguments: Any, names: Collection[str]) -> Any:
    """The arguments, with copies of those of ``names`` that are tensors."""
    return arguments._replace(**{name: _copy(tensor) for name, tensor in _tensors(arguments).items() if name in names})


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, with the same strides."""
    low, high = extent(tensor)
    memory = tensor.detach().as_strided(((high - low) // tensor.element_size(),), (1,)).view(torch.uint8).clone()
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


# ---- search ----------------------------------------------------------------------------------------------------------


class Search:
    """Successive halving: every tactic is measured briefly, then the fastest ones again and for longer.

    ``times`` has the last measurement of each tactic; infinity for one that cannot be built or launched. A search can
    be interrupted at any time: ``best`` is the fastest tactic so far, and ``finished`` says whether the search ended.
    """

    def __init__(self, candidates: Iterable[Any]) -> None:
        self.left = list(candidates)
        self.times: dict[Any, float] = {}
        self.finished = False

    def run(self, measure: Measure, expired: Callable[[], bool], on_measured: Callable[[], object]) -> None:
        """Measure until the last round ends or the time expires."""
        for replays, kept in ROUNDS:
            for tactic in self.left:
                if self.times and expired():
                    break
                try:
                    self.times[tactic] = measure(tactic, replays)
                except (CompileError, ToolchainError, LaunchError):
                    self.times[tactic] = math.inf
                on_measured()
            self.left = sorted(self.left, key=self._time)[:kept]
        self.finished = True

    @property
    def most(self) -> int:
        """The number of measurements of a whole search."""
        return sum(min(len(self.left), kept) for kept in (len(self.left), *(kept for _, kept in ROUNDS[:-1])))

    def _time(self, tactic: Any) -> float:
        return self.times.get(tactic, math.inf)

    @property
    def best(self) -> Any:
        """The fastest tactic; None if none was measured."""
        best = min(self.left, key=self._time, default=None)
        return None if self._time(best) == math.inf else best


def tune(
    call: Callable[[], object],
    path: str | Path,
    seconds: float = 60.0,
    again: bool = False,
    progress: bool = True,
    measurer: Measurer = on_gpu,
    clock: Callable[[], float] = time.monotonic,
) -> TacticsFile:
    """Run a call, find the fastest tactic for each problem in it, and keep these tactics in a file.

    Args:
        call: a function without arguments, such as a step of a model; it runs once, on one GPU. Kernels that it runs by
            replays of CUDA graphs are not tuned. Measurements use copies of its tensors; if the tensors of a kernel
            take more than 1 GiB, copies only of those that the kernel writes.
        path: the file for the choices. An existing file is continued: its choices stay, and its problems are not
            measured again. The file is written after each problem, so that an interruption (Ctrl-C) keeps what is
            measured; the next run measures an interrupted problem again.
        seconds: the longest time of the search for one problem; one last measurement may exceed it.
        again: measure the problems in the file again.
        progress: show a progress bar on stderr if it is a terminal.
        measurer: measures a call; the default uses CUDA events around replayed graphs, with a cold L2.
        clock: gives the time for ``seconds``.
    Returns:
        The content of the file. Calls use it after load_tactics(), or where the variable JITFP4_TACTICS names it.
    Raises:
        ArgumentError: the call launches no kernel, or runs on several GPUs; ``path`` cannot be a file.
        TacticsError: the existing file is damaged, or of another GPU or toolchain.
        ToolchainError: NVRTC is not installed.
    """
    path, seen = Path(path), dict[tuple[Any, ...], Observed]()
    check_out(path)
    known = tactics.read(path) if path.exists() else None

    def see(one: Observed) -> None:
        seen.setdefault((one.operation.name, one.operation.bucket(one.problem), one.target.gpu, one.target.device), one)

    with observed(see):
        call()
    targets = {one.target._replace(races=False) for one in seen.values()}
    if len(targets) != 1:
        here = "" if torch.cuda.is_available() else "; this machine has no GPU, and calls on CPU tensors launch nothing"
        allowed = f"one that launches kernels on one GPU{here}"
        raise ArgumentError("call", f"one with kernels on {len(targets)} GPUs", allowed)
    file = _continued(known, path, targets.pop())
    todo = [one for one in seen.values() if again or not _has(file, one)]
    with _bar(len(todo), shown=progress) as bar:
        for one in todo:
            search = Search(_candidates(one))
            end = clock() + seconds
            bar.begin(one, search)
            try:
                with measurer(one, search.left) as measure:
                    search.run(measure, lambda end=end: clock() > end, bar.advance)  # type: ignore[misc]
            finally:
                if search.best is not None and (search.finished or not _has(file, one)):
                    file = file.updated([_choice(one, search)])
                    tactics.write(file, path)
    return file


def load_tactics(path: str | Path | None) -> None:
    """Use the choices of a file for the calls of this process from now on, instead of the committed tables.

    Args:
        path: a file that tune() or ``jitfp4 tune`` wrote; None: the file that JITFP4_TACTICS names, or no file. CUDA
            graphs that were captured before keep their kernels.
    Returns:
        None.
    Raises:
        TacticsError: the file is damaged, or of another GPU, toolchain or version; choices in use stay in use.
        OSError: the file cannot be read.
    """
    if path is None:
        tactics.use(None)
        return
    file = tactics.read(Path(path))
    simulated = sim.active_device()
    names = [device_name(index) for index in range(torch.cuda.device_count())]
    file.check([*dict.fromkeys(names), *([engine.Target(simulated.arch, None).gpu] if simulated else [])])
    try:
        for choice in file.choices.values():
            operations(choice.operation)[0].chosen(choice)
    except ArgumentError as error:
        raise TacticsError(f"{path}: of another version of jitfp4: {error}") from None
    tactics.use(file)


def _continued(known: TacticsFile | None, path: Path, target: engine.Target) -> TacticsFile:
    """The existing file, or a new one."""
    toolchain = nvrtc.toolchain()
    if toolchain is None:
        raise ToolchainError("NVRTC is not installed, and tuning compiles: install jitfp4[cu12] or jitfp4[cu13]")
    if known is None:
        return TacticsFile(target.gpu, target.arch.name, toolchain.name, {}, path)
    known.check([target.gpu])
    return known


def _has(file: TacticsFile, one: Observed) -> bool:
    """Whether the file has a finished search for the bucket of this problem."""
    problem = fields_of(one.operation.bucket(one.problem))
    return any(choice.finished and choice.problem == problem for choice in file.of(one.operation.name))


def _candidates(one: Observed) -> list[Any]:
    """Every legal tactic, first that of the tables, so that the fastest one found is never slower."""
    operation, arch = one.operation, one.target.arch
    return list(dict.fromkeys([operation.select(one.problem, arch), *operation.candidates(one.problem, arch)]))


def _choice(one: Observed, search: Search) -> Choice:
    best = search.best
    kernel = next(kernel for kernel in one.operation.kernels if kernel.tactic is type(best))
    return Choice(
        operation=one.operation.name,
        problem=fields_of(one.operation.bucket(one.problem)),
        kernel=kernel.name,
        tactic=fields_of(best),
        us=round(search.times[best], 3),
        measured=len(search.times),
        finished=search.finished,
    )


# ---- progress --------------------------------------------------------------------------------------------------------


class _Bar:
    """The progress bar: the problem, how much of its search is done, and the fastest time so far."""

    def __init__(self, progress: Any, problems: int) -> None:
        self._progress, self._problems, self._begun = progress, problems, 0
        self._task = progress.add_task("", total=None)
        self._search: Search | None = None

    def begin(self, one: Observed, search: Search) -> None:
        """Show the next problem."""
        self._begun, self._search = self._begun + 1, search
        self._name = f"{one.operation.name} ({self._begun} of {self._problems})"
        self._progress.reset(self._task, total=search.most, description=self._name)

    def advance(self) -> None:
        """Count one measurement."""
        if self._search is not None:
            best = self._search._time(self._search.best)
            self._progress.update(self._task, advance=1, description=f"{self._name}, best {best:.2f} us")


@contextmanager
def _bar(problems: int, *, shown: bool) -> Iterator[_Bar]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    hidden = not shown or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        yield _Bar(progress, problems)
