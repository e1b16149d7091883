"""Calls that cost little more than a launch: a call is remembered, and repeated with the addresses of new tensors.

A public function checks its arguments, allocates its results, and launches a kernel. The outcome of the checks and of
the choice of a kernel depends only on dtypes, shapes, strides, devices and flags, so a second call with equal ones need
not repeat them. ``@replayed`` looks such a call up. If it is found, results are allocated and its kernels are launched
in order with the new addresses. A call is remembered only if each address that a kernel got was that of an argument,
of a new result, or of a tensor that ``scratch`` or ``temporary`` made, and each new result was given to a kernel. What
the call does besides is not repeated: work on the GPU that is no launch belongs into a ``temporary``.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from jitfp4.addresses import ALIGNMENT, extent
from jitfp4.dispatch import current_stream, empty_cuda, exchange_device, guard, is_plain, is_watched
from jitfp4.layouts import SfLayout

P = ParamSpec("P")
R = TypeVar("R")

_address = torch.Tensor.data_ptr
_MOST = 4096  # most keys of calls that a function remembers, and most sets of addresses that a call remembers


class Launch(Protocol):
    """A launch that can be repeated: driver.PreparedLaunch."""

    def launch(self, stream: int, addresses: Sequence[int]) -> None: ...


class Step(NamedTuple):
    """A launch of a call and its tensors; the numbers of those that must be aligned, and of pairs that must not share
    memory.
    """

    launch: Launch
    tensors: Sequence[torch.Tensor]
    aligned: tuple[int, ...]
    disjoint: tuple[tuple[int, int], ...]


class _Temporary(NamedTuple):
    """A tensor that a call made for its launches, the function that made it, and the tensors that it was made from."""

    tensor: torch.Tensor
    make: Callable[..., torch.Tensor]
    sources: tuple[torch.Tensor, ...]


class _Notes(NamedTuple):
    """The launches of a running call in order, the memory between them, and its temporaries."""

    steps: list[Step | None]
    scratch: list[torch.Tensor]
    temporaries: list[_Temporary]


_notes: ContextVar[_Notes | None] = ContextVar("jitfp4_notes", default=None)
_memories: list[_Memory] = []
_MOST_OF_A_KEY = 15  # further calls that a function remembers for one key, which differ only in their tensors
_suspended = 0
_generation = 0  # forget() begins a new one: calls that began in an earlier one are not remembered
_counting = threading.Lock()


def note(step: Step | None) -> None:
    """Add a launch to the call that is being remembered, if any; None for a launch that cannot be repeated."""
    if (notes := _notes.get()) is not None:
        notes.steps.append(step)


def scratch(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """A new tensor without values on ``like``'s device, for the launches of the running call.

    A repeated call allocates another one.
    """
    tensor = torch.empty(shape, dtype=dtype, device=like.device)
    if not torch.compiler.is_dynamo_compiling() and (notes := _notes.get()) is not None:
        notes.scratch.append(tensor)
    return tensor


def temporary(make: Callable[..., torch.Tensor], *sources: torch.Tensor) -> torch.Tensor:
    """The new tensor ``make(*sources)``. A repeated call makes it again, from the tensors of that call.

    ``sources`` are arguments of the call, views of their memory from its start on, scratch or temporaries. ``make``
    must depend only on the flags, and return no tensor that somebody else may write. A repeated call makes all
    temporaries before its first launch: a call that makes one from other tensors behind a launch is never repeated.
    """
    tensor = make(*sources)
    if not torch.compiler.is_dynamo_compiling() and (notes := _notes.get()) is not None:
        if sources and notes.steps:
            notes.steps.append(None)
        notes.temporaries.append(_Temporary(tensor, make, sources))
    return tensor


def is_noting() -> bool:
    """Whether a call is being remembered."""
    return _notes.get() is not None


def forget() -> None:
    """Forget every call, also those that threads are about to remember."""
    global _generation
    with _counting:
        _generation += 1
    for memory in _memories:
        memory.clear()


@contextmanager
def suspended() -> Iterator[None]:
    """Inside the block calls are neither remembered nor repeated."""
    global _suspended
    with _counting:
        _suspended += 1
    try:
        yield
    finally:
        with _counting:
            _suspended -= 1


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function of tensors: see above. Calls on other than plain CUDA tensors are not changed."""
    memory: _Memory = {}
    _memories.append(memory)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() or _suspended or is_watched():
            return function(*args, **kwargs)
        values: tuple[Any, ...] = (*args, *kwargs.values()) if kwargs else args
        if len(values) == 1 and isinstance(values[0], tuple):  # a record of arguments
            (values,) = values
        sort = _sort((*map(type, values),), (*kwargs,))
        if sort is None:
            return function(*args, **kwargs)
        tensors = sort.tensors(values)
        if not tensors[0].is_cuda:
            return function(*args, **kwargs)
        key = sort, sort.flags(values), tensors[0].shape
        for matches, action in memory.get(key, ()):
            if matches(*tensors):
                if action is None:
                    return function(*args, **kwargs)
                if (result := action.repeat(tensors)) is not None:
                    return result  # type: ignore[no-any-return]
        return _remember(memory, key, functools.partial(function, *args, **kwargs), tensors)

    return call


