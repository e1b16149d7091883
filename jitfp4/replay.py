"""Calls that cost no more than a launch: what a call did is remembered, and repeated with other addresses.

A public function checks its arguments, allocates what it returns, and launches. All of that follows from dtypes,
shapes, strides, devices and flags, so a second call with the same ones needs none of it. ``@replayed`` looks those up;
when it has met them, it allocates the results, launches with the new addresses, and returns. A call is remembered only
when it was one launch, and each address that the kernel got was that of an argument or of a result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from jitfp4.dispatch import is_plain_cuda
from jitfp4.layouts import SfLayout
from jitfp4.tensors import ALIGNMENT, extent, on_device

P = ParamSpec("P")
R = TypeVar("R")

_MOST = 4096  # calls that a function remembers


class Launch(Protocol):
    """A launch that can be repeated: driver.PreparedLaunch."""

    tensors: tuple[torch.Tensor, ...]

    def launch(self, stream: int, addresses: Sequence[int]) -> None: ...


class Step(NamedTuple):
    """A launch of a call, and what has to hold for its tensors, by number: alignment, and memory of their own."""

    launch: Launch
    aligned: tuple[int, ...]
    disjoint: tuple[tuple[int, int], ...]


_steps: ContextVar[list[Step | None] | None] = ContextVar("jitfp4_steps", default=None)
_memories: list[dict[Any, _Call | None]] = []
_suspended = 0


def note(step: Step | None) -> None:
    """Tell the call that is being remembered, if any, what was launched; None for what cannot be repeated."""
    if (steps := _steps.get()) is not None:
        steps.append(step)


def forget() -> None:
    """Forget every call."""
    for memory in _memories:
        memory.clear()


@contextmanager
def suspended() -> Iterator[None]:
    """Inside the block calls are neither remembered nor repeated."""
    global _suspended
    _suspended += 1
    try:
        yield
    finally:
        _suspended -= 1


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function of tensors: see above. Everywhere but on plain CUDA tensors it stays as it is."""
    memory: dict[Any, _Call | None] = {}
    _memories.append(memory)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() or _suspended:
            return function(*args, **kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        if not values or not is_plain_cuda(values[0]):
            return function(*args, **kwargs)
        try:
            key = (*[_FACETS[type(value)](value) for value in values], *kwargs)
        except KeyError:  # a type whose identity says nothing of its value, or a wrong one
            return function(*args, **kwargs)
        known = memory.get(key)
        if known is not None and (result := known.repeat(values)) is not None:
            return result  # type: ignore[no-any-return]
        if known is None and key in memory:
            return function(*args, **kwargs)
        return _remember(memory, key, functools.partial(function, *args, **kwargs), values)

    return call


def _tensor(value: torch.Tensor) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride(), value.device


_FACETS: dict[type, Callable[[Any], object]] = {
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    float: lambda value: (value, math.copysign(1.0, value)),
    **dict.fromkeys((bool, int), lambda value: (value, type(value))),
    **dict.fromkeys((type(None), str, torch.dtype, SfLayout), lambda value: value),
}
"""What a call depends on, by the exact type of an argument."""


def _remember(memory: dict[Any, _Call | None], key: object, function: Callable[[], R], values: Sequence[Any]) -> R:
    token = _steps.set([])
    try:
        result = function()
        steps = _steps.get()
    finally:
        _steps.reset(token)
    call, lasting = _understand(steps or [], values, result)
    for step in steps or ():
        if step is not None:
            step.launch.tensors = ()  # a memory of calls must not keep their tensors alive
    if lasting:
        if len(memory) >= _MOST:
            memory.clear()
        memory[key] = call
    return result


class _Output(NamedTuple):
    """A result that a call allocates."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class _Call(NamedTuple):
    """What a call did. A number counts the arguments first and then the tensors that it allocated."""

    launch: Launch
    device: torch.device
    sources: tuple[int, ...]  # of the launch's tensors
    aligned: tuple[int, ...]
    disjoint: tuple[tuple[int, int, int, int], ...]  # two of the launch's tensors, and their extents in bytes
    outputs: tuple[_Output, ...]
    results: tuple[int, ...]
    single: bool  # one tensor is returned, not a tuple

    def repeat(self, values: tuple[Any, ...]) -> Any:
        """Do it again. Returns None, having done nothing, where an address forbids it."""
        if self.outputs:
            values = (*values, *[output.empty(self.device) for output in self.outputs])
        addresses = [values[source].data_ptr() for source in self.sources]
        for number in self.aligned:
            if addresses[number] % ALIGNMENT:
                return None
        for first, second, size, other in self.disjoint:
            if addresses[first] < addresses[second] + other and addresses[second] < addresses[first] + size:
                return None
        with on_device(self.device.index) as stream:
            self.launch.launch(stream, addresses)
        return values[self.results[0]] if self.single else tuple([values[number] for number in self.results])


def _understand(steps: Sequence[Step | None], values: Sequence[Any], result: Any) -> tuple[_Call | None, bool]:
    """How to repeat a call; or None, and whether calls like it will never be repeatable."""
    if len(steps) != 1 or steps[0] is None:
        return None, bool(steps)
    step, returned = steps[0], result if isinstance(result, tuple) else (result,)
    places: dict[int, int] = {}
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.numel():
            if value.data_ptr() in places:
                return None, False  # two arguments at one address: which of them did the kernel get?
            places[value.data_ptr()] = number
    outputs: list[_Output] = []
    results: list[int] = []
    for tensor in returned:
        number = next((n for n, value in enumerate(values) if value is tensor), -1)
        if number < 0:
            if not isinstance(tensor, torch.Tensor) or not _is_whole(tensor) or tensor.data_ptr() in places:
                return None, True
            number = places[tensor.data_ptr()] = len(values) + len(outputs)
            outputs.append(_Output(tuple(tensor.shape), tensor.stride(), tensor.dtype))
        results.append(number)
    tensors = step.launch.tensors
    if any(tensor.data_ptr() not in places for tensor in tensors):
        return None, True
    sizes = [high - low for low, high in map(extent, tensors)]
    call = _Call(
        step.launch,
        tensors[0].device,
        tuple(places[tensor.data_ptr()] for tensor in tensors),
        step.aligned,
        tuple((a, b, sizes[a], sizes[b]) for a, b in step.disjoint),
        tuple(outputs),
        tuple(results),
        not isinstance(result, tuple),
    )
    return call, True


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its memory for itself."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
