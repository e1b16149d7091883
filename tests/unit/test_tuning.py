"""The tuner: what it finds in recorded measurements and how long that takes, interruptions, limits, what it copies.

Nothing here needs a GPU: measurements are recorded or made up, and clocks are counted.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, CompileError, TacticsError, sim, tactics, tuning
from jitfp4.arch import Arch
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.operation import Observed, operations
from jitfp4.tuning import Measure, Search, tune
from tests.support.experts import make_layer, make_routing, make_x

SM_90A = Arch.of("sm_90a")
X = torch.ones(4, 64).bfloat16()
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "h200"
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
    assert count == 162


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
