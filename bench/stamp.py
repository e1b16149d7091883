"""The origin of results, which every result file states."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

from jitfp4 import nvrtc

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "cuda-bindings", "cuda-core", "numpy")


def stamp() -> dict[str, object]:
    """Time, machine, GPU, driver, toolchain, package versions, the commit, and whether the tree differed from it.

    For an export of a commit, which has no .git folder, ``BENCH_COMMIT`` names the commit.
    """
    exported = os.environ.get("BENCH_COMMIT")
    toolchain = nvrtc.toolchain()
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader")
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": exported or _output("git", "rev-parse", "HEAD"),
        "dirty": not exported and bool(_output("git", "status", "--porcelain", "--", ".", ":!bench/results")),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "gpu": gpu and gpu.splitlines()[0],  # name, driver, maximal SM and memory clocks
        "nvrtc": toolchain and toolchain.name,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """The output of a program; None if it is missing or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
