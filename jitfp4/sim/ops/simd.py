"""Several small integers in one register: s16x2 and u16x2, and the SIMD video instructions (vadd2, vmax4, ...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jitfp4.sim.decode import Decode, Step, broadcast, step
from jitfp4.sim.ops.compare import comparison
from jitfp4.sim.ptx import TYPES, Array, Type

WORD = TYPES["b32"]


def elements(value: Any, n: int, dtype: Any) -> Any:
    """Registers as arrays of their elements, neighbours in memory order."""
    return np.ascontiguousarray(broadcast(value, n)).view(dtype)


def build(d: Decode, op: str, kind: Type) -> Step:
    """add, min and max of s16x2 and u16x2."""
    fn = {"add": np.add, "min": np.minimum, "max": np.maximum}.get(op)
    if fn is None:
        raise d.error(f"{op} has no type .{kind.name}")
    relu = d.flag("relu")
    dtype = np.dtype(np.int16 if kind.is_signed else np.uint16)
    dst, a, b = d.dst(WORD), d.src(WORD), d.src(WORD)

    def run(m: Any, lanes: Any) -> None:
        value = fn(elements(a(m, lanes), lanes.n, dtype), elements(b(m, lanes), lanes.n, dtype))
        dst(m, lanes, (np.maximum(value, dtype.type(0)) if relu else value).view(np.uint32))

    return run


def _average(a: Array, b: Array) -> Array:
    """Half the sum, ties away from zero."""
    total = a + b
    return total + (total >= 0) >> 1


_VIDEO: dict[str, Callable[[Array, Array], Array]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vavrg": _average,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@step(*(f"{op}{count}" for op in (*_VIDEO, "vset") for count in (2, 4)))
def _video(d: Decode) -> Step:
    """Element by element on two halves or four bytes; with ``.add`` the sum of the results plus c."""
    op, count = d.instr.name[:-1], int(d.instr.name[-1])
    out = TYPES["u32"] if op == "vset" else d.type()
    types = d.type(), d.type()
    if op == "vset":
        compare = comparison(d.need(*_COMPARISONS), is_float=False)
        fn: Callable[[Array, Array], Array] = lambda a, b: compare(a, b).astype(np.int64)  # noqa: E731
    else:
        fn = _VIDEO[op]
    clamp, accumulate = d.flag("sat"), d.flag("add")
    size = 4 // count
    dtypes = [np.dtype(f"{t.dtype.kind}{size}") for t in types]
    element = np.dtype(f"{out.dtype.kind}{size}")
    limits = np.iinfo(element)
    dst, a, b, c = d.dst(WORD), d.src(WORD), d.src(WORD), d.src(WORD)

    def run(m: Any, lanes: Any) -> None:
        x, y = (elements(s(m, lanes), lanes.n, t).astype(np.int64) for s, t in zip((a, b), dtypes, strict=True))
        value = fn(x, y)
        if accumulate:
            dst(m, lanes, (value.reshape(lanes.n, count).sum(axis=1) + c(m, lanes)).astype(np.uint32))
            return
        value = np.clip(value, limits.min, limits.max) if clamp else value
        dst(m, lanes, np.ascontiguousarray(value.astype(element)).view(np.uint32))

    return run
