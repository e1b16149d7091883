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
import itertools
import math
import operator
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ParamSpec, TypeVar

import torch

from jitfp4.dispatch import guard, is_plain, is_watched
from jitfp4.formats import BlockFormat, NVFP44Over6Config
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


def unpack(kind: type, *fields: str) -> None:
    """Let an argument of this type stand for these attributes of it: tensors and flags, all that a function reads."""
    _fields[kind] = operator.attrgetter(*fields)


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function of tensors: see above. Calls on other than plain CUDA tensors are not changed."""
    memory: _Memory = {}
    _memories.append(memory)
    sorts = _Sorts()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_compiling() or _suspended or is_watched():
            return function(*args, **kwargs)
        values: tuple[Any, ...] = (*args, *kwargs.values()) if kwargs else args
        kinds: _Kinds = (*map(type, values), *kwargs)  # type: ignore[arg-type]
        sort = sorts[kinds]
        if (groups_of := sort.groups) is not None:
            groups = groups_of(values)
            lengths: tuple[int, ...]
            if len(groups) == 2:  # K and V, their scales; faster than the other way
                first, second = groups
                more, lengths = (*first, *second), (len(first), len(second))
            else:
                more, lengths = (*itertools.chain(*groups),), (*map(len, groups),)
            values += more
            sort = sort.of_lengths.get(lengths) or sort.add(lengths, more)
            if sort.of_types is not None:
                sort = sort.of_types[(*map(type, more),)]
        if (tensors_of := sort.tensors) is None:
            return function(*args, **kwargs)
        tensors = tensors_of(values)
        key = sort, sort.flags(values), tensors[0].numel()
        for matches, repeat in memory.get(key, ()):
            if matches(*tensors):
                if repeat is None:
                    return function(*args, **kwargs)
                if (result := repeat(tensors)) is not REFUSED:
                    return result  # type: ignore[no-any-return]
        if not tensors[0].is_cuda:
            return function(*args, **kwargs)
        return _remember(memory, key, functools.partial(function, *args, **kwargs), tensors)

    return call


_Take = Callable[[Sequence[Any]], tuple[Any, ...]]
_Kinds = tuple[type | str, ...]
"""The exact types of arguments, and the names of the last of them: one for each way to call."""


@dataclass(slots=True, eq=False)
class _Sort:
    """For arguments of certain ``types``: functions that return the tensors among them, and the other values.

    Tuples, lists and unpacked records among them are ``groups``. If there are any, what they hold goes behind the
    arguments, and the functions for all of these are found by the lengths of the groups and, where they hold other
    things than tensors, by the types of these. ``tensors`` is None where a type is not known here, as of a group in a
    group, or none is a tensor.
    """

    types: tuple[type, ...]
    tensors: _Take | None = None
    flags: Callable[[Sequence[Any]], Hashable] = tuple
    groups: _Take | None = None
    of_lengths: dict[tuple[int, ...], _Sort] = field(default_factory=dict)
    of_types: _Sorts | None = None

    def add(self, lengths: tuple[int, ...], held: Sequence[Any]) -> _Sort:
        """The functions for groups of these lengths. Where they hold tensors now and something else in a later call,
        the check of its tensors fails, of which the first is none of a group.
        """
        sorts, types = _Sorts(*self.types), (*map(type, held),)
        all_tensors = _TENSOR_TYPES.issuperset(types) and not _TENSOR_TYPES.isdisjoint(self.types)
        return self.of_lengths.setdefault(lengths, sorts[types] if all_tensors else _Sort(self.types, of_types=sorts))


class _Sorts(dict[_Kinds, _Sort]):
    """By their kinds: arguments, or what stands ``behind`` arguments of these types."""

    def __init__(self, *behind: type) -> None:
        super().__init__()
        self._behind = behind

    def __missing__(self, kinds: _Kinds) -> _Sort:
        types = (*self._behind, *(kind for kind in kinds if isinstance(kind, type)))
        return self.setdefault(kinds, self._sort(types))  # of two threads, both get the first

    def _sort(self, types: tuple[type, ...]) -> _Sort:
        tensors = [number for number, kind in enumerate(types) if kind in _TENSOR_TYPES]
        flags = [number for number, kind in enumerate(types) if kind in _FLAG_TYPES or issubclass(kind, IntEnum)]
        groups = [number for number, kind in enumerate(types) if kind in _GROUP_TYPES or kind in _fields]
        known = len(tensors) + len(flags) + len(groups) == len(types)
        if not known or any(number >= len(self._behind) > 0 for number in groups):
            return _Sort(types)
        if groups and not self._behind:
            return _Sort(types, groups=_groups_of(types, groups))
        return _Sort(types, take(tensors) if tensors else None, _flags_of(types, flags))


_FLAG_TYPES = (type(None), bool, int, float, str, torch.dtype, SfLayout, BlockFormat, NVFP44Over6Config)
_GROUP_TYPES = (tuple, list)
_TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_fields: dict[type, _Take] = {}  # by unpack()
_sign = functools.partial(math.copysign, 1.0)


def _groups_of(types: tuple[type, ...], numbers: Sequence[int]) -> _Take:
    """A function that returns the groups with these numbers."""
    if not any(types[number] in _fields for number in numbers):
        return take(numbers)
    parts = [(number, _fields.get(types[number], tuple)) for number in numbers]
    return lambda values: (*[held(values[number]) for number, held in parts],)


def _flags_of(types: tuple[type, ...], flags: Sequence[int]) -> Callable[[Sequence[Any]], Hashable]:
    """A function that returns the flags with these numbers."""
    floats = [number for number in flags if types[number] is float]
    if not floats:
        return take(flags)
    all_of, floats_of = take(flags), take(floats)
    return lambda values: (all_of(values), *map(_sign, floats_of(values)))  # 0.0 == -0.0


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
                    memory[key] = ((guard(tensors), repeat), *memory.get(key, ())[:_MOST_OF_A_KEY])
    return result


_Memory = dict[Hashable, tuple[tuple[Callable[..., bool], Repeat | None], ...]]
"""By the types, the flags and the size of the first tensor: a check of all tensors, and what repeats the call; None
where nothing can.
"""
