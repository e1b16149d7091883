"""Processes of their own for fault tests: light ones that may be forked, killed, limited, and run under the shim.

    sandboxed("tests.faults.crashes:exit_everywhere", store="cache", root=str(tmp_path))

runs the function in a fresh interpreter and returns what it returned, through JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock  # noqa: F401 - jitfp4 imports it late; a child that is killed within milliseconds has no time for that
import pytest

ROOT = Path(__file__).parents[2]
EXIT, TEAR, FAIL, TRACE = 1, 2, 3, 4
EXITED = 77
_LIMIT_SECONDS = 900  # against hanging only
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_WRAPPER = "import sys; from tests.faults.sandbox import main; main(*sys.argv[1:])"


def sandboxed(function: str, *, shim: Path | None = None, env: dict[str, str] | None = None, **arguments: Any) -> Any:
    """What ``module:function`` returned, called with ``arguments`` in a new process; its stderr if it failed."""
    preload = {"LD_PRELOAD": str(shim)} if shim else {}
    process = subprocess.Popen(
        [sys.executable, "-c", _WRAPPER, function, json.dumps(arguments)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **preload, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with every child that it forked
        raise
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def main(function: str, arguments: str) -> None:
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    sys.stdout.write(json.dumps(result) + "\n")


def build_shim(folder: Path) -> Path:
    """shim.so, compiled by the system's compiler; skips the test where there is none."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler `cc` on this machine: the fault shim cannot be built")
    out = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(out), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return out


class Shim:
    """The preloaded library, seen from inside."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.shim_trace.restype = ctypes.c_char_p

    def arm(self, name: str, nth: int, action: int, err: int = 0) -> None:
        self._library.shim_arm(name.encode(), nth, action, err)

    def trace(self) -> list[list[str]]:
        return [line.split() for line in self._library.shim_trace().decode().splitlines()]


def in_child(work: Callable[[], object]) -> int:
    """Exit status of ``work`` in a forked child: 0, 77 when the shim ended it, 1 when it raised, -9 when killed."""
    return end_child(start_child(work))


def end_child(child: int, how: int | None = None) -> int:
    """Wait for a child, after sending it a signal if ``how`` names one; its exit status."""
    if how is not None:
        os.kill(child, how)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def interruptible(code: str, **options: Any) -> subprocess.Popen[str]:
    """A new interpreter that runs ``code`` and that SIGINT interrupts, also where this process ignores the signal.

    A job in the background of a shell ignores it, and so would everything that it starts.
    """
    first = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen([sys.executable, "-c", first + code], cwd=ROOT, text=True, **options)


def keep_orphans() -> None:
    """Grandchildren whose parents die become children, so that their numbers are theirs until they are waited for."""
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def start_child(work: Callable[[], object]) -> int:
    """Process id of a forked child that does ``work`` and ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return child