class _Sort(NamedTuple):
    """For arguments of certain types: functions that return the tensors among them, and the other values."""

    tensors: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]
    flags: Callable[[Sequence[Any]], Hashable]


_FLAG_TYPES = (type(None), bool, int, float, str, torch.dtype, SfLayout)
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


@functools.cache
def _sort(kinds: tuple[type, ...], names: tuple[str, ...]) -> _Sort | None:  # noqa: ARG001 - one for each way to call
    """The functions for arguments of these exact types; None where a type is not known here, or none is a tensor."""
    tensors = [number for number, kind in enumerate(kinds) if kind in _TENSOR_TYPES]
    flags = [number for number, kind in enumerate(kinds) if kind in _FLAG_TYPES or issubclass(kind, IntEnum)]
    if not tensors or len(tensors) + len(flags) < len(kinds):
        return None
    floats = [number for number in flags if kinds[number] is float]
    if floats:  # 0.0 == -0.0

        def signed(values: Sequence[Any]) -> Hashable:
            return _take(flags)(values), *(math.copysign(1.0, values[number]) for number in floats)

        return _Sort(_take(tensors), signed)
    return _Sort(_take(tensors), _take(flags))


def _take(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that returns the items with these numbers, as a tuple."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    if not numbers:
        return _nothing
    (number,) = numbers
    return lambda values: (values[number],)


def _nothing(_values: Sequence[Any]) -> tuple[Any, ...]:
    return ()


def _remember(memory: _Memory, key: Hashable, function: Callable[[], R], tensors: Sequence[torch.Tensor]) -> R:
    notes, generation = _Notes([], [], []), _generation
    token = _notes.set(notes)
    try:
        result = function()
    finally:
        _notes.reset(token)
    if all(map(is_plain, tensors)):
        call, lasting = _understand(notes, tensors, result)
        if lasting:
            if len(memory) >= _MOST:
                memory.clear()
            with _counting:
                if generation == _generation:
                    memory[key] = (*memory.get(key, ())[-_MOST_OF_A_KEY:], (guard(tensors), call))
    return result


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""A tensor that a call allocates: shape, stride, dtype."""


class _Call(NamedTuple):
    """A remembered call. Tensors have numbers: first the arguments, then what is allocated, then the temporaries."""

    launch: Launch
    device: int
    chosen: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]  # the launch's tensors
    twins: tuple[tuple[int, int], ...]  # pairs of arguments with the same address
    allocated: tuple[_Layout, ...]  # results and scratch
    temporaries: tuple[tuple[Callable[..., torch.Tensor], tuple[int, ...]], ...]  # and the numbers of their sources
    aligned: tuple[int, ...]
    disjoint: tuple[tuple[int, int, int, int], ...]  # two of the launch's tensors, and their extents in bytes
    results: Callable[[Sequence[torch.Tensor]], Any]
    allowed: set[tuple[int, ...]]  # addresses that passed the checks before

    def repeat(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Repeat the call with other tensors. Returns None, without a launch, where their addresses forbid it."""
        launch, device, chosen, twins, allocated, temporaries, _, _, results, allowed = self  # faster than one by one
        for first, second in twins:
            if tensors[first].data_ptr() != tensors[second].data_ptr():
                return None
        previous = exchange_device(device)
        try:
            if allocated:
                tensors = (*tensors, *[empty_cuda(*layout) for layout in allocated])
            for make, sources in temporaries:
                tensors = (*tensors, make(*[tensors[source] for source in sources]))
            addresses = (*map(_address, chosen(tensors)),)
            if addresses not in allowed:
                if not self._allows(addresses):
                    return None
                if len(allowed) >= _MOST:
                    allowed.clear()
                allowed.add(addresses)
            launch.launch(current_stream(device), addresses)
        finally:
            if previous != device:
                exchange_device(previous)
        return results(tensors)

    def _allows(self, addresses: Sequence[int]) -> bool:
        """Whether the addresses are aligned, and the tensors share no memory, where the operations require it."""
        return not any(addresses[number] % ALIGNMENT for number in self.aligned) and not any(
            addresses[first] < addresses[second] + other and addresses[second] < addresses[first] + size
            for first, second, size, other in self.disjoint
        )


_Memory = dict[Hashable, tuple[tuple[Callable[..., bool], _Call | None], ...]]
"""By the types, the flags and the shape of the first tensor: a check of all tensors, and the call; None for a call that
cannot be repeated.
"""


# ---- what a call did -------------------------------------------------------------------------------------------------


class _Unrepeatable(Exception):  # noqa: N818 - it is no error
    """A call uses a tensor that a repeated call would not find or make."""


def _understand(notes: _Notes, given: Sequence[torch.Tensor], result: Any) -> tuple[_Call | None, bool]:
    """How to repeat a call; None if it cannot be repeated, and then whether that holds for all calls like it."""
    steps = [step for step in notes.steps if step is not None]
    if not steps or len(steps) < len(notes.steps):
        return None, bool(notes.steps)
    try:
        return _repeatable(_joined(steps), notes, given, result), True
    except _Unrepeatable:
        return None, True


def _repeatable(step: Step, notes: _Notes, given: Sequence[torch.Tensor], result: Any) -> _Call:
    """The call of these launches."""
    returned = result if isinstance(result, tuple) else (result,)
    numbers = _Numbers(given)
    made = [one.tensor for one in notes.temporaries]
    results = [one for one in returned if not any(one is other for other in (*given, *notes.scratch, *made))]
    allocated = (*notes.scratch, *results)
    for tensor in (*allocated, *made):
        numbers.add(tensor)
    chosen = [numbers.at(tensor) for tensor in step.tensors]
    for tensor in results:
        if not _is_whole(tensor) or numbers.of(tensor) not in chosen:  # part of another, or not filled by a launch
            raise _Unrepeatable
    sizes = [high - low for low, high in map(extent, step.tensors)]
    places = [numbers.of(tensor) for tensor in returned]
    return _Call(
        step.launch,
        step.tensors[0].get_device(),
        _take(chosen),
        tuple(numbers.twins),
        tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in allocated),
        tuple((one.make, tuple(map(numbers.source, one.sources))) for one in notes.temporaries),
        step.aligned,
        tuple((a, b, sizes[a], sizes[b]) for a, b in step.disjoint),
        _take(places) if isinstance(result, tuple) else operator.itemgetter(*places),
        set(),
    )


