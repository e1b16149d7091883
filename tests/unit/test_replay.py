"""Calls that are repeated: the same results and errors as the first, with other addresses, and nothing kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, SfLayout, engine, replay
from jitfp4.arch import ARCHS
from jitfp4.families.kv import checks
from jitfp4.remembered import Step
from tests.support.launches import FakeLaunch, Launches, plain  # noqa: F401 - a fixture
from tests.support.replay import Public, aligned


@pytest.mark.usefixtures("plain")
class TestLogic:
    def test_a_second_call_repeats_the_launch_with_its_own_addresses(self) -> None:
        public, first, second = Public(), aligned(4, 8), aligned(4, 8)
        public.call(first)
        out, sums = public.call(second)
        assert public.ran == 1
        assert public.repeated == [(second.data_ptr(), out.data_ptr(), sums.data_ptr())]
        assert out.shape == (4, 8) and sums.shape == (4,) and out.data_ptr() != second.data_ptr()

    def test_given_outputs_are_returned(self) -> None:
        public, x = Public(), aligned(4, 8)
        public.call(x, aligned(4, 8))
        target = aligned(4, 8)
        out, _ = public.call(x, target)
        assert public.ran == 1 and out is target

    def test_a_number_of_results_stays_a_tuple_and_one_stays_a_tensor(self) -> None:
        @replay.replayed
        def one(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty(x.shape)
            replay.note(Step(FakeLaunch(), (x, out), (), ()))
            return out

        x = aligned(4)
        assert isinstance(one(x), torch.Tensor) and isinstance(one(x), torch.Tensor)

    @pytest.mark.parametrize(
        "change",
        [
            lambda _: ((aligned(5, 8),), {}),
            lambda x: ((x.double(),), {}),
            lambda _: ((aligned(8, 4).t(),), {}),
            lambda x: ((x, None, 1), {}),
            lambda x: ((x, None, True), {}),
            lambda x: ((x,), {"scale": 1}),
            lambda x: ((x,), {"scale": 2.0}),
            lambda x: ((x,), {"scale": 0.0}),
            lambda x: ((x,), {"scale": -0.0}),
            lambda x: ((x,), {"flag": 1.0}),
            lambda x: ((x, None, "1"), {}),
            lambda x: ((x, None, SfLayout.layout_8x4), {}),
            lambda x: ((x, None, torch.float16), {}),
            lambda x: ((x, aligned(4, 8)), {}),
            lambda x: ((torch.nn.Parameter(x, requires_grad=False),), {}),
        ],
    )  # fmt: skip
    def test_what_differs_is_another_call(self, change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        public, x = Public(), aligned(4, 8)
        variants: list[Any] = [
            ((x,), {}),
            ((x, None, 0), {}),
            ((x, None, False), {}),
            ((x,), {"scale": 1.0}),
            change(x),
        ]
        for number, (args, kwargs) in enumerate(variants, 1):
            public.call(*args, **kwargs)
            assert public.ran == number, "a call was taken for another"
        for args, kwargs in variants:
            public.call(*args, **kwargs)
        assert public.ran == 5 and len(public.repeated) == 5

    def test_zeros_of_both_signs_differ(self) -> None:
        public, x = Public(), aligned(4, 8)
        public.call(x, scale=0.0)
        public.call(x, scale=-0.0)
        assert public.ran == 2

    def test_values_of_unknown_types_are_never_remembered(self) -> None:
        public, x = Public(), aligned(4, 8)
        for _ in range(2):
            public.call(x, flag={1})
        assert public.ran == 2

    def test_a_misaligned_or_overlapping_tensor_takes_the_long_way(self) -> None:
        public, memory = Public(), aligned(200)
        x, out = memory[:32].view(4, 8), memory[32:64].view(4, 8)
        public.call(x, out)
        public.call(memory[64:96].view(4, 8), out)
        assert public.ran == 1
        public.call(memory[65:97].view(4, 8), out)
        assert public.ran == 2, "misaligned"
        public.call(x, memory[28:60].view(4, 8))
        assert public.ran == 3, "overlapping"
        public.call(x, memory[100:132].view(4, 8))
        assert public.ran == 3

    @pytest.mark.parametrize("wrong", [{"launches": 0}, {"launches": 2, "hidden": True}, {"hidden": True}], ids=str)
    def test_what_is_not_launches_on_known_tensors_is_not_repeated(self, wrong: dict[str, Any]) -> None:
        public, x = Public(**wrong), aligned(4, 8)
        for _ in range(3):
            public.call(x)
        assert public.ran == 3 and not public.repeated

    def test_launches_are_repeated_in_order_with_memory_of_their_own(self) -> None:
        order: list[tuple[int, ...]] = []

        class Ordered(FakeLaunch):
            def bound(self, addresses: Sequence[int], stream: int) -> Any:
                order.append(tuple(addresses))
                return super().bound(addresses, stream)

        ran = []

        @replay.replayed
        def function(x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            between, out = replay.scratch((7,), torch.float32, x), torch.empty(4)
            for tensors in ((x, between), (between, out), (out,)):
                replay.note(Step(Ordered(), tensors, aligned=(tensors[0],), disjoint=()))
            return out

        memory = aligned(8)
        function(aligned(4))
        out = function(memory[:4])
        between = order[0][1]
        assert order == [(memory.data_ptr(), between), (between, out.data_ptr()), (out.data_ptr(),)] and len(ran) == 1
        function(memory[1:5])  # misaligned: of the first launch
        assert len(ran) == 2

    def test_conditions_of_a_later_launch_hold_for_its_own_tensors(self) -> None:
        ran = []

        @replay.replayed
        def function(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            replay.note(Step(FakeLaunch(), (x, x), aligned=(), disjoint=()))
            replay.note(Step(FakeLaunch(), (y, out), aligned=(out,), disjoint=((out, y),)))
            return out

        memory = aligned(64)
        x, y, out = memory[:4], memory[4:8], memory[8:12]
        function(x, y, out)
        function(memory[1:5], memory[13:17], out)  # x may lie anywhere, and y need not be aligned
        function(memory[8:12], y, out)  # x and out may share memory
        assert len(ran) == 1
        function(x, y, memory[9:13])
        assert len(ran) == 2, "misaligned"
        function(x, memory[11:15], out)
        assert len(ran) == 3, "overlapping"

    def test_a_condition_on_a_tensor_of_an_earlier_launch_holds(self) -> None:
        ran = []

        @replay.replayed
        def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            between = replay.scratch((4,), torch.float32, x)
            replay.note(Step(FakeLaunch(), (x, between), (), ()))
            replay.note(Step(FakeLaunch(), (between, out), (), disjoint=((out, x),)))
            return out

        memory = aligned(12)
        function(memory[:4], memory[4:8]), function(memory[4:8], memory[8:])
        assert len(ran) == 1
        function(memory[:4], memory[2:6])
        assert len(ran) == 2

    def test_a_result_that_no_launch_fills_is_not_repeated(self) -> None:
        ran = []

        @replay.replayed
        def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ran.append(1)
            out = torch.empty(4)
            replay.note(Step(FakeLaunch(), (x, out), (), ()))
            return out, x + 1

        x = aligned(4)
        function(x), function(x)
        assert len(ran) == 2

    def test_an_unpacked_record_is_its_fields(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Record(NamedTuple):
            x: torch.Tensor
            factor: float
            out: torch.Tensor | None = None
            note: object = None

        monkeypatch.setattr(replay, "_fields", {})
        replay.unpack(Record, "x", "factor", "out")
        launch, ran = FakeLaunch(), []

        @replay.replayed
        def scaled(record: Record) -> torch.Tensor:
            ran.append(record)
            out = torch.empty(4) if record.out is None else record.out
            replay.note(Step(launch, (record.x, out), (), ()))
            return out

        x, out = aligned(4), aligned(4)
        scaled(Record(x, 2.0))
        scaled(Record(factor=2.0, x=x, note=[]))
        assert len(ran) == 1 and launch.repeated[0][0] == x.data_ptr()
        scaled(Record(x, 3.0))
        scaled(Record(x, 2.0, out))
        assert len(ran) == 3
        assert scaled(Record(x, 2.0, out)) is out and len(ran) == 3
        scaled(Record(x, 2)), scaled(Record(x, True)), scaled(Record(x, -0.0)), scaled(Record(x, 0.0))
        assert len(ran) == 7

    def test_a_global_scale_that_is_a_number_or_of_another_dtype_is_repeated(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launch, scales = FakeLaunch(), []

        def launched(plan: Any, values: Any, target: Any, *, pdl: object) -> Any:
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            scales.append(tensors[1].item())
            return launch, tensors

        monkeypatch.setattr(engine, "target_of", lambda _: engine.Target(ARCHS["sm_90a"], 0))
        monkeypatch.setattr(engine, "launch", launched)
        a = aligned(16, 64).bfloat16()
        for scale in (3.0, torch.tensor([5.0]).half()):
            for _ in range(3):
                jitfp4.nvfp4_quantize(a, scale)
            jitfp4.fp4_quantize(a, scale, is_global_scale_inversed=True)
            jitfp4.fp4_quantize(a, scale, is_global_scale_inversed=True)
        assert scales == [3.0, pytest.approx(1 / 3), 5.0, pytest.approx(0.2)]
        assert len(launch.repeated) == 6

    def test_a_scale_of_a_cache_that_changed_is_checked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launches = Launches(monkeypatch, "sm_90a")
        x, slots = aligned(2, 1, 64).bfloat16(), torch.arange(2)
        codes, sf = (torch.zeros(4, 2, 4, 1, width, dtype=torch.uint8) for width in (32, 4))
        scales = torch.ones(1), torch.ones(1)

        def append() -> None:
            given = x, x.clone(), slots, codes, sf.view(torch.float8_e4m3fn), *scales
            jitfp4.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*given)

        append(), append(), append()
        assert (len(launches.first), len(launches.repeated)) == (1, 2), "a cache with K and V in one tensor"
        scales[1].fill_(0.5)
        append()
        with torch.inference_mode():  # no version says whether their values changed
            scales = torch.ones(1), torch.ones(1)
            append(), append(), append()
        assert (len(launches.first), len(launches.repeated)) == (2, 5)
        scales = torch.ones(1), torch.full((1,), -1.0)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="v_scale"):
                append()
        assert (len(launches.first), len(launches.repeated)) == (2, 5)

    def test_no_value_of_a_scale_is_read_while_a_graph_is_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scale, other = torch.ones(1), torch.full((1,), -1.0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert checks._are_good(scale, other)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert checks._are_good(scale) and not checks._are_good(scale, other)
        monkeypatch.setattr(torch.Tensor, "is_cuda", False)
        assert checks._are_good(scale)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not checks._are_good(scale), "it would be copied to the device"

    def test_an_error_is_raised_again_and_not_remembered(self) -> None:
        ran = []

        @replay.replayed
        def fails(x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            replay.note(Step(FakeLaunch(), (x,), (), ()))
            raise ArgumentError("x", 1, "2")

        x = aligned(4)
        for _ in range(2):
            with pytest.raises(ArgumentError):
                fails(x)
        assert len(ran) == 2 and not replay.is_noting()

    def test_suspended_and_forgotten_calls_run(self) -> None:
        public, x = Public(), aligned(4, 8)
        with replay.suspended(), replay.suspended():
            public.call(x)
        public.call(x)
        assert public.ran == 2
        with replay.suspended():
            public.call(x)
        assert public.ran == 3
        engine.reset()
        public.call(x)
        assert public.ran == 4

    def test_memory_is_not_kept_alive(self) -> None:
        public, x = Public(), aligned(4, 8)
        out, sums = public.call(x)
        kept = [weakref.ref(tensor) for tensor in (x, out, sums)]
        del x, out, sums
        gc.collect()
        assert [reference() for reference in kept] == [None] * 3

    def test_a_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay, "_MOST", 4)
        public, x = Public(), aligned(4, 8)
        for flag in range(40):
            public.call(x, None, flag)
        assert max(map(len, replay._memories)) <= 4
        for _ in range(40):
            public.call(aligned(4, 8))  # other addresses of one call
        assert public.ran == 41


def test_cpu_tensors_are_not_remembered() -> None:
    public, x = Public(), aligned(4, 8)
    public.call(x)
    public.call(x)
    assert public.ran == 2
