"""What this package needs of torch's internals: one place, each with a public way for a torch that lacks it.

The public ways are right and slower: torch.cuda.current_stream() takes 4 us where the internal one takes 0.1
(bench/results/h200/launch.csv has what a call costs in all).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _internal(path: str) -> Callable[..., Any] | None:
    """The function at a dotted path below torch, or None where this torch has none."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if callable(found) else None


_dispatch_modes = _internal("_C._len_torch_dispatch_stack")
_transforms = _internal("_C._functorch.peek_interpreter_stack")
_raw_stream = _internal("_C._cuda_getCurrentRawStream")
_exchange = _internal("cuda._exchange_device")


def is_plain_cuda(tensor: Any) -> bool:
    """Whether the dispatcher would go straight to an operator's CUDA implementation: nobody traces, fakes or wraps."""
    return (
        (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter)
        and tensor.is_cuda
        and _dispatch_modes is not None
        and not _dispatch_modes()
        and _transforms is not None
        and _transforms() is None
    )


def exchange_device(index: int) -> int:
    """Make CUDA device ``index`` current. Returns the one before."""
    if _exchange is not None:
        return int(_exchange(index))
    previous = torch.cuda.current_device()
    torch.cuda.set_device(index)
    return previous


def current_stream(index: int) -> int:
    """The handle of the current stream of a CUDA device."""
    if _raw_stream is not None:
        return int(_raw_stream(index))
    return torch.cuda.current_stream(index).cuda_stream
