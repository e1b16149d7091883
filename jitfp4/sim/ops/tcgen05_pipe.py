"""tcgen05: what the tensor pipe of the sm_100 family does on its own: copies of scales, products, commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jitfp4.errors import SimError
from jitfp4.sim import tcgen05, tmem
from jitfp4.sim.async_copies import Signal
from jitfp4.sim.decode import Decode, Step, broadcast, step
from jitfp4.sim.instruction_descriptor import KINDS, InstructionDescriptor
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.machine import Machine
from jitfp4.sim.matrix_descriptor import MatrixDescriptor
from jitfp4.sim.mbarriers import MBarriers
from jitfp4.sim.memory import RANK_BITS
from jitfp4.sim.ops.tcgen05 import cta_group
from jitfp4.sim.ptx import TYPES, Addr
from jitfp4.sim.tensor_pipe import TensorPipe

U16, U32, U64, PRED = TYPES["u16"], TYPES["u32"], TYPES["u64"], TYPES["pred"]


def _queue(m: Machine, lanes: Lanes, build: Callable[[int, int], Callable[[], None]]) -> None:
    """Queue one piece of work per thread; faults of the models name the thread and the instruction."""
    pipe = m.unit(TensorPipe)
    for position, thread in enumerate(lanes.ids.tolist()):
        with pipe.blame(thread):
            pipe.issue(thread, build(position, thread))


@step("tcgen05.cp")
def _copy(d: Decode) -> Step:
    """Shared memory to tensor memory."""
    group = cta_group(d)
    shape = d.need("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
    multicast = d.take("warpx2::02_13", "warpx2::01_23", "warpx4")
    if multicast:
        shape += f".{multicast}"
    address, descriptor = d.address(), d.src(U64)

    def run(m: Machine, lanes: Lanes) -> None:
        pipe = m.unit(TensorPipe)
        at, bits = address(m, lanes), broadcast(descriptor(m, lanes), lanes.n)

        def build(position: int, thread: int) -> Callable[[], None]:
            to, source = int(at[position]), int(bits[position])
            rows, columns = tmem.copy_extent(shape)
            ctas, first = pipe.ctas_of(thread, group), to & 0xFFFF
            for cta in ctas:
                pipe.allocations[cta].require(first, columns)
                where = MatrixDescriptor.of_tcgen05(source).addresses(rows, 4 * columns)
                m.memory.check_operand(cta, where, thread)
                if m.races is not None:
                    m.races.tensor.operand(thread, cta, where)
            if m.races is not None:
                m.races.tensor.pipe(thread, ctas, (), ((first, columns),))
            pipe.expect_write(ctas, first, columns)

            def perform() -> None:
                for cta in ctas:
                    tmem.copy(pipe.cells[cta], to, source, m.memory.of_cta(cta), shape)
                pipe.wrote(ctas, first, columns)

            return perform

        _queue(m, lanes, build)

    return run


def _scale_block(d: Decode, kind: str) -> int:
    """The block length that .block16, .block32 or .scale_vec::NX mean."""
    name = d.take("block16", "block32", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X")
    if name is None and kind == "mxf4nvf4":
        raise d.error("kind::mxf4nvf4 needs .block16 or .block32")
    return 16 if name in ("block16", "scale_vec::4X") else 32


@step("tcgen05.mma")
def _mma(d: Decode) -> Step:
    group, kind = cta_group(d), d.need(*(f"kind::{k}" for k in KINDS)).removeprefix("kind::")
    scaled = d.flag("block_scale")
    block = _scale_block(d, kind) if scaled else 0
    d.ignore(*(f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")))
    target = d.address()
    first = d.next()
    in_tmem = isinstance(first, Addr)
    a = d.address(first) if in_tmem else d.src(U64, first)
    b, idesc = d.src(U64), d.src(U32)
    scales = (d.address(), d.address()) if scaled else None
    if not scaled and len(d.operands) > 1:
        raise d.error("tcgen05.mma with disable-output-lane or scale-input-d is not modelled")
    enable = d.src(PRED)

    form = _Form(group, kind, block)

    def run(m: Machine, lanes: Lanes) -> None:
        reads = (target, a, b, idesc, enable, *(scales or ()))
        rows = list(zip(*(broadcast(read(m, lanes), lanes.n).tolist() for read in reads), strict=True))

        def build(position: int, thread: int) -> Callable[[], None]:
            to, left, right, bits, use, *sf = rows[position]
            operand = tcgen05.TmemOperand(left) if in_tmem else left
            return _multiply(
                m, thread, form, _Operands(to, operand, right, bits, (sf[0], sf[1]) if sf else (0, 0), use)
            )

        _queue(m, lanes, build)

    return run


@dataclass(frozen=True, slots=True)
class _Form:
    """What the modifiers say; ``block`` is 0 without block scales."""

    group: int
    kind: str
    block: int


@dataclass(frozen=True, slots=True)
class _Operands:
    """The operands of one tcgen05.mma; ``scales`` are the addresses of SFA and SFB."""

    d: int
    a: int | tcgen05.TmemOperand
    b: int
    idesc: int
    scales: tuple[int, int]
    enable: bool


def _multiply(m: Machine, thread: int, form: _Form, o: _Operands) -> Callable[[], None]:
    """Check what must hold at issue; the result multiplies when performed."""
    pipe, arch = m.unit(TensorPipe), m.launch.arch
    shape = InstructionDescriptor.decode(o.idesc, form.kind, form.group, arch, block=form.block)
    ctas = pipe.ctas_of(thread, form.group)
    for cta in ctas:
        for operand, rows, of_a in ((o.a, shape.m, True), (o.b, shape.n, False)):
            if isinstance(operand, int):
                where = _extent(shape, operand, rows // form.group, of_a=of_a)
                m.memory.check_operand(cta, where, thread)
                if m.races is not None:
                    m.races.tensor.operand(thread, cta, where)
    first, columns = o.d & 0xFFFF, shape.n // 2 if form.group == 2 and shape.m == 128 else shape.n
    if o.enable and not pipe.will_hold(ctas, first, columns):
        raise SimError("tcgen05.mma accumulates into tensor memory that nothing wrote")
    if m.races is not None:
        m.races.tensor.pipe(thread, ctas, _tensor_reads(form, shape, o), ((first, columns),))
    pipe.expect_write(ctas, first, columns)
    multiply: Callable[..., None] = partial(tcgen05.mma, kind=form.kind)
    if form.block:
        multiply = partial(tcgen05.mma_block_scale, kind=form.kind, block=form.block, scales=o.scales)

    def perform() -> None:
        views = tuple(pipe.view(cta) for cta in ctas)
        multiply(views, d=o.d, a=o.a, b=o.b, idesc=o.idesc, enable_input_d=o.enable, arch=arch)
        pipe.wrote(ctas, first, columns)

    return perform


def _tensor_reads(form: _Form, shape: InstructionDescriptor, o: _Operands) -> list[tuple[int, int]]:
    """First column and columns of A and of the scale factors where they lie in tensor memory."""
    reads = []
    if isinstance(o.a, tcgen05.TmemOperand):
        size = {"f16": 2, "bf16": 2, "tf32": 4}.get(shape.a_type, 1)
        reads.append((o.a.address & 0xFFFF, shape.k * size // 4))
    if form.block:
        operands = zip(o.scales, (shape.m // form.group, shape.n), (shape.sfa_id, shape.sfb_id), strict=True)
        for address, rows, sf_id in operands:
            words = (sf_id + max(1, shape.k // form.block) + 3) // 4
            step = 8 if rows > 128 else 4
            reads += [((address & 0xFFFF) + step * word, -(-rows // 32)) for word in range(words)]
    return reads


def _extent(shape: InstructionDescriptor, descriptor: int, rows: int, *, of_a: bool) -> Any:
    """Shared addresses of an operand."""
    type_name, transposed = (shape.a_type, shape.trans_a) if of_a else (shape.b_type, shape.trans_b)
    size = {"f16": 2, "bf16": 2, "tf32": 4}.get(type_name, 1)
    k_bytes = shape.k // 2 if shape.kind in ("mxf4", "mxf4nvf4") else shape.k * size
    decoded = MatrixDescriptor.of_tcgen05(descriptor)
    return decoded.addresses(rows, k_bytes, element_bytes=size, mn_major=transposed)


@step("tcgen05.commit")
def _commit(d: Decode) -> Step:
    """One arrival on an mbarrier when the thread's earlier work is done; with multicast in every CTA of a mask."""
    cta_group(d)
    d.need("mbarrier::arrive::one")
    d.take("shared::cluster")
    multicast = d.flag("multicast::cluster")
    d.need("b64")
    address = d.address()
    mask = d.src(U16) if multicast else None

    def run(m: Machine, lanes: Lanes) -> None:
        at = address(m, lanes)
        masks = None if mask is None else broadcast(mask(m, lanes), lanes.n)

        def build(position: int, thread: int) -> Callable[[], None]:
            ids = np.array([thread])
            place = int(at[position])
            ranks = Signal(place, None if masks is None else int(masks[position])).ranks(place >> RANK_BITS)
            places = [np.array([rank << RANK_BITS | place & (1 << RANK_BITS) - 1]) for rank in ranks]
            barriers = m.unit(MBarriers)
            keys = [int(barriers.keys("shared::cluster", ids, to)[0]) for to in places]
            known = None if m.races is None else m.races.tensor.commit(thread)
            for key in keys:
                barriers.use_async(key, ids)

            def arrive(key: int) -> None:
                if known is not None:
                    barriers.publish_async(key, known)
                barriers.arrive(key, 1, ids)

            def perform() -> None:
                for key in keys:
                    if key // m.memory.shared_stride == m.cta[thread]:
                        arrive(key)
                    else:
                        m.unit(TensorPipe).arrive_abroad(thread, partial(arrive, key))

            return perform

        _queue(m, lanes, build)

    return run
