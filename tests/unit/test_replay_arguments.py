"""What calls that are repeated may take: groups of tensors, parts of one, tensors at one address; and no result."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch

from jitfp4 import replay
from jitfp4.remembered import Step
from tests.support.launches import FakeLaunch, Launches, plain  # noqa: F401 - a fixture
from tests.support.replay import Public, aligned


@pytest.mark.usefixtures("plain")
class TestArguments:
    def test_pairs_of_tensors_are_arguments_like_others(self) -> None:
        ran, launch = [], FakeLaunch()

        @replay.replayed
        def function(x: torch.Tensor, cache: object, flag: str = "") -> torch.Tensor:
            ran.append(1)
            k, v = cache  # type: ignore[misc]
            out = torch.empty(4)
            replay.note(Step(launch, (x, k, v, out), (), ()))
            return out

        tensors = [aligned(4) for _ in range(6)]
        function(tensors[0], (tensors[1], tensors[2]))
        out = function(tensors[3], (tensors[4], tensors[5]))
        assert launch.repeated == [(*(x.data_ptr() for x in tensors[3:]), out.data_ptr())] and len(ran) == 1
        function(tensors[0], [tensors[1], tensors[2]])
        function(tensors[0], (tensors[1], aligned(4).double()))
        function(tensors[0], (tensors[1], tensors[2]), "other")
        assert len(ran) == 4, "a call was taken for another"
        for cache in ((tensors[1], None), (tensors[1], "k")):  # what is wrong with them is for the function to say
            function(tensors[0], cache), function(tensors[0], cache)
        for wrong in (tuple(tensors[:1]), ()):
            with pytest.raises(ValueError, match="unpack"):
                function(tensors[0], wrong)
        assert len(ran) == 10 and len(launch.repeated) == 1

    def test_groups_of_other_lengths_are_other_calls(self) -> None:
        ran = []

        @replay.replayed
        def function(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> None:
            ran.append((len(first), len(second)))
            replay.note(Step(FakeLaunch(), (*first, *second), (), ()))

        a, b, c = (aligned(4) for _ in "abc")
        calls: list[Any] = [((a,), (b, c)), ((a, b), (c,)), ((a, b, c), ()), ((), (a, b, c)), ((a,), (b,))]
        for first, second in calls * 2:
            function(first, second)
        assert ran == [(1, 2), (2, 1), (3, 0), (0, 3), (1, 1)]

    def test_groups_of_flags_are_other_calls_for_other_values_and_types(self) -> None:
        ran = []

        @replay.replayed
        def function(x: Any, sizes: object, mixed: object = ()) -> None:
            ran.append((sizes, mixed))
            replay.note(Step(FakeLaunch(), (x if isinstance(x, torch.Tensor) else x[0],), (), ()))

        x = aligned(4)
        groups: list[Any] = [(1, 2), (1, 3), (True, 2), (1.0, 2), (0.0, 2), (-0.0, 2), (1, None), [x, 2], [2, x], (2,)]
        for _ in range(2):
            for sizes in groups:
                function(x, sizes), function(x, sizes, (x, "a")), function(x, (), sizes)
        assert len(ran) == 3 * len(groups)
        for sizes in ((x, x[:]), (1, 2)) * 2:
            function(sizes, sizes)
        assert len(ran) == 3 * len(groups) + 3, "a call without a tensor is not remembered"
        ran.clear()
        for unknown in ((1, (2,)), (1, {2}), [[]]):  # a group in a group, or something else
            function(x, unknown), function(x, unknown)
        assert len(ran) == 6

    def test_a_call_without_a_result_returns_none(self) -> None:
        ran = []

        @replay.replayed
        def function(x: torch.Tensor) -> None:
            ran.append(1)
            replay.note(Step(FakeLaunch(), (x,), (x,), ()))

        memory = aligned(8)
        assert function(memory[:4]) is None and function(memory[4:]) is None
        assert len(ran) == 1
        assert function(memory[1:5]) is None
        assert len(ran) == 2, "misaligned"

    def test_parts_of_an_argument_keep_their_place_in_it(self) -> None:
        ran, launch = [], FakeLaunch()

        @replay.replayed
        def function(cache: torch.Tensor, out: torch.Tensor) -> None:
            ran.append(1)
            k, v = cache[:, 0], replay.part(cache[:, 1], cache)
            replay.note(Step(launch, (k, v, out), (v,), ((out, v),)))

        first, second, out = aligned(3, 2, 4), aligned(3, 2, 4), aligned(4)
        function(first, out)
        function(second, out)
        assert launch.repeated == [(second.data_ptr(), second.data_ptr() + 16, out.data_ptr())] and len(ran) == 1
        function(second, second.view(-1)[12:16])  # V of the second page
        assert len(ran) == 2, "overlapping"

    def test_a_part_where_another_argument_begins_is_not_understood(self) -> None:
        ran = []

        @replay.replayed
        def function(cache: torch.Tensor, other: torch.Tensor) -> None:
            ran.append(1)
            replay.note(Step(FakeLaunch(), (replay.part(cache[1], cache), other), (), ()))

        cache = aligned(2, 4)
        function(cache, cache[1]), function(cache, cache[1])
        assert len(ran) == 2

    def test_a_condition_holds_for_each_call(self) -> None:
        ran, asked = [], []

        def holds(x: torch.Tensor) -> bool:
            asked.append(x)
            return bool(x[0] > 0)

        @replay.replayed
        def function(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            out = torch.empty(4)
            replay.require(holds, x)
            replay.note(Step(FakeLaunch(), (y, out), (), ()))
            return out

        y, x = aligned(4), aligned(4) + 1
        function(y, x), function(y, x)
        assert len(ran) == 1 and asked[-1] is x
        x.zero_()
        function(y, x), function(y, x)
        assert len(ran) == 3

    def test_two_arguments_at_one_address_are_not_understood_but_others_later_are(self) -> None:
        public, x = Public(), aligned(4, 8)
        public.call(x, x)
        public.call(x, x)
        assert public.ran == 2
        public.call(x, aligned(4, 8))
        public.call(aligned(4, 8), x)
        assert public.ran == 3

    def test_arguments_at_one_address_are_repeated_while_they_share_it(self) -> None:
        launched: list[FakeLaunch] = []

        @replay.replayed
        def total(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = torch.empty(4)
            launched.append(FakeLaunch())
            replay.note(Step(launched[-1], (a, b, out), (), ()))
            return out

        one, other = aligned(4), aligned(4)
        total(one, one)
        total(other, other)
        assert len(launched) == 1 and launched[0].repeated[0][:2] == (other.data_ptr(), other.data_ptr())
        total(one, other)
        total(other, one)
        assert len(launched) == 2 and launched[1].repeated[0][:2] == (other.data_ptr(), one.data_ptr())

    def test_one_tensor_twice_is_another_call_than_two_at_one_address(self) -> None:
        ran = []

        @replay.replayed
        def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ran.append(a is b)
            if a is not b:
                replay.require(operator.is_not, a, b)
            out = torch.empty(4)
            replay.note(Step(FakeLaunch(), (a, b, out), (), ()))
            return out

        for first, then in itertools.permutations((lambda x: x, lambda x: x[:], torch.clone), 2):
            replay.forget()
            ran.clear()
            for _ in range(2):
                for make in (first, then):
                    x = aligned(4)
                    function(x, make(x))
            assert len(ran) == len({*ran}) or ran == [False, False], "two tensors, once at one address and once not"

    def test_a_result_that_is_part_of_something_larger_is_not_repeated(self) -> None:
        ran = []

        @replay.replayed
        def half(x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            out = torch.empty(2, *x.shape)[0]
            replay.note(Step(FakeLaunch(), (x, out), (), ()))
            return out

        x = aligned(4)
        half(x), half(x)
        assert len(ran) == 2
