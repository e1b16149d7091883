"""The operations of the family: kernels, tables, references."""

from __future__ import annotations

import torch

from jitfp4.dtypes import ACTIVATIONS, FLOATS
from jitfp4.families.quantize import tables
from jitfp4.families.quantize.arguments import Arguments, BatchArguments, DequantizeArguments, TokenArguments
from jitfp4.families.quantize.four_over_six import recipe_of
from jitfp4.families.quantize.kernels import dequantize, e4m3, grouped, per_token, tma, vector
from jitfp4.families.quantize.problem import BatchProblem, DequantizeProblem, Problem, TokenProblem
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import block_amax, swizzle, unswizzle

_MAX_ROW = 1 << 36  # elements: kernels count the blocks of a row in 32 bits


def _matrix_problem(arguments: Arguments) -> Problem:
    m, k = arguments.out.shape[0], 2 * arguments.out.shape[1]
    by_row = arguments.scale is not None and arguments.scale.numel() > 1
    layout = SfLayout(arguments.layout)
    plain = layout is SfLayout.layout_linear and arguments.a.stride(0) == k and not (by_row or arguments.silu)
    if plain and m * k < _MAX_ROW:
        m, k = 1, m * k  # as one long row, which has the same bytes: a short row would leave lanes of a warp idle
    dtype = ACTIVATIONS[arguments.a.dtype]
    better = arguments.four_over_six != 0
    return Problem(BlockFormat(arguments.format), dtype, layout, arguments.silu, by_row, m, k, better)


def _matrix_reference(arguments: Arguments) -> None:
    x = reference.silu_and_mul(arguments.a) if arguments.silu else arguments.a
    scale = arguments.scale
    if scale is not None:
        scale = scale.reshape(-1, 1)
        if x.dtype == torch.float8_e4m3fn:
            x = reference.widen_e4m3(x, scale)
    codes, scales = _quantize(x, scale, arguments.four_over_six, BlockFormat(arguments.format))
    arguments.out.copy_(codes)
    arguments.out_sf.copy_(swizzle(scales, SfLayout(arguments.layout)))


def _quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    code: int,
    form: BlockFormat = NVFP4,
    row_amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and linear scales, by the recipe that a code stands for, if any."""
    recipe = recipe_of(code)
    if recipe is None or scale is None:
        return reference.quantize_blocks(x, form, scale)
    return reference.quantize_4over6(x, recipe, scale, row_amax)


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
    better = arguments.four_over_six != 0
    return BatchProblem(dtype, arguments.mask is not None, arguments.silu, batch, m, 2 * half, better)


def _batch_reference(arguments: BatchArguments) -> None:
    a, mask, scale, by_row, q, sf, silu, code, _ = arguments
    batch, m = a.shape[:2]
    layout, cols = SfLayout.layout_128x4, 2 * q.shape[2] // NVFP4.block
    padded = layout.shape(m, cols)
    scales = scale.reshape(1, -1, 1).expand(batch, -1, 1) if by_row else scale.reshape(-1, 1, 1).expand(batch, 1, 1)
    for b in range(batch):
        filled = m if mask is None else min(max(int(mask[b]), 0), m)
        x = reference.silu_and_mul(a[b, :filled]) if silu else a[b, :filled]
        codes, bytes_ = _quantize(x, scales[b, :filled] if by_row else scales[b], code)
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


def _token_problem(arguments: TokenArguments) -> TokenProblem:
    dtype, (m, k) = ACTIVATIONS[arguments.a.dtype], arguments.a.shape
    return TokenProblem(dtype, SfLayout(arguments.layout), m, k, arguments.four_over_six != 0)


def _token_reference(arguments: TokenArguments) -> None:
    encode, decode = reference.row_scales(arguments.a, arguments.inverse_base)
    amax = block_amax(arguments.a.float()).unsqueeze(1)
    codes, scales = _quantize(arguments.a, encode.unsqueeze(1), arguments.four_over_six, row_amax=amax)
    arguments.out.copy_(codes)
    arguments.out_sf.copy_(swizzle(scales, SfLayout(arguments.layout)))
    arguments.decode.copy_(decode)


QUANTIZE_PER_TOKEN = Operation(
    TokenArguments,
    name="quantize_per_token",
    kernels=(per_token.KERNEL,),
    problem=_token_problem,
    problems=tables.token_problems,
    tables=tables.TOKEN_TABLES,
    reference=_token_reference,
    output="out",
    aligned=("a", "out", "out_sf"),
    exclusive=("out", "out_sf"),
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
