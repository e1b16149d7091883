"""Repeated calls of every public function on a GPU: results, errors, threads, streams, graphs, torch.compile."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, SfLayout, dispatch, engine, remembered, replay
from jitfp4.families.quantize.kernels.vector import VectorTactic
from jitfp4.families.quantize.operation import QUANTIZE
from tests.inputs.calls import function_of
from tests.inputs.repeated import CHECKED, NO_LAUNCH, filled, repeated_calls, tensors_of, without_outputs
from tests.support.compare import assert_same_bytes
from tests.support.gdn import case


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def delta_rule(seed: int, tokens: int = 2) -> dict[str, Any]:
    return {name: x.cuda() for name, x in case(3, tokens, 2, 4, 128, seed=seed).items()}


def moved(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def outcome(name: str, given: dict[str, Any]) -> list[torch.Tensor]:
    """What a call returned, and what its arguments are then."""
    return [*tensors_of(function_of(name)(**given)), *tensors_of(given)]


def assert_same(name: str, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    for number, (left, right) in enumerate(zip(got, want, strict=True)):
        assert_same_bytes(f"{name}: {number}", left.contiguous(), right.contiguous())


class Counted:
    """How often the checked way was taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches = 0
        launch = engine.launch

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.launches += 1
            return launch(*args, **kwargs)

        monkeypatch.setattr(engine, "launch", counted)


