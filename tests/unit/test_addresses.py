"""Whether two tensors share memory, against the sets of their bytes."""

from __future__ import annotations

import random

import pytest
import torch

import jitfp4
from jitfp4 import replay
from jitfp4.addresses import Places, extent
from tests.support.kv import ARRANGEMENTS, paged_cache
from tests.support.launches import Launches, plain  # noqa: F401 - a fixture

MEMORY = torch.zeros(1 << 13, dtype=torch.uint8)


def owned(tensor: torch.Tensor) -> set[int]:
    """The numbers of the bytes of MEMORY that a tensor has."""
    numbers = torch.arange(MEMORY.numel()).as_strided(
        (*tensor.shape, tensor.element_size()),
        (*(stride * tensor.element_size() for stride in tensor.stride()), 1),
        tensor.data_ptr() - MEMORY.data_ptr(),
    )
    return set(numbers.flatten().tolist())


def share(first: torch.Tensor, second: torch.Tensor) -> bool:
    return Places.of(first, second).meet(first.data_ptr(), second.data_ptr())


def test_no_shared_byte_is_missed() -> None:
    """Views of random sizes, strides and offsets. Some that are apart may count as sharing, not most."""
    random.seed(4)
    apart = found = 0
    for _ in range(3000):
        views = []
        for _ in range(2):
            dtype = random.choice((torch.uint8, torch.int16, torch.float32))
            shape, stride, step = [], [], 1
            for _ in range(random.randint(0, 3)):
                shape.insert(0, random.randint(1, 4))
                step *= random.choice((1, 1, 2, 3))
                stride.insert(0, step)
                step *= shape[0]
            views.append(MEMORY.view(dtype).as_strided(shape, stride, random.randint(0, 60)))
        shared = bool(owned(views[0]) & owned(views[1]))
        assert share(*views) or not shared, [(view.shape, view.stride(), view.storage_offset()) for view in views]
        apart += not shared
        found += not share(*views)
    assert apart * 0.9 < found <= apart


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_parts_of_a_page_and_of_a_head_are_apart(layout: str) -> None:
    """Caches as engines pack them: K and V stacked, as parts of a page with their scales, and in one head."""
    shape = (3, 4, 2) if layout == "NHD" else (3, 2, 4)
    stacked = MEMORY[: 3 * 2 * 8 * 16].view(3, 2, *shape[1:], 16)
    head = MEMORY[: 24 * 40].view(*shape, 40)
    page = MEMORY[: 3 * 360].view(3, 360)
    parts = [page[:, a:b].unflatten(1, (*shape[1:], -1)) for a, b in ((0, 128), (128, 144), (144, 272), (272, 288))]
    for views in (stacked.unbind(1), head.split((16, 16, 4, 4), -1), parts):
        for number, first in enumerate(views):
            for other in views[number + 1 :]:
                assert not share(first, other) and not share(other, first)
                assert share(first, first[:]) and share(first, first[1:])
    assert not share(parts[0], MEMORY[300:350]), "the rest of a page belongs to nobody"
    assert share(parts[0], MEMORY[300:380])


def test_the_extent_holds_every_byte() -> None:
    view = MEMORY.view(torch.int16).as_strided((3, 2), (10, 3), 5)
    low, high = (address - MEMORY.data_ptr() for address in extent(view))
    assert (low, high) == (min(owned(view)), max(owned(view)) + 1)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_an_append_into_packed_pages_is_repeated(arrangement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other caches, whose K and V lie beside each other like those of the first call."""
    replay.forget()
    launches, scale = Launches(monkeypatch, "sm_90a"), torch.ones(1)
    slots = torch.zeros(5, dtype=torch.int64)
    for _ in range(3):
        cache = paged_cache(4, 16, 2, (128, 128), "NHD", arrangement, "cpu")
        key, value = torch.zeros(2, 5, 2, 128).bfloat16()
        jitfp4.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            key, value, slots, cache.codes, cache.sf, scale, scale
        )
    assert launches.first == ["kv/quantize"] and launches.repeated == ["kv/quantize"] * 2
