"""What a remembered call makes anew: temporaries, and companions of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from jitfp4 import remembered, replay
from jitfp4.remembered import Step
from tests.support.launches import FakeLaunch, plain  # noqa: F401 - a fixture
from tests.support.replay import aligned

pytestmark = pytest.mark.usefixtures("plain")


def test_a_temporary_of_what_a_launch_wrote_is_not_made_before_it() -> None:
    ran = []

    @replay.replayed
    def function(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        between, out = replay.scratch((4,), torch.float32, x), torch.empty(4)
        replay.note(Step(FakeLaunch(), (x, between), (), ()))
        doubled = replay.temporary(lambda y: y.double(), between)
        replay.note(Step(FakeLaunch(), (doubled, out), (), ()))
        return out

    x = aligned(4)
    function(x), function(x)
    assert len(ran) == 2


def test_scratch_is_one_allocation_but_for_what_something_is_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, made = FakeLaunch(), []

    def empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty_strided(shape, stride, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(remembered, "empty_cuda", empty)

    @replay.replayed
    def function(x: torch.Tensor) -> torch.Tensor:
        first, source, last = (replay.scratch((5, 3), dtype, x) for dtype in (torch.float64, torch.int8, torch.float32))
        out, own = torch.empty(4), replay.temporary(torch.Tensor.int, source)
        replay.note(Step(launch, (x, first, last), (first,), disjoint=((first, last),)))
        replay.note(Step(launch, (last, first, source, own, out), (), ()))
        return out

    function(aligned(4))
    out = function(aligned(4))
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in made] == [
        ((4,), torch.float32),
        ((5, 3), torch.int8),
        ((1024,), torch.uint8),
    ]
    (_, first, last), (*again, source, own, result) = launch.repeated
    assert (first, last) == (made[2].data_ptr(), made[2].data_ptr() + 512) == tuple(reversed(again))
    assert (source, result) == (made[1].data_ptr(), out.data_ptr()) and own not in (source, first, last)


def test_temporaries_are_made_anew() -> None:
    """From a number, from an argument, and from a temporary: nobody's old values are used."""
    launch = FakeLaunch()
    seen: list[torch.Tensor] = []

    @replay.replayed
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        out = torch.empty(x.shape)
        number = replay.temporary(lambda: torch.full((1,), factor))
        doubled = replay.temporary(lambda y: y.double(), x)
        both = replay.temporary(lambda *values: seen.append(torch.cat(values)) or seen[-1], number, doubled)
        replay.note(Step(launch, (both, out, number), (), ()))
        return out

    scaled(aligned(4), 2.0)
    out = scaled(aligned(4) + 3, 2.0)
    assert seen[1].tolist() == [2, 3, 3, 3, 3]
    ((made, result, _),) = launch.repeated
    assert (made, result) == (seen[1].data_ptr(), out.data_ptr())
    scaled(aligned(4), 5.0)
    assert seen[2].tolist() == [5, 0, 0, 0, 0] and len(launch.repeated) == 1


def test_a_companion_is_asked_for_once_at_an_address_unless_it_is_another_each_time() -> None:
    launch, asked = FakeLaunch(), []
    kept: dict[int, torch.Tensor] = {}

    def find(source: torch.Tensor) -> torch.Tensor:
        asked.append(source.data_ptr())
        if lasts:
            return kept.setdefault(source.data_ptr(), torch.zeros(2))
        kept[len(asked)] = torch.zeros(2)
        return kept[len(asked)]

    @replay.replayed
    def counted(x: torch.Tensor, out: torch.Tensor, lasting: bool) -> torch.Tensor:
        replay.note(Step(launch, (replay.companion(find, x), x, out), (x,), ()))
        return out

    out, spaces, lasts = aligned(4), (aligned(4), aligned(4)), True
    for space in (*spaces, *spaces, *spaces):
        counted(space, out, True)
    assert asked.count(spaces[1].data_ptr()) == 2, "the second only to see whether it is the same"
    assert [own for own, *_ in launch.repeated] == [kept[at].data_ptr() for _, at, _ in launch.repeated]
    lasts, before = False, len(launch.repeated)
    for _ in range(4):
        counted(spaces[0], out, False)
    last = [own for own, *_ in launch.repeated[before:]]
    assert len(set(last)) == len(last) == 3, "no tensor is given to two launches"


@pytest.mark.parametrize("made_by", [replay.temporary, replay.companion])
def test_a_temporary_may_come_from_a_view_of_an_argument_and_be_kept(made_by: Callable[..., Any]) -> None:
    """As counters that belong to the address of a workspace."""
    launch, ran = FakeLaunch(), []
    kept: dict[int, torch.Tensor] = {}

    @replay.replayed
    def counted(x: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        out, scratch = torch.empty(x.shape), space.view(torch.uint8).flatten()
        own = made_by(lambda y: kept.setdefault(y.data_ptr(), torch.zeros(2)), scratch)
        replay.note(Step(launch, (x, scratch, own, out), (), ()))
        return out

    spaces = aligned(4, 2), aligned(4, 2)
    for space in (spaces[0], *spaces, *spaces):
        counted(aligned(4), space)
    assert len(ran) == 1
    wanted = [(space.data_ptr(), kept[space.data_ptr()].data_ptr()) for space in (*spaces, *spaces)]
    assert [addresses[1:3] for addresses in launch.repeated] == wanted and len(kept) == 2


def test_temporaries_of_something_else_are_not_repeated() -> None:
    ran = []

    @replay.replayed
    def hidden(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        out = torch.empty(x.shape)
        made = replay.temporary(torch.Tensor.double, torch.ones(4))
        replay.note(Step(FakeLaunch(), (made, out), (), ()))
        return out

    x = aligned(4)
    hidden(x), hidden(x)
    assert len(ran) == 2
