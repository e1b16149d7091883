"""Executes the PTX of generated kernels on the CPU."""

from __future__ import annotations

from jitfp4.sim.api import Stats, active_arch, device, run
from jitfp4.sim.tensormap import TensorMap

__all__ = ["Stats", "TensorMap", "active_arch", "device", "run"]
