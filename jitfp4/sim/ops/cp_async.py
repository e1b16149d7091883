"""cp.async of 4 to 16 bytes per thread, and its groups."""

from __future__ import annotations

import numpy as np

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.async_copies import SmallCopies
from jitfp4.sim.decode import Decode, Source, Step, broadcast, step
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import Machine
from jitfp4.sim.mbarriers import MBarriers
from jitfp4.sim.memory import IN_FLIGHT, Part
from jitfp4.sim.ops.memory import CACHE
from jitfp4.sim.ptx import TYPES, Array, Reg

U32 = TYPES["u32"]


@step("cp.async")
def _cp_async(d: Decode) -> Step:
    """Copy 4, 8 or 16 bytes; beyond ``src-size`` the destination is filled with zeros."""
    cache = d.need("ca", "cg")
    d.need("shared", "shared::cta")
    d.need("global")
    hint = d.flag("L2::cache_hint")
    d.ignore(*CACHE)
    dst, src, size = d.address(), d.address(), d.immediate()
    if size not in (4, 8, 16) or (cache == "cg" and size != 16):
        raise d.error("cp.async copies 4, 8 or 16 bytes, .cg 16")
    if hint:
        d.operands.pop()
    valid = _source_size(d, size)

    def run(m: Machine, lanes: Lanes) -> None:
        (part,) = m.memory.locate("shared", lanes.ids, dst(m, lanes), size)
        count = broadcast(valid(m, lanes), lanes.n).astype(np.int64)
        if (count > size).any():
            raise m.error(SimError, "cp.async src-size exceeds cp-size", lanes.ids[count > size])
        data = _fetch(m, lanes, src(m, lanes), count, size)
        m.memory.check_write(part, lanes.ids, size)
        m.memory.state.data[part.offset[:, None] + np.arange(size)] = IN_FLIGHT
        m.unit(SmallCopies).issue(lanes, part, data)

    return run


def _source_size(d: Decode, size: int) -> Source:
    """How many bytes are read: all, ``src-size``, or none where the ignore-src predicate holds."""
    everything = np.uint32(size)
    if not d.operands:
        return lambda _m, _lanes: everything
    operand = d.operands[0]
    if not isinstance(operand, Reg) or operand.type.bits > 1:
        return d.src(U32)
    ignore = d.src(TYPES["pred"])
    return lambda m, lanes: np.where(ignore(m, lanes), np.uint32(0), everything)


def _fetch(m: Machine, lanes: Lanes, address: Array, count: Array, total: int) -> Array:
    """uint8 [lanes, total]: ``count`` bytes of global memory, then zeros. Bytes that are not read may not exist."""
    data = np.zeros((lanes.n, total), np.uint8)
    misaligned = address & (total - 1) != 0
    if misaligned.any():
        raise m.error(SimMemoryError, f"cp.async source is not aligned to {total} bytes", lanes.ids[misaligned])
    for size in np.unique(count[count > 0]):
        rows = np.flatnonzero(count == size)
        for part in m.memory.locate("global", lanes.ids[rows], address[rows], 1):
            m.memory.bound(part.of(lanes.ids[rows]), part.offset, 0, len(part.region.data), int(size), part.region.name)
            picked = rows if part.pick is None else rows[part.pick]
            if m.races is not None:
                piece = int(size) & -int(size)
                for start in range(0, int(size), piece):
                    there = Part(part.region, None, part.offset + start, "global")
                    m.races.read(there, lanes.ids[picked], piece)
            data[picked, :size] = part.region.data[part.offset[:, None] + np.arange(size)]
    return data


@step("cp.async.commit_group")
def _commit(d: Decode) -> Step:
    del d

    def run(m: Machine, lanes: Lanes) -> None:
        m.unit(SmallCopies).committed[lanes.sel] += 1

    return run


@step("cp.async.wait_group", "cp.async.wait_all")
def _wait(d: Decode) -> Step:
    allowed = None if d.instr.mods[-1] == "wait_all" else d.immediate()
    return lambda m, lanes: m.unit(SmallCopies).wait(lanes.ids, allowed)


@step("cp.async.mbarrier.arrive")
def _arrive(d: Decode) -> Step:
    """Arrive when the thread's earlier cp.async are complete; without ``.noinc`` the count is raised first."""
    counted = d.flag("noinc")
    d.ignore("shared", "shared::cta")
    d.need("b64")
    address = d.address()

    def run(m: Machine, lanes: Lanes) -> None:
        barriers = m.unit(MBarriers)
        keys = barriers.keys("shared", lanes.ids, address(m, lanes))
        if not counted:
            for key in keys:
                barriers.get(int(key), lanes.ids).pending += 1
        m.unit(SmallCopies).arrive_later(lanes, keys)

    return run
