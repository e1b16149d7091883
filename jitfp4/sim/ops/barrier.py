"""bar, barrier, barrier.cluster, and the fences."""

from __future__ import annotations

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim.barriers import Barriers, ClusterBarrier
from jitfp4.sim.decode import Control, Decode, Source, Step, broadcast, control, step
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import WARP, Machine
from jitfp4.sim.ptx import TYPES, Not

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
    d.take("release", "relaxed")
    d.ignore("aligned")

    def run(m: Machine, lanes: Lanes, following: int) -> None:
        m.ready.push(following, lanes)
        m.unit(ClusterBarrier).arrive(lanes)

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
    """Ordering of memory operations: the machine performs ordinary accesses in program order, visible at once."""
    d.ignore("sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "gl", "sys", "mbarrier_init")
    d.ignore("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    if d.flag("proxy"):
        kinds = ("async", "async::generic", "async.global", "alias", "tensormap", "tensormap::generic")
        d.need(*kinds)
        d.ignore("global", "shared::cta", "shared::cluster", "acquire", "release", "cta", "cluster", "gpu", "sys")
        if d.operands:
            raise d.error("fence.proxy.tensormap of a map in memory is not modelled")
    return lambda _m, _lanes: None
