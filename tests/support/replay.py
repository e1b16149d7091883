"""A function whose calls are repeated, and tensors for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jitfp4 import replay
from jitfp4.remembered import Step
from tests.support.launches import FakeLaunch


class Public:
    """A public function ``x, out, flag -> out, sums``, decorated; how often it ran, and its launches."""

    def __init__(self, *, launches: int = 1, hidden: bool = False) -> None:
        self.ran = 0
        self.launched: list[FakeLaunch] = []

        @replay.replayed
        def function(
            x: torch.Tensor, out: torch.Tensor | None = None, flag: object = None, *, scale: object = 1.0
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.ran += 1
            out = torch.empty(x.shape) if out is None else out
            sums = torch.empty(x.shape[0])
            for _ in range(launches):
                launch, tensors = FakeLaunch(), (x, out, sums, *([torch.empty(3)] if hidden else []))
                self.launched.append(launch)
                replay.note(Step(launch, tensors, aligned=(x,), disjoint=((out, x),)))
            return out, sums

        self.call: Callable[..., Any] = function

    @property
    def repeated(self) -> list[tuple[int, ...]]:
        return [addresses for launch in self.launched for addresses in launch.repeated]


def aligned(*shape: int) -> torch.Tensor:
    tensor = torch.zeros(*shape)
    assert tensor.data_ptr() % 16 == 0
    return tensor
