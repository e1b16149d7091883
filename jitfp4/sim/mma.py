"""``mma.sync``: warp-level matrix multiply, dense, with and without block scales.

A machine passes the operand vectors of whole warps as uint32 ``[..., 32, registers]`` (bits, PTX order) and writes back
the result of the same layout as ``c``. ``ldmatrix``, ``stmatrix`` and ``movmatrix`` are in fragments.py.

Numerics are those of tensorcore.py with the widths of the architecture. On Hopper and the sm_100 family an e4m3 or e5m2
``mma.sync`` has no instruction of its own: ptxas 12.9 converts to f16, multiplies the even and the odd pairs of every
four k in two chained HMMAs that start from zero, and adds the accumulator with one FADD; the model does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitfp4.arch import Arch
from jitfp4.errors import SimError
from jitfp4.sim import formats
from jitfp4.sim.fragments import a_matrix, b_matrix, c_matrix, c_registers
from jitfp4.sim.tensorcore import DotUnit, Operand, block_scaled_dot_add, fused_dot_add

Array = NDArray[Any]

_FLOATS = {
    "f16": formats.F16,
    "bf16": formats.BF16,
    "tf32": formats.TF32,
    "e4m3": formats.E4M3,
    "e5m2": formats.E5M2,
    "e3m2": formats.E3M2,
    "e2m3": formats.E2M3,
    "e2m1": formats.E2M1,
}
_INTEGER_BITS = {"s8": 8, "u8": 8, "s4": 4, "u4": 4}
_FP8 = ("e4m3", "e5m2")
# Types that kind::f8f6f4 keeps in 8-bit containers: how far the code is shifted left.
_CONTAINER_SHIFT = {"e4m3": 0, "e5m2": 0, "e3m2": 0, "e2m3": 0, "e2m1": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Block scales of one operand of a block-scaled mma.

    ``registers`` uint32 ``[..., 32]``; ``byte_id`` and ``thread_id`` are the two selectors that follow it in PTX.
    """

    registers: Array
    byte_id: int
    thread_id: int


def mma(k: int, types: str, a: Array, b: Array, c: Array, *, arch: Arch, satfinite: bool = False) -> Array:
    """``mma.sync.m16n8k<k>.row.col.<types>``: registers of d.

    ``types`` is the dot-joined ``d.a.b.c`` of the instruction, such as ``f32.bf16.bf16.f32`` or ``s32.s8.u8.s32``. a
    holds 16 x k elements, b k x 8, c and d 16 x 8; f16 accumulators are packed in pairs. ``satfinite`` is for integers.
    """
    d_type, a_type, b_type, c_type = types.split(".")
    if d_type == c_type == "s32" and a_type in _INTEGER_BITS and b_type in _INTEGER_BITS:
        return _integer_mma(k, a_type, b_type, a, b, c, satfinite)
    if d_type != c_type or d_type not in ("f32", "f16") or a_type not in _FLOATS or b_type not in _FLOATS:
        raise SimError(f"mma.sync.m16n8k{k}.{types} is not modelled")
    bits = {"f16": 16, "bf16": 16, "tf32": 32}.get(a_type, 8)
    wide_a, wide_b = _operand(a_matrix(a, bits), a_type, bits), _operand(b_matrix(b, bits), b_type, bits)
    _require_k(k, types, wide_a.values.shape[-1], wide_b.values.shape[-1])
    accumulator = _accumulator(c, c_type)
    if a_type in _FP8 and (arch.has_wgmma or arch.has_tcgen05):
        result = _fp8_by_f16(wide_a, wide_b, accumulator, _unit(arch, "f16", d_type))
    else:
        result = fused_dot_add(wide_a, wide_b, accumulator, _unit(arch, a_type, d_type))
    return _result(result, d_type)


def mma_block_scale(
    kind: str, scale_vec: int, types: str, a: Array, b: Array, c: Array, *, sfa: Scales, sfb: Scales
) -> Array:
    """``mma.sync.m16n8k{64,32}.row.col.kind::<kind>.block_scale.scale_vec::<n>X.<types>.<scale type>`` of sm_120a.

    ``types`` is ``f32.<a>.<b>.f32.<scale>``; ``kind`` is mxf4nvf4, mxf4 (k = 64) or mxf8f6f4 (k = 32). Returns d.
    """
    _, a_type, b_type, _, scale_type = types.split(".")
    allowed = {("mxf4nvf4", 4), ("mxf4nvf4", 2), ("mxf4", 2), ("mxf8f6f4", 1)}
    if (kind, scale_vec) not in allowed or (scale_type == "ue4m3" and (kind, scale_vec) != ("mxf4nvf4", 4)):
        raise SimError(f"mma.sync kind::{kind}.block_scale.scale_vec::{scale_vec}X.{types} is not a PTX form")
    accumulator = _accumulator(c, "f32")
    scale_a = _scale_rows(sfa, scale_vec, scale_type, by_row=True)
    scale_b = _scale_rows(sfb, scale_vec, scale_type, by_row=False)
    if kind == "mxf8f6f4":
        wide_a, wide_b = _operand(a_matrix(a, 8), a_type, 8), _operand(b_matrix(b, 8), b_type, 8)
        unit = DotUnit(chunk=32, fraction_bits=25)
        return _result(fused_dot_add(wide_a.scaled(scale_a), wide_b.scaled(scale_b), accumulator, unit), "f32")
    codes_a, codes_b = a_matrix(a, 4), b_matrix(b, 4)
    repeat = 4 // scale_vec
    d = block_scaled_dot_add(
        formats.e2m1_to_f32(codes_a),
        formats.e2m1_to_f32(codes_b),
        np.repeat(scale_a, repeat, -1),
        np.repeat(scale_b, repeat, -1),
        accumulator,
        formats.E4M3 if scale_type == "ue4m3" else None,
    )
    return _result(d, "f32")


