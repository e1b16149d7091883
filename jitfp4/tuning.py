"""Tuning: measure the tactics of the calls that a program makes on its GPU, and keep the fastest in a file.

A call is timed as a CUDA graph of several. Cold: each call has its own set of tensors, and before every replay the L2
is overwritten, so that no call finds its input there; that lies outside the timed region. Warm: all calls share one set
of tensors, and replays follow each other.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

import jitfp4.families  # noqa: F401 - registers every operation
from jitfp4 import engine, nvrtc, sim, tactics
from jitfp4.addresses import extent
from jitfp4.bundle import check_out
from jitfp4.errors import ArgumentError, CompileError, LaunchError, TacticsError, ToolchainError
from jitfp4.operation import Observed, observed, operations
from jitfp4.spec import fields_of
from jitfp4.tactics import Choice, TacticsFile
from jitfp4.tensors import device_name

FLUSH_BYTES = 512 << 20  # several times any L2
GRAPH_BYTES = 2 << 30  # memory that the calls of one cold graph may touch together
MAX_CALLS, WARM_CALLS = 50, 10
REPLAYS, UNCOUNTED = 15, 2  # the first ones do not count
WARM_UP_S = 0.03  # after a pause, what runs first is up to a tenth slower
ROUNDS = ((3, 10), (7, 4), (REPLAYS, 1))
"""Of a search: replays that count, and how many of the tactics, the fastest, go on to the next round."""

Call = Callable[[], object]
L2 = Literal["cold", "warm"]
Measure = Callable[[Any, int], float]
"""Microseconds of a call by a tactic, the median of so many replays."""
Measurer = Callable[[Observed, Sequence[Any]], AbstractContextManager[Measure]]
"""Prepares to measure a call by some tactics."""


# ---- timing ----------------------------------------------------------------------------------------------------------


def calls_per_graph(bytes_per_call: int) -> int:
    """How many calls, each on its own tensors, one cold graph holds."""
    return max(2, min(MAX_CALLS, GRAPH_BYTES // max(bytes_per_call, 1)))


def time_us(make_call: Callable[[], Call], bytes_per_call: int, *, l2: L2 = "cold", replays: int = REPLAYS) -> float:
    """Median microseconds of one call.

    Args:
        make_call: allocates and fills the tensors of one call and returns it, bound to them.
        bytes_per_call: memory that one call touches; decides how many calls a cold graph holds.
        l2: see above.
        replays: of the graph, that count.
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
    """Measure a call on its GPU. Kernels are compiled in parallel, in the order of ``candidates``, meanwhile."""
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

    def measure(tactic: Any, replays: int) -> float:
        built[plans[tactic].kernel, plans[tactic].spec].result()
        own = itertools.cycle(sets)
        with torch.cuda.device(call.target.device), operation.forced(tactic):
            return time_us(lambda: _bound(operation, next(own)), size, replays=replays)

    try:
        yield measure
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _bound(operation: Any, arguments: Any) -> Call:
    return lambda: operation(arguments)


def _tensors(arguments: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments._asdict().items() if isinstance(value, torch.Tensor)}


def _copied(call: Observed, *, everything: bool) -> Any:
    """The arguments with tensors of their own: all of them, or, of those that are too large, what the call writes."""
    own = {
        name: _copy(tensor)
        for name, tensor in _tensors(call.arguments).items()
        if everything or name in call.operation.written
    }
    return call.arguments._replace(**own)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at the same strides."""
    low, high = extent(tensor)
    memory = tensor.detach().as_strided(((high - low) // tensor.element_size(),), (1,)).view(torch.uint8).clone()
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


# ---- search ----------------------------------------------------------------------------------------------------------


class Search:
    """Successive halving: every tactic is measured briefly, the fastest again and for longer.

    ``times`` has the last measurement of each, infinity for what cannot be built or launched. It can be interrupted at
    any time: ``best`` is the fastest of what was measured so far, and ``finished`` says whether it ran to its end.
    """

    def __init__(self, candidates: Iterable[Any]) -> None:
        self.left = list(candidates)
        self.times: dict[Any, float] = {}
        self.finished = False

    def run(self, measure: Measure, expired: Callable[[], bool], on_measured: Callable[[], object]) -> None:
        """Measure until the rounds are over or the time is."""
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
        """Measurements that it takes."""
        return sum(min(len(self.left), kept) for kept in (len(self.left), *(kept for _, kept in ROUNDS[:-1])))

    def _time(self, tactic: Any) -> float:
        return self.times.get(tactic, math.inf)

    @property
    def best(self) -> Any:
        """The fastest tactic, None where none was measured."""
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
    """Run a call, find the fastest tactic for each problem that it gives to a kernel, and keep them in a file.

    Args:
        call: a function without arguments, such as a step of a model; it runs once, on one GPU. What CUDA graphs replay
            in it is not seen. What is measured works on copies of its tensors; where those of a kernel take more than 1
            GiB, only of those that it writes.
        path: the file to keep choices in. One that is there is continued: its choices stay, and problems that it has
            are not measured again. The file is written after each problem, so that an interruption (Ctrl-C) keeps what
            is measured; a problem that it cut short is measured again by the next run.
        seconds: the most that the search for one problem may take, plus one measurement.
        again: measure also what the file has.
        progress: show a bar on stderr when that is a terminal.
        measurer: how a call is measured; the default by CUDA events around replayed graphs with a cold L2.
        clock: what ``seconds`` are read from.
    Returns:
        What the file holds. It is not used before load_tactics(), or the variable JITFP4_TACTICS, names it.
    Raises:
        ArgumentError: the call launches no kernel, or runs on several GPUs; ``path`` cannot be a file.
        TacticsError: the file that is there is damaged, or of another GPU or toolchain.
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
        raise ArgumentError("call", f"one with kernels on {len(targets)} GPUs", "one that launches kernels on one GPU")
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
    """Use the choices of a file for the calls of this process from now on, in place of the committed tables'.

    Args:
        path: a file that tune() or ``jitfp4 tune`` wrote; None: none, or the one that JITFP4_TACTICS names. CUDA graphs
            that are captured already keep their kernels.
    Returns:
        None.
    Raises:
        TacticsError: it is damaged, or of another GPU, toolchain or version; what was used before stays.
        OSError: it cannot be read.
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
    """The file that is there, or a new one."""
    toolchain = nvrtc.toolchain()
    if toolchain is None:
        raise ToolchainError("NVRTC is not installed, and tuning compiles: install jitfp4[cu12] or jitfp4[cu13]")
    if known is None:
        return TacticsFile(target.gpu, target.arch.name, toolchain.name, {}, path)
    known.check([target.gpu])
    return known


def _has(file: TacticsFile, one: Observed) -> bool:
    """Whether a search for this problem, or one of its bucket, ran to its end."""
    problem = fields_of(one.operation.bucket(one.problem))
    return any(choice.finished and choice.problem == problem for choice in file.of(one.operation.name))


def _candidates(one: Observed) -> list[Any]:
    """Every legal tactic, first the one that the tables give: what is found is never slower than that."""
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
    """What is measured, how far it is, and the fastest time so far."""

    def __init__(self, progress: Any, problems: int) -> None:
        self._progress, self._problems, self._begun = progress, problems, 0
        self._task = progress.add_task("", total=None)
        self._search: Search | None = None

    def begin(self, one: Observed, search: Search) -> None:
        """Another problem."""
        self._begun, self._search = self._begun + 1, search
        self._name = f"{one.operation.name} ({self._begun} of {self._problems})"
        self._progress.reset(self._task, total=search.most, description=self._name)

    def advance(self) -> None:
        """One measurement more."""
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
