"""Every instruction, by topic. Importing this package fills the registry of ``jitfp4.sim.decode``."""

from __future__ import annotations

from jitfp4.sim.ops import (
    arithmetic,
    async_copy,
    atomics,
    barrier,
    bits,
    compare,
    control,
    convert,
    matrix,
    mbarrier,
    memory,
    move,
    tcgen05,
    warp,
)

__all__ = [
    "arithmetic",
    "async_copy",
    "atomics",
    "barrier",
    "bits",
    "compare",
    "control",
    "convert",
    "matrix",
    "mbarrier",
    "memory",
    "move",
    "tcgen05",
    "warp",
]
