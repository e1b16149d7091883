"""Every instruction, by topic. Importing this package fills the registry of ``jitfp4.sim.decode``."""

from __future__ import annotations

from jitfp4.sim.ops import (
    arithmetic,
    bits,
    compare,
    control,
    convert,
    memory,
    move,
)

__all__ = ["arithmetic", "bits", "compare", "control", "convert", "memory", "move"]
