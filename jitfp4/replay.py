"""Calls that cost little more than a launch: a call is remembered, and repeated with the addresses of new tensors.

A public function checks its arguments, allocates its results, and launches a kernel. The outcome of the checks and of
the choice of a kernel depends only on dtypes, shapes, strides, devices and flags, so a second call with equal ones need
not repeat them. ``@replayed`` looks such a call up. If it is found, results are allocated and its kernels are launched
in order with the new addresses. A call is remembered only if each address that a kernel got was that of an argument,
of a new result, or of a tensor that ``scratch``, ``temporary`` or ``companion`` made, and each new result was given to
a kernel. What the call does besides is not repeated: work on the GPU that is no launch belongs into a ``temporary``, a
look at values into ``require``, and a view that does not begin where its tensor does is a ``part``.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from jitfp4.dispatch import guard, is_plain, is_watched
from jitfp4.formats import NVFP44Over6Config
from jitfp4.layouts import SfLayout
from jitfp4.remembered import REFUSED, Companion, Notes, Repeat, Step, Temporary, take, understand

P = ParamSpec("P")
R = TypeVar("R")

_MOST = 4096  # most keys of calls that a function remembers
_notes: ContextVar[Notes | None] = ContextVar("jitfp4_notes", default=None)
_memories: list[_Memory] = []
_MOST_OF_A_KEY = 15  # further calls that a function remembers for one key, which differ only in their tensors
_suspended = 0
_generation = 0  # forget() begins a new one: calls that began in an earlier one are not remembered
_counting = threading.Lock()
_is_compiling = torch.compiler.is_dynamo_compiling


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
        notes.temporaries.append(Temporary(tensor, make, sources))
    return tensor


def companion(find: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor) -> torch.Tensor:
    """The tensor ``find(source)``, which is kept somewhere for the address of ``source``, as temporary()'s sources are.

    A repeated call asks again for a new address, and at every time where ``find`` gives another tensor each time.
    """
    tensor = find(source)
    if not torch.compiler.is_dynamo_compiling() and (notes := _notes.get()) is not None:
        notes.companions.append(Companion(tensor, find, source))
    return tensor


def part(view: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``view``, which lies in the memory of the argument ``source``, at an offset that follows from its strides."""
    if not torch.compiler.is_dynamo_compiling() and (notes := _notes.get()) is not None:
        notes.parts.append((view, source))
    return view


def require(holds: Callable[..., bool], *sources: torch.Tensor) -> None:
    """Let the call be repeated only with arguments in place of ``sources`` for which ``holds`` is true."""
    if not torch.compiler.is_dynamo_compiling() and (notes := _notes.get()) is not None:
        notes.conditions.append((holds, sources))


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
        if _is_compiling() or _suspended or is_watched():
            return function(*args, **kwargs)
        values: tuple[Any, ...] = (*args, *kwargs.values()) if kwargs else args
        if len(values) == 1 and isinstance(values[0], tuple):  # a record of arguments
            (values,) = values
        kinds: tuple[Any, ...] = (*map(type, values), *kwargs)
        if (sort := _sorts[kinds]) is None:
            return function(*args, **kwargs)
        tensors_of, flags_of, groups_of, with_groups = sort
        if groups_of is not None:
            groups = groups_of(values)
            lengths: tuple[int, ...]
            if len(groups) == 2:  # K and V, their scales; faster than the loop
                first, second = groups
                values, lengths = (*values, *first, *second), (len(first), len(second))
            else:
                for group in groups:
                    values += (*group,)
                lengths = (*map(len, groups),)
            if (sort := with_groups.get(lengths) or _add_sort(with_groups, kinds, lengths, values)) is None:
                return function(*args, **kwargs)
            tensors_of, flags_of, _, _ = sort
        tensors = tensors_of(values)
        if not tensors[0].is_cuda:
            return function(*args, **kwargs)
        key = tensors_of, flags_of(values), tensors[0].shape
        for matches, repeat in memory.get(key, ()):
            if matches(*tensors):
                if repeat is None:
                    return function(*args, **kwargs)
                if (result := repeat(tensors)) is not REFUSED:
                    return result  # type: ignore[no-any-return]
        return _remember(memory, key, functools.partial(function, *args, **kwargs), tensors)

    return call


