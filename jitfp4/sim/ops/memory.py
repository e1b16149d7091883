"""ld, st, prefetch and fences that need no state."""

from __future__ import annotations

from typing import Any

import numpy as np

from jitfp4.sim.decode import Decode, Source, Step, broadcast, step
from jitfp4.sim.flags import SCOPES, Access
from jitfp4.sim.ptx import TYPES, Addr, Sym, Type

SPACES = (
    *("global", "shared", "shared::cta", "shared::cluster"),
    *("local", "const", "param", "param::entry", "param::func"),
)
_PRIORITIES = ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
_STRONG = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
CACHE = (
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "unified"),
    *(f"L{level}::{priority}" for level in (1, 2) for priority in _PRIORITIES),
)


def space_of(d: Decode) -> str:
    """The state space modifier; without one the address is generic."""
    return (d.take(*SPACES) or "generic").replace("param::entry", "param").replace("param::func", "param")


def policy(d: Decode) -> None:
    """Consume a cache-policy operand."""
    d.src(TYPES["b64"])


def order_of(d: Decode, *, atomic: bool = False) -> Access:
    """Consume the semantics and the scope of an access."""
    read_only = "nc" in d.mods
    semantics = d.take("weak", *_STRONG)
    scope = SCOPES[d.take("cta", "cluster", "gpu", "sys") or ("gpu" if semantics != "volatile" else "sys")]
    both = semantics == "acq_rel"
    return Access(
        strong=atomic or semantics in _STRONG,
        acquire=both or semantics == "acquire",
        release=both or semantics == "release",
        read_only=read_only,
        scope=scope,
    )


def _access(d: Decode) -> tuple[str, int, Type]:
    """Consume the modifiers of ld and st: space, vector length, element type."""
    space = space_of(d)
    d.ignore(*CACHE)
    count = int((d.take("v2", "v4", "v8") or "v1")[1:])
    kind = d.type()
    if kind.bits == 1 or kind.bits * count > 256:
        raise d.error(f"an access of {count} x .{kind.name} is not in the manual")
    return space, count, kind


def _located(d: Decode, space: str, operand: Any) -> tuple[str, Source]:
    """The address operand. Parameters of calls and of device functions live in local memory."""
    if space == "param" and isinstance(operand, Addr) and isinstance(operand.base, Sym):
        space = d.program.address_of(operand.base)[0]
    return space, d.address(operand)


@step("ld", "ldu")
def _load(d: Decode) -> Step:
    hint, order = "L2::cache_hint" in d.mods, order_of(d)
    space, count, kind = _access(d)
    targets, operand = d.vector(), d.next()
    if len(targets) != count:
        raise d.error(f"{count} elements into {len(targets)} registers")
    writes = [d.dst(kind, target, wide=True) for target in targets]
    space, address = _located(d, space, operand)
    if hint:
        policy(d)
    size, dtype = kind.bytes, kind.dtype

    def run(m: Any, lanes: Any) -> None:
        values = m.memory.load(space, lanes.ids, address(m, lanes), size, count, order)
        for write, value in zip(writes, values, strict=True):
            write(m, lanes, value.view(dtype))

    return run


@step("st")
def _store(d: Decode) -> Step:
    hint, order = "L2::cache_hint" in d.mods, order_of(d)
    space, count, kind = _access(d)
    operand, sources = d.next(), d.vector()
    if len(sources) != count:
        raise d.error(f"{count} elements from {len(sources)} registers")
    reads = [d.src(kind, source, wide=True) for source in sources]
    space, address = _located(d, space, operand)
    if hint:
        policy(d)
    raw = kind.raw

    def run(m: Any, lanes: Any) -> None:
        values = [np.asarray(read(m, lanes)).view(raw) for read in reads]
        m.memory.store(space, lanes.ids, address(m, lanes), values, order)

    return run


@step("prefetch", "prefetchu")
def _prefetch(d: Decode) -> Step:
    """No effect on results, except that a tensor map's address must be that of one."""
    tensormap = d.flag("tensormap")
    space = space_of(d)
    d.ignore("L1", "L2", *CACHE)
    if not tensormap:
        d.address()
        return lambda _m, _lanes: None
    read = d.address()

    def run(m: Any, lanes: Any) -> None:
        for address in np.unique(broadcast(read(m, lanes), lanes.n)):
            m.tensor_map(space, int(address), lanes)

    return run


@step("createpolicy")
def _createpolicy(d: Decode) -> Step:
    """Cache policies are opaque; zero stands for all of them."""
    d.mods.clear()
    dst = d.dst(TYPES["b64"])
    d.operands.clear()
    return lambda m, lanes: dst(m, lanes, np.uint64(0))
