"""Executes the PTX of generated kernels on the CPU; see README.md.

``run`` is what executes; importing this package alone loads neither NumPy nor the instructions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jitfp4.sim.device import active_device, device

if TYPE_CHECKING:
    from jitfp4.sim.api import Stats, run
    from jitfp4.sim.chain import Chain
    from jitfp4.sim.tensormap import TensorMap

__all__ = ["Chain", "Stats", "TensorMap", "active_device", "device", "run"]

_HOME = {"Chain": "chain", "Stats": "api", "run": "api", "TensorMap": "tensormap"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
