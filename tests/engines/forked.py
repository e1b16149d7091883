"""A pytest plugin: collects once, and runs the tests in processes that are forked then, so many at a time.

Every test function gets its turn: the first test of each, then the second of each, in an order of its tests that is
drawn once and for all. What a run with ``--seconds`` got to is a sample of everything.

``--results FILE`` keeps what each test did, a JSON line for each, and what stands there is not run again: a run that
was cut goes on. A process that a test has left broken, or that ended in one, is replaced, and no other test is lost.
Tests that failed, or had no memory, are run once more at the end, by an eighth of the processes; the last line of a
test is the one that counts.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

Line = dict[str, Any]
"""A test's ``id``, ``outcome``, ``reason``, ``seconds`` and, where it failed, ``text``."""

AGAIN = ("failed", "no memory")
NOT_STARTED = 3
LIMIT = 120
"""Seconds after which a test, and the process that it runs in, is ended."""
started: list[Callable[[int], None]] = []
"""What each process does first, with the number of processes."""
is_sound: list[Callable[[], bool]] = []
"""Whether a process can run another test after one that failed, or had no memory."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, metavar="N", help="how many run tests at a time (default 1)")
    parser.addoption("--seconds", type=float, default=1e9, metavar="S", help="how long tests are begun (default: all)")
    default = Path("results.jsonl")
    parser.addoption("--results", type=Path, default=default, metavar="FILE", help=f"default: {default}")


def spread(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests, so that functions take turns."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for tests in functions.values():
        random.Random(0).shuffle(tests)
    turns = itertools.zip_longest(*functions.values())
    return [item for turn in turns for item in turn if item is not None]


def read(path: Path) -> dict[str, Line]:
    """What is known of each test; a line that was cut is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {line["id"]: line for text in lines if text.endswith("\n") for line in [json.loads(text)]}


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if option.collectonly:
        return None
    items, known, end = spread(session.items), read(option.results), time.monotonic() + option.seconds
    gc.freeze()  # what was collected stays shared with the processes
    new = [item for item in items if item.nodeid not in known]
    _run(new, option.results, option.processes, end - option.seconds / 8)
    known = read(option.results)
    again = [item for item in items if item.nodeid in known and known[item.nodeid]["outcome"] in AGAIN]
    _run(again, option.results, max(1, option.processes // 8), end)
    session.testsfailed += sum(line["outcome"] == "failed" for line in read(option.results).values())
    return True


def _run(items: list[pytest.Item], results: Path, count: int, end: float) -> None:
    """Process ``n`` runs every test whose place is ``n`` modulo ``count``; where it ends in one, another goes on."""
    at = RawArray("q", range(count))  # where each process is
    workers = {_fork(items, results, number, count, at, end): number for number in range(count)}
    while workers:
        pid, status = os.wait()
        number = workers.pop(pid)
        place = at[number]
        if os.waitstatus_to_exitcode(status) == NOT_STARTED:
            raise RuntimeError("a process could not start; its error was printed")
        if status and place < len(items):
            _write(results, items[place], "failed", f"its process ended with status {status}", 0.0, "")
            at[number] += count
        if at[number] < len(items) and time.monotonic() < end:
            workers[_fork(items, results, number, count, at, end)] = number


def _fork(items: list[pytest.Item], results: Path, number: int, count: int, at: Any, end: float) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = NOT_STARTED
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tests print
        for first in started:
            first(count)
        status = 1
        while at[number] < len(items) and time.monotonic() < end:
            signal.alarm(LIMIT)
            outcome = _one(items[at[number]], results)
            at[number] += count
            if outcome in AGAIN and not all(sound() for sound in is_sound):
                break
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _one(item: pytest.Item, results: Path) -> str:
    begin = time.monotonic()
    reports = runtestprotocol(item, log=False, nextitem=None)
    seconds = time.monotonic() - begin
    properties = dict(reports[-1].user_properties)
    text = next((report.longreprtext for report in reports if report.failed), "")
    reason = next((str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple)), "")
    if text:
        outcome, reason = "failed", next(_message(report) for report in reports if report.failed)
    elif any(hasattr(report, "wasxfail") for report in reports):
        outcome, reason = "elsewhere", "the test is expected to fail"
    else:
        outcome = properties.get("outcome", "elsewhere" if reason else "passed")
        reason = properties.get("reason") or reason
    _write(results, item, outcome, reason, seconds, text[-6000:])
    return outcome


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longreprtext).partition("\n")[0]


def _write(results: Path, item: pytest.Item, outcome: str, reason: str, seconds: float, text: str) -> None:
    line = {"id": item.nodeid, "outcome": outcome, "reason": reason[:300], "seconds": round(seconds, 3)}
    with results.open("ab", buffering=0) as file:  # one write for a line, since others write, too
        file.write(json.dumps(line | ({"text": text} if text else {})).encode() + b"\n")
