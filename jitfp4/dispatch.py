"""All uses of torch's internals, each with a public replacement for a version of torch without that internal.

The replacements give the same results, but are slower; bench/results/h200/launch.csv has the cost of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _internal(path: str) -> Callable[..., Any] | None:
    """The function at a dotted path below torch, or None if this version of torch does not have it."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if callable(found) else None


_count_modes = _internal("_C._len_torch_dispatch_stack")
_transform = _internal("_C._functorch.peek_interpreter_stack")
_guards = _internal("_C._dynamo.guards.TensorGuards")


def is_watched() -> bool:
    """Whether a tracer, a fake tensor mode or a functorch transform is active, or torch cannot tell."""
    return _count_modes is None or _transform is None or _count_modes() > 0 or _transform() is not None


def is_plain(tensor: Any) -> bool:
    """Whether ``tensor`` is a CUDA tensor of torch's own types, not of a subclass."""
    return (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter) and tensor.is_cuda


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that takes as many tensors as ``tensors`` and returns whether they have the same types, dtypes,
    shapes, strides and devices.
    """
    if _guards is not None and len({*map(id, tensors)}) == len(tensors):  # _guards refuses one tensor given twice
        check: Callable[..., bool] = _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check
    known = [_facts(tensor) for tensor in tensors]
    return lambda *others: [_facts(tensor) for tensor in others] == known


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    """What guard() compares; of anything else than a tensor, which is in a group of a wrong call, the type alone."""
    if not isinstance(tensor, torch.Tensor):
        return (type(tensor),)
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _exchange(index: int) -> int:
    previous = torch.cuda.current_device()
    torch.cuda.set_device(index)
    return previous


def _stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


# Repeated calls use these, so nothing stands between them and torch.
exchange_device: Callable[[int], int] = _internal("cuda._exchange_device") or _exchange
"""Make CUDA device ``index`` current. Returns the previous one."""
current_stream: Callable[[int], int] = _internal("_C._cuda_getCurrentRawStream") or _stream
"""The handle of the current stream of a CUDA device."""
empty_cuda: Callable[..., torch.Tensor] = _internal("_C._dynamo.guards._empty_strided_cuda") or _empty
"""torch.empty_strided(shape, stride, dtype) on the current CUDA device."""


def known(condition: Any) -> bool:
    """Whether a comparison of sizes holds. What torch.compile does not know is taken for false."""
    if not torch.compiler.is_dynamo_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def differ(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether two shapes differ. Sizes that torch.compile does not know count as equal, and are checked at run time."""
    if not torch.compiler.is_dynamo_compiling():
        return tuple(shape) != tuple(wanted)
    if len(shape) != len(wanted):
        return True
    for size, other in zip(shape, wanted, strict=True):
        if known(size != other):
            return True
        torch._check(size == other)
    return False


def reaches(size: int, limit: int) -> bool:
    """Whether a size is ``limit`` or more. One that torch.compile does not know counts as less, and is checked at run
    time.
    """
    if known(size >= limit):
        return True
    if torch.compiler.is_dynamo_compiling():
        torch._check(size < limit)
    return False


def is_among(size: int, sizes: Sequence[int]) -> bool:
    """Whether a size is one of ``sizes``. One that torch.compile does not know counts as the last, as in differ()."""
    return any(known(size == other) for other in sizes) or not differ((size,), sizes[-1:])
