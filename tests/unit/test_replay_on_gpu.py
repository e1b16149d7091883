"""Repeated calls of every public function on a GPU: results, errors, threads, streams, graphs, torch.compile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, SfLayout, dispatch, engine, replay
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.families.quantize.problem import VectorTactic
from tests.support.compare import assert_same_bytes
from tests.support.gdn import case


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
    "nvfp4_block_scale_interleave": lambda seed: {"unswizzled_sf": codes("", "sf", seed)["sf"]},
    "make_nvfp4_global_scale": lambda seed: {"input_tensor": random(4, 64, seed=seed), "per_token_activation": False},
    "mxfp4_dequantize_host": lambda seed: {
        "weight": codes("q", "", seed, block=32)["q"],
        "scale": torch.full((128, 8), 120 + seed, dtype=torch.uint8).cuda(),
    },
    "silu_and_mul": lambda seed: {"input": random(130, 512, seed=seed)},
    "shuffle_matrix_a": lambda seed: {"input_tensor": codes("q", "", seed)["q"], "epilogue_tile_m": 128},
    "shuffle_matrix_sf_a": lambda seed: {"input_tensor": codes("", "sf", seed)["sf"], "epilogue_tile_m": 128},
    "rmsnorm_fp4quant": lambda seed: {"input": random(130, 256, seed=seed), "weight": random(256)},
    "add_rmsnorm_fp4quant": lambda seed: {
        "input": random(130, 256, seed=seed),
        "residual": random(130, 256, seed=seed + 1),
        "weight": random(256),
    },
    "rmsnorm": lambda seed: {"input": random(130, 256, seed=seed), "weight": random(256)},
    "gemma_rmsnorm": lambda seed: {"input": random(130, 256, seed=seed), "weight": random(256)},
    "rmsnorm_gated": lambda seed: {
        "input": random(130, 256, seed=seed),
        "gate": random(130, 256, seed=seed + 1),
        "weight": random(256),
    },
    "gated_delta_rule_mtp": delta_rule,
    "gated_delta_rule_decode_pretranspose": one_token,
    "gated_delta_rule_decode": one_token,
}  # fmt: skip
TORCH = ("block_scale", "nvfp4_block_scale", "make_", "shuffle", "silu_and_mul")  # no kernel, or none of their own
REPEATED = [name for name in CALLS if not name.startswith(TORCH) or name.endswith("quantize")]


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
