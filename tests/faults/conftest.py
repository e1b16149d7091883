"""The shim, compiled once for a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.sandbox import build_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))
