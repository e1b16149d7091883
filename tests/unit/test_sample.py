"""The sample of a test's cases: a share of them, always the same, never none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sample import beside_the_sample, some


def case(name: str, *marks: int) -> Any:
    return SimpleNamespace(nodeid=name, iter_markers=lambda _name: [SimpleNamespace(args=(n,)) for n in marks])


def ran(items: list[Any]) -> list[str]:
    left_out = list(beside_the_sample(items))
    return [item.nodeid for item in items if item not in left_out]


@pytest.mark.parametrize(("cases", "n", "stay"), [(12, 4, 3), (13, 4, 3), (3, 4, 1), (1, 4, 1), (12, 1, 12)])
def test_one_case_in_n_stays_and_at_least_one(cases: int, n: int, stay: int) -> None:
    assert len(ran([case(f"a.py::test[{i}]", n) for i in range(cases)])) == stay


def test_the_sample_is_the_same_in_every_order_and_process() -> None:
    items = [case(f"a.py::test[{i}]", 4) for i in range(12)]
    assert set(ran(items)) == set(ran(items[::-1])) == {f"a.py::test[{i}]" for i in (8, 9, 10)}


def test_every_test_is_sampled_by_itself_and_unmarked_cases_all_run() -> None:
    items = [case(f"a.py::test_{name}[{i}]", *n) for name, n in (("x", [4]), ("y", [8]), ("z", [])) for i in range(8)]
    kept = ran(items)
    assert [sum(f"test_{name}[" in one for one in kept) for name in "xyz"] == [2, 1, 8]


def test_marks_multiply_and_no_second_group_of_cases_has_to_stay() -> None:
    kept = [ran([case(f"a.py::{test}[{i}]", 4, *[9] * (i % 2)) for i in range(16)]) for test in map(str, range(36))]
    second = [sum(int(one.rstrip("]")[-1]) % 2 for one in ones) for ones in kept]
    assert {len(ones) - more for ones, more in zip(kept, second, strict=True)} == {2}
    assert 0 < sum(second) < 36 * 8 // 18


def test_some_items_of_a_test() -> None:
    few = some(3, range(12), whole=False)
    assert few == some(3, reversed(range(12)), whole=False)
    assert (len(few), sorted(some(3, range(12), whole=True))) == (3, [*range(12)])
    assert some(3, range(2), whole=False, name=lambda item: f"item {item}") != []


def test_whole_runs_are_those_with_the_option(whole: bool, request: pytest.FixtureRequest) -> None:
    assert whole is request.config.getoption("--all")
