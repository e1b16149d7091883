"""Runs a benchmark whole where there is no GPU: tensors without data, launches that only bind, a clock that guesses.

Every tensor "on cuda" is on torch's meta device, so the functions check their arguments and allocate their results as
they do for a GPU. Operations choose a tactic and bind the kernel's parameters, and launch nothing. Only what is below
that (streams, graphs, events, loaded kernels) is pretended.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from jitfp4 import driver, engine, nvrtc, operation, tuning
from jitfp4.arch import Arch

ARCH = Arch.of("sm_90a")
TARGET = engine.Target(ARCH, 0)
GRAPH_MS = 1.0  # what the clock says of everything


class OnMeta(TorchFunctionMode):
    """Tensors of device "cuda" are made on torch's meta device."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.random_:  # has no meta implementation
            return args[0]
        return func(*args, **kwargs | ({"device": "meta"} if str(kwargs.get("device")) == "cuda" else {}))


class Stream:
    cuda_stream = 0

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, *, enable_timing: bool) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _other: Event) -> float:
        return GRAPH_MS


class CUDAGraph:
    def replay(self) -> None: ...


class LoadedKernel:
    """A kernel that takes as many arguments as it declares."""

    def __init__(self, _cubin: bytes, _symbol: str, params: tuple[Any, ...], _device: int) -> None:
        self.params = params

    def launch(self, _geometry: Any, args: Any, **_: Any) -> None:
        assert len(args) == len(self.params)


def plan(called: operation.Operation[Any, Any], arguments: Any) -> None:
    """What a call does up to its launch."""
    problem = called.problem(called.arguments(*arguments))
    if (observer := operation._observer.get()) is not None:
        observer(operation.Observed(called, arguments, problem, TARGET))
    called.prepare(called.plan(problem, ARCH, called.select(problem, ARCH)), arguments)


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Inside the block the imported benchmarks, and what they call, see a GPU of ``ARCH`` that computes nothing."""
    modules = [driver, engine, *(module for name, module in sys.modules.items() if name.startswith("bench."))]
    cuda = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "graph": lambda *_, **__: contextlib.nullcontext(),
        "current_stream": Stream,
        "synchronize": lambda: None,
        "get_device_capability": lambda: (9, 0),
    }
    replaced = {
        "LoadedKernel": LoadedKernel,
        "target_of": lambda _: TARGET,
        "device_name": lambda _: "a GPU",
        "build": lambda *_: SimpleNamespace(cubin=b""),
    }
    peers = {
        "triton": None,
        "fla": None,
        "flashinfer": None,
        "bench.triton_norm": SimpleNamespace(rmsnorm=lambda x, *_: torch.empty_like(x)),
        "bench.triton_quantize": SimpleNamespace(quantize=lambda x, _: (x, x)),
    }
    with pytest.MonkeyPatch.context() as patch, OnMeta():
        for name, peer in peers.items():
            patch.setitem(sys.modules, name, peer)
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        for name, value in replaced.items():
            for module in modules:
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        patch.setattr(nvrtc, "compile_cubin", lambda *_, **__: b"")
        patch.setattr(torch, "compile", lambda function, **_: function)
        patch.setattr(operation.Operation, "__call__", plan)
        patch.setattr(tuning, "WARM_UP_S", 0)
        patch.setattr(tuning, "MAX_CALLS", 2)
        yield
