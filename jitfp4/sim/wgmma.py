"""``wgmma.mma_async``: the warpgroup matrix multiply of sm_90a, dense.

A machine calls ``wgmma`` for one warpgroup with the registers of its four warps, uint32 ``[4, 32, registers]`` in PTX
order, the descriptors as integers and the CTA's shared memory as a uint8 array; it gets the new registers of d. When
the instruction takes effect (commit, wait) is the machine's concern; ``operand_addresses`` tells which bytes it reads.

Numerics are those of tensorcore.py: f16, bf16 and tf32 keep 25 fraction bits, 16 (tf32: 8) products per rounding; e4m3
and e5m2 keep 13, with 32 products, and an f32 result of 13 mantissa bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitfp4.errors import SimError
from jitfp4.sim import formats
from jitfp4.sim.fragments import a_matrix, c_matrix, c_registers
from jitfp4.sim.matrix_descriptor import MatrixDescriptor
from jitfp4.sim.tensorcore import DotUnit, Operand, fused_dot_add

Array = NDArray[Any]

_FLOATS = {t.name: t for t in (formats.F16, formats.BF16, formats.TF32, formats.E4M3, formats.E5M2)}
_PAIRS = {
    "f16": ("f16",),
    "bf16": ("bf16",),
    "tf32": ("tf32",),
    "e4m3": ("e4m3", "e5m2"),
    "e5m2": ("e4m3", "e5m2"),
    "s8": ("s8", "u8"),
    "u8": ("s8", "u8"),
}
# k of one instruction is 32 bytes for every type.
_K_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Modifiers:
    """The immediates after the operands: imm-scale-a/b == -1, imm-trans-a/b (1: MN-major), and .satfinite."""

    negate_a: bool = False
    negate_b: bool = False
    trans_a: bool = False
    trans_b: bool = False
    satfinite: bool = False


def wgmma(
    n: int, types: str, a: int | Array, b: int, d: Array, shared: NDArray[np.uint8], *, scale_d: bool, mods: Modifiers
) -> Array:
    """``wgmma.mma_async.sync.aligned.m64n<n>k<k>.<types>``: the registers of d afterwards.

    ``types`` is ``d.a.b``, such as ``f32.bf16.bf16``. ``a`` is a descriptor or registers ``[4, 32, 4]``; ``b`` is a
    descriptor; ``d`` has n / 2 registers per lane (n / 4 for f16). ``scale_d`` false ignores the old d.
    """
    d_type, a_type, b_type = types.split(".")
    _check(n, types, a, mods)
    size = _element_bytes(a_type)
    codes_a = (
        a_matrix(a, 8 * size).reshape(64, -1)
        if isinstance(a, np.ndarray)
        else MatrixDescriptor.of_wgmma(a).read(shared, 64, _K_BYTES, element_bytes=size, mn_major=mods.trans_a)
    )
    codes_b = MatrixDescriptor.of_wgmma(b).read(shared, n, _K_BYTES, element_bytes=size, mn_major=mods.trans_b)
    if d_type == "s32":
        return _integer(codes_a, codes_b, a_type, b_type, d, scale_d, mods.satfinite)
    width = 16 if d_type == "f16" else 32
    old = c_matrix(d, width).reshape(64, n)
    c = formats.f16_to_f32(old) if d_type == "f16" else old.view(np.float32)
    left, right = Operand.of_codes(codes_a, _FLOATS[a_type]), Operand.of_codes(codes_b, _FLOATS[b_type])
    left, right = left.negated() if mods.negate_a else left, right.negated() if mods.negate_b else right
    result = fused_dot_add(left, right, c if scale_d else np.zeros_like(c), _unit(a_type, d_type))
    bits = formats.f32_to_f16(result) if d_type == "f16" else result.view(np.uint32)
    return c_registers(bits.reshape(4, 16, n), width)


def operand_addresses(descriptor: int, rows: int, a_type: str, *, mn_major: bool) -> Array:
    """Shared addresses that an operand of ``rows`` (64, or n) reads: int64 ``[rows, 32]``."""
    decoded = MatrixDescriptor.of_wgmma(descriptor)
    return decoded.addresses(rows, _K_BYTES, element_bytes=_element_bytes(a_type), mn_major=mn_major)


def _check(n: int, types: str, a: int | Array, mods: Modifiers) -> None:
    d_type, a_type, b_type = types.split(".")
    if b_type not in _PAIRS.get(a_type, ()) or not 8 <= n <= 256 or n % 8:
        raise SimError(f"wgmma m64n{n} of types {types} is not modelled")
    allowed = {"s8": ("s32",), "u8": ("s32",), "bf16": ("f32",), "tf32": ("f32",)}.get(a_type, ("f32", "f16"))
    if d_type not in allowed:
        raise SimError(f"wgmma of {a_type} accumulates in {' or '.join(allowed)}, not {d_type}")
    transposed = mods.trans_b or (mods.trans_a and not isinstance(a, np.ndarray))
    if transposed and a_type not in ("f16", "bf16"):
        raise SimError(f"wgmma of {a_type}: operands must be K-major")


def _element_bytes(a_type: str) -> int:
    return {"f16": 2, "bf16": 2, "tf32": 4}.get(a_type, 1)


def _unit(a_type: str, d_type: str) -> DotUnit:
    if a_type in ("e4m3", "e5m2"):
        return DotUnit(chunk=32, fraction_bits=13, result="f16" if d_type == "f16" else "e8m13")
    return DotUnit(chunk=_K_BYTES // _element_bytes(a_type), fraction_bits=25, result=d_type)


def _integer(a: Array, b: Array, a_type: str, b_type: str, d: Array, scale_d: bool, satfinite: bool) -> Array:
    wide = [
        (x.astype(np.uint8).view(np.int8) if t == "s8" else x).astype(np.int64) for x, t in ((a, a_type), (b, b_type))
    ]
    old = c_matrix(d, 32).reshape(64, -1).view(np.int32)
    total = wide[0] @ wide[1].T + (old if scale_d else 0)
    if satfinite:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return c_registers((total & 0xFFFFFFFF).astype(np.uint32).reshape(4, 16, -1), 32)
