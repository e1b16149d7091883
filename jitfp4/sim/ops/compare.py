"""setp, set and testp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jitfp4.sim.decode import Decode, Dest, Source, Step, step
from jitfp4.sim.ops.floating import flushed
from jitfp4.sim.ops.half import flush_half, halves, widen
from jitfp4.sim.ptx import TYPES, Array, Pair, Sink, Type

PRED = TYPES["pred"]
_ORDERED: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_NAMES = (*_ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_COMBINE: dict[str, Callable[..., Any]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, is_float: bool) -> Callable[[Any, Any], Any]:
    """A comparison by PTX's name; the ``u`` forms of floats hold for NaN, the plain forms do not."""
    if name == "num":
        return lambda a, b: (a == a) & (b == b)
    if name == "nan":
        return lambda a, b: (a != a) | (b != b)
    if name not in _ORDERED:
        inner = _ORDERED[name[:-1]]
        return lambda a, b: inner(a, b) | (a != a) | (b != b)
    if name == "ne" and is_float:
        return lambda a, b: (a != b) & (a == a) & (b == b)
    return _ORDERED[name]


def _operands(d: Decode, kind: Type, ftz: bool) -> tuple[Source, Source]:
    """Both sources as comparable values: halves widened, packed halves as [n, 2]."""
    if kind.name in ("f16", "bf16", "f16x2", "bf16x2"):
        raw = TYPES[f"b{kind.bits}"]

        def wide() -> Source:
            read = d.src(raw)

            def value(m: Any, lanes: Any) -> Array:
                x = widen(kind.name, halves(read(m, lanes), lanes.n))
                x = flush_half(kind.name, x) if ftz else x
                return x.reshape(lanes.n, 2) if kind.bits == 32 else x

            return value

        return wide(), wide()
    a, b = d.src(kind), d.src(kind)
    return (flushed(a), flushed(b)) if ftz else (a, b)


@step("setp")
def _setp(d: Decode) -> Step:
    name, combine, ftz = d.need(*_NAMES), d.take(*_COMBINE), d.flag("ftz")
    kind = d.type()
    target = d.next()
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    dst, dst2 = d.dst(PRED, first), d.dst(PRED, second)
    a, b = _operands(d, kind, ftz)
    compare = comparison(name, kind.is_float)
    if kind.name in ("f16x2", "bf16x2"):
        return _setp_packed(dst, dst2, lambda m, lanes: compare(a(m, lanes), b(m, lanes)))
    if combine is None and isinstance(second, Sink):
        return lambda m, lanes: dst(m, lanes, np.asarray(compare(a(m, lanes), b(m, lanes))))
    c = d.src(PRED) if combine is not None else None
    merge = _COMBINE[combine or "and"]

    def run(m: Any, lanes: Any) -> None:
        holds = np.asarray(compare(a(m, lanes), b(m, lanes)))
        other = np.True_ if c is None else c(m, lanes)
        dst2(m, lanes, np.asarray(merge(~holds, other)))
        dst(m, lanes, np.asarray(merge(holds, other)))

    return run


def _setp_packed(dst: Dest, dst2: Dest, compare: Callable[[Any, Any], Any]) -> Step:
    """The first predicate takes the low half's result, the second the high half's."""

    def run(m: Any, lanes: Any) -> None:
        holds = compare(m, lanes)
        dst(m, lanes, holds[:, 0].copy())
        dst2(m, lanes, holds[:, 1].copy())

    return run


@step("set")
def _set(d: Decode) -> Step:
    """All ones (or 1.0) where the comparison holds, else zero."""
    name, combine, ftz = d.need(*_NAMES), d.take(*_COMBINE), d.flag("ftz")
    out, kind = d.type(), d.type()
    packed = kind.name in ("f16x2", "bf16x2")
    true = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}.get(out.name, -1)
    raw = TYPES[f"b{out.bits}"]
    dst = d.dst(raw)
    a, b = _operands(d, kind, ftz)
    c = d.src(PRED) if combine is not None else None
    compare, merge = comparison(name, kind.is_float), _COMBINE[combine or "and"]
    element = np.dtype(np.uint16) if packed else raw.raw

    def run(m: Any, lanes: Any) -> None:
        holds = np.asarray(compare(a(m, lanes), b(m, lanes)))
        if c is not None:
            other = c(m, lanes)
            holds = merge(holds, other[:, None] if packed and other.ndim else other)
        value = np.where(holds, np.array(true).astype(element), element.type(0))
        dst(m, lanes, np.ascontiguousarray(value).view(raw.raw).reshape(-1) if packed else value)

    return run


@step("testp")
def _testp(d: Decode) -> Step:
    name = d.need("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    kind = d.type()
    dst, read = d.dst(PRED), d.src(kind)
    smallest = np.finfo(kind.dtype).smallest_normal
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= smallest) | (x == 0)),
        "subnormal": lambda x: (np.abs(x) < smallest) & (x != 0),
    }
    return lambda m, lanes: dst(m, lanes, np.asarray(tests[name](read(m, lanes))))
