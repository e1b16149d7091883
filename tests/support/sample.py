"""Samples of cases: what takes long runs in part, always the same part, unless pytest is given ``--all``."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import ceil
from typing import TypeVar

import pytest

T = TypeVar("T")

SIM_ARCHS = ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.one_in(4))]
"""What kernels are simulated for. Their sources for both differ in little: the conversions, and fp32 pairs."""


def beside_the_sample(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """What ``one_in(n)`` leaves out: of each marked test's cases, one in ``n`` stays, chosen by the digest of its name.

    At least one case of a test stays, so a case that is asked for by name runs.
    """
    cases = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            cases[item.nodeid.split("[")[0], mark.args[0]].append(item)
    for (_, n), found in cases.items():
        found.sort(key=lambda item: _digest(item.nodeid))
        yield from found[ceil(len(found) / n) :]


def some(most: int, items: Iterable[T], *, whole: bool, name: Callable[[T], str] = str) -> list[T]:
    """Of what a test goes through: ``most`` items, chosen by the digests of their names; all of them if ``whole``."""
    found = sorted(items, key=lambda item: _digest(name(item)))
    return found if whole else found[:most]


def _digest(name: str) -> tuple[int, str]:
    return zlib.crc32(name.encode()), name
