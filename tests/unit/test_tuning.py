"""The tuner: what it finds in recorded measurements and how long that takes, interruptions, limits, what it copies.

Nothing here needs a GPU: measurements are recorded or made up, and clocks are counted.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, CompileError, TacticsError, engine, sim, tactics, tuning
from jitfp4.arch import Arch
from jitfp4.families.experts.operation import EXPERTS_DOWN
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.quantize.kernels.vector import VectorTactic
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.operation import Observed, operations
from jitfp4.tuning import Measure, Search, tune
from tests.support.experts import assert_layer, make_layer, make_routing, make_x

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "h200"
SM_90A = Arch.of("sm_90a")
X = torch.ones(4, 64).bfloat16()
COMPILE_S, SET_UP_S = 0.4, 0.03  # of a tactic on two cores; of a graph


# ---- the search ------------------------------------------------------------------------------------------------------


class Gpu:
    """Recorded microseconds of each tactic, with noise that falls with the number of replays, and the time that passes.

    A graph holds 50 calls, as of the smallest problems, unless they are long.
    """

    def __init__(self, times: dict[Any, float]) -> None:
        self.times, self.now, self.measured = times, 0.0, 0
        self._built = {tactic: COMPILE_S * (number + 1) for number, tactic in enumerate(times)}

    def measure(self, tactic: Any, replays: int) -> float:
        us = self.times[tactic]
        self.now = max(self.now, self._built[tactic]) + SET_UP_S
        self.now += (replays + tuning.UNCOUNTED) * max(2, min(50, 20000 / us)) * us * 1e-6
        self.measured += 1
        digest = hashlib.sha256(f"{tactic} {replays}".encode()).digest()
        return us * (1 + 0.06 * (digest[0] / 127.5 - 1) / replays**0.5)


def recorded() -> Iterator[tuple[str, dict[Any, float]]]:
    """Each problem of both searches on an H200, and the time of every tactic that was measured."""
    for name, kind in (("gemm_search", NarrowTactic), ("gemm_wide_search", WideTactic)):
        with (RESULTS / f"{name}.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        for problem, group in groupby(lines, lambda line: (line["n"], line["k"], line["m"])):
            times = {}
            for line in group:
                tactic = kind(**{field: _value(line[field]) for field in kind.__dataclass_fields__ if field in line})
                times[tactic] = float(line["us"])
            yield f"{name} {problem}", times


def _value(text: str) -> int | bool:
    return text == "True" if text in ("True", "False") else int(text)


def test_what_it_finds_is_within_3_percent_of_the_best_and_takes_less_than_a_minute() -> None:
    count = 0
    for problem, times in recorded():
        gpu, search = Gpu(times), Search(times)
        most = search.most
        search.run(gpu.measure, lambda gpu=gpu: gpu.now > 60, lambda: None)  # type: ignore[misc]
        assert search.finished and gpu.measured == most
        assert times[search.best] <= 1.03 * min(times.values()), problem
        assert gpu.now <= 60, problem
        count += 1
    assert count == 156


def test_all_candidates_of_a_problem_fit_into_a_minute() -> None:
    like = MM_BF16_FP4.problems(SM_90A)[0]
    for m, n, k in ((16, 57344, 8192), (8192, 57344, 8192), (64, 4096, 4096)):
        candidates = list(MM_BF16_FP4.candidates(like._replace(m=m, n=n, k=k), SM_90A))
        slow = 2e-6 * m * n * k / 600 + n * k / 2 / 4e6  # microseconds at 600 TFLOP/s and 4 TB/s
        gpu = Gpu({tactic: slow * (1 + number % 7 / 4) for number, tactic in enumerate(candidates)})
        search = Search(candidates)
        search.run(gpu.measure, lambda gpu=gpu: gpu.now > 60, lambda: None)  # type: ignore[misc]
        assert gpu.now <= 61
        assert gpu.times[search.best] == min(gpu.times.values())


def test_a_search_that_runs_out_of_time_keeps_the_best_so_far() -> None:
    gpu = Gpu({number: 100.0 * 0.8**number for number in range(50)})
    search = Search(gpu.times)
    search.run(gpu.measure, lambda: gpu.measured == 20, lambda: None)
    assert (search.best, search.finished, len(search.times)) == (19, True, 20)
    search = Search(gpu.times)
    search.run(gpu.measure, lambda: True, lambda: None)
    assert search.best == 0  # what comes first is measured whatever the limit


def test_what_cannot_be_built_is_passed_over() -> None:
    def measure(tactic: int, _replays: int) -> float:
        if tactic % 3:
            raise CompileError("program", "sm_90a", "log", "")
        return 10.0 + tactic

    search = Search(range(1, 20))
    search.run(measure, lambda: False, lambda: None)
    assert search.best == 3
    search = Search([1, 2])
    search.run(measure, lambda: False, lambda: None)
    assert search.best is None


# ---- a call ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Specs of launches, on a simulated GPU that runs nothing."""
    specs: list[Any] = []
    monkeypatch.setattr(engine, "launch", lambda plan, *_, **__: specs.append(plan.spec))
    with sim.device("sm_90a"):
        yield specs


