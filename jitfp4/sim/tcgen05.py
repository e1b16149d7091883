"""``tcgen05.mma``: the matrix multiply of the sm_100 family, dense, for one CTA or a pair.

A machine describes the CTAs that take part, ``(cta,)`` or ``(even, odd)``, as ``Cta`` values over its own arrays, and
calls ``mma`` or ``mma_block_scale`` when the instruction takes effect; D is written into the ``tmem`` arrays.
Descriptors and tensor-memory addresses are the integers of the instruction. Scale factors are those that
``tcgen05.cp`` put into tensor memory; that they differ between the lane quadrants that read them is an error.

Numerics are those of tensorcore.py: 25 fraction bits and 32 bytes of k per rounding; mxf4 and mxf4nvf4 sum groups of 16
exactly and keep 35 bits. That a K of 96 is one such sum has not been checked on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitfp4.arch import Arch
from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim import formats
from jitfp4.sim.formats import FloatFormat
from jitfp4.sim.instruction_descriptor import BLOCK_SCALED, InstructionDescriptor
from jitfp4.sim.matrix_descriptor import MatrixDescriptor
from jitfp4.sim.tensorcore import DotUnit, Operand, block_scaled_dot_add, fused_dot_add
from jitfp4.sim.tmem import COLUMNS, Allocations

Array = NDArray[Any]

_FLOATS: dict[str, FloatFormat] = {
    fmt.name: fmt
    for fmt in (
        formats.F16,
        formats.BF16,
        formats.TF32,
        formats.E4M3,
        formats.E5M2,
        formats.E3M2,
        formats.E2M3,
        formats.E2M1,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cta:
    """The memories of one CTA: ``shared`` uint8 ``[bytes]``, ``tmem`` uint32 ``[128, 512]``, and who holds columns."""

    shared: NDArray[np.uint8]
    tmem: NDArray[np.uint32]
    allocations: Allocations


@dataclass(frozen=True, slots=True)
class TmemOperand:
    """The ``[a]`` form of the A operand: a tensor-memory address."""

    address: int


def mma(
    ctas: tuple[Cta, ...],
    kind: str,
    d: int,
    a: int | TmemOperand,
    b: int,
    idesc: int,
    *,
    enable_input_d: bool,
    arch: Arch,
    disabled_lanes: Array | None = None,
) -> None:
    """``tcgen05.mma.cta_group::<len(ctas)>.kind::{f16,tf32,f8f6f4,i8}``.

    ``disabled_lanes`` bool ``[ctas, 128]`` is the disable-output-lane vector: those lanes of D keep their values.
    """
    if kind in BLOCK_SCALED:
        raise SimError(f"tcgen05.mma kind::{kind} without .block_scale")
    shape = InstructionDescriptor.decode(idesc, kind, len(ctas), arch)
    b_codes = np.concatenate([_shared_operand(c, b, shape.n // len(ctas), shape, of_a=False) for c in ctas])
    for number, cta in enumerate(ctas):
        a_codes = _a_operand(cta, a, shape, len(ctas))
        place = _Accumulator.of(cta, d, shape, len(ctas))
        old = place.read() if enable_input_d else np.zeros((len(a_codes), shape.n), np.uint32)
        new = _integer_mma(shape, a_codes, b_codes, old) if kind == "i8" else _float_mma(shape, a_codes, b_codes, old)
        place.write(new, None if disabled_lanes is None else ~disabled_lanes[number])


def mma_block_scale(
    ctas: tuple[Cta, ...],
    kind: str,
    block: int,
    d: int,
    a: int,
    b: int,
    idesc: int,
    scales: tuple[int, int],
    *,
    enable_input_d: bool,
    arch: Arch,
) -> None:
    """``tcgen05.mma.cta_group::<len(ctas)>.kind::{mxf8f6f4,mxf4,mxf4nvf4}.block_scale.block{16,32}``.

    ``block`` is 16 (also written scale_vec::4X) or 32 (2X, and 1X of mxf8f6f4); ``scales`` are the addresses of the
    scale factors of A and B.
    """
    shape = InstructionDescriptor.decode(idesc, kind, len(ctas), arch, block=block)
    b_codes = np.concatenate([_shared_operand(c, b, shape.n // len(ctas), shape, of_a=False) for c in ctas])
    for cta in ctas:
        a_codes = _shared_operand(cta, a, shape.m // len(ctas), shape, of_a=True)
        place = _Accumulator.of(cta, d, shape, len(ctas))
        c = place.read().view(np.float32) if enable_input_d else np.zeros((len(a_codes), shape.n), np.float32)
        sfa = _scale_factors(cta, scales[0], shape, block, _a_groups(shape, len(ctas)), shape.sfa_id)
        sfb = _scale_factors(cta, scales[1], shape, block, _b_groups(shape, len(ctas)), shape.sfb_id)
        sign_a, sign_b = -1 if shape.negate_a else 1, -1 if shape.negate_b else 1
        if kind == "mxf8f6f4":
            left = Operand.of_codes(a_codes, _FLOATS[shape.a_type]).scaled(sign_a * sfa)
            right = Operand.of_codes(b_codes, _FLOATS[shape.b_type]).scaled(sign_b * sfb)
            result = fused_dot_add(left, right, c, DotUnit(chunk=32, fraction_bits=25))
        else:
            result = block_scaled_dot_add(
                sign_a * formats.e2m1_to_f32(a_codes),
                sign_b * formats.e2m1_to_f32(b_codes),
                np.repeat(sfa, block // 16, -1),
                np.repeat(sfb, block // 16, -1),
                c,
                formats.E4M3 if shape.scale_type == "ue4m3" else None,
            )
        place.write(result.view(np.uint32))


@dataclass(frozen=True, slots=True)
class _Accumulator:
    """Where D lies in one CTA: ``lanes`` and ``columns``, each ``[rows, n]``."""

    cta: Cta
    lanes: Array
    columns: Array

    @staticmethod
    def of(cta: Cta, d: int, shape: InstructionDescriptor, group: int) -> _Accumulator:
        rows, n = np.arange(shape.m // group)[:, None], np.arange(shape.n)[None, :]
        if group == 2 and shape.m == 128:  # 64 rows per CTA: the right half of the columns in the upper lanes
            half = shape.n // 2
            lanes, columns = rows + 64 * (n // half), n % half + 0 * rows
        elif shape.m == 64:  # 16 rows in each lane quadrant
            lanes, columns = rows // 16 * 32 + rows % 16 + 0 * n, n + 0 * rows
        else:
            lanes, columns = rows + 0 * n, n + 0 * rows
        first = d & 0xFFFF
        _require_columns(cta, first, int(columns.max()) + 1, "D")
        if d >> 16:
            raise SimMemoryError(f"tcgen05.mma: D at lane {d >> 16}, it starts at lane 0")
        return _Accumulator(cta, lanes, first + columns)

    def read(self) -> Array:
        return np.asarray(self.cta.tmem[self.lanes, self.columns])

    def write(self, values: Array, enabled: Array | None = None) -> None:
        kept = slice(None) if enabled is None else enabled[self.lanes]
        self.cta.tmem[self.lanes[kept], self.columns[kept]] = values[kept]


def _require_columns(cta: Cta, first: int, count: int, what: str) -> None:
    if first + count > COLUMNS:
        raise SimMemoryError(f"tcgen05.mma: {what} reaches column {first + count - 1} of {COLUMNS}")
    cta.allocations.require(first, count)


def _a_operand(cta: Cta, a: int | TmemOperand, shape: InstructionDescriptor, group: int) -> Array:
    """Codes of A ``[rows of this CTA, k]`` from shared or tensor memory."""
    if not isinstance(a, TmemOperand):
        return _shared_operand(cta, a, shape.m // group, shape, of_a=True)
    if shape.m // group != 128 or shape.trans_a or shape.a_type in ("e2m1", "e3m2", "e2m3"):
        raise SimError(f"tcgen05.mma: A of {shape.a_type}, M = {shape.m} in tensor memory is not modelled")
    size = _element_bytes(shape.a_type)
    first, columns = a.address & 0xFFFF, shape.k * size // 4
    _require_columns(cta, first, columns, "A")
    return np.ascontiguousarray(cta.tmem[:, first : first + columns]).view(f"<u{size}")


def _shared_operand(cta: Cta, descriptor: int, rows: int, shape: InstructionDescriptor, *, of_a: bool) -> Array:
    """Codes ``[rows, k]`` that a descriptor names in one CTA."""
    type_name, transposed = (shape.a_type, shape.trans_a) if of_a else (shape.b_type, shape.trans_b)
    decoded = MatrixDescriptor.of_tcgen05(descriptor)
    if decoded.lbo_is_address and shape.k != 96:
        raise SimError("tcgen05.mma: the absolute leading-dimension mode of a descriptor belongs to K = 96")
    if shape.kind in ("mxf4", "mxf4nvf4"):
        return formats.unpack_e2m1x2(decoded.read(cta.shared, rows, shape.k // 2))
    size = _element_bytes(type_name)
    if type_name not in ("e2m1", "e3m2", "e2m3"):
        return decoded.read(cta.shared, rows, shape.k * size, element_bytes=size, mn_major=transposed)
    if transposed:
        raise SimError(f"tcgen05.mma: MN-major {type_name} is not modelled")
    return _unpack_padded(decoded.read(cta.shared, rows, shape.k), _FLOATS[type_name].bits)


def _unpack_padded(raw: Array, bits: int) -> Array:
    """Codes of 16-byte groups that hold 16 elements of 4 or 6 bits and padding, as TMA's 16u4 and 16u6 types write."""
    groups = raw.reshape(len(raw), -1, 16)[..., : 2 * bits]
    flat = np.unpackbits(groups, axis=-1, bitorder="little").reshape(len(raw), -1, bits)
    return np.asarray(np.packbits(flat, axis=-1, bitorder="little")[..., 0])


