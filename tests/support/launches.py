"""Calls that run without a GPU up to their launches, which are noted: CPU tensors pass for CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from jitfp4 import counters, engine, remembered, replay
from jitfp4.arch import Arch
from jitfp4.kernel import Plan
from jitfp4.spec import TileMap


class FakeLaunch:
    """A launch that notes the addresses that it is repeated with."""

    def __init__(self) -> None:
        self.repeated: list[tuple[int, ...]] = []

    def bound(self, addresses: Sequence[int], stream: int) -> Any:
        assert stream == 7
        return lambda: self.repeated.append(tuple(addresses))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors pass for CUDA tensors."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(remembered, "exchange_device", lambda _index: 0)
    monkeypatch.setattr(remembered, "current_stream", lambda _index: 7)
    monkeypatch.setattr(
        remembered, "empty_cuda", lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(counters, "of", lambda _workspace: torch.zeros(counters.COUNTER_BYTES, dtype=torch.uint8))
    yield
    replay.forget()


class Launches:
    """Launches of an architecture's kernels: which ran the checked way, and what was repeated, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
        self.first: list[str] = []  # kernels
        self.repeated: list[str] = []
        monkeypatch.setattr(engine, "target_of", lambda _: engine.Target(Arch.of(arch), 0))
        monkeypatch.setattr(engine, "launch", self._launch)
        monkeypatch.setattr(engine, "device_name", lambda _: "a GPU")

    def _launch(self, plan: Plan, args: Sequence[Any], *_: Any, **__: Any) -> tuple[Any, list[torch.Tensor]]:
        name = plan.kernel.name
        self.first.append(name)
        tensors = [arg.tensor if isinstance(arg, TileMap) else arg for arg in args]
        return _Named(name, self.repeated), [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


class _Named:
    def __init__(self, name: str, repeated: list[str]) -> None:
        self._name, self._repeated = name, repeated

    def bound(self, _addresses: Sequence[int], _stream: int) -> Any:
        return lambda: self._repeated.append(self._name)
