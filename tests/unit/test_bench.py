"""What the benchmarks of bench/ share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from bench.bench_gemm import Replay


def call_with_an_output() -> tuple[Callable[[], Any], weakref.ref[torch.Tensor]]:
    out = torch.empty(4)
    return out.zero_, weakref.ref(out)


def test_a_graph_keeps_what_its_calls_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows addresses only; the capture of the next one gives memory that nobody holds back to the system."""
    event = MagicMock()
    event.return_value.elapsed_time.return_value = 1.0
    stand_ins = {"Event": event, "stream": MagicMock(return_value=nullcontext())}
    for name in ("Stream", "CUDAGraph", "current_stream", "graph"):
        stand_ins[name] = MagicMock()
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    call, out = call_with_an_output()
    replay = Replay([call])
    del call
    assert out() is not None
    del replay
    assert out() is None
