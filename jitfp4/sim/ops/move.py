"""mov with packing and unpacking, address conversion, selection."""

from __future__ import annotations

from typing import Any

import numpy as np

from jitfp4.sim.decode import Decode, Step, step
from jitfp4.sim.memory import RANK_BITS, WINDOW_BITS, WINDOWS
from jitfp4.sim.ops.floating import flushed
from jitfp4.sim.ptx import RAW_DTYPES, TYPES, Operand, Sym, Type, Vec


@step("mov")
def _mov(d: Decode) -> Step:
    kind = d.type()
    to, source = d.next(), d.next()
    if isinstance(to, Vec):
        return _unpack(d, to, source, kind)
    if isinstance(source, Vec):
        return _pack(d, to, source, kind)
    dst, read = d.dst(kind, to), d.src(kind, source)
    return lambda m, lanes: dst(m, lanes, read(m, lanes).copy())


def _element(d: Decode, vec: Vec, kind: Type) -> Type:
    bits = kind.bits // len(vec.items)
    if bits * len(vec.items) != kind.bits or bits not in RAW_DTYPES:
        raise d.error(f"{len(vec.items)} elements do not make up .{kind.name}")
    return TYPES[f"b{bits}"]


def _pack(d: Decode, to: Operand, source: Vec, kind: Type) -> Step:
    """The first element becomes the lowest bits."""
    part = _element(d, source, kind)
    raw = TYPES[f"b{kind.bits}"]
    dst, reads = d.dst(raw, to), [d.src(part, item) for item in source.items]

    def run(m: Any, lanes: Any) -> None:
        out = np.empty((lanes.n, len(reads)), part.raw)
        for j, read in enumerate(reads):
            out[:, j] = read(m, lanes)
        dst(m, lanes, out.view(raw.raw).reshape(lanes.n))

    return run


def _unpack(d: Decode, to: Vec, source: Operand, kind: Type) -> Step:
    part = _element(d, to, kind)
    raw = TYPES[f"b{kind.bits}"]
    read, writes = d.src(raw, source), [d.dst(part, item) for item in to.items]

    def run(m: Any, lanes: Any) -> None:
        value = np.asarray(read(m, lanes))
        for j, write in enumerate(writes):
            write(m, lanes, (value >> raw.dtype.type(j * part.bits)).astype(part.raw))

    return run


@step("cvta")
def _cvta(d: Decode) -> Step:
    """Between an address of a state space and a generic address."""
    back = d.flag("to")
    space = d.need("global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const")
    base = WINDOWS.get(space.split("::")[0], 0)
    kind = d.type()
    if kind.bits == 32:
        raise d.error("32-bit generic addresses are not modelled")
    dst = d.dst(kind)
    source = d.next()
    read = d.src(kind, Sym(source.name, source.offset) if isinstance(source, Sym) else source)
    shift = np.uint64(base)
    return lambda m, lanes: dst(m, lanes, read(m, lanes) - shift if back else read(m, lanes) + shift)


@step("isspacep")
def _isspacep(d: Decode) -> Step:
    """Whether a generic address lies in a state space."""
    space = d.need("global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const")
    dst, read = d.dst(TYPES["pred"]), d.src(TYPES["u64"])
    base = WINDOWS.get(space.split("::")[0])

    def run(m: Any, lanes: Any) -> None:
        address = np.asarray(read(m, lanes)).astype(np.int64)
        window = address >> WINDOW_BITS
        if base is None:
            inside = ~np.isin(window, [b >> WINDOW_BITS for b in WINDOWS.values()])
        else:
            inside = window == base >> WINDOW_BITS
        if space in ("shared", "shared::cta"):
            inside = inside & ((address - WINDOWS["shared"]) >> RANK_BITS == m.rank[lanes.sel])
        dst(m, lanes, np.asarray(inside))

    return run


@step("selp")
def _selp(d: Decode) -> Step:
    kind = d.type()
    dst, a, b, p = d.dst(kind), d.src(kind), d.src(kind), d.src(TYPES["pred"])
    return lambda m, lanes: dst(m, lanes, np.where(p(m, lanes), a(m, lanes), b(m, lanes)))


@step("slct")
def _slct(d: Decode) -> Step:
    """a when c >= 0, else b; a NaN c selects b."""
    ftz = d.flag("ftz")
    kind, test = d.type(), d.type()
    dst, a, b, c = d.dst(kind), d.src(kind), d.src(kind), d.src(test)
    c = flushed(c) if ftz else c  # a flushed negative subnormal is -0, and -0 >= 0
    zero = test.dtype.type(0)
    return lambda m, lanes: dst(m, lanes, np.where(c(m, lanes) >= zero, a(m, lanes), b(m, lanes)))
