"""Warp and warpgroup matrix instructions: ldmatrix, stmatrix, movmatrix, mma.sync and wgmma."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim import fragments, mma, wgmma
from jitfp4.sim.decode import Control, Decode, Source, Step, broadcast, control
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import WARP, Machine
from jitfp4.sim.ops.warp import collective
from jitfp4.sim.ptx import TYPES, Array, Imm, Operand, Reg, Vec
from jitfp4.sim.registers import RegisterWatch
from jitfp4.sim.warp_groups import Accumulator, WarpGroups, gather, scatter

_ELEMENTS = (
    *("f16", "bf16", "tf32", "f32", "s32", "s8", "u8", "s4", "u4", "ue8m0", "ue4m3"),
    *("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"),
)
B32, U32, U64, PRED = TYPES["b32"], TYPES["u32"], TYPES["u64"], TYPES["pred"]


def aligned_warps(body: Step, *, group: int = 1, forward: bool = True) -> Control:
    """An ``.aligned`` instruction of whole warps; without ``forward`` the body sends its threads on."""

    def whole(m: Machine, lanes: Lanes) -> None:
        if lanes.n % WARP or (m.lane[lanes.sel] != np.tile(np.arange(WARP), lanes.n // WARP)).any():
            raise m.error(SimError, "not every thread of the warp takes part", lanes.ids)
        body(m, lanes)

    return collective(whole, group=group, forward=forward)


def registers(d: Decode, operand: Operand | None = None) -> list[Source]:
    """Readers of a vector of 32-bit registers."""
    return [d.src(B32, item) for item in d.vector(operand)]


def _types(d: Decode) -> list[str]:
    """Consume element types, in order."""
    out = []
    while (name := d.take(*_ELEMENTS)) is not None:
        out.append(name)
    return out


def _matrix_form(d: Decode) -> tuple[int, bool]:
    """Consume .sync.aligned.m8n8.xN{.trans}{.shared}.b16. Returns the number of matrices and .trans."""
    for mod in ("sync", "aligned", "m8n8"):
        d.need(mod)
    count = int(d.need("x1", "x2", "x4")[1:])
    trans = d.flag("trans")
    d.take("shared", "shared::cta")
    d.need("b16")
    return count, trans


@control("ldmatrix")
def _ldmatrix(d: Decode) -> Control:
    count, trans = _matrix_form(d)
    writes = [d.dst(B32, item) for item in d.vector()]
    address = d.address()

    def body(m: Machine, lanes: Lanes) -> None:
        giving = m.lane[lanes.sel] < 8 * count
        ids, at = lanes.ids[giving], address(m, lanes)[giving]
        words = m.memory.load("shared", ids, at, 8, 2)
        rows = np.stack(words, axis=1).view(np.uint8).reshape(-1, 8 * count, 16)
        scatter(m, lanes, writes, fragments.ldmatrix(rows, trans=trans))

    return aligned_warps(body)


@control("stmatrix")
def _stmatrix(d: Decode) -> Control:
    count, trans = _matrix_form(d)
    address = d.address()
    reads = [d.src(B32, item) for item in d.vector()]

    def body(m: Machine, lanes: Lanes) -> None:
        giving = m.lane[lanes.sel] < 8 * count
        ids, at = lanes.ids[giving], address(m, lanes)[giving]
        rows = fragments.stmatrix(gather(m, lanes, reads), trans=trans)
        words = np.ascontiguousarray(rows).view(np.uint64).reshape(-1, 2)
        m.memory.store("shared", ids, at, [words[:, 0].copy(), words[:, 1].copy()])

    return aligned_warps(body)


@control("movmatrix")
def _movmatrix(d: Decode) -> Control:
    for mod in ("sync", "aligned", "m8n8", "trans", "b16"):
        d.need(mod)
    dst, read = d.dst(B32), d.src(B32)
    return aligned_warps(
        lambda m, lanes: dst(
            m, lanes, fragments.movmatrix(broadcast(read(m, lanes), lanes.n).reshape(-1, WARP)).reshape(-1)
        )
    )


@control("mma")
def _mma(d: Decode) -> Control:
    """mma.sync.aligned.m16n8kN.row.col, with or without block scales."""
    for mod in ("sync", "aligned", "row", "col"):
        d.need(mod)
    shape = next((mod for mod in d.mods if mod.startswith("m16n8k")), None)
    if shape is None:
        raise d.error("only the m16n8 shapes of mma are modelled")
    d.need(shape)
    k = int(shape.removeprefix("m16n8k"))
    kind = d.take("kind::f8f6f4", "kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4")
    scaled, satfinite = d.flag("block_scale"), d.flag("satfinite")
    vec = d.take("scale_vec::1X", "scale_vec::2X", "scale_vec::4X")
    types = ".".join(_types(d))
    d.no_more_mods()
    writes = [d.dst(B32, item) for item in d.vector()]
    a, b, c = (registers(d) for _ in range(3))
    if not scaled:
        return aligned_warps(
            lambda m, lanes: scatter(
                m,
                lanes,
                writes,
                mma.mma(k, types, *(gather(m, lanes, r) for r in (a, b, c)), arch=m.launch.arch, satfinite=satfinite),
            )
        )
    name = str(kind).removeprefix("kind::")
    count = int(vec.removeprefix("scale_vec::")[0]) if vec else {"mxf4": 2, "mxf8f6f4": 1}.get(name, 4)
    sfa, sfb = _scales(d), _scales(d)

    def body(m: Machine, lanes: Lanes) -> None:
        values = [gather(m, lanes, r) for r in (a, b, c)]
        scatter(
            m, lanes, writes, mma.mma_block_scale(name, count, types, *values, sfa=sfa(m, lanes), sfb=sfb(m, lanes))
        )

    return aligned_warps(body)


def _scales(d: Decode) -> Callable[[Machine, Lanes], mma.Scales]:
    """A scale register and its ``{byte-id, thread-id}``."""
    read = d.src(B32)
    selectors = [int(item.value) for item in d.vector() if isinstance(item, Imm)]
    if len(selectors) != 2:
        raise d.error("scale selectors must be immediates")
    return lambda m, lanes: mma.Scales(
        registers=broadcast(read(m, lanes), lanes.n).reshape(-1, WARP), byte_id=selectors[0], thread_id=selectors[1]
    )


# wgmma


def _flag(d: Decode, one: int) -> bool:
    """An immediate modifier operand; true when it equals ``one``."""
    return d.immediate() == one


@control("wgmma.mma_async")
def _wgmma(d: Decode) -> Control:
    """Queue a multiply of a warpgroup; d is poisoned until its group is waited for."""
    for mod in ("sync", "aligned"):
        d.need(mod)
    shape = next((mod for mod in d.mods if mod.startswith("m64n")), "")
    d.need(shape)
    n = int(shape.removeprefix("m64n").partition("k")[0])
    satfinite = d.flag("satfinite")
    names = _types(d)
    d.no_more_mods()
    if len(names) != 3:
        raise d.error("wgmma needs the types of d, a and b")
    types, element = ".".join(names), names[1]
    accumulators = d.vector()
    reads, writes = [d.src(B32, item) for item in accumulators], [d.dst(B32, item) for item in accumulators]
    places = tuple(item.index for item in accumulators if isinstance(item, Reg))
    first = d.next()
    a_places = tuple(item.index for item in d.vector(first) if isinstance(item, Reg)) if isinstance(first, Vec) else ()
    a_registers = registers(d, first) if isinstance(first, Vec) else None
    a_descriptor = d.src(U64, first) if a_registers is None else None
    b_descriptor, scale_d = d.src(U64), d.src(PRED)
    negate_a = bool(d.operands) and _flag(d, -1)
    negate_b = bool(d.operands) and _flag(d, -1)
    trans_a = bool(d.operands) and a_registers is None and _flag(d, 1)
    trans_b = bool(d.operands) and _flag(d, 1)
    mods = wgmma.Modifiers(negate_a=negate_a, negate_b=negate_b, trans_a=trans_a, trans_b=trans_b, satfinite=satfinite)

    def body(m: Machine, lanes: Lanes) -> None:
        units = m.unit(WarpGroups)
        a = None if a_registers is None else gather(m, lanes, a_registers)
        a_bits = None if a_descriptor is None else broadcast(a_descriptor(m, lanes), lanes.n)
        b_bits, keep = broadcast(b_descriptor(m, lanes), lanes.n), broadcast(scale_d(m, lanes), lanes.n)
        for number, ids in units.of(lanes):
            own = m.lanes(ids)
            at = int(np.searchsorted(lanes.ids, ids[0]))
            left = a[at // WARP : at // WARP + 4] if a is not None else _uniform(m, own, a_bits, at)
            right = _uniform(m, own, b_bits, at)
            _check_operands(m, own, left, right, n, element, mods)
            multiply = partial(wgmma.wgmma, n, types, left, right, scale_d=bool(keep[at]), mods=mods)
            units.issue(number, own, Accumulator(places, reads, writes), a_places, multiply)

    return aligned_warps(body, group=4)


def _uniform(m: Machine, own: Lanes, bits: Any, at: int) -> int:
    """A descriptor, which must be the same in all threads of the warpgroup."""
    mine = bits[at : at + own.n]
    if (mine != mine[0]).any():
        raise m.error(SimError, "threads of a warpgroup give different wgmma descriptors", own.ids)
    return int(mine[0])


def _check_operands(
    m: Machine, own: Lanes, a: int | Array, b: int, n: int, element: str, mods: wgmma.Modifiers
) -> None:
    for operand, rows, mn_major in ((a, 64, mods.trans_a), (b, n, mods.trans_b)):
        if isinstance(operand, int):
            where = wgmma.operand_addresses(operand, rows, element, mn_major=mn_major)
            m.memory.check_operand(int(m.cta[own.ids[0]]), where, int(own.ids[0]))
            m.unit(WarpGroups).note_operand(own.ids, where)


@control("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
def _wgmma_order(d: Decode) -> Control:
    what = d.instr.mods[0]
    d.need("sync")
    d.need("aligned")
    allowed = d.immediate() if what == "wait_group" else 0

    def body(m: Machine, lanes: Lanes) -> None:
        units = m.unit(WarpGroups)
        for number, ids in units.of(lanes):
            if what == "fence":
                units.fenced[number] = True
                if m.races is not None:
                    m.unit(RegisterWatch).fence(ids)
            elif what == "commit_group":
                units.committed[number] += 1
            else:
                units.wait(number, ids, allowed)

    return aligned_warps(body, group=4)
