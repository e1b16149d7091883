"""Operations. Each is one torch operator in the namespace ``jitfp4``, for eager calls, torch.compile and CUDA graphs.

An operator writes into tensors that its caller allocated, and returns nothing. So its Meta implementation is empty, and
torch.compile sees ordinary allocations and an operator that mutates its arguments.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch

from jitfp4 import engine, replay, sim, tactics
from jitfp4.addresses import ALIGNMENT, Places, extent, meet
from jitfp4.arch import ARCHS, Arch
from jitfp4.dispatch import is_plain, is_watched
from jitfp4.errors import ArgumentError, UnsupportedArchError
from jitfp4.kernel import AnyKernel, Kernel, Plan, Which, register
from jitfp4.remembered import Pair, Step
from jitfp4.selection import Row, Table, table_for
from jitfp4.spec import KernelSpec, record_of
from jitfp4.tactics import Choice, TacticsFile
from jitfp4.tensors import writing

ArgumentsT = TypeVar("ArgumentsT", bound=tuple[Any, ...])
ProblemT = TypeVar("ProblemT")

Written = Annotated[torch.Tensor, "written"]
"""The type of an argument that the operator fills or updates in place."""


class Selection(NamedTuple):
    """A tactic and its origin: ``forced``, ``tuned`` with the file, or the row of a committed table."""

    tactic: Any
    by: str


class Observed(NamedTuple):
    """A call that launches a kernel, with everything that a tuner needs to repeat it."""

    operation: Operation[Any, Any]
    arguments: Any
    problem: Any
    target: engine.Target


_operations: dict[str, Operation[Any, Any]] = {}
_observer: ContextVar[Callable[[Observed], None] | None] = ContextVar("jitfp4_observer", default=None)
_log = logging.getLogger("jitfp4.tactics")
_library = torch.library.Library("jitfp4", "DEF")
# With int in place of SymInt, torch.compile would trace again for each value of a length.
_TYPES = {torch.Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str"}


class Operation(Generic[ArgumentsT, ProblemT]):
    """One torch operator: its arguments, the kernels that can run it, and which of them a call gets.

    Args:
        arguments: a NamedTuple whose fields are the operator's arguments, under the names of the public function, and
            whose types give its schema; arguments of type ``Written`` are mutated. The field ``enable_pdl`` is
            programmatic dependent launch. A field ``names`` may hold other public names for error messages, as in
            ``"a=input"``.
        name: the operator is ``torch.ops.jitfp4.<name>``.
        kernels: the kernels that can run it.
        problem: gives the problem of a call, from which a tactic is selected.
        problems: gives, for an architecture, problems that together reach every row of every table.
        tables: measured choices; see Table.
        reference: runs on CPU tensors; inside ``sim.device(arch)`` the kernel runs instead.
        output: the main output; a call in which it has no elements does nothing.
        aligned: the arguments that must start at a multiple of 16 bytes. This is checked in the operator, because
            torch.compile sees no addresses.
        exclusive: the written arguments that must not share memory with any other argument.
        zeroed: written arguments that must hold zeros before each call, and that a call may leave otherwise. The tuner,
            which repeats a call, clears them.
        growing: fields of the problem that vary from call to call, such as the number of rows. One tuned choice serves
            all values up to the next power of two: see bucket().
    """

    def __init__(
        self,
        arguments: type[ArgumentsT],
        *,
        name: str,
        kernels: tuple[Kernel[ArgumentsT, ProblemT, Any], ...],
        problem: Callable[[ArgumentsT], ProblemT],
        problems: Callable[[Arch], Iterable[ProblemT]],
        tables: tuple[Table[Any], ...],
        reference: Callable[[ArgumentsT], None],
        output: str,
        aligned: tuple[str, ...] = (),
        exclusive: tuple[str, ...] = (),
        zeroed: tuple[str, ...] = (),
        growing: tuple[str, ...] = (),
    ) -> None:
        self.arguments, self.name, self.kernels = arguments, name, kernels
        self.zeroed = zeroed
        self.tables, self.problem, self._problems, self._reference = tables, problem, problems, reference
        self._output, self._aligned, self._growing = output, aligned, growing
        kinds = {field: _bare(hint) for field, hint in _hints(arguments).items()}
        fields = [field for field, (kind, _, _) in kinds.items() if kind is torch.Tensor]
        self.written = frozenset(field for field, (_, _, written) in kinds.items() if written)
        pairs = (pair for pair in itertools.product(exclusive, fields) if pair[0] != pair[1])
        self._disjoint = list({frozenset(pair): pair for pair in pairs}.values())
        self._tensors = sorted({name for pair in self._disjoint for name in pair})
        self._kernel_of = {kernel.tactic: kernel for kernel in kernels}
        self._forced: ContextVar[Any] = ContextVar(f"jitfp4_{name}_forced", default=None)
        self._tuned_of = functools.lru_cache(maxsize=4)(self._read_tuned)
        self.plan = functools.lru_cache(maxsize=4096)(self._plan)
        for kernel in kernels:
            register(kernel, functools.partial(self._specs, kernel))
        _operations[name] = self
        _library.define(_schema(name, arguments))
        self.operator = getattr(torch.ops.jitfp4, name).default
        _library.impl(name, lambda *args: self._launch(self._checked(args)), "CUDA")
        _library.impl(name, self._on_cpu, "CPU")
        _library.impl(name, lambda *_: None, "Meta")  # it returns nothing, so no shape is to be inferred

    def __call__(self, arguments: ArgumentsT) -> None:
        """Run the operation; without torch's dispatcher for plain CUDA tensors, if no tracer or mode is active."""
        if not (torch.compiler.is_dynamo_compiling() or is_watched()) and is_plain(getattr(arguments, self._output)):
            self._launch(self._checked(arguments))
        else:
            self.operator(*arguments)

    # ---- selection ---------------------------------------------------------------------------------------------------

    def candidates(self, problem: ProblemT, arch: Arch) -> Iterator[Any]:
        """Every tactic that can run a problem."""
        return itertools.chain.from_iterable(kernel.candidates(problem, arch) for kernel in self.kernels)

    def select(self, problem: ProblemT, arch: Arch, tuned: TacticsFile | None = None) -> Any:
        """The tactic for a problem: forced, else tuned, else from the table. Reads no device, clock or environment."""
        return self.selection(problem, arch, tuned).tactic

    def selection(self, problem: ProblemT, arch: Arch, tuned: TacticsFile | None = None) -> Selection:
        """What select() gives, with its origin."""
        if (forced := self._forced.get()) is not None:
            return Selection(forced, "forced")
        if tuned is not None and (tactic := self.tuned(problem, arch, tuned)) is not None:
            return Selection(tactic, f"tuned: {tuned.path}")
        table, row, tactic = self._row(problem, arch)
        measured = row.measured or table.elsewhere.get(type(tactic), table.measured)
        source = f"read from bench/results/{measured}" if measured else "a model, not measured"
        return Selection(tactic, f"table: row {table.rows.index(row) + 1} of {len(table.rows)}, {source}")

    def bucket(self, problem: ProblemT) -> ProblemT:
        """The problem that stands for all that share a tuned choice: ``growing`` fields become powers of two."""
        sizes = {name: getattr(problem, name) for name in self._growing}
        return problem._replace(**{name: 1 << max(0, size - 1).bit_length() for name, size in sizes.items()})  # type: ignore[attr-defined,no-any-return]

    def tuned(self, problem: ProblemT, arch: Arch, file: TacticsFile) -> Any:
        """The tactic that a file gives for a problem; None if there is none, or it cannot run the problem."""
        if file.arch != arch.name or (tactic := self._tuned_of(file).get(self.bucket(problem))) is None:
            return None
        return tactic if self._kernel_of[type(tactic)].rejects(problem, tactic, arch) is None else None

    def chosen(self, choice: Choice) -> tuple[ProblemT, Any]:
        """Problem and tactic of a tuned choice. Raises ArgumentError when this version does not have them."""
        known = {kernel.name: kernel for kernel in self.kernels}
        if choice.kernel not in known:
            raise ArgumentError("kernel", repr(choice.kernel), ", ".join(known))
        kernel = known[choice.kernel]
        tactic = record_of(kernel.tactic, choice.tactic, "tactic")
        if tactic not in kernel.tactics:
            raise ArgumentError("tactic", tactic, f"one that {kernel.name} lists")
        return record_of(self.problem_type, choice.problem, "problem"), tactic

    @functools.cached_property
    def problem_type(self) -> type[ProblemT]:
        """The type of its problems."""
        return next(type(problem) for arch in ARCHS.values() for problem in self._problems(arch))

    @functools.cache  # noqa: B019 - operations live as long as the process
    def problems(self, arch: Arch) -> tuple[ProblemT, ...]:
        """Problems that together reach every row of every table; none on an architecture without a kernel."""
        return tuple(self._problems(arch))

    def _read_tuned(self, file: TacticsFile) -> dict[ProblemT, Any]:
        found = {}
        for choice in file.of(self.name):
            try:
                problem, tactic = self.chosen(choice)
            except ArgumentError as error:  # of another version of jitfp4
                _log.warning("%s: %s: %s; its table selects", file.path, self.name, error)
            else:
                found[problem] = tactic
        return found

    def _row(self, problem: ProblemT, arch: Arch) -> tuple[Table[Any], Row[Any], Any]:
        """The table for an architecture, its first row that fits the problem and whose tactic can run it, and that."""
        table = table_for(self.tables, arch)
        for row in table.rows:
            tactic = row.of(problem, arch)
            if tactic is not None and self._kernel_of[type(tactic)].rejects(problem, tactic, arch) is None:
                return table, row, tactic
        if not self.problems(arch):
            others = " and ".join(other.name for other in ARCHS.values() if self.problems(other))
            raise UnsupportedArchError(f"{self.name} has no kernel for {arch.name}, but for {others}")
        raise ArgumentError("problem", problem, f"one that a row of {self.name}'s table fits on {arch.name}")

    def check(self, problem: ProblemT, arch: Arch) -> None:
        """Check that selection can compute with a problem that a person or a file named. Raises ArgumentError for one
        that no call has, such as one of no KV heads.
        """
        try:
            for row in table_for(self.tables, arch).rows:
                row.of(problem, arch)
            any(self.candidates(problem, arch))
        except ArithmeticError as error:
            raise ArgumentError("problem", problem, f"sizes that a call has ({error})") from None

    @contextmanager
    def forced(self, tactic: Any) -> Iterator[None]:
        """Calls inside the block use ``tactic``, for tests and measurements; a call that it cannot run is an error."""
        if type(tactic) not in self._kernel_of:
            kinds = ", ".join(kind.__name__ for kind in self._kernel_of)
            raise ArgumentError("tactic", tactic, f"one of {self.name}: {kinds}")
        token = self._forced.set(tactic)
        with replay.suspended():
            try:
                yield
            finally:
                self._forced.reset(token)

    def _plan(self, problem: ProblemT, arch: Arch, tactic: Any = None) -> Plan:
        """The plan of a problem with ``tactic``, or with the one that the tables give. Plans are remembered."""
        tactic = self._row(problem, arch)[2] if tactic is None else tactic
        return self._kernel_of[type(tactic)].plan(problem, tactic, arch)

    def _specs(self, kernel: AnyKernel, arch: Arch, which: Which) -> Iterable[KernelSpec]:
        return (spec for known, spec in self._all_specs(arch, which) if known is kernel)

    @functools.cache  # noqa: B019 - operations live as long as the process
    def _all_specs(self, arch: Arch, which: Which) -> tuple[tuple[AnyKernel, KernelSpec], ...]:
        found: dict[tuple[AnyKernel, KernelSpec], None] = {}
        for problem in self.problems(arch):
            selected = which == "selected"
            for tactic in [self._row(problem, arch)[2]] if selected else self.candidates(problem, arch):
                kernel = self._kernel_of[type(tactic)]
                found[kernel, kernel.specialise(problem, tactic)] = None
        return tuple(found)

    # ---- a call ------------------------------------------------------------------------------------------------------

    def _on_cpu(self, *args: Any) -> None:
        arguments = self._checked(args)
        if sim.active_device() is not None:
            self._launch(arguments)
        elif getattr(arguments, self._output).numel():
            with writing(*(tensor for field in self.written if (tensor := getattr(arguments, field)) is not None)):
                self._reference(arguments)

    def _launch(self, arguments: ArgumentsT) -> None:
        output = getattr(arguments, self._output)
        if not output.numel():
            return
        target, problem = engine.target_of(output), self.problem(arguments)
        if (observer := _observer.get()) is not None:
            observer(Observed(self, arguments, problem, target))
        tactic = self._forced.get()
        if tactic is None and (file := tactics.active(lambda: target.gpu)) is not None:
            tactic = self.tuned(problem, target.arch, file)
        plan = self.plan(problem, target.arch, tactic)
        pdl: bool | None = arguments.enable_pdl  # type: ignore[attr-defined]
        launched = engine.launch(plan, self.prepare(plan, arguments), target, pdl=pdl)
        if replay.is_noting():
            step = None if launched is None else Step(*launched, *self._conditions(arguments))
            replay.note(step)

    def prepare(self, plan: Plan, arguments: ArgumentsT) -> tuple[Any, ...]:
        """The kernel's arguments for its launch; its scratch is allocated then, and what goes before it has run."""
        kernel, like = plan.kernel, getattr(arguments, self._output)
        scratch = {name: replay.scratch(*wanted, like) for name, wanted in kernel.scratch(arguments, plan).items()}
        for before in kernel.before:
            if (given := before.arguments(arguments, plan, **scratch)) is not None:
                before.operation(given)
        return kernel.values(kernel.bind(arguments, plan, **scratch))

    def _conditions(self, arguments: ArgumentsT) -> tuple[tuple[torch.Tensor, ...], tuple[Pair, ...]]:
        """What _checked() requires: the tensors that must be aligned, and the pairs that must share no memory."""
        aligned = (getattr(arguments, name) for name in self._aligned)
        pairs = ((getattr(arguments, written), getattr(arguments, other)) for written, other in self._disjoint)
        return (
            tuple(tensor for tensor in aligned if tensor is not None),
            tuple((first, second) for first, second in pairs if first is not None and second is not None),
        )

    def _checked(self, args: tuple[Any, ...]) -> ArgumentsT:
        """The arguments by name, after the checks that depend on addresses: alignment and overlap."""
        arguments = self.arguments(*args)
        for name in self._aligned:
            tensor = getattr(arguments, name)
            if tensor is not None and (past := tensor.data_ptr() % ALIGNMENT):
                public = self._public(arguments, name)
                raise ArgumentError(public, f"an address {past} bytes past a multiple of 16", "16-byte alignment")
        extents = {name: extent(tensor) for name in self._tensors if (tensor := getattr(arguments, name)) is not None}
        for written, other in self._disjoint:
            if written not in extents or other not in extents or not meet(extents[written], extents[other]):
                continue
            first, second = getattr(arguments, written), getattr(arguments, other)
            if Places.of(first, second).meet(first.data_ptr(), second.data_ptr()):
                names = self._public(arguments, written), self._public(arguments, other)
                raise ArgumentError(names[0], f"memory of {names[1]}", "memory of its own")
        return arguments

    @staticmethod
    def _public(arguments: Any, name: str) -> str:
        """The name of an argument in the public function."""
        renamed = dict(pair.split("=") for pair in getattr(arguments, "names", "").split(",") if pair)
        return renamed.get(name, name)


