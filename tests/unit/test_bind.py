"""bind() of every kernel says what the parameters are, and does nothing: it launches, allocates and copies nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jitfp4 import replay
from jitfp4.kernel import AnyKernel, kernels
from jitfp4.remembered import Notes
from tests.inputs.calls import function_of
from tests.inputs.repeated import archs_of, repeated_calls
from tests.support.launches import Launches, plain  # noqa: F401 - a fixture

LENT = (
    *("attention/decode", "attention/decode_masked", "experts/router", "gemm/expanded_fp8"),
    *("attention/prefill_wgmma", "attention/prefill_wgmma_masked"),
)
"""Kernels whose bind() asks for counters, which are memory of the library."""


class OnlyViews(TorchDispatchMode):
    """Operations on tensors must give views of what they are given."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.is_view, f"bind() runs {function}"
        return function(*args, **(kwargs or {}))


def watched(kernel: AnyKernel, bound: set[str]) -> Callable[..., Any]:
    """The kernel's bind(), which fails where it does more than that."""
    bind = kernel.bind

    def checked(*args: Any, **scratch: Any) -> Any:
        notes = Notes.none()
        token = replay._notes.set(notes)
        try:
            with OnlyViews():
                values = bind(*args, **scratch)
        finally:
            replay._notes.reset(token)
        assert not any(notes), "bind() launches or makes something"
        bound.add(kernel.name)
        return values

    return checked


@pytest.fixture
def bound() -> Iterator[set[str]]:
    """The kernels whose bind() was called, and did nothing else."""
    names: set[str] = set()
    originals = {kernel: kernel.bind for kernel in kernels() if kernel.name not in LENT}
    for kernel in originals:
        object.__setattr__(kernel, "bind", watched(kernel, names))
    yield names
    for kernel, bind in originals.items():
        object.__setattr__(kernel, "bind", bind)


@pytest.mark.complete
@pytest.mark.usefixtures("plain")
def test_bind_does_nothing_else(bound: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in repeated_calls().items():
        for arch in archs_of(name):
            replay.forget()
            Launches(monkeypatch, arch)
            function_of(name)(**make())
    assert bound == {kernel.name for kernel in kernels()} - {*LENT}, "tests/inputs/repeated.py needs a call"


def test_what_is_no_view_is_noticed() -> None:
    x = torch.zeros(4)
    with OnlyViews():
        assert x.view(2, 2).transpose(0, 1)[0].shape == (2,)
        for make in (lambda: torch.empty(3), lambda: x + 1, x.clone, lambda: x.fill_(1)):
            with pytest.raises(AssertionError, match="bind"):
                make()
