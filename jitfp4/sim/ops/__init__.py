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
    mbarrier,
    memory,
    move,
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
    "mbarrier",
    "memory",
    "move",
    "warp",
]
