"""Which lane and register holds which matrix element: the fragments of mma, wgmma, ldmatrix and stmatrix.

Registers are uint32 ``[..., 32, registers]``: any leading dimensions (warps), then the lane, then the operand's vector
in PTX order. Matrices are ``[..., rows, columns]`` of unsigned element codes, ``b`` transposed: ``[..., n, k]``.

One rule covers every element width: a 32-bit register holds ``e = 32 / bits`` neighbours along k, lane ``4 g + c`` owns
row ``g`` and columns from ``e c``; the second register moves 8 rows down, the next pair ``4 e`` columns right.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LANE = np.arange(32)
_GROUP, _QUAD_LANE = _LANE // 4, _LANE % 4


def unpack(registers: Array, bits: int) -> Array:
    """Element codes ``[..., registers * 32 / bits]`` of registers ``[..., registers]``, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (np.asarray(registers, np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return np.asarray(codes.reshape(*codes.shape[:-2], -1))


def pack(codes: Array, bits: int) -> Array:
    """Registers ``[..., n * bits / 32]`` of element codes ``[..., n]``: the inverse of ``unpack``."""
    codes = np.asarray(codes).astype(np.uint32).reshape(*np.shape(codes)[:-1], -1, 32 // bits)
    return np.ascontiguousarray(np.bitwise_or.reduce(codes << np.arange(0, 32, bits, dtype=np.uint32), axis=-1))


@cache
def _a_map(registers: int, bits: int) -> tuple[Array, Array]:
    """Row and column of each element of an A fragment, ``[32, registers * e]``."""
    e = 32 // bits
    element = np.arange(registers * e)
    register, within = element // e, element % e
    row = _GROUP[:, None] + 8 * (register % 2)
    column = e * _QUAD_LANE[:, None] + within + 4 * e * (register // 2)
    return row, column


@cache
def _b_map(registers: int, bits: int) -> tuple[Array, Array]:
    """Column n and row k of each element of a B fragment, ``[32, registers * e]``."""
    e = 32 // bits
    element = np.arange(registers * e)
    k = e * _QUAD_LANE[:, None] + element % e + 4 * e * (element // e)
    return np.broadcast_to(_GROUP[:, None], k.shape), k


@cache
def _c_map(columns: int) -> tuple[Array, Array]:
    """Row and column of each accumulator element of a 16-row tile, ``[32, columns / 2]``."""
    element = np.arange(columns // 2)
    row = _GROUP[:, None] + 8 * (element // 2 % 2)
    column = 2 * _QUAD_LANE[:, None] + element % 2 + 8 * (element // 4)
    return row, column


def a_matrix(registers: Array, bits: int) -> Array:
    """A ``[..., 16, k]`` of 2 or 4 registers: k is ``4 e`` for two registers, ``8 e`` for four."""
    count = registers.shape[-1]
    row, column = _a_map(count, bits)
    matrix = np.empty((*registers.shape[:-2], 16, count // 2 * 128 // bits), np.uint32)
    matrix[..., row, column] = unpack(registers, bits)
    return matrix


def b_matrix(registers: Array, bits: int) -> Array:
    """B transposed, ``[..., 8, k]``: k is ``4 e`` for one register, ``8 e`` for two."""
    count = registers.shape[-1]
    n, k = _b_map(count, bits)
    matrix = np.empty((*registers.shape[:-2], 8, count * 128 // bits), np.uint32)
    matrix[..., n, k] = unpack(registers, bits)
    return matrix


def c_matrix(registers: Array, bits: int) -> Array:
    """Accumulator ``[..., 16, n]``: n is twice the elements per lane; ``bits`` 16 packs two neighbours per register."""
    codes = unpack(registers, bits)
    row, column = _c_map(2 * codes.shape[-1])
    matrix = np.empty((*codes.shape[:-2], 16, 2 * codes.shape[-1]), np.uint32)
    matrix[..., row, column] = codes
    return matrix


def c_registers(matrix: Array, bits: int) -> Array:
    """Registers of an accumulator matrix of codes: the inverse of ``c_matrix``."""
    row, column = _c_map(matrix.shape[-1])
    return pack(np.asarray(matrix)[..., row, column], bits)


def ldmatrix(rows: Array, *, trans: bool = False) -> Array:
    """Registers ``[..., 32, count]`` of ``ldmatrix.m8n8.x{1,2,4}.b16``.

    ``rows`` is uint8 ``[..., 8 * count, 16]``: the 16 bytes at the address that lane i gives, i below ``8 * count``.
    """
    halves = np.ascontiguousarray(rows, np.uint8).view(np.uint16)
    matrices = halves.reshape(*halves.shape[:-2], -1, 8, 8)
    if trans:
        matrices = np.swapaxes(matrices, -1, -2)
    pairs = matrices.reshape(*matrices.shape[:-2], 32, 2).astype(np.uint32)
    return np.ascontiguousarray(np.swapaxes(pairs[..., 0] | pairs[..., 1] << np.uint32(16), -1, -2))


def stmatrix(registers: Array, *, trans: bool = False) -> Array:
    """Rows uint8 ``[..., 8 * count, 16]`` of ``stmatrix.m8n8``, row i for the address of lane i."""
    registers = np.swapaxes(np.asarray(registers, np.uint32), -1, -2)
    matrices = unpack(registers[..., None], 16).astype(np.uint16).reshape(*registers.shape[:-1], 8, 8)
    if trans:
        matrices = np.swapaxes(matrices, -1, -2)
    return np.ascontiguousarray(matrices).view(np.uint8).reshape(*matrices.shape[:-3], -1, 16)


def movmatrix(registers: Array) -> Array:
    """``movmatrix.m8n8.trans.b16``: the transposed 8 x 8 matrix of registers ``[..., 32]``."""
    return ldmatrix(stmatrix(registers[..., None]), trans=True)[..., 0]
