"""Approximate functions: computed in float64 and rounded to nearest float32.

The GPU's tables are not public, so results may differ from it by the manual's error bound: rcp, rsqrt and sqrt 1 ulp,
div.approx and div.full 2 ulp, ex2 2 ulp, lg2 relative 2**-22 (absolute near 1), sin and cos absolute 2**-20.5, tanh
relative 2**-11. Special values (zero, Inf, NaN, subnormal inputs with and without .ftz) follow the manual's tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jitfp4.sim import rounding as exact
from jitfp4.sim.decode import Decode, Step, step
from jitfp4.sim.ops.floating import finish, sources
from jitfp4.sim.ops.half import flush_half, halves, narrow, widen
from jitfp4.sim.ptx import TYPES, Array, Type


def _wide(fn: Callable[..., Array]) -> Callable[..., Array]:
    """``fn`` in float64, rounded once to float32."""
    return lambda *args: np.asarray(fn(*(np.asarray(a).astype(np.float64) for a in args))).astype(np.float32)


def _div_approx(a: Array, b: Array) -> Array:
    """``a / b`` for |b| up to 2**126; beyond it div.approx gives 0, or NaN for an infinite or NaN a."""
    huge = (np.abs(b) > 2.0**126) & np.isfinite(b)
    return np.where(huge, np.where(np.isfinite(a), np.copysign(0.0, a) * np.sign(b), np.nan), a / b)


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "rcp": _wide(lambda a: 1.0 / a),
    "sqrt": _wide(np.sqrt),
    "rsqrt": _wide(lambda a: 1.0 / np.sqrt(a)),
    "ex2": _wide(np.exp2),
    "lg2": _wide(np.log2),
    "sin": _wide(np.sin),
    "cos": _wide(np.cos),
    "tanh": _wide(np.tanh),
    "div": _wide(np.divide),
}


def build(d: Decode, op: str) -> Step:
    """rcp, sqrt, div (approx and full), rsqrt, ex2, lg2, sin, cos, tanh."""
    how = d.need("approx", "full")
    ftz = d.flag("ftz")
    kind = d.type()
    fn = _FUNCTIONS[op]
    if op == "div" and how == "approx":
        fn = _wide(_div_approx)
    if kind.bits == 16 or kind.name in ("f16x2", "bf16x2"):
        return _half(d, fn, kind, ftz)
    if kind.name == "f64":
        return _double(d, op)
    return finish(d, kind, fn, sources(d, kind, 2 if op == "div" else 1, ftz), ftz=ftz)


def _half(d: Decode, fn: Callable[..., Array], kind: Type, ftz: bool) -> Step:
    """ex2 and tanh of halves."""
    raw = TYPES[f"b{kind.bits}"]
    dst, read = d.dst(raw), d.src(raw)

    def run(m: Any, lanes: Any) -> None:
        x = widen(kind.name, halves(read(m, lanes), lanes.n))
        y = fn(flush_half(kind.name, x) if ftz else x)
        dst(m, lanes, narrow(kind.name, flush_half(kind.name, y) if ftz else y).view(raw.dtype))

    return run


def _double(d: Decode, op: str) -> Step:
    """rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 return a value whose low 32 bits are zero."""
    if op not in ("rcp", "rsqrt"):
        raise d.error(f"{op}.approx.f64 is not in the manual")
    kind = TYPES["f64"]
    dst, read = d.dst(kind), d.src(kind)

    def run(m: Any, lanes: Any) -> None:
        x = np.asarray(read(m, lanes))
        y = np.asarray(1.0 / (x if op == "rcp" else np.sqrt(x)))
        dst(m, lanes, exact.canonical(y).view(np.uint64) & np.uint64(0xFFFFFFFF00000000))

    return run


@step("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def _approximate(d: Decode) -> Step:
    return build(d, d.instr.name)
