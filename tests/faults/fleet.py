"""Ranks of a job, and containers without a compiler. Run inside the sandbox, or by torchrun."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ARCH, PATTERN, KERNELS = "sm_90a", "quantize/vector", 3
_NEW_MOUNTS, _READ_ONLY, _REMOUNT, _BIND, _PRIVATE = 0x20000, 1, 32, 4096, 1 << 18 | 16384
NOT_ALLOWED = 75


def some_tasks(count: int = KERNELS) -> tuple[object, ...]:
    from jitfp4 import warmup
    from jitfp4.arch import Arch

    return warmup.plan([Arch.of(ARCH)], [PATTERN])[:count]


def rank() -> None:
    """What one of the ranks does: wait for the others, build every kernel, add up the counters."""
    import torch
    import torch.distributed as dist

    from jitfp4 import engine

    dist.init_process_group("gloo")
    tasks = some_tasks()
    dist.barrier()
    for task in tasks:
        engine.build(task.kernel, task.spec, task.arch)
    info = engine.cache_info()
    counts = torch.tensor([info.builds, info.publishes, info.hits + info.joins, sum(info.store_errors.values())])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        Path(os.environ["FLEET_REPORT"]).write_text(json.dumps(counts.tolist()))
    dist.destroy_process_group()


def run_anywhere(cache: str) -> dict[str, object]:
    """Where NVRTC is gone and every mount is read-only: which kernels are there, and what a missing one says."""
    nvidia = importlib.util.find_spec("nvidia")
    assert nvidia is not None
    assert nvidia.submodule_search_locations is not None
    folders = [
        Path(root) / name for root in nvidia.submodule_search_locations for name in ("cuda_nvrtc", "cu12", "cu13")
    ]
    status = os.fork()
    if status:
        return {"status": os.waitstatus_to_exitcode(os.waitpid(status, 0)[1])}
    for folder in filter(Path.is_dir, folders):
        _hide(folder)
    _make_read_only()
    code = "from tests.faults.fleet import check_offline; check_offline()"
    environment = {**os.environ, "JITFP4_CACHE_DIR": "/nowhere/to/write", "JITFP4_CACHE_RO": cache}
    os._exit(subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode)


def check_offline() -> None:
    """A process of the read-only container."""
    import pytest

    from jitfp4 import engine, nvrtc, warmup
    from jitfp4.errors import OfflineError

    assert nvrtc.toolchain() is None
    tasks = some_tasks(KERNELS + 1)
    assert warmup.missing(tasks[:KERNELS]) == []
    for task in tasks[:KERNELS]:
        assert engine.build(task.kernel, task.spec, task.arch).missed is None
    with pytest.raises(OfflineError, match=f"jitfp4 warmup --arch {ARCH} --kernel {PATTERN}"):
        engine.build(tasks[-1].kernel, tasks[-1].spec, tasks[-1].arch)
    assert engine.cache_info().store_errors == {}
    assert "libnvrtc" not in Path("/proc/self/maps").read_text()
    with pytest.raises(OSError, match="Read-only"):
        Path(os.environ["JITFP4_CACHE_RO"], "probe").touch()


def _hide(folder: Path) -> None:
    _call("unshare", _NEW_MOUNTS)
    _call("mount", b"none", b"/", None, _PRIVATE, None)
    _call("mount", b"tmpfs", bytes(folder), b"tmpfs", 0, None)


def _make_read_only() -> None:
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        place, kind = line.split()[1:3]
        if kind not in ("proc", "sysfs", "devtmpfs", "devpts"):
            ctypes.CDLL(None).mount(b"none", place.encode(), None, _REMOUNT | _BIND | _READ_ONLY, None)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None), name)(*arguments) != 0:
        os._exit(NOT_ALLOWED)


if __name__ == "__main__":
    rank()
