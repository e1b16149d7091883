"""Samples of cases: what takes long runs in part, always the same part, unless pytest is given ``--all``."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TypeVar

import pytest

T = TypeVar("T")

SIM_ARCHS = ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.one_in(4))]
"""What kernels are simulated for. Their sources for both differ in little: the conversions, and fp32 pairs."""


def beside_the_sample(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """What ``one_in(n)`` leaves out: of each marked test's cases, about one in ``n`` stays, chosen by digests of names.

    Marks multiply. At least one case of a test stays, so a case that is asked for by name runs.
    """
    tests: dict[str, dict[int, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        n = prod(mark.args[0] for mark in item.iter_markers("one_in"))
        tests[item.nodeid.split("[")[0]][n].append(item)
    for name, cases in tests.items():
        stays = False
        for n, found in sorted(cases.items()):
            found.sort(key=lambda item: _digest(item.nodeid))
            number, rest = divmod(len(found), n)
            number += _digest(name)[0] % n < rest or not (number or stays)
            stays = stays or number > 0
            yield from found[number:]


def some(most: int, items: Iterable[T], *, whole: bool, name: Callable[[T], str] = str) -> list[T]:
    """Of what a test goes through: ``most`` items, chosen by the digests of their names; all of them if ``whole``."""
    found = sorted(items, key=lambda item: _digest(name(item)))
    return found if whole else found[:most]


def _digest(name: str) -> tuple[int, str]:
    return zlib.crc32(name.encode()), name
