"""Numbers as arguments of kernels that read tensors: a number that comes again is one tensor, which stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from jitfp4 import tensors

GPU = torch.device("cuda", 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The numbers that the host copied to the GPU and waited for; tensors are on the CPU."""
    copied: list[float] = []
    full, tensor = torch.full, torch.tensor

    def copy(values: list[float], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == GPU and not torch.is_inference_mode_enabled()
        copied.extend(values)
        return tensor(values, dtype=dtype)

    def fill(shape: Any, value: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == GPU
        return full(shape, value, dtype=dtype)

    monkeypatch.setattr(torch, "full", fill)
    monkeypatch.setattr(torch, "tensor", copy)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tensors, "_numbers", {})
    yield copied


def number(value: float) -> torch.Tensor:
    found = tensors._number(value, GPU)
    assert found.dtype == torch.float32 and found.tolist() == [value]
    return found


def test_a_number_that_comes_again_is_copied_once(made: list[float]) -> None:
    first = number(0.5)
    assert not made, "a number that comes once makes nobody wait"
    with torch.inference_mode():
        second = number(0.5)
    assert made == [0.5] and second is not first and not second.is_inference()
    assert number(0.5) is second and number(0.25) is not second and made == [0.5]


def test_a_graph_captures_a_tensor_of_its_own_unless_there_is_one(
    made: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [number(0.5), number(0.5)][1]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert number(0.5) is kept
    assert number(2.0) is not number(2.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert number(2.0) is not number(2.0) and made == [0.5, 2.0]


def test_tracers_get_a_tensor_of_their_own(made: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [number(0.5), number(0.5)][1]
    monkeypatch.setattr(tensors, "is_watched", lambda: True)
    assert number(0.5) is not kept and made == [0.5]


def test_numbers_are_bounded(made: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_MOST_NUMBERS", 2)
    for _ in range(3):
        for value in (0.5, 1.0, 2.0):
            number(value)
    assert made == [0.5, 1.0] and len(tensors._numbers) == 2


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of the lists that the host copied to the GPU and waited for; tensors are on the CPU."""
    copied: list[int] = []
    arange = torch.arange

    def copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device == GPU and tensor.is_cpu and not torch.is_inference_mode_enabled()
        copied.append(len(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch, "arange", lambda *ends, dtype, device: arange(*ends, dtype=dtype))  # noqa: ARG005
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tensors, "_counts", {})
    monkeypatch.setattr(tensors, "_counted", {})
    yield copied


def count(start: int, stop: int) -> torch.Tensor:
    found = tensors._count(start, stop, GPU)
    assert found.dtype == torch.int32 and found.tolist() == list(range(start, stop))
    return found


def test_lists_are_parts_of_one_that_is_copied_once(counted: list[int]) -> None:
    with torch.inference_mode():
        first = count(0, 5)
    assert count(0, 5) is first and counted == [1024] and not first.is_inference()
    assert count(1023, 1024).data_ptr() == first.data_ptr() + 4 * 1023 and counted == [1024]
    longer = count(1024, 1025)
    assert counted == [1024, 2048] and count(0, 5) is first
    assert count(0, 6).data_ptr() == longer.data_ptr() - 4 * 1024
    assert len(tensors._counts[GPU]) == 2, "a graph may read the shorter one"


@pytest.mark.parametrize("why", ["captured", "traced", "long"])
def test_a_list_of_its_own(why: str, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = count(0, 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: why == "captured")
    monkeypatch.setattr(tensors, "is_watched", lambda: why == "traced")
    monkeypatch.setattr(tensors, "_MOST_COUNTED", 1)
    assert count(0, 6) is not count(0, 6) and counted == [1024]
    assert (count(0, 5) is kept) == (why != "traced")


def test_lists_are_bounded(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_MOST_NUMBERS", 4)
    for stop in range(1, 20):
        count(0, stop)
    assert len(tensors._counted) <= 4 and counted == [1024]