def _unit(arch: Arch, a_type: str, d_type: str) -> DotUnit:
    """The adder that serves operands of ``a_type`` on ``arch``: since Hopper it adds twice as many at a time."""
    if a_type in _FP8 and not arch.has_tma:
        return DotUnit(chunk=16, fraction_bits=13, result="f16" if d_type == "f16" else "e8m13")
    chunk_bytes, fraction_bits = (32, 25) if arch.has_tma else (16, 24)
    element_bytes = {"f16": 2, "bf16": 2, "tf32": 4}.get(a_type, 1)
    return DotUnit(chunk=chunk_bytes // element_bytes, fraction_bits=fraction_bits, result=d_type)


def _require_k(k: int, types: str, *found: int) -> None:
    if any(n != k for n in found):
        raise SimError(f"mma.sync.m16n8k{k}.{types}: the operand vectors hold k = {found}")


def _operand(codes: Array, type_name: str, bits: int) -> Operand:
    """Values of element codes, taken out of their 8-bit containers."""
    fmt = _FLOATS[type_name]
    if bits == 8:
        codes = (codes >> np.uint32(_CONTAINER_SHIFT[type_name])) & np.uint32((1 << fmt.bits) - 1)
    return Operand.of_codes(codes, fmt)


def _accumulator(c: Array, c_type: str) -> Array:
    if c_type == "f16":
        return formats.f16_to_f32(c_matrix(c, 16))
    return c_matrix(c, 32).view(np.float32)


def _result(d: Array, d_type: str) -> Array:
    return c_registers(formats.f32_to_f16(d), 16) if d_type == "f16" else c_registers(d.view(np.uint32), 32)


def _fp8_by_f16(a: Operand, b: Operand, c: Array, unit: DotUnit) -> Array:
    """Two f16 products over the even and odd pairs of k from zero, then one addition to nearest even."""
    k = np.arange(a.values.shape[-1])
    total = np.zeros_like(c)
    for half in (k % 4 < 2, k % 4 >= 2):
        total = fused_dot_add(
            Operand(values=a.values[..., half], exponents=a.exponents[..., half]),
            Operand(values=b.values[..., half], exponents=b.exponents[..., half]),
            total,
            unit,
        )
    exact = c.astype(np.float64) + total
    if unit.result == "f16":
        return formats.f16_to_f32(formats.f32_to_f16(exact))
    return formats.f64_to_f32(exact)


def _scale_rows(scales: Scales, count: int, scale_type: str, *, by_row: bool) -> Array:
    """Scale values: ``[..., 16, count]`` of A (two lanes per quad), ``[..., 8, count]`` of B (one lane per quad)."""
    if scales.byte_id % count or scales.byte_id > 3 or scales.thread_id > (1 if by_row else 3):
        raise SimError(f"mma.sync block_scale: selectors {{{scales.byte_id}, {scales.thread_id}}} with {count}X")
    row = np.arange(16 if by_row else 8)
    lane = 4 * (row % 8) + (2 * scales.thread_id + row // 8 if by_row else scales.thread_id)
    shifts = np.uint32(8) * (scales.byte_id + np.arange(count, dtype=np.uint32))
    byte = (np.asarray(scales.registers, np.uint32)[..., lane, None] >> shifts) & np.uint32(0xFF)
    if scale_type == "ue8m0":
        return formats.ue8m0_to_f32(byte)
    return formats.e4m3_to_f32(byte & np.uint32(0x7F))


def _integer_mma(k: int, a_type: str, b_type: str, a: Array, b: Array, c: Array, satfinite: bool) -> Array:
    """Exact integer products; the sum wraps or saturates at 32 bits."""
    bits = _INTEGER_BITS[a_type]
    if _INTEGER_BITS[b_type] != bits:
        raise SimError(f"mma.sync.s32.{a_type}.{b_type}.s32: operands of different width")
    wide_a, wide_b = _signed(a_matrix(a, bits), a_type), _signed(b_matrix(b, bits), b_type)
    _require_k(k, f"s32.{a_type}.{b_type}.s32", wide_a.shape[-1], wide_b.shape[-1])
    total = wide_a @ np.swapaxes(wide_b, -1, -2) + c_matrix(c, 32).view(np.int32)
    if satfinite:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return c_registers((total & 0xFFFFFFFF).astype(np.uint32), 32)


def _signed(codes: Array, type_name: str) -> Array:
    bits = _INTEGER_BITS[type_name]
    values = codes.astype(np.int64)
    return np.where(values >> (bits - 1), values - (1 << bits), values) if type_name.startswith("s") else values