def _element_bytes(type_name: str) -> int:
    return {"f16": 2, "bf16": 2, "tf32": 4}.get(type_name, 1)


def _float_mma(shape: InstructionDescriptor, a: Array, b: Array, old: Array) -> Array:
    """Accumulator bits; f16 accumulators use the low half of a cell."""
    left, right = Operand.of_codes(a, _FLOATS[shape.a_type]), Operand.of_codes(b, _FLOATS[shape.b_type])
    left, right = left.negated() if shape.negate_a else left, right.negated() if shape.negate_b else right
    unit = DotUnit(chunk=32 // _element_bytes(shape.a_type), fraction_bits=25, result=shape.d_type)
    if shape.d_type == "f16":
        c = formats.f16_to_f32(old & 0xFFFF)
        return formats.f32_to_f16(fused_dot_add(left, right, c, unit)).astype(np.uint32)
    return fused_dot_add(left, right, old.view(np.float32), unit).view(np.uint32)


def _integer_mma(shape: InstructionDescriptor, a: Array, b: Array, old: Array) -> Array:
    wide = [(x.view(np.int8) if t == "s8" else x).astype(np.int64) for x, t in ((a, shape.a_type), (b, shape.b_type))]
    total = wide[0] @ wide[1].T + old.view(np.int32)
    if shape.saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return np.asarray((total & 0xFFFFFFFF).astype(np.uint32))


def _a_groups(shape: InstructionDescriptor, group: int) -> list[tuple[Array, tuple[int, ...]]]:
    """Rows of A's scales in one CTA and the lane quadrants that read them."""
    return [(np.arange(shape.m // group), (0, 1, 2, 3))]


def _b_groups(shape: InstructionDescriptor, group: int) -> list[tuple[Array, tuple[int, ...]]]:
    """The same for B. With 64 rows per CTA the upper lanes compute, and scale, the right half of the columns."""
    if group == 2 and shape.m == 128:
        half = np.arange(shape.n // 2)
        return [(half, (0, 1)), (half, (2, 3))]
    return [(np.arange(shape.n), (0, 1, 2, 3))]


def _scale_factors(
    cta: Cta,
    address: int,
    shape: InstructionDescriptor,
    block: int,
    groups: list[tuple[Array, tuple[int, ...]]],
    sf_id: int,
) -> Array:
    """Scale values float32 ``[rows, k / block]`` (mxf8f6f4: ``[rows, 1]``).

    Row r lies in lane r % 32 of every quadrant, column r / 32; byte j of the factors is byte j % 4 of the word, four or
    (for more than 128 rows) eight columns further for each four. Bits 30-31 of the address may repeat the id.
    """
    if address >> 30 not in (0, sf_id):
        raise SimError(f"tcgen05.mma: scale address {address:#x} and the instruction descriptor name different ids")
    first = address & 0xFFFF
    if first % 2 or address >> 16 & 0x3FFF:
        raise SimMemoryError(f"tcgen05.mma: scale address {address:#x} is not lane 0 of an even column")
    byte = sf_id + np.arange(max(1, shape.k // block))
    values = []
    for rows, quadrants in groups:
        step = 8 if len(rows) > 128 else 4
        column = first + rows[:, None] // 32 + byte // 4 * step
        _require_columns(cta, first, int(column.max()) - first + 1, "a scale factor")
        copies = [
            cta.tmem[32 * q + rows[:, None] % 32, column] >> (8 * (byte % 4)).astype(np.uint32) & 0xFF
            for q in quadrants
        ]
        if any((c != copies[0]).any() for c in copies):
            raise SimError(f"tcgen05.mma: scale factors at {address:#x} differ between lane quadrants {quadrants}")
        values.append(copies[0])
    code = np.concatenate(values)
    return formats.ue8m0_to_f32(code) if shape.scale_type == "ue8m0" else formats.e4m3_to_f32(code & 0x7F)
