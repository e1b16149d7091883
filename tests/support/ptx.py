"""PTX for the simulator, compiled once for all tests and all workers of a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from jitfp4 import nvrtc
from jitfp4.arch import Arch

CompilePtx = Callable[..., str]


def kept(folder: Path, compile_ptx: CompilePtx) -> CompilePtx:
    """``compile_ptx``, with its results kept in a folder that processes may share.

    The engine forgets its kernels after each test, so that no test sees another's; without this, each simulated test
    would compile anew. They are kept on disk only: of all kernels they are hundreds of megabytes.
    """

    def compiled(source: str, arch: Arch, symbol: str, toolchain: nvrtc.Toolchain | None) -> str:
        what = "\0".join((source, arch.ptx_target, symbol, toolchain.name if toolchain else "none", *nvrtc.OPTIONS))
        path = folder / f"{hashlib.sha256(what.encode()).hexdigest()}.ptx"
        if not path.exists():
            whole = path.with_suffix(f".{os.getpid()}")
            whole.write_text(compile_ptx(source, arch, symbol=symbol))
            whole.rename(path)
        return path.read_text()

    return lambda source, arch, *, symbol: compiled(source, arch, symbol, nvrtc.toolchain())
