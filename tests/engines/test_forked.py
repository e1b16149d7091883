"""Tests in forked processes: none is lost, whatever another one does to its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.engines.forked import read, spread

TESTS = """
import os
import signal
import pytest

@pytest.mark.parametrize("number", range(12))
def test_many(number):
    if number == 3:
        os._exit(5)
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    assert number != 5

@pytest.mark.parametrize("number", range(2))
def test_few(number):
    if number:
        pytest.skip("not here")

@pytest.mark.xfail
def test_known():
    assert False

@pytest.fixture
def broken():
    raise RuntimeError("in a fixture")

def test_broken(broken):
    pass
"""
MANY = {f"test_it.py::test_many[{number}]": "passed" for number in range(12)}
WANTED = MANY | {
    **{f"test_it.py::test_many[{number}]": "failed" for number in (3, 4, 5)},
    "test_it.py::test_few[0]": "passed",
    "test_it.py::test_few[1]": "elsewhere",
    "test_it.py::test_known": "elsewhere",
    "test_it.py::test_broken": "failed",
}


def _run(folder: Path, *options: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "forked", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run([*command, *options, "test_it.py"], cwd=folder, env=environment, timeout=60).returncode


def test_no_test_is_lost_and_a_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    assert _run(tmp_path, "--seconds", "0") == 0
    assert not read(tmp_path / "results.jsonl")
    assert _run(tmp_path, "--processes", "3") == 1
    known = read(tmp_path / "results.jsonl")
    assert {name: line["outcome"] for name, line in known.items()} == WANTED
    assert known["test_it.py::test_many[4]"]["reason"] == "its process ended with status 9"
    assert known["test_it.py::test_broken"]["reason"] == "RuntimeError: in a fixture"
    assert known["test_it.py::test_few[1]"]["reason"] == "Skipped: not here"
    size = len((tmp_path / "results.jsonl").read_text().splitlines())
    assert _run(tmp_path) == 1
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == size + 4  # those that failed, again


class _Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_functions_take_turns() -> None:
    items = [_Item(f"a.py::one[{n}]") for n in range(9)] + [_Item(f"a.py::two[{n}]") for n in range(3)]
    order = [item.nodeid for item in spread(items)]  # type: ignore[arg-type]
    assert sorted(order) == sorted(item.nodeid for item in items)
    assert [name.partition("[")[0] for name in order[:6]] == ["a.py::one", "a.py::two"] * 3
    assert order != [item.nodeid for item in items]
    assert order == [item.nodeid for item in spread(items)]  # type: ignore[arg-type]
