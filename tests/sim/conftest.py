"""Random numbers."""

from __future__ import annotations

import zlib

import numpy as np
import pytest


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))
