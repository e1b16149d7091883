"""What the tuner does around a measurement on a GPU: copies, builds, counters; and tuning on a real one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, engine, sim, tuning
from jitfp4.arch import Arch
from jitfp4.families.experts.operation import EXPERTS_DOWN
from jitfp4.families.quantize.kernels.vector import VectorTactic
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.operation import Observed
from jitfp4.tuning import tune
from tests.support.experts import assert_layer, make_layer, make_routing, make_x

SM_90A = Arch.of("sm_90a")
X = torch.ones(4, 64).bfloat16()


def test_arguments_are_copied_with_their_strides_and_what_is_large_only_where_it_is_written() -> None:
    memory = torch.arange(64, dtype=torch.int16)
    for tensor in (
        memory[3:51].view(6, 8)[:, :5],
        memory[5:10].expand(4, 5),
        memory.view(8, 8).t(),
        memory[:0],
        memory.view(torch.float8_e4m3fn)[7:20],
        torch.ones(3, 4, requires_grad=True)[:, 1:],
    ):
        copy = tuning._copy(tensor)
        assert copy.stride() == tensor.stride() and copy.dtype == tensor.dtype
        values = [x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (copy, tensor)]
        assert torch.equal(*values)
        assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()
    seen: list[Observed] = []
    with sim.device("sm_90a"), pytest.MonkeyPatch.context() as patch, tuning.observed(seen.append):
        patch.setattr(engine, "launch", lambda *_, **__: None)
        jitfp4.nvfp4_quantize(X, 1.0)
    (call,) = seen
    assert QUANTIZE.written == {"out", "out_sf"}
    for everything in (True, False):
        own = tuning._copied(call, everything=everything)
        assert (own.a.data_ptr() == X.data_ptr()) is not everything
        assert own.out.data_ptr() != call.arguments.out.data_ptr()


def test_on_a_gpu_each_tactic_is_built_once_and_timed_on_copies(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does around time_us(), which needs a GPU."""
    seen: list[Observed] = []
    with tuning.observed(seen.append):
        jitfp4.nvfp4_quantize(X, 1.0)
    built: list[Any] = []
    timed: list[tuple[int, int, set[int]]] = []

    def time_us(
        make_call: Callable[[], Callable[[], object]], size: int, *, replays: int, before: Callable[[], object]
    ) -> float:
        before()
        calls = [make_call() for _ in range(tuning.calls_per_graph(size))]
        for call in calls:
            call()
        timed.append((size, replays, set(addresses)))
        return 1.0

    addresses: list[int] = []
    monkeypatch.setattr(tuning, "time_us", time_us)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(engine, "build", lambda kernel, spec, _: built.append((kernel, spec)))
    monkeypatch.setattr(
        type(QUANTIZE), "_checked", lambda self, args: addresses.append(args[0].data_ptr()) or self.arguments(*args)
    )
    with pytest.raises(ArgumentError, match="one on a simulated GPU"), tuning.on_gpu(seen[0], []):
        pass
    call = seen[0]._replace(target=engine.Target(SM_90A, 0))
    tactics_ = [VectorTactic(1, 128), VectorTactic(1, 256), VectorTactic(4, 256)]
    with tuning.on_gpu(call, tactics_) as measure:
        assert [measure(tactic, 3) for tactic in tactics_] == [1.0] * 3
    plans = [QUANTIZE.plan(seen[0].problem, SM_90A, tactic) for tactic in tactics_]
    assert launched[1:] == [plan.spec for plan in plans for _ in range(50)]
    assert sorted(map(repr, built)) == sorted({repr((plan.kernel, plan.spec)) for plan in plans})
    size = X.nbytes + 4 * 32 + 128 * 4 + 4
    assert [(bytes_, replays) for bytes_, replays, _ in timed] == [(size, 3)] * 3
    assert len(timed[0][2]) == 50 and timed[2][2] == timed[0][2] and X.data_ptr() not in timed[0][2]


@pytest.mark.parametrize("large", [False, True])
def test_on_a_gpu_counters_are_zero_before_each_replay(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Each call of a graph has counters of its own, also where the calls share all that is large."""
    layer, x, (ids, weights) = make_layer(8, 64, 96), make_x(3, 64), make_routing(3, 2, 8)
    seen: list[Observed] = []
    with tuning.observed(seen.append):
        jitfp4.fp4_experts(x, layer, ids, weights)
    (call,) = (one for one in seen if one.operation is EXPERTS_DOWN)
    given: list[Any] = []

    def time_us(
        make_call: Callable[[], Callable[[], object]], size: int, *, replays: int, before: Callable[[], object]
    ) -> float:
        calls = [make_call() for _ in range(tuning.calls_per_graph(size))]
        for _ in range(replays):
            before()
            given.clear()
            for one in calls:
                one()
            assert len(given) == len(calls) == len({done.data_ptr() for done, _ in given})
            assert len({w2.data_ptr() for _, w2 in given}) == (1 if large else len(calls))
        return 1.0

    def run(arguments: Any) -> Any:
        assert not arguments.done.any()
        arguments.done.fill_(7)
        given.append((arguments.done, arguments.w2))
        return arguments

    monkeypatch.setattr(tuning, "time_us", time_us)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(engine, "build", lambda *_: None)
    monkeypatch.setattr(type(EXPERTS_DOWN), "_checked", lambda self, args: run(self.arguments(*args)))
    monkeypatch.setattr(tuning, "GRAPH_BYTES", tuning.extent(layer.w2)[1] - tuning.extent(layer.w2)[0])
    if not large:
        monkeypatch.setattr(tuning, "GRAPH_BYTES", 1 << 30)
    candidates = list(EXPERTS_DOWN.candidates(call.problem, SM_90A))[:2]
    call.arguments.done.fill_(5)
    with tuning.on_gpu(call._replace(target=engine.Target(SM_90A, 0)), candidates) as measure:
        assert [measure(tactic, 3) for tactic in candidates] == [1.0] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 40])
def test_a_gpu_is_tuned_for_a_layer_of_experts(tmp_path: Path, tokens: int) -> None:
    layer, x = make_layer(16, 256, 128, device="cuda"), make_x(tokens, 256).cuda()
    ids, weights = (tensor.cuda() for tensor in make_routing(tokens, 4, 16))
    file = tune(
        lambda: jitfp4.fp4_experts(x, layer, ids, weights), tmp_path / "tactics.json", seconds=10, progress=False
    )
    assert {choice.operation for choice in file.choices.values()} >= {"experts_up", "experts_down"}
    jitfp4.load_tactics(tmp_path / "tactics.json")
    assert_layer(layer, x, ids, weights)


@pytest.mark.gpu
def test_a_gpu_is_tuned_and_computes_the_same_bytes(tmp_path: Path) -> None:
    x = torch.randn(512, 4096, device="cuda").bfloat16()
    want = jitfp4.nvfp4_quantize(x, 1.0)
    file = tune(lambda: jitfp4.nvfp4_quantize(x, 1.0), tmp_path / "tactics.json", progress=False)
    assert [choice.finished for choice in file.choices.values()] == [True]
    jitfp4.load_tactics(tmp_path / "tactics.json")
    for got, wanted in zip(jitfp4.nvfp4_quantize(x, 1.0), want, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
