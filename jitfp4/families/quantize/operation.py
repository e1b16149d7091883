"""The operations of the family: kernels, tables, references."""

from __future__ import annotations

import torch

from jitfp4.dtypes import ACTIVATIONS, FLOATS
from jitfp4.families.quantize import tables
from jitfp4.families.quantize.arguments import Arguments, BatchArguments, DequantizeArguments, RowScaleArguments
from jitfp4.families.quantize.kernels import dequantize, e4m3, grouped, row_scale, tma, vector
from jitfp4.families.quantize.problem import BatchProblem, DequantizeProblem, Problem, RowScaleProblem
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import swizzle, unswizzle

_MAX_ROW = 1 << 36  # elements: kernels count the blocks of a row in 32 bits


def _matrix_problem(arguments: Arguments) -> Problem:
    m, k = arguments.out.shape[0], 2 * arguments.out.shape[1]
    by_row = arguments.scale is not None and arguments.scale.numel() > 1
    layout = SfLayout(arguments.layout)
    plain = layout is SfLayout.layout_linear and arguments.a.stride(0) == k and not (by_row or arguments.silu)
    if plain and m * k < _MAX_ROW:
        m, k = 1, m * k  # as one long row, which has the same bytes: a short row would leave lanes of a warp idle
    dtype = ACTIVATIONS[arguments.a.dtype]
    return Problem(BlockFormat(arguments.format), dtype, layout, arguments.silu, by_row, m, k)


def _matrix_reference(arguments: Arguments) -> None:
    x = reference.silu_and_mul(arguments.a) if arguments.silu else arguments.a
    scale = arguments.scale
    if scale is not None:
        scale = scale.reshape(-1, 1)
        if x.dtype == torch.float8_e4m3fn:
            x = reference.widen_e4m3(x, scale)
    codes, scales = reference.quantize_blocks(x, BlockFormat(arguments.format), scale)
    arguments.out.copy_(codes)
    arguments.out_sf.copy_(swizzle(scales, SfLayout(arguments.layout)))


QUANTIZE = Operation(
    Arguments,
    name="quantize",
    kernels=(vector.KERNEL, tma.KERNEL, e4m3.KERNEL),
    problem=_matrix_problem,
    problems=tables.matrix_problems,
    tables=tables.MATRIX_TABLES,
    reference=_matrix_reference,
    output="out",
    aligned=("a", "out", "out_sf"),
    exclusive=("out", "out_sf"),
    growing=("m",),
)


def _batch_problem(arguments: BatchArguments) -> BatchProblem:
    batch, m, half = arguments.out.shape
    dtype = ACTIVATIONS[arguments.a.dtype]
    return BatchProblem(dtype, arguments.mask is not None, arguments.silu, batch, m, 2 * half)


def _batch_reference(arguments: BatchArguments) -> None:
    a, mask, scale, by_row, q, sf, silu, _ = arguments
    batch, m = a.shape[:2]
    layout, cols = SfLayout.layout_128x4, 2 * q.shape[2] // NVFP4.block
    padded = layout.shape(m, cols)
    scales = scale.reshape(1, -1, 1).expand(batch, -1, 1) if by_row else scale.reshape(-1, 1, 1).expand(batch, 1, 1)
    for b in range(batch):
        filled = m if mask is None else min(max(int(mask[b]), 0), m)
        x = reference.silu_and_mul(a[b, :filled]) if silu else a[b, :filled]
        codes, bytes_ = reference.quantize_blocks(x, NVFP4, scales[b, :filled] if by_row else scales[b])
        q[b, :filled] = codes
        linear = unswizzle(sf[b].view(padded), layout, *padded).clone()  # rows from filled to m are not changed
        linear[:filled], linear[m:] = 0, 0
        linear[:filled, :cols] = bytes_
        sf[b] = swizzle(linear, layout).view(sf[b].shape)


QUANTIZE_BATCH = Operation(
    BatchArguments,
    name="quantize_batch",
    kernels=(grouped.KERNEL,),
    problem=_batch_problem,
    problems=tables.batch_problems,
    tables=tables.BATCH_TABLES,
    reference=_batch_reference,
    output="out",
    aligned=("a", "out", "out_sf"),
    exclusive=("out", "out_sf"),
    growing=("batch", "m"),
)


def _row_scale_reference(arguments: RowScaleArguments) -> None:
    encode, decode = reference.row_scales(arguments.a, arguments.inverse_base)
    arguments.encode.copy_(encode)
    arguments.decode.copy_(decode)


ROW_SCALE = Operation(
    RowScaleArguments,
    name="row_scale",
    kernels=(row_scale.KERNEL,),
    problem=lambda arguments: RowScaleProblem(ACTIVATIONS[arguments.a.dtype], arguments.a.shape[0]),
    problems=tables.row_scale_problems,
    tables=tables.ROW_SCALE_TABLES,
    reference=_row_scale_reference,
    output="encode",
    aligned=("a",),
    growing=("m",),
)


def _dequantize_problem(arguments: DequantizeArguments) -> DequantizeProblem:
    out_dtype = FLOATS[arguments.out.dtype]
    layout = SfLayout(arguments.layout)
    return DequantizeProblem(BlockFormat(arguments.format), out_dtype, layout, *arguments.out.shape)


def _dequantize_reference(arguments: DequantizeArguments) -> None:
    codes, scales, scale, out, form, layout, *_ = arguments
    out.copy_(reference.dequantize(codes, scales, BlockFormat(form), scale, SfLayout(layout)))


DEQUANTIZE = Operation(
    DequantizeArguments,
    name="dequantize",
    kernels=(dequantize.KERNEL,),
    problem=_dequantize_problem,
    problems=tables.dequantize_problems,
    tables=tables.DEQUANTIZE_TABLES,
    reference=_dequantize_reference,
    output="out",
    aligned=("a_fp4", "a_sf", "out"),
    exclusive=("out",),
    growing=("m",),
)
