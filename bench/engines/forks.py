"""Forks of a process that has imported an engine, and asks for what it says of the GPU without using it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

LOGGED = 40  # lines of what failed
_PR_SET_PDEATHSIG = 1
_SHOWN = ("RESULT", "READY")


def use_recorded_gpu() -> None:
    """Let torch.cuda tell of the GPU what a fork has found: to ask for it is to use CUDA, and forks could not then.

    For a process that sees one GPU and leaves it to processes that it starts.
    """
    found = _in_fork(lambda: _described(torch.cuda.get_device_properties(0)))
    properties = SimpleNamespace(**found)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_name": lambda _device=None: properties.name,
        "get_device_capability": lambda _device=None: (properties.major, properties.minor),
        "get_device_properties": lambda _device=None: properties,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def begun(run: Callable[[], None], log: Path) -> int:
    """Begin a fork, its output in a file; returns its id."""
    child = os.fork()
    if child:
        return child
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.setpgrp()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 9)  # it ends with this process, however that ends
    status = 1
    try:
        run()
        status = 0
    except BaseException:  # the fork ends here, whatever it was
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def wait_for(file: Path, child: int, limit: float) -> None:
    """Wait until a fork has made a file or has ended, at most so many seconds."""
    begun = time.monotonic()
    while not file.exists() and time.monotonic() - begun < limit:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.05)


def finished(child: int, log: Path, limit: float) -> int:
    """Wait for a fork, and end it after more seconds than the limit; prints what its log shows. Returns its status."""
    begun = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() - begun > limit:
            _end(child)
        time.sleep(0.05)
    _end(child)  # what it has started
    status = os.waitstatus_to_exitcode(ended[1])
    lines = log.read_text(errors="replace").splitlines()
    failed = [line[:400] for line in lines[-LOGGED:]]
    shown = [line for line in lines if line.startswith(_SHOWN)] if status == 0 else failed
    print("\n".join([f"{log.stem}: status {status} after {time.monotonic() - begun:.0f} s", *shown]), flush=True)
    return status


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 9)


def _in_fork(function: Callable[[], Any]) -> Any:
    """What a function returns in a fork."""
    ours, its = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(its, json.dumps(function()).encode())
        os._exit(0)
    os.close(its)
    with os.fdopen(ours) as file:
        found = json.load(file)
    os.waitpid(child, 0)
    return found


def _described(properties: Any) -> dict[str, Any]:
    """The plain attributes of an object."""
    names = [name for name in dir(properties) if not name.startswith("_")]
    return {name: value for name in names if isinstance(value := getattr(properties, name), int | float | str)}
