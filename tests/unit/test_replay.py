"""Calls that are repeated: the same results and errors as the first, with other addresses, and nothing kept alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, SfLayout, dispatch, engine, replay
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.families.quantize.problem import VectorTactic
from tests.support.compare import assert_same_bytes
from tests.support.gdn import case

# ---- the logic, on CPU tensors ---------------------------------------------------------------------------------------


class FakeLaunch:
    """A launch that notes the addresses that it is repeated with."""

    def __init__(self) -> None:
        self.repeated: list[tuple[int, ...]] = []

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        assert stream == 7
        self.repeated.append(tuple(addresses))


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
                replay.note(replay.Step(launch, tensors, aligned=(0,), disjoint=((1, 0),)))
            return out, sums

        self.call: Callable[..., Any] = function

    @property
    def repeated(self) -> list[tuple[int, ...]]:
        return [addresses for launch in self.launched for addresses in launch.repeated]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors pass for CUDA tensors."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(replay, "exchange_device", lambda _index: 0)
    monkeypatch.setattr(replay, "current_stream", lambda _index: 7)
    monkeypatch.setattr(
        replay, "empty_cuda", lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype)
    )
    yield
    replay.forget()


def aligned(*shape: int) -> torch.Tensor:
    tensor = torch.zeros(*shape)
    assert tensor.data_ptr() % 16 == 0
    return tensor


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
            replay.note(replay.Step(FakeLaunch(), (x, out), (), ()))
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
            public.call(x, flag=[1])
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

    @pytest.mark.parametrize("wrong", [{"launches": 0}, {"launches": 2}, {"hidden": True}], ids=str)
    def test_what_is_not_one_launch_on_known_tensors_is_not_repeated(self, wrong: dict[str, Any]) -> None:
        public, x = Public(**wrong), aligned(4, 8)
        for _ in range(3):
            public.call(x)
        assert public.ran == 3 and not public.repeated

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
            replay.note(replay.Step(launched[-1], (a, b, out), (), ()))
            return out

        one, other = aligned(4), aligned(4)
        total(one, one)
        total(other, other)
        assert len(launched) == 1 and launched[0].repeated[0][:2] == (other.data_ptr(), other.data_ptr())
        total(one, other)
        total(other, one)
        assert len(launched) == 2 and launched[1].repeated[0][:2] == (other.data_ptr(), one.data_ptr())

    def test_a_result_that_is_part_of_something_larger_is_not_repeated(self) -> None:
        ran = []

        @replay.replayed
        def half(x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            out = torch.empty(2, *x.shape)[0]
            replay.note(replay.Step(FakeLaunch(), (x, out), (), ()))
            return out

        x = aligned(4)
        half(x), half(x)
        assert len(ran) == 2

    def test_an_error_is_raised_again_and_not_remembered(self) -> None:
        ran = []

        @replay.replayed
        def fails(x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            replay.note(replay.Step(FakeLaunch(), (x,), (), ()))
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


@pytest.mark.parametrize("name", ["_count_modes", "_transform", "_guards", "_exchange"])
def test_what_torch_may_lack_has_another_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU shows it. The class below takes away everything."""
    assert getattr(dispatch, name) is not None, "this torch has it"
    monkeypatch.setattr(dispatch, name, None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _index: None)
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
    ):
        assert not matches(*other)
    assert dispatch.is_watched() == (name in ("_count_modes", "_transform"))
    if name == "_exchange":
        assert dispatch.exchange_device(1) == 2


def test_tracing_and_transforming_are_seen() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not dispatch.is_watched()
    with FakeTensorMode():
        assert dispatch.is_watched()
    seen = []
    torch.func.vmap(lambda x: (seen.append(dispatch.is_watched()), x)[1])(torch.zeros(2, 3))
    assert seen == [True]


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def codes(first: str, second: str, seed: int, block: int = 16) -> dict[str, torch.Tensor]:
    """FP4 codes and their 128x4 scales under these names."""
    q, sf = jitfp4.fp4_quantize(random(128, 256, seed=seed), 3.0, block, block == 32)
    return {first: q, second: sf}


def delta_rule(seed: int, tokens: int = 2) -> dict[str, Any]:
    return {name: x.cuda() for name, x in case(3, tokens, 2, 4, 128, seed=seed).items()}


def one_token(seed: int) -> dict[str, Any]:
    given = delta_rule(seed, 1)
    del given["initial_state_indices"]
    return given | {"state": given.pop("initial_state")}


CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "nvfp4_quantize": lambda seed: {"a": random(130, 256, seed=seed), "a_global_sf": torch.tensor([3.0]).cuda()},
    "mxfp4_quantize": lambda seed: {"a": random(130, 256, seed=seed)},
    "fp4_quantize": lambda seed: {"input": random(130, 256, seed=seed), "global_scale": torch.tensor([3.0]).cuda()},
    "silu_and_mul_nvfp4_quantize": lambda seed: {
        "input": random(130, 512, seed=seed),
        "global_scale": torch.tensor([3.0]).cuda(),
    },
    "nvfp4_batched_quantize": lambda seed: {"a": random(3, 130, 256, seed=seed), "a_global_sf": torch.ones(1).cuda()},
    "scaled_fp4_grouped_quantize": lambda seed: {
        "a": random(3, 128, 256, seed=seed),
        "mask": torch.full((3,), 128, dtype=torch.int32).cuda(),
        "a_global_sf": torch.ones(3).cuda(),
    },
    "silu_and_mul_scaled_nvfp4_experts_quantize": lambda seed: {
        "a": random(3, 128, 512, seed=seed),
        "mask": torch.full((3,), 128, dtype=torch.int32).cuda(),
        "a_global_sf": torch.ones(3).cuda(),
    },
    "nvfp4_dequantize": lambda seed: codes("a_fp4", "a_sf", seed) | {"global_decode_scale": torch.ones(1).cuda()},
    "mxfp4_dequantize": lambda seed: codes("a_fp4", "a_sf", seed, block=32),
    "e2m1_and_ufp8sf_scale_to_float": lambda seed: codes("e2m1_tensor", "ufp8_scale_tensor", seed)
    | {"global_scale_tensor": torch.ones(1).cuda()},
    "block_scale_interleave": lambda seed: {"unswizzled_sf": codes("", "sf", seed)["sf"]},
    "shuffle_matrix_a": lambda seed: {"input_tensor": codes("q", "", seed)["q"], "epilogue_tile_m": 128},
    "shuffle_matrix_sf_a": lambda seed: {"input_tensor": codes("", "sf", seed)["sf"], "epilogue_tile_m": 128},
    "rmsnorm_fp4quant": lambda seed: {"input": random(130, 256, seed=seed), "weight": random(256)},
    "add_rmsnorm_fp4quant": lambda seed: {
        "input": random(130, 256, seed=seed),
        "residual": random(130, 256, seed=seed + 1),
        "weight": random(256),
    },
    "gated_delta_rule_mtp": delta_rule,
    "gated_delta_rule_decode_pretranspose": one_token,
    "gated_delta_rule_decode": one_token,
}  # fmt: skip
REPEATED = [name for name in CALLS if not name.startswith(("block_scale", "shuffle"))]


def moved(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def outcome(name: str, given: dict[str, Any]) -> list[torch.Tensor]:
    """What a call returned, and what its arguments are then."""
    result = getattr(jitfp4, name)(**given)
    return [*(result if isinstance(result, tuple) else (result,)), *(x for x in given.values() if torch.is_tensor(x))]


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


FAMILIES = ("gdn", "norm", "quantize")


def test_every_public_function_of_these_families_is_here() -> None:
    public = {name: getattr(jitfp4, name) for name in jitfp4.__all__}
    homes = tuple(f"jitfp4.families.{family}." for family in FAMILIES)
    functions = {name for name, value in public.items() if getattr(value, "__module__", "").startswith(homes)}
    assert functions == set(CALLS)


@pytest.mark.gpu
@pytest.mark.compile
class TestOnGpu:
    @pytest.mark.parametrize("name", CALLS)
    def test_a_repeated_call_gives_what_a_first_one_does(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        given = [CALLS[name](seed) for seed in (0, 1, 2)]
        with replay.suspended():
            want = [outcome(name, moved(arguments)) for arguments in given]
        counted = Counted(monkeypatch)
        for arguments, wanted in zip(given, want, strict=True):
            assert_same(name, outcome(name, moved(arguments)), wanted)
        assert counted.launches == (name in REPEATED)

    @pytest.mark.parametrize("removed", ["_count_modes", "_transform", "_guards", "_empty", "_raw_stream", "_exchange"])
    @pytest.mark.parametrize("name", ["nvfp4_quantize", "add_rmsnorm_fp4quant", "gated_delta_rule_mtp"])
    def test_without_an_internal_of_torch(self, name: str, removed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        given = CALLS[name](3)
        want = outcome(name, moved(given))
        monkeypatch.setattr(dispatch, removed, None)
        for _ in range(3):
            assert_same(name, outcome(name, moved(given)), want)

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
