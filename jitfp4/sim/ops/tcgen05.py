"""tcgen05: tensor memory of the sm_100 family, its allocation, loads and stores. What is queued is in tcgen05_pipe."""

from __future__ import annotations

from typing import Any

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim import tmem
from jitfp4.sim.decode import Control, Decode, Source, Step, broadcast, control, step
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import WARP, Machine
from jitfp4.sim.ops.matrix import aligned_warps
from jitfp4.sim.ptx import TYPES, Reg
from jitfp4.sim.registers import RegisterWatch
from jitfp4.sim.tensor_pipe import TensorPipe
from jitfp4.sim.warp_groups import gather, scatter

B32, U16, U32, U64, PRED = TYPES["b32"], TYPES["u16"], TYPES["u32"], TYPES["u64"], TYPES["pred"]


def cta_group(d: Decode) -> int:
    """The CTAs that an instruction is for, 1 or 2."""
    return int(d.need("cta_group::1", "cta_group::2")[-1])


def _sync_aligned(d: Decode) -> None:
    d.need("sync")
    d.need("aligned")


def _warps(lanes: Lanes) -> list[slice]:
    return [slice(start, start + WARP) for start in range(0, lanes.n, WARP)]


# Allocation


@control("tcgen05.alloc")
def _alloc(d: Decode) -> Control:
    """Allocate columns for the CTA and store their address to shared memory; waits while there is no room."""
    cta_group(d)
    _sync_aligned(d)
    d.take("shared::cta")
    d.need("b32")
    address, count = d.address(), d.src(U32)
    pc = d.pc

    def body(m: Machine, lanes: Lanes) -> None:
        pipe = m.unit(TensorPipe)
        at, columns = address(m, lanes), broadcast(count(m, lanes), lanes.n)
        for warp in _warps(lanes):
            ids = lanes.ids[warp]
            cta = int(m.cta[ids[0]])
            granted = pipe.allocations[cta].alloc(int(columns[warp][0]))
            if granted is None:
                m.suspend(m.lanes(ids))
                pipe.waiting.append(m.lanes(ids))
                continue
            pipe.allocations[cta], column = granted
            m.memory.store("shared", ids[:1], at[warp][:1], [np.array([column], np.uint32)])
            m.ready.push(pc + 1, m.lanes(ids))

    return aligned_warps(body, forward=False)


@control("tcgen05.dealloc")
def _dealloc(d: Decode) -> Control:
    cta_group(d)
    _sync_aligned(d)
    d.need("b32")
    address, count = d.src(U32), d.src(U32)

    def body(m: Machine, lanes: Lanes) -> None:
        at, columns = broadcast(address(m, lanes), lanes.n), broadcast(count(m, lanes), lanes.n)
        for warp in _warps(lanes):
            thread, first, freed = int(lanes.ids[warp][0]), int(at[warp][0]), int(columns[warp][0])
            if m.races is not None:
                m.races.tensor.free(thread, first, freed)
            m.unit(TensorPipe).free(int(m.cta[thread]), first, freed)

    return aligned_warps(body)


@control("tcgen05.relinquish_alloc_permit")
def _relinquish(d: Decode) -> Control:
    cta_group(d)
    _sync_aligned(d)

    def body(m: Machine, lanes: Lanes) -> None:
        allocations = m.unit(TensorPipe).allocations
        for cta in np.unique(m.cta[lanes.sel]):
            allocations[cta] = allocations[cta].relinquish()

    return aligned_warps(body)


# Loads, stores, fences


def _form(d: Decode, packing: str) -> tuple[str, int, bool]:
    """Consume .sync.aligned.<shape>.xN{.pack::16b}.b32."""
    _sync_aligned(d)
    shape = d.need("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    number = d.need(*(f"x{1 << i}" for i in range(8)))
    packed = d.flag(packing)
    d.need("b32")
    return shape, int(number[1:]), packed


def _half_split(d: Decode, shape: str) -> int:
    """The immediate of 16x32bx2."""
    return d.immediate() if shape == "16x32bx2" else 0


def _each_warp(
    m: Machine, lanes: Lanes, address: Source, form: tuple[str, int, bool], split: int
) -> list[tuple[int, slice, Any]]:
    """CTA, positions and cells of each warp's access."""
    shape, number, packed = form
    out = []
    at = address(m, lanes)
    for warp in _warps(lanes):
        thread = int(lanes.ids[warp][0])
        if (at[warp] != at[warp][0]).any():
            raise m.error(SimError, "lanes of a warp give different tensor memory addresses", lanes.ids[warp])
        number_in_cta = int(m.tid[thread]) // WARP
        cells = tmem.cells(shape, number, int(at[warp][0]), number_in_cta, half_split=split, packed=packed)
        out.append((int(m.cta[thread]), warp, cells))
    return out


@control("tcgen05.ld")
def _load(d: Decode) -> Control:
    """Registers are written at once; the sanitised run watches that nobody touches them before wait::ld."""
    form = _form(d, "pack::16b")
    targets = d.vector()
    writes = [d.dst(B32, item) for item in targets]
    places = [item.index for item in targets if isinstance(item, Reg)]
    address = d.address()
    split = _half_split(d, form[0])

    def body(m: Machine, lanes: Lanes) -> None:
        pipe = m.unit(TensorPipe)
        values = []
        for cta, warp, cells in _each_warp(m, lanes, address, form, split):
            pipe.check_read(cta, cells, lanes.ids[warp])
            if m.races is not None:
                m.races.tensor.warp("ld", lanes.ids[warp], cta, cells)
            values.append(tmem.load(pipe.cells[cta], cells))
        scatter(m, lanes, writes, np.stack(values))
        if m.races is not None:
            m.unit(RegisterWatch).load(lanes.ids, places)

    return aligned_warps(body)


@control("tcgen05.st")
def _store(d: Decode) -> Control:
    form = _form(d, "unpack::16b")
    address = d.address()
    split = _half_split(d, form[0])
    reads = [d.src(B32, item) for item in d.vector()]

    def body(m: Machine, lanes: Lanes) -> None:
        pipe = m.unit(TensorPipe)
        values = gather(m, lanes, reads)
        for row, (cta, _, cells) in enumerate(_each_warp(m, lanes, address, form, split)):
            columns = cells[1]
            pipe.allocations[cta].require(int(columns.min()), int(columns.max() - columns.min()) + 1)
            if m.races is not None:
                m.races.tensor.warp("st", m.lanes(lanes.ids[32 * row : 32 * row + 32]).ids, cta, cells)
            tmem.store(pipe.cells[cta], cells, values[row])
            pipe.written[cta, cells[0], columns] = True

    return aligned_warps(body)


@control("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(d: Decode) -> Control:
    _sync_aligned(d)
    kind = d.instr.mods[0].removeprefix("wait::")

    def body(m: Machine, lanes: Lanes) -> None:
        if m.races is not None:
            m.races.tensor.wait(kind, lanes.ids)
            if kind == "ld":
                m.unit(RegisterWatch).loads_done(lanes.ids)

    return aligned_warps(body)


@step("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(d: Decode) -> Step:
    before = d.instr.mods[0] == "fence::before_thread_sync"

    def run(m: Machine, lanes: Lanes) -> None:
        if m.races is not None:
            m.races.tensor.fence(lanes.ids, before=before)

    return run
