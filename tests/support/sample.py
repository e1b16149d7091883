"""Samples of cases: what takes long runs in part, always the same part, unless pytest is given ``--all``."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import ceil

import pytest

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
        found.sort(key=lambda item: (zlib.crc32(item.nodeid.encode()), item.nodeid))
        yield from found[ceil(len(found) / n) :]
