"""Every instruction, by topic. Importing this package fills the registry of ``jitfp4.sim.decode``."""

from __future__ import annotations

from jitfp4.sim.ops import (
    arithmetic,
    atomics,
    barrier,
    bits,
    bulk_copy,
    compare,
    control,
    convert,
    cp_async,
    matrix,
    mbarrier,
    memory,
    move,
    tcgen05,
    tcgen05_pipe,
    warp,
)

__all__ = [
    "arithmetic",
    "atomics",
    "barrier",
    "bits",
    "bulk_copy",
    "compare",
    "control",
    "convert",
    "cp_async",
    "matrix",
    "mbarrier",
    "memory",
    "move",
    "tcgen05",
    "tcgen05_pipe",
    "warp",
]