def operations(name: str | None = None) -> tuple[Operation[Any, Any], ...]:
    """All operations of the imported families in name order, or the one called ``name``.

    Raises ArgumentError when there is none of that name.
    """
    found = tuple(known for key, known in sorted(_operations.items()) if name in (None, key))
    if not found:
        raise ArgumentError("operation", repr(name), ", ".join(sorted(_operations)))
    return found


@contextmanager
def observed(observer: Callable[[Observed], None]) -> Iterator[None]:
    """Inside the block, ``observer`` gets every call of this context that launches a kernel, before the launch."""
    token = _observer.set(observer)
    with replay.suspended():
        try:
            yield
        finally:
            _observer.reset(token)


def _hints(arguments: type[Any]) -> dict[str, Any]:
    return get_type_hints(arguments, include_extras=True)


def _bare(hint: Any) -> tuple[Any, bool, bool]:
    """The type without ``None`` and marks; whether it may be None; whether it is written."""
    optional = type(None) in get_args(hint)
    kind = next(part for part in get_args(hint) if part is not type(None)) if optional else hint
    written = get_origin(kind) is Annotated
    return get_args(kind)[0] if written else kind, optional, written


def _schema(name: str, arguments: type[Any]) -> str:
    """The operator's schema in torch's language."""
    aliases, fields = iter("abcdefghij"), []
    for field, hint in _hints(arguments).items():
        kind, optional, written = _bare(hint)
        alias = f"({next(aliases)}!)" if written else ""
        fields.append(f"{_TYPES[kind]}{alias}{'?' if optional else ''} {field}")
    return f"{name}({', '.join(fields)}) -> ()"