class _Sort(NamedTuple):
    """For arguments of certain types: functions that return the tensors among them, and the other values.

    Both take all arguments, and behind them the tensors in ``groups``, which are the tuples and lists among them. If
    there are any, the functions are those in ``with_groups``, by the lengths of all groups. No two sorts have the same
    function ``tensors``.
    """

    tensors: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]
    flags: Callable[[Sequence[Any]], Hashable]
    groups: Callable[[Sequence[Any]], tuple[Sequence[torch.Tensor], ...]] | None
    with_groups: dict[tuple[int, ...], _Sort]


_FLAG_TYPES = (type(None), bool, int, float, str, torch.dtype, SfLayout, NVFP44Over6Config)
_sign = functools.partial(math.copysign, 1.0)
_TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


_Kinds = tuple[type | str, ...]
"""The exact types of arguments, and the names of the last of them: one for each way to call."""


class _Sorts(dict[_Kinds, "_Sort | None"]):
    """The functions by kinds of arguments; None where a type is not known here, or none is a tensor."""

    def __missing__(self, kinds: _Kinds) -> _Sort | None:
        types = _types(kinds)
        tensors, flags, groups = _kinds(types)
        sort = None
        if len(tensors) + len(flags) + len(groups) == len(types):
            sort = _Sort(take(()), take(()), take(groups), {}) if groups else _functions(types, tensors, flags)
        return self.setdefault(kinds, sort)  # of two threads, both get the first


_sorts = _Sorts()


def _types(kinds: _Kinds) -> tuple[type, ...]:
    return tuple(kind for kind in kinds if not isinstance(kind, str))


def _add_sort(
    with_groups: dict[tuple[int, ...], _Sort], kinds: _Kinds, lengths: tuple[int, ...], values: Sequence[Any]
) -> _Sort | None:
    """Add the functions for groups of these lengths, whose elements stand behind the arguments; None where not all of
    them are tensors. Where a later call has others, the check of its tensors fails.
    """
    types = _types(kinds)
    if not _TENSOR_TYPES.issuperset(map(type, values[len(types) :])):
        return None
    tensors, flags, _ = _kinds(types)
    tensors += range(len(types), len(values))
    if (sort := _functions(types, tensors, flags)) is not None:
        with_groups[lengths] = sort
    return sort


def _kinds(types: tuple[type, ...]) -> tuple[list[int], list[int], list[int]]:
    """The numbers of arguments that are tensors, flags and groups."""
    tensors = [number for number, kind in enumerate(types) if kind in _TENSOR_TYPES]
    flags = [number for number, kind in enumerate(types) if kind in _FLAG_TYPES or issubclass(kind, IntEnum)]
    groups = [number for number, kind in enumerate(types) if kind in (tuple, list)]
    return tensors, flags, groups


def _functions(kinds: tuple[type, ...], tensors: Sequence[int], flags: Sequence[int]) -> _Sort | None:
    """The functions for tensors and flags with these numbers."""
    if not tensors:
        return None
    floats = [number for number in flags if kinds[number] is float]
    if floats:  # 0.0 == -0.0
        all_of, floats_of = take(flags), take(floats)

        def signed(values: Sequence[Any]) -> Hashable:
            return all_of(values), *map(_sign, floats_of(values))

        return _Sort(take(tensors), signed, None, {})
    return _Sort(take(tensors), take(flags), None, {})


def _remember(memory: _Memory, key: Hashable, function: Callable[[], R], tensors: Sequence[torch.Tensor]) -> R:
    notes, generation = Notes.none(), _generation
    token = _notes.set(notes)
    try:
        result = function()
    finally:
        _notes.reset(token)
    declared = [source for one in notes.temporaries for source in one.sources]
    if all(is_plain(tensor) or any(tensor is source for source in declared) for tensor in tensors):
        repeat, lasting = understand(notes, tensors, result)
        if lasting:
            if len(memory) >= _MOST:
                memory.clear()
            with _counting:
                if generation == _generation:
                    memory[key] = (*memory.get(key, ())[-_MOST_OF_A_KEY:], (guard(tensors), repeat))
    return result


_Memory = dict[Hashable, tuple[tuple[Callable[..., bool], Repeat | None], ...]]
"""By the types, the flags and the shape of the first tensor: a check of all tensors, and what repeats the call; None
where nothing can.
"""
