"""Kernels: the name, template and parameters of each, and how it runs which problems.

A *problem* is the part of a call that selection depends on: dtypes, sizes and flags. A *tactic* is one way to run a
problem: a kernel and the values of its tunable fields. A *spec* holds the values that a kernel's source is generated
with. Importing ``jitfp4.families`` registers all kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, Literal, NamedTuple, TypeVar

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError, LaunchError
from jitfp4.render import render
from jitfp4.spec import Geometry, KernelSpec, Param

ArgumentsT = TypeVar("ArgumentsT")
ProblemT = TypeVar("ProblemT")
TacticT = TypeVar("TacticT")

_MAX_SIZE = 1024  # of what a spec counts besides its tactic: elements of a head, tokens, rows of a tile

Which = Literal["selected", "all"]
"""``selected``: specs that selection returns for some problem; ``all``: specs of every tactic that can run one."""


class Scratch(NamedTuple):
    """Memory that a launch needs and that no caller sees: a tensor of this shape and torch dtype, without values."""

    shape: tuple[int, ...]
    dtype: Any


def _no_scratch(_arguments: Any, _plan: Plan) -> dict[str, Scratch]:
    return {}


class Before(NamedTuple):
    """An operation that runs before a kernel's launch, unless its arguments, from what bind() gets, are None."""

    operation: Callable[[Any], None]
    arguments: Callable[Concatenate[Any, Plan, ...], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel(Generic[ArgumentsT, ProblemT, TacticT]):
    """One template and everything that is specific to it.

    Args:
        name: the template's path without its suffix, such as ``quantize/vector``: it finds the template, the golden
            files and, with ``/`` read as ``_``, the kernel's symbol.
        spec: the type of its specifications.
        params: its parameters. The C++ parameter list is rendered from them, and bind() gives their values.
        tactics: every tactic that is worth trying, of one type that belongs to this kernel alone.
        rejects: says why a tactic cannot run a problem on an architecture; None when it can. Nothing else decides that.
        specialise: gives the spec of a tactic for a problem.
        geometry: gives the launch geometry of a tactic for a problem.
        bind: gives the value of each parameter, by name, for the arguments of a call and its plan, and for the
            tensors of ``scratch`` as keywords. It launches and allocates nothing.
        scratch: gives by name what memory a call needs besides its arguments.
        before: what runs before the kernel, in order.
    """

    name: str
    spec: type[KernelSpec]
    params: tuple[Param, ...]
    tactics: tuple[TacticT, ...]
    rejects: Callable[[ProblemT, TacticT, Arch], str | None]
    specialise: Callable[[ProblemT, TacticT], KernelSpec]
    geometry: Callable[[ProblemT, TacticT, Arch], Geometry]
    bind: Callable[Concatenate[ArgumentsT, Plan, ...], Mapping[str, Any]]
    scratch: Callable[[ArgumentsT, Plan], Mapping[str, Scratch]] = _no_scratch
    before: tuple[Before, ...] = ()

    @property
    def template(self) -> str:
        return f"{self.name}.cu.j2"

    @property
    def symbol(self) -> str:
        return self.name.replace("/", "_")

    @property
    def tactic(self) -> type[TacticT]:
        """The type of the kernel's tactics."""
        return type(self.tactics[0])

    def read_spec(self, fields: Mapping[str, object]) -> KernelSpec:
        """The specification that a file names. Raises ArgumentError for one that no problem can give."""
        spec = self.spec.from_fields(fields)
        self.check_spec(spec)
        return spec

    def check_spec(self, spec: KernelSpec) -> None:
        """Check that tunable fields have values that some tactic has, that other integers are sizes in a kernel, and
        that what follows from them can be computed.

        What comes from a file is checked, because a template or the compiler may never end with other values. Raises
        ArgumentError.
        """
        for name, value in spec.fields().items():
            tuned = {getattr(tactic, name) for tactic in self.tactics if hasattr(tactic, name)}
            if tuned and getattr(spec, name) not in tuned:
                allowed = ", ".join(map(str, sorted(tuned)))
            elif not tuned and type(value) is int and not 0 <= value <= _MAX_SIZE:
                allowed = f"0 to {_MAX_SIZE}"
            else:
                continue
            raise ArgumentError("spec", f"{name}={value}"[:80], f"{allowed} in {self.name}")
        for name in dir(self.spec):
            if isinstance(getattr(self.spec, name), property):
                try:
                    getattr(spec, name)
                except ArithmeticError as error:
                    raise ArgumentError("spec", str(spec), f"sizes of which {name} follows: {error}") from None

    def render(self, spec: KernelSpec, arch: Arch) -> str:
        """The generated source of one specialisation."""
        if type(spec) is not self.spec:
            raise ArgumentError("spec", type(spec).__name__, f"{self.spec.__name__}, the spec of {self.name}")
        return render(self.template, spec, arch, symbol=self.symbol, params=self.params)

    def candidates(self, problem: ProblemT, arch: Arch) -> Iterator[TacticT]:
        """The tactics that can run a problem."""
        return (tactic for tactic in self.tactics if self.rejects(problem, tactic, arch) is None)

    def plan(self, problem: ProblemT, tactic: TacticT, arch: Arch) -> Plan:
        """The plan of a tactic. Raises ArgumentError when it cannot run the problem."""
        if why := self.rejects(problem, tactic, arch):
            raise ArgumentError("tactic", tactic, f"another one for this problem on {arch.name}: {why}")
        return Plan(self, self.specialise(problem, tactic), self.geometry(problem, tactic, arch), problem)

    def values(self, bound: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of bind(), in the order of ``params``. Raises LaunchError unless every parameter has one value."""
        if len(bound) != len(self.params) or any(param.name not in bound for param in self.params):
            names = {param.name for param in self.params}
            missing, unknown = sorted(names - bound.keys()), sorted(bound.keys() - names)
            raise LaunchError(f"{self.name}: parameters without a value: {missing}; values without one: {unknown}")
        return (*[bound[param.name] for param in self.params],)

    def specs(self, arch: Arch, which: Which = "selected") -> tuple[KernelSpec, ...]:
        """The kernel's specialisations on ``arch``; none if it does not exist there."""
        return tuple(_registered[self.name].specs(arch, which))


AnyKernel = Kernel[Any, Any, Any]


class Plan(NamedTuple):
    """How a problem is run: one specialisation of a kernel at one geometry."""

    kernel: AnyKernel
    spec: Any  # of the kernel's type, as the problem is of its operation's
    geometry: Geometry
    problem: Any


class _Registered(NamedTuple):
    kernel: AnyKernel
    specs: Callable[[Arch, Which], Iterable[KernelSpec]]


_registered: dict[str, _Registered] = {}


def register(kernel: AnyKernel, specs: Callable[[Arch, Which], Iterable[KernelSpec]]) -> None:
    """Add a kernel and the function that lists its specialisations. Registering a name twice is an error."""
    if kernel.name in _registered:
        raise ArgumentError("kernel", repr(kernel.name), "a name that is not registered yet")
    _registered[kernel.name] = _Registered(kernel, specs)


def kernels(pattern: str | None = None) -> tuple[AnyKernel, ...]:
    """All kernels in name order, or the one called ``pattern``, or those of the family ``pattern``.

    Raises ArgumentError when ``pattern`` names none.
    """
    found = tuple(
        known.kernel
        for name, known in sorted(_registered.items())
        if pattern is None or name == pattern or name.startswith(f"{pattern}/")
    )
    if not found:
        raise ArgumentError("kernel", repr(pattern), ", ".join(sorted(_registered)))
    return found


def lookup(name: str) -> AnyKernel:
    """The kernel called ``name`` exactly."""
    if name not in _registered:
        raise ArgumentError("kernel", repr(name), ", ".join(sorted(_registered)))
    return _registered[name].kernel
