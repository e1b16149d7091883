"""Calls that cost little more than a launch: a call is remembered, and repeated with the addresses of new tensors.

A public function checks its arguments, allocates its results, and launches a kernel. The outcome of the checks and of
the choice of a kernel depends only on dtypes, shapes, strides, devices and flags, so a second call with equal ones need
not repeat them. ``@replayed`` looks such a call up. If it is found, results are allocated and the kernel is launched
with the new addresses. A call is remembered only if it ran exactly one operation, and each address that its kernels
got was that of an argument, of a result, or of a tensor that ``temporary`` made.
"""

from __future__ import annotations

import functools
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
    """A tensor that a call made for its launch, the function that made it, and the tensors that it was made from."""

    tensor: torch.Tensor
    make: Callable[..., torch.Tensor]
    sources: tuple[torch.Tensor, ...]


class _Notes(NamedTuple):
    """The launches and temporaries of a running call."""

    steps: list[Step | None]
    temporaries: list[_Temporary]


_notes: ContextVar[_Notes | None] = ContextVar("jitfp4_notes", default=None)
_memories: list[_Memory] = []
_MOST_OF_A_KEY = 15  # further calls that a function remembers for one key, which differ only in their tensors
_suspended = 0
_generation = 0  # forget() begins a new one: calls that began in an earlier one are not remembered
_counting = threading.Lock()


def noted() -> int:
    """The number of launches that were added to the call that is being remembered."""
    return len(notes.steps) if (notes := _notes.get()) is not None else 0


def note(step: Step | None, behind: int | None = None) -> None:
    """Add a launch to the call that is being remembered, if any; None for a launch that cannot be repeated.

    The launches from number ``behind`` on belong to the same operation, and become one with it.
    """
    if (notes := _notes.get()) is not None:
        first = len(notes.steps) if behind is None else behind
        notes.steps.append(step)
        if len(notes.steps) > first + 1:
            notes.steps[first:] = [_joined(notes.steps[first:])]


class _Launches(NamedTuple):
    """Launches behind each other as one; each gets a part of the addresses."""

    parts: tuple[tuple[Launch, slice], ...]

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        for launch, part in self.parts:
            launch.launch(stream, addresses[part])


def _joined(steps: Sequence[Step | None]) -> Step | None:
    """Several launches as one; None if one of them cannot be repeated."""
    parts: list[tuple[Launch, slice]] = []
    tensors: list[torch.Tensor] = []
    aligned: list[int] = []
    disjoint: list[tuple[int, int]] = []
    for step in steps:
        if step is None:
            return None
        first = len(tensors)
        tensors += step.tensors
        parts.append((step.launch, slice(first, len(tensors))))
        aligned += [first + number for number in step.aligned]
        disjoint += [(first + one, first + other) for one, other in step.disjoint]
    return Step(_Launches(tuple(parts)), tensors, tuple(aligned), tuple(disjoint))


def temporary(make: Callable[..., torch.Tensor], *sources: torch.Tensor) -> torch.Tensor:
    """The new tensor ``make(*sources)``. A repeated call makes it again, from the tensors of that call.

    ``sources`` are arguments of the call, views of their memory from its start on, or temporaries. ``make`` must depend
    only on the flags, and return no tensor that somebody else may write.
    """
    tensor = make(*sources)
    if not torch.compiler.is_dynamo_compiling() and (notes := _notes.get()) is not None:
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
    notes, generation = _Notes([], []), _generation
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


_Output = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""A result that a call allocates: shape, stride, dtype."""


class _Call(NamedTuple):
    """A remembered call. Tensors have numbers: first the arguments, then the temporaries, then the new results."""

    launch: Launch
    device: int
    chosen: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]  # the launch's tensors
    twins: tuple[tuple[int, int], ...]  # pairs of arguments with the same address
    temporaries: tuple[tuple[Callable[..., torch.Tensor], tuple[int, ...]], ...]  # and the numbers of their sources
    aligned: tuple[int, ...]
    disjoint: tuple[tuple[int, int, int, int], ...]  # two of the launch's tensors, and their extents in bytes
    outputs: tuple[_Output, ...]
    results: Callable[[Sequence[torch.Tensor]], Any]
    allowed: set[tuple[int, ...]]  # addresses that passed the checks before

    def repeat(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Repeat the call with other tensors. Returns None, without a launch, where their addresses forbid it."""
        launch, device, chosen, twins, temporaries, _, _, outputs, results, allowed = self  # faster than one by one
        for first, second in twins:
            if tensors[first].data_ptr() != tensors[second].data_ptr():
                return None
        previous = exchange_device(device)
        try:
            for make, sources in temporaries:
                tensors = (*tensors, make(*[tensors[source] for source in sources]))
            if outputs:
                tensors = (*tensors, *[empty_cuda(*output) for output in outputs])
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
        """Whether the addresses are aligned, and the tensors share no memory, where the operation requires it."""
        return not any(addresses[number] % ALIGNMENT for number in self.aligned) and not any(
            addresses[first] < addresses[second] + other and addresses[second] < addresses[first] + size
            for first, second, size, other in self.disjoint
        )


_Memory = dict[Hashable, tuple[tuple[Callable[..., bool], _Call | None], ...]]
"""By the types, the flags and the shape of the first tensor: a check of all tensors, and the call; None for a call that
cannot be repeated.
"""


def _understand(notes: _Notes, given: Sequence[torch.Tensor], result: Any) -> tuple[_Call | None, bool]:
    """How to repeat a call; None if it cannot be repeated, and then whether that holds for all calls like it."""
    if len(notes.steps) != 1 or notes.steps[0] is None:
        return None, bool(notes.steps)
    step, returned = notes.steps[0], result if isinstance(result, tuple) else (result,)
    places: dict[int, int] = {}
    twins: list[tuple[int, int]] = []
    for number, tensor in enumerate(given):
        if tensor.numel():
            first = places.setdefault(tensor.data_ptr(), number)
            if first != number:
                twins.append((first, number))  # it is not known which of them the kernel got: they must be equal again
    known, temporaries = list(given), []
    for tensor, make, sources in notes.temporaries:
        same = [next((n for n, one in enumerate(known) if one is source), None) for source in sources]
        numbers = [places.get(of.data_ptr(), -1) if n is None else n for n, of in zip(same, sources, strict=True)]
        if -1 in numbers or tensor.data_ptr() in places:
            return None, True
        places[tensor.data_ptr()] = len(known)
        known.append(tensor)
        temporaries.append((make, tuple(numbers)))
    outputs: list[_Output] = []
    results: list[int] = []
    for tensor in returned:
        number = next((n for n, value in enumerate(given) if value is tensor), -1)
        if number < 0:
            if not isinstance(tensor, torch.Tensor) or not _is_whole(tensor) or tensor.data_ptr() in places:
                return None, True
            number = places[tensor.data_ptr()] = len(known) + len(outputs)
            outputs.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))
        results.append(number)
    tensors = step.tensors
    if any(tensor.data_ptr() not in places for tensor in tensors):
        return None, True
    sizes = [high - low for low, high in map(extent, tensors)]
    call = _Call(
        step.launch,
        tensors[0].get_device(),
        _take([places[tensor.data_ptr()] for tensor in tensors]),
        tuple(twins),
        tuple(temporaries),
        step.aligned,
        tuple((a, b, sizes[a], sizes[b]) for a, b in step.disjoint),
        tuple(outputs),
        _take(results) if isinstance(result, tuple) else operator.itemgetter(*results),
        set(),
    )
    return call, True


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers the whole of its storage."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
