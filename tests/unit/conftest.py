"""What tests of the tuner share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jitfp4 import engine, sim


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Specs of launches, on a simulated GPU that runs nothing."""
    specs: list[Any] = []
    monkeypatch.setattr(engine, "launch", lambda plan, *_, **__: specs.append(plan.spec))
    with sim.device("sm_90a"):
        yield specs