class FakeMeasurer:
    """Of each problem, the last candidate is the fastest; ``stop`` is called before each measurement."""

    def __init__(self, stop: Callable[[int], None] = lambda _: None) -> None:
        self.problems: list[Any] = []
        self.measured = 0
        self.first: list[Any] = []
        self._stop = stop

    @contextmanager
    def __call__(self, call: Observed, candidates: Sequence[Any]) -> Iterator[Measure]:
        self.problems.append(call.problem)
        self.first.append((candidates[0], call.operation.select(call.problem, call.target.arch)))
        order = list(candidates)

        def measure(tactic: Any, _replays: int) -> float:
            self._stop(self.measured)
            self.measured += 1
            return 100.0 - order.index(tactic)

        yield measure


def calls() -> None:
    jitfp4.nvfp4_quantize(X, 1.0)
    jitfp4.nvfp4_quantize(X[:3], 1.0)  # of the same bucket
    jitfp4.rmsnorm_fp4quant(X, X[0])


def test_a_call_is_tuned_loaded_and_used(tmp_path: Path, launched: list[Any]) -> None:
    measurer = FakeMeasurer()
    file = tune(calls, tmp_path / "tactics.json", measurer=measurer)
    assert len(measurer.problems) == 2 and all(first == table for first, table in measurer.first)
    best = list(QUANTIZE.candidates(measurer.problems[0], SM_90A))[-1]
    (choice,) = file.of("quantize")
    assert QUANTIZE.chosen(choice) == (measurer.problems[0], best)
    assert choice.finished and choice.measured > 10 and file.gpu == "simulated sm_90a"
    assert tactics.read(tmp_path / "tactics.json").choices == file.choices
    before = jitfp4.nvfp4_quantize(X, 1.0) and launched[-1]
    jitfp4.load_tactics(tmp_path / "tactics.json")
    jitfp4.nvfp4_quantize(X, 1.0)
    assert launched[-1] != before
    assert launched[-1] == QUANTIZE.plan(measurer.problems[0], SM_90A, best).spec


def test_what_the_file_has_is_not_measured_again_unless_that_is_asked_for(tmp_path: Path, launched: list[Any]) -> None:
    path, measurer = tmp_path / "tactics.json", FakeMeasurer()
    tune(lambda: jitfp4.nvfp4_quantize(X, 1.0), path, measurer=measurer)
    file = tune(calls, path, measurer=measurer)
    assert len(measurer.problems) == 2 and len(file.choices) == 2
    tune(calls, path, again=True, measurer=measurer)
    assert len(measurer.problems) == 4


