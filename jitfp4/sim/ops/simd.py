"""Several small integers in one register: add, min and max of s16x2 and u16x2."""

from __future__ import annotations

from typing import Any

import numpy as np

from jitfp4.sim.decode import Decode, Step, broadcast
from jitfp4.sim.ptx import TYPES, Type


def elements(value: Any, n: int, dtype: Any) -> Any:
    """Registers as arrays of their elements, neighbours in memory order."""
    return np.ascontiguousarray(broadcast(value, n)).view(dtype)


def build(d: Decode, op: str, kind: Type) -> Step:
    fn = {"add": np.add, "min": np.minimum, "max": np.maximum}.get(op)
    if fn is None:
        raise d.error(f"{op} has no type .{kind.name}")
    relu = d.flag("relu")
    word, dtype = TYPES["b32"], np.dtype(np.int16 if kind.is_signed else np.uint16)
    dst, a, b = d.dst(word), d.src(word), d.src(word)

    def run(m: Any, lanes: Any) -> None:
        value = fn(elements(a(m, lanes), lanes.n, dtype), elements(b(m, lanes), lanes.n, dtype))
        dst(m, lanes, (np.maximum(value, dtype.type(0)) if relu else value).view(np.uint32))

    return run
