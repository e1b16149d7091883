"""Marks, isolation, samples and the GPU gate: no test sees the user's kernel cache, `gpu` tests run only where there
is a GPU, and what takes long runs as a sample unless ``--all`` is given.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from jitfp4 import engine, nvrtc
from jitfp4.errors import ToolchainError
from tests.support import ptx
from tests.support.ledger import NVRTC
from tests.support.sample import beside_the_sample


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", dest="whole", help="run every case and full counts, not samples")
    parser.addoption("--kernel-cache", type=Path, metavar="DIR", help="keep the kernels that tests compile there")


def pytest_configure(config: pytest.Config) -> None:
    """Workers share the cores: with as many threads in each as there are cores, they wait for each other.

    A worker that dies ends the run, which names its test: no test may kill one, and what it held is not given back.
    """
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    gc.set_threshold(50_000, 20, 20)  # Python's 700, 10, 10 take a fifth of a run: tests and programs are many objects


@pytest.hookimpl(trylast=True)  # after -k and -m: what they choose is sampled
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: set[pytest.Item] = set()
    if not torch.cuda.is_available():
        left_out.update(item for item in items if item.get_closest_marker("gpu"))
    if (toolchain := nvrtc.toolchain()) is not None and toolchain.version == NVRTC:
        left_out.update(item for item in items if item.get_closest_marker("other_nvrtc"))
    if not config.getoption("whole"):
        left_out.update(beside_the_sample([item for item in items if item not in left_out]))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Tests live to the end: a garbage collection need not look at them."""
    gc.freeze()


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
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether this run does everything (``--all``): full counts, not samples."""
    return bool(request.config.getoption("whole"))


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a run."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def shared_ptx(run_folder: Path) -> Iterator[None]:
    """The PTX of each kernel is compiled once in a run, also where its tests are spread over workers."""
    folder = run_folder / "ptx"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "compile_ptx", ptx.kept(folder, nvrtc.compile_ptx))
        yield


@pytest.fixture(scope="session")
def shared_cache(run_folder: Path, request: pytest.FixtureRequest) -> Path:
    """One cache for the kernels that tests compile in order to run them, whichever worker they run in."""
    folder: Path = request.config.getoption("--kernel-cache") or run_folder / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def isolated_cache(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> Iterator[None]:
    """No test reads or writes the user's cache, and none sees another's configuration."""
    for name in ("CACHE_RO", "CACHE", "OFFLINE", "STRICT", "BUNDLE_SHA256", "TACTICS"):
        monkeypatch.delenv(f"JITFP4_{name}", raising=False)
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(shared_cache))
    engine.reset()
    yield
    engine.reset()
