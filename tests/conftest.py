"""Marks, isolation and the GPU gate: every test has its own kernel cache, and `gpu` tests run only where there is
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from jitfp4 import engine
from jitfp4.errors import ToolchainError


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=on_gpu)
    items[:] = [item for item in items if item not in on_gpu]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A test of an architecture that this NVRTC is too old for (12.8 lacks two) is skipped."""
    try:
        return (yield)
    except ToolchainError as error:
        if "does not know" in str(error):
            pytest.skip(str(error))
        raise


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many attacks were tried, by file of tests/faults."""
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if report.nodeid.startswith("tests/faults/"):
                counts[Path(report.nodeid.split("::")[0]).stem, outcome] += 1
    if counts:
        terminalreporter.section("fault campaign")
        for (name, outcome), count in sorted(counts.items()):
            terminalreporter.line(f"{name:<28} {count:>5} {outcome}")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the kernels that tests compile in order to run them."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def isolated_cache(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> Iterator[None]:
    """No test reads or writes the user's cache, and none sees another's configuration."""
    for name in ("CACHE_RO", "CACHE", "OFFLINE", "STRICT", "BUNDLE_SHA256", "TACTICS"):
        monkeypatch.delenv(f"JITFP4_{name}", raising=False)
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(shared_cache))
    engine.reset()
    yield
    engine.reset()