@pytest.mark.parametrize("tokens", [2, 40])
def test_a_layer_of_experts_is_tuned_loaded_and_used(tmp_path: Path, launched: list[Any], tokens: int) -> None:
    layer, x, (ids, weights) = make_layer(16, 64, 96), make_x(tokens, 64), make_routing(tokens, 4, 16)

    def call() -> None:
        jitfp4.fp4_experts(x, layer, ids, weights)

    measurer = FakeMeasurer()
    file = tune(call, tmp_path / "tactics.json", measurer=measurer)
    assert all(first == table for first, table in measurer.first)
    best = {one.operation: operations(one.operation)[0].chosen(one)[1] for one in file.choices.values()}
    assert {"experts_up", "experts_down"} <= best.keys()
    jitfp4.load_tactics(tmp_path / "tactics.json")
    before = list(launched)
    with tuning.observed(lambda one: seen.append(one)):
        seen: list[Observed] = []
        call()
    plans = [one.operation.plan(one.problem, SM_90A, best[one.operation.name]) for one in seen]
    assert sorted(map(repr, launched[len(before) :])) == sorted(repr(plan.spec) for plan in plans)


def test_an_interruption_keeps_what_is_measured_and_the_next_run_goes_on(tmp_path: Path, launched: list[Any]) -> None:
    counted = FakeMeasurer()
    tune(lambda: jitfp4.nvfp4_quantize(X, 1.0), tmp_path / "one.json", measurer=counted)

    def stop(measured: int) -> None:
        if measured == counted.measured + 3:
            raise KeyboardInterrupt

    path = tmp_path / "tactics.json"
    with pytest.raises(KeyboardInterrupt):
        tune(calls, path, measurer=FakeMeasurer(stop))
    kept = tactics.read(path)
    assert [(choice.operation, choice.finished) for choice in kept.choices.values()] == [
        ("quantize", True),
        ("rmsnorm_fp4quant", False),
    ]
    assert kept.of("rmsnorm_fp4quant")[0].measured == 3
    measurer = FakeMeasurer()
    file = tune(calls, path, measurer=measurer)
    assert len(measurer.problems) == 1 and all(choice.finished for choice in file.choices.values())


def test_an_interruption_takes_nothing_away(tmp_path: Path, launched: list[Any]) -> None:
    def stop(measured: int) -> None:
        if measured == 2:
            raise KeyboardInterrupt

    path = tmp_path / "tactics.json"
    tune(calls, path, measurer=FakeMeasurer())
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        tune(calls, path, again=True, measurer=FakeMeasurer(stop))
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused_before_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "tactics.json").write_bytes(b"{")
    with pytest.raises(TacticsError, match="damaged"):
        tune(lambda: pytest.fail("it ran"), tmp_path / "tactics.json", measurer=FakeMeasurer())


def test_an_interruption_before_anything_is_measured_leaves_no_file(tmp_path: Path, launched: list[Any]) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(calls, tmp_path / "tactics.json", measurer=FakeMeasurer(stop))
    assert list(tmp_path.iterdir()) == []


def test_the_limit_is_for_each_problem(tmp_path: Path, launched: list[Any]) -> None:
    now = 0.0

    def pass_time(_: int) -> None:
        nonlocal now
        now += 1.0

    file = tune(calls, tmp_path / "tactics.json", 4.0, measurer=FakeMeasurer(pass_time), clock=lambda: now)
    assert [choice.measured for choice in file.choices.values()] == [5, 5]


def test_a_file_of_another_gpu_is_not_continued(tmp_path: Path, launched: list[Any]) -> None:
    path = tmp_path / "tactics.json"
    tune(calls, path, measurer=FakeMeasurer())
    data = path.read_bytes()
    with sim.device("sm_100a"), pytest.raises(TacticsError, match="tuned on 'simulated sm_90a'; here is 'simulated"):
        tune(calls, path, measurer=FakeMeasurer())
    assert path.read_bytes() == data


def test_a_call_must_launch_on_one_gpu(tmp_path: Path, launched: list[Any]) -> None:
    def on_two() -> None:
        calls()
        with sim.device("sm_100a"):
            calls()

    for call, count in ((lambda: None, 0), (on_two, 2)):
        with pytest.raises(ArgumentError, match=f"kernels on {count} GPUs"):
            tune(call, tmp_path / "tactics.json", measurer=FakeMeasurer())
    with pytest.raises(ArgumentError, match="a regular file"):
        tune(calls, tmp_path, measurer=FakeMeasurer())


# ---- copies ----------------------------------------------------------------------------------------------------------


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
