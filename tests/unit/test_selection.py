"""Tables of tactics: which row a problem gets."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from jitfp4.arch import ARCHS, Arch
from jitfp4.formats import DType
from jitfp4.selection import Row, Table, rows, table_for

SM_80, SM_90A, SM_100A = (ARCHS[name] for name in ("sm_80", "sm_90a", "sm_100a"))


class Problem(NamedTuple):
    size: int
    share: float = 0.5
    dtype: DType = DType.BF16
    flag: bool = False

    @property
    def twice(self) -> int:
        return 2 * self.size

    def waves(self, arch: Arch) -> int:
        return self.size // arch.num_sms


@pytest.mark.parametrize(
    ("when", "fits"),
    [
        ({}, True),
        ({"size": 1000}, True),
        ({"size": 999}, False),
        ({"twice": 2000}, True),
        ({"twice": 1999}, False),
        ({"share": 0.5}, True),
        ({"share": 0.4}, False),
        ({"dtype": DType.BF16}, True),
        ({"dtype": DType.F16}, False),
        ({"flag": False}, True),
        ({"flag": True}, False),
        ({"size": 1000, "dtype": DType.F16}, False),
    ],
    ids=str,
)
def test_numbers_are_bounds_and_all_else_is_compared(when: dict[str, object], fits: bool) -> None:
    assert Row("tactic", when).of(Problem(1000), SM_90A) == ("tactic" if fits else None)


def test_a_flag_is_no_bound() -> None:
    assert Row("tactic", {"flag": True}).of(Problem(1, flag=False), SM_90A) is None  # though False <= True


def test_a_method_is_asked_about_the_architecture() -> None:
    row = Row("tactic", {"waves": 7})  # 1000 // 132 and 1000 // 108
    assert row.of(Problem(1000), SM_90A) and row.of(Problem(1000), SM_80) is None


def test_an_attribute_that_a_problem_lacks_is_an_error() -> None:
    with pytest.raises(AttributeError):
        Row("tactic", {"sizes": 3}).of(Problem(1), SM_90A)


def test_a_tactic_may_be_a_function_of_problem_and_architecture() -> None:
    def model(problem: Problem, arch: Arch) -> str | None:
        return f"{problem.size} on {arch.name}" if problem.size < 10 else None

    row = Row(model, {"flag": False})
    assert row.of(Problem(3), SM_80) == "3 on sm_80"
    assert row.of(Problem(30), SM_80) is None and row.of(Problem(3, flag=True), SM_80) is None


def test_rows_share_their_conditions() -> None:
    first, second = rows(("a", {"size": 3}), ("b", {}), flag=True)
    assert (first.tactic, first.when) == ("a", {"flag": True, "size": 3})
    assert (second.tactic, second.when) == ("b", {"flag": True})


def test_an_architecture_has_its_own_table_or_the_one_for_the_rest() -> None:
    rest = Table((Row("rest"),), "a.csv")
    own = Table((Row("own"),), "b.csv", needs="has_tcgen05")
    for tables in ((rest, own), (own, rest)):
        assert table_for(tables, SM_100A) is own
        assert table_for(tables, SM_90A) is rest