class _InOrder(NamedTuple):
    """Several launches as one; each gets its part of the addresses."""

    parts: tuple[tuple[Launch, slice], ...]

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        for launch, part in self.parts:
            launch.launch(stream, addresses[part])


def _joined(steps: Sequence[Step]) -> Step:
    """The launches of a call as one."""
    if len(steps) == 1:
        return steps[0]
    ends = [0, *itertools.accumulate(len(step.tensors) for step in steps)]
    parts = tuple((step.launch, slice(*part)) for step, part in zip(steps, itertools.pairwise(ends), strict=True))
    return Step(
        _InOrder(parts),
        [tensor for step in steps for tensor in step.tensors],
        tuple(first + number for step, first in zip(steps, ends, strict=False) for number in step.aligned),
        tuple((first + a, first + b) for step, first in zip(steps, ends, strict=False) for a, b in step.disjoint),
    )


class _Numbers:
    """The numbers of a call's tensors, by object and by address."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self._known = list(given)
        self._places: dict[int, int] = {}
        self.twins: list[tuple[int, int]] = []
        for number, tensor in enumerate(given):
            if tensor.numel():
                first = self._places.setdefault(tensor.data_ptr(), number)
                if first != number:
                    # it is not known which of them the kernel got: they must be equal again
                    self.twins.append((first, number))

    def add(self, tensor: Any) -> None:
        """Give a tensor the next number. Raises _Unrepeatable when another one begins at its address."""
        if not isinstance(tensor, torch.Tensor) or tensor.data_ptr() in self._places:
            raise _Unrepeatable
        self._places[tensor.data_ptr()] = len(self._known)
        self._known.append(tensor)

    def of(self, tensor: torch.Tensor) -> int:
        """The number of this object."""
        for number, known in enumerate(self._known):
            if known is tensor:
                return number
        raise _Unrepeatable

    def source(self, tensor: torch.Tensor) -> int:
        """The number of this object, or of the tensor of which it is a view."""
        known = any(one is tensor for one in self._known)
        return self.of(tensor) if known else self.at(tensor)

    def at(self, tensor: torch.Tensor) -> int:
        """The number of the tensor that begins where this one does."""
        if tensor.data_ptr() not in self._places:
            raise _Unrepeatable
        return self._places[tensor.data_ptr()]


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers the whole of its storage."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
