"""What is used of torch's internals, and what stands in where a torch lacks it."""

from __future__ import annotations

import pytest
import torch

from jitfp4 import dispatch


@pytest.mark.parametrize("name", ["_count_modes", "_transform", "_guards"])
def test_what_torch_may_lack_has_another_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU shows it. On a GPU test_replay_on_gpu.py takes away each."""
    assert getattr(dispatch, name) is not None, "this torch has it"
    monkeypatch.setattr(dispatch, name, None)
    x, y = torch.zeros(4, 8), torch.zeros(8)
    matches = dispatch.guard((x, y))
    assert matches(torch.ones(4, 8), torch.ones(8))
    for other in (
        (torch.zeros(5, 8), y),
        (torch.zeros(8, 4).t(), y),
        (x.double(), y),
        (x.to("meta"), y),
        (torch.nn.Parameter(x), y),
        (x, torch.zeros(9)),
        (x, "y"),
        (x, y.numpy()),
    ):
        assert not matches(*other)
    assert dispatch.is_watched() == (name in ("_count_modes", "_transform"))


def test_a_device_is_made_current_by_public_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    assert dispatch._exchange(1) == 2 and made == [1]


def test_one_tensor_given_twice() -> None:
    x = torch.zeros(4, 8)
    matches = dispatch.guard((x, x))
    assert matches(x, torch.ones(4, 8))
    assert not any(matches(x, other) for other in (x.double(), "x", x.numpy(), None))


def test_tracing_and_transforming_are_seen() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not dispatch.is_watched()
    with FakeTensorMode():
        assert dispatch.is_watched()
    seen = []
    torch.func.vmap(lambda x: (seen.append(dispatch.is_watched()), x)[1])(torch.zeros(2, 3))
    assert seen == [True]
