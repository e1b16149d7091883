"""bar, barrier, barrier.cluster, and the fences."""

from __future__ import annotations

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim.barriers import Barriers, ClusterBarrier
from jitfp4.sim.clocks import ASYNC_GLOBAL, ASYNC_SHARED, MAPS, MAPS_SENT
from jitfp4.sim.decode import Control, Decode, Source, Step, broadcast, control, step
from jitfp4.sim.flags import SCOPES
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import WARP, Machine
from jitfp4.sim.mbarriers import MBarriers
from jitfp4.sim.ptx import TYPES, Not
from jitfp4.sim.tensormap import TENSOR_MAP_BYTES

U32, PRED = TYPES["u32"], TYPES["pred"]


def _operands(d: Decode) -> tuple[Source, Source | None]:
    """Barrier number and optional thread count."""
    number = d.src(U32)
    return number, d.src(U32) if d.operands else None


def _arrive(m: Machine, lanes: Lanes, operands: tuple[Source, Source | None], *, wait: bool, aligned: bool) -> None:
    number, count = operands
    which = broadcast(number(m, lanes), lanes.n).astype(np.int64)
    expected = np.zeros(lanes.n, np.int64) if count is None else broadcast(count(m, lanes), lanes.n).astype(np.int64)
    if (expected % WARP).any():
        raise m.error(SimError, "a barrier's thread count must be a multiple of 32", lanes.ids)
    units = m.unit(Barriers)
    units.release(units.arrive(lanes, which, expected, wait=wait, aligned=aligned))


@control("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync")
def _sync(d: Decode) -> Control:
    aligned = d.flag("aligned") or d.instr.name == "bar"
    operands = _operands(d)
    return lambda m, lanes, _following: _arrive(m, lanes, operands, wait=True, aligned=aligned)


@control("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def _barrier_arrive(d: Decode) -> Control:
    aligned = d.flag("aligned") or d.instr.name == "bar"
    operands = _operands(d)
    if operands[1] is None:
        raise d.error("arrive needs a thread count")

    def run(m: Machine, lanes: Lanes, following: int) -> None:
        m.ready.push(following, lanes)
        _arrive(m, lanes, operands, wait=False, aligned=aligned)

    return run


@control("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def _reduce(d: Decode) -> Control:
    """Barrier with a reduction of one predicate per thread: popc, and, or."""
    op = d.need("popc", "and", "or")
    aligned = d.flag("aligned") or d.instr.name == "bar"
    kind = d.type()
    dst = d.dst(kind)
    predicate = d.operands.pop()
    read = d.src(PRED, predicate.reg if isinstance(predicate, Not) else predicate)
    inverted = isinstance(predicate, Not)
    operands = _operands(d)

    def finish(m: Machine, lanes: Lanes) -> None:
        values = m.unit(Barriers).value
        cta = m.cta[lanes.sel]
        ones = np.bincount(cta, values[lanes.sel], m.ctas)[cta]
        count = np.bincount(cta, minlength=m.ctas)[cta]
        dst(m, lanes, {"popc": ones.astype(np.uint32), "and": ones == count, "or": ones > 0}[op])

    d.program.barrier_results[d.pc] = finish

    def run(m: Machine, lanes: Lanes, _following: int) -> None:
        value = broadcast(read(m, lanes), lanes.n)
        m.unit(Barriers).value[lanes.sel] = ~value if inverted else value
        _arrive(m, lanes, operands, wait=True, aligned=aligned)

    return run


@control("barrier.cluster.arrive")
def _cluster_arrive(d: Decode) -> Control:
    relaxed = d.take("release", "relaxed") == "relaxed"
    d.ignore("aligned")

    def run(m: Machine, lanes: Lanes, following: int) -> None:
        m.ready.push(following, lanes)
        m.unit(ClusterBarrier).arrive(lanes, relaxed=relaxed)

    return run


@control("barrier.cluster.wait")
def _cluster_wait(d: Decode) -> Control:
    d.ignore("acquire", "aligned")

    def run(m: Machine, lanes: Lanes, following: int) -> None:
        through, _ = m.unit(ClusterBarrier).wait(lanes)
        if through is not None:
            m.ready.push(following, through)

    return run


@step("membar", "fence")
def _fence(d: Decode) -> Step:
    """Accesses are performed in program order and seen at once: a fence changes what the sanitised run finds."""
    if d.flag("proxy"):
        return _proxy_fence(d)
    if d.flag("mbarrier_init"):
        d.need("release")
        d.need("cluster")
        return lambda m, lanes: m.unit(MBarriers).publish_init(lanes.ids)
    semantics = d.take("sc", "acq_rel", "acquire", "release")
    d.ignore("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    scope = SCOPES[d.need(*SCOPES)]
    acquire, release = semantics != "release", semantics != "acquire"

    def run(m: Machine, lanes: Lanes) -> None:
        if m.races is not None:
            m.races.flags.fence(lanes.ids, scope, acquire=acquire, release=release)

    return run


def _proxy_fence(d: Decode) -> Step:
    """fence.proxy.async of shared memory, of global memory, or of both; fence.proxy.tensormap."""
    kind = d.need("async", "async::generic", "alias", "tensormap::generic")
    if kind == "tensormap::generic":
        return _tensor_map_fence(d)
    spaces = {d.take("global"), d.take("shared::cta", "shared::cluster")} - {None}
    d.ignore("acquire", "release", "cta", "cluster", "gpu", "sys", "sync_restrict::shared::cluster")
    layers = tuple(
        layer
        for layer, is_global in ((ASYNC_SHARED, False), (ASYNC_GLOBAL, True))
        if not spaces or ("global" in spaces) == is_global
    )

    def run(m: Machine, lanes: Lanes) -> None:
        if m.races is not None and kind.startswith("async"):
            m.races.clocks.fence(lanes.ids, layers)
            if ASYNC_SHARED in layers:
                m.unit(MBarriers).publish_init(lanes.ids)

    return run


def _tensor_map_fence(d: Decode) -> Step:
    """``.release`` behind what changed a tensor map, ``.acquire`` of its 128 bytes before a copy uses it."""
    acquire = d.need("acquire", "release") == "acquire"
    d.need(*SCOPES)
    if acquire:
        d.address()
        if d.immediate() != TENSOR_MAP_BYTES:
            raise d.error("fence.proxy.tensormap acquires 128 bytes")

    def run(m: Machine, lanes: Lanes) -> None:
        if m.races is None:
            return
        if acquire:
            m.races.clocks.lift(lanes.ids, MAPS_SENT, MAPS)
        else:
            m.races.clocks.fence(lanes.ids, (MAPS_SENT,))

    return run