@pytest.mark.gpu
@pytest.mark.compile
class TestOnGpu:
    @pytest.mark.parametrize("outputs", [True, False], ids=["given", "allocated"])
    @pytest.mark.parametrize("name", repeated_calls())
    def test_a_repeated_call_gives_what_a_first_one_does(
        self, name: str, outputs: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def called(seed: int) -> list[torch.Tensor]:
            with torch.device("cuda"):
                given = filled(name, seed)
            return outcome(name, given if outputs else without_outputs(name, given))

        with replay.suspended():
            want = [called(seed) for seed in range(3)]
        replay.forget()
        counted, launches = Counted(monkeypatch), []
        for seed, wanted in enumerate(want):
            assert_same(name, called(seed), wanted)
            launches.append(counted.launches)
        first = launches[0]
        assert bool(first) == (name not in NO_LAUNCH)
        assert launches == [first, 2 * first, 3 * first] if name in CHECKED else [first] * 3

    @pytest.mark.parametrize(
        ("where", "name_of", "other"),
        [
            *((dispatch, name, None) for name in ("_count_modes", "_transform", "_guards")),
            (remembered, "exchange_device", dispatch._exchange),
            (remembered, "current_stream", dispatch._stream),
            (remembered, "empty_cuda", dispatch._empty),
        ],
        ids=["modes", "transform", "guards", "exchange", "stream", "empty"],
    )
    @pytest.mark.parametrize("name", ["nvfp4_quantize", "add_rmsnorm_fp4quant", "gated_delta_rule_mtp"])
    def test_without_an_internal_of_torch(
        self, name: str, where: Any, name_of: str, other: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torch.device("cuda"):
            given = [filled(name, 3) for _ in range(4)]
        want = outcome(name, given.pop())
        monkeypatch.setattr(where, name_of, other)
        for arguments in given:
            assert_same(name, outcome(name, arguments), want)

    def test_bad_addresses_raise_as_at_first(self) -> None:
        a, scale = random(16, 64), torch.ones(1, device="cuda")
        memory = torch.zeros(16 * 64 + 8, dtype=torch.bfloat16, device="cuda")
        out, out_sf = jitfp4.nvfp4_quantize(a, scale)
        jitfp4.nvfp4_quantize(memory[:1024].view(16, 64), scale, out=out, out_sf=out_sf)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="16-byte alignment") as caught:
                jitfp4.nvfp4_quantize(memory[1:1025].view(16, 64), scale, out=out, out_sf=out_sf)
            assert caught.value.name == "a"
            with pytest.raises(ArgumentError, match="memory of its own") as caught:
                jitfp4.nvfp4_quantize(a, scale, out=a.view(torch.uint8).view(-1)[:512].view(16, 32), out_sf=out_sf)
            assert caught.value.name == "out"
            jitfp4.nvfp4_quantize(memory[8:1032].view(16, 64), scale, out=out, out_sf=out_sf)

    def test_what_differs_is_not_confused(self) -> None:
        scale, a = torch.ones(1, device="cuda"), random(128, 256)
        strided = random(128, 320)[:, :256]
        calls: list[Callable[[], tuple[torch.Tensor, ...]]] = [
            lambda: jitfp4.nvfp4_quantize(a, scale),
            lambda: jitfp4.nvfp4_quantize(a.half(), scale),
            lambda: jitfp4.nvfp4_quantize(a[:64], scale),
            lambda: jitfp4.nvfp4_quantize(a.view(64, 512), scale),
            lambda: jitfp4.nvfp4_quantize(a.view(2, 64, 256), scale),
            lambda: jitfp4.nvfp4_quantize(strided, scale),
            lambda: jitfp4.nvfp4_quantize(a, scale, SfLayout.layout_linear),
            lambda: jitfp4.nvfp4_quantize(a, scale, enable_pdl=False),
            lambda: jitfp4.nvfp4_quantize(a, scale, per_token_activation=True),
            lambda: jitfp4.nvfp4_quantize(a, 2.0),
            lambda: jitfp4.nvfp4_quantize(a, 3.0),
        ]
        with replay.suspended():
            want = [call() for call in calls]
        for _ in range(3):
            for call, wanted in zip(calls, want, strict=True):
                assert_same("result", call(), wanted)

    def test_one_tensor_twice(self) -> None:
        given = delta_rule(0)
        given["k"] = given["q"]
        with replay.suspended():
            want = outcome("gated_delta_rule_mtp", moved(given) | {"q": given["q"], "k": given["q"]})
        for _ in range(2):
            shared = given["q"].clone()
            assert_same("result", outcome("gated_delta_rule_mtp", moved(given) | {"q": shared, "k": shared}), want)

    def test_one_list_of_slots_and_two(self) -> None:
        """With ssm_state_indices the final state is written where the lists are two tensors, in whatever order."""
        given = moved(delta_rule(0) | {"ssm_state_indices": torch.full((3, 2), -1, device="cuda")})
        makes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "one": lambda slots: slots,
            "another": torch.clone,
            "a view": lambda slots: slots[:],
        }

        def called(make: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
            arguments = moved(given)
            arguments["output_state_indices"] = make(arguments["initial_state_indices"])
            return outcome("gated_delta_rule_mtp", arguments)

        with replay.suspended():
            want = {name: called(make) for name, make in makes.items()}
        assert torch.equal(want["one"][1], given["initial_state"]) and not torch.equal(
            *(want[n][1] for n in list(want)[:2])
        )
        for first in itertools.permutations(makes):
            replay.forget()
            for name in (*first, *first):
                assert_same(f"{name} of {first}", called(makes[name]), want[name])

    def test_two_threads_and_two_streams(self) -> None:
        scale = torch.ones(1, device="cuda")
        inputs = [random(128, 256, seed=seed) for seed in range(8)]
        with replay.suspended():
            want = [jitfp4.nvfp4_quantize(a, scale) for a in inputs]
        torch.cuda.synchronize()
        errors: list[BaseException] = []

        def work(first: int) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    got = [(n, jitfp4.nvfp4_quantize(inputs[n], scale)) for _ in range(50) for n in range(first, 8, 2)]
                    torch.cuda.current_stream().synchronize()
                for n, result in got:
                    assert_same("result", result, want[n])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    def test_a_graph_captures_a_repeated_call(self) -> None:
        a, scale = random(128, 256), torch.ones(1, device="cuda")
        for _ in range(2):
            jitfp4.nvfp4_quantize(a, scale)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q, sf = jitfp4.nvfp4_quantize(a, scale)
        a.copy_(random(128, 256, seed=5))
        graph.replay()
        with replay.suspended():
            assert_same("result", (q, sf), jitfp4.nvfp4_quantize(a, scale))

    def test_forcing_is_not_passed_by(self, monkeypatch: pytest.MonkeyPatch) -> None:
        a, scale = random(128, 256), torch.ones(1, device="cuda")
        for _ in range(2):
            jitfp4.nvfp4_quantize(a, scale)
        counted = Counted(monkeypatch)
        with QUANTIZE.forced(VectorTactic(4, 256)):
            jitfp4.nvfp4_quantize(a, scale)
        assert counted.launches == 1
        jitfp4.nvfp4_quantize(a, scale)
        assert counted.launches == 1

    def test_memory_is_not_kept_alive(self) -> None:
        scale = torch.ones(1, device="cuda")
        jitfp4.nvfp4_quantize(random(2048, 2048), scale)
        torch.cuda.synchronize()
        gc.collect()  # what earlier tests left
        before = torch.cuda.memory_allocated()
        for seed in range(3):
            jitfp4.nvfp4_quantize(random(4096, 2048, seed=seed), scale)
        gc.collect()
        assert torch.cuda.memory_allocated() == before

    def test_torch_compile_traces_what_was_repeated_before(self) -> None:
        a, scale = random(128, 256), torch.ones(1, device="cuda")
        for _ in range(2):
            want = jitfp4.nvfp4_quantize(a, scale)
        compiled = torch.compile(lambda x: jitfp4.nvfp4_quantize(x, scale), fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert_same("result", compiled(a), want)
