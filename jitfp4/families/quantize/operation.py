"""The operations of the family: arguments, kernels, references."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jitfp4.dtypes import ACTIVATIONS, FLOATS
from jitfp4.families.quantize import problem as p
from jitfp4.families.quantize import tables
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation, Written
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import swizzle, unswizzle
from jitfp4.spec import I64, Geometry, Ptr, TensorMapParam, TileMap

_MAX_ROW = 1 << 36  # elements: kernels count the blocks of a row in 32 bits

_Q = Ptr("q", "uint8", "[m, k/2], low nibble first")
_SF = Ptr("sf", "uint8", "block scales in kSfLayout")


# ---- a matrix --------------------------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """Rows [m, k], or [m, 2k] for silu_and_mul, and their codes and scales. ``scale``: one float32, one for each row,
    or None.
    """

    a: torch.Tensor
    scale: torch.Tensor | None
    out: Written
    out_sf: Written
    format: str
    layout: int
    silu: bool
    enable_pdl: bool | None
    names: str


def _matrix_problem(arguments: Arguments) -> p.Problem:
    m, k = arguments.out.shape[0], 2 * arguments.out.shape[1]
    by_row = arguments.scale is not None and arguments.scale.numel() > 1
    layout = SfLayout(arguments.layout)
    plain = layout is SfLayout.layout_linear and arguments.a.stride(0) == k and not (by_row or arguments.silu)
    if plain and m * k < _MAX_ROW:
        m, k = 1, m * k  # as one long row, which has the same bytes: a short row would leave lanes of a warp idle
    dtype = ACTIVATIONS[arguments.a.dtype]
    return p.Problem(BlockFormat(arguments.format), dtype, layout, arguments.silu, by_row, m, k)


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


def _bind_codes(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return {
        "global_scale": arguments.scale,
        "q": arguments.out,
        "sf": arguments.out_sf,
        "m": plan.problem.m,
        "k": plan.problem.k,
    }


def _bind_tma(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    rows = arguments.a.view(torch.uint16).view(plan.problem.m, plan.problem.k)
    return _bind_codes(arguments, plan) | {"x": TileMap(rows, (plan.spec.box_rows, plan.spec.box_cols), swizzle=128)}


def _bind_table(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    folded = plan.problem.m != arguments.out.shape[0]
    stride = plan.problem.k if folded else arguments.a.stride(0)
    return _bind_codes(arguments, plan) | {"x": arguments.a, "x_stride": stride}


def _bind_vector(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return _bind_table(arguments, plan) | {"scale_stride": int(plan.problem.by_row)}


VECTOR = Kernel(
    name="quantize/vector",
    spec=p.VectorSpec,
    params=(
        Ptr("x", "const In", "[m, k], of silu_and_mul [m, 2k]; rows x_stride elements apart"),
        Ptr("global_scale", "const float", "encode scale of row r at r * scale_stride; null for MXFP4"),
        _Q,
        _SF,
        I64("m"),
        I64("k"),
        I64("x_stride"),
        I64("scale_stride"),
    ),
    tactics=tables.VECTOR_TACTICS,
    rejects=p.vector_rejects,
    specialise=p.vector_spec,
    geometry=p.vector_geometry,
    bind=_bind_vector,
)
TMA = Kernel(
    name="quantize/tma",
    spec=p.TmaSpec,
    params=(
        TensorMapParam("x", "[m, k]"),
        Ptr("global_scale", "const float", "[1], encode"),
        _Q,
        _SF,
        I64("m"),
        I64("k"),
    ),
    tactics=tables.TMA_TACTICS,
    rejects=p.tma_rejects,
    specialise=p.tma_spec,
    geometry=p.tma_geometry,
    bind=_bind_tma,
)
TABLE = Kernel(
    name="quantize/e4m3",
    spec=p.TableSpec,
    params=(
        Ptr("x", "const In", "[m, k], rows x_stride elements apart"),
        Ptr("global_scale", "const float", "[1], encode"),
        _Q,
        _SF,
        I64("m"),
        I64("k"),
        I64("x_stride"),
    ),
    tactics=tables.TABLE_TACTICS,
    rejects=p.table_rejects,
    specialise=p.table_spec,
    geometry=p.table_geometry,
    bind=_bind_table,
)
QUANTIZE = Operation(
    Arguments,
    name="quantize",
    kernels=(VECTOR, TMA, TABLE),
    problem=_matrix_problem,
    problems=tables.matrix_problems,
    tables=tables.MATRIX_TABLES,
    reference=_matrix_reference,
    output="out",
    aligned=("a", "out", "out_sf"),
    exclusive=("out", "out_sf"),
    growing=("m",),
)


# ---- a batch ---------------------------------------------------------------------------------------------------------


class BatchArguments(NamedTuple):
    """Matrices [batch, m, k], and their NVFP4 codes and 128x4 scales. ``scale``: one float32, one for each matrix, or
    with ``by_row`` one for each row.
    """

    a: torch.Tensor
    mask: torch.Tensor | None
    scale: torch.Tensor
    by_row: bool
    out: Written
    out_sf: Written
    silu: bool
    enable_pdl: bool | None


def _batch_problem(arguments: BatchArguments) -> p.BatchProblem:
    batch, m, half = arguments.out.shape
    dtype = ACTIVATIONS[arguments.a.dtype]
    return p.BatchProblem(dtype, arguments.mask is not None, arguments.silu, batch, m, 2 * half)


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


def _bind_batch(arguments: BatchArguments, plan: Plan) -> dict[str, Any]:
    by_matrix = arguments.scale.numel() > 1 and not arguments.by_row
    return {
        "x": arguments.a,
        "mask": arguments.mask,
        "global_scale": arguments.scale,
        "q": arguments.out,
        "sf": arguments.out_sf,
        "m": plan.problem.m,
        "k": plan.problem.k,
        "x_stride": arguments.a.stride(1),
        "x_batch_stride": arguments.a.stride(0),
        "scale_stride": int(arguments.by_row),
        "scale_batch_stride": int(by_matrix),
    }


GROUPED = Kernel(
    name="quantize/grouped",
    spec=p.GroupedSpec,
    params=(
        Ptr("x", "const In", "[batch, m, k], of silu_and_mul [batch, m, 2k]"),
        Ptr("mask", "const int32", "[batch] filled rows; null unless kMasked"),
        Ptr("global_scale", "const float", "encode scale of row r of batch b"),
        Ptr("q", "uint8", "[batch, m, k/2], low nibble first"),
        Ptr("sf", "uint8", "[batch], E4M3 scales in the 128x4 layout"),
        I64("m"),
        I64("k"),
        I64("x_stride"),
        I64("x_batch_stride"),
        I64("scale_stride"),
        I64("scale_batch_stride"),
    ),
    tactics=tables.GROUPED_TACTICS,
    rejects=p.grouped_rejects,
    specialise=p.grouped_spec,
    geometry=p.grouped_geometry,
    bind=_bind_batch,
)
QUANTIZE_BATCH = Operation(
    BatchArguments,
    name="quantize_batch",
    kernels=(GROUPED,),
    problem=_batch_problem,
    problems=tables.batch_problems,
    tables=tables.BATCH_TABLES,
    reference=_batch_reference,
    output="out",
    aligned=("a", "out", "out_sf"),
    exclusive=("out", "out_sf"),
    growing=("batch", "m"),
)


# ---- the scale of each row -------------------------------------------------------------------------------------------


class RowScaleArguments(NamedTuple):
    """Rows [m, k], and an encode and a decode scale for each."""

    a: torch.Tensor
    inverse_base: torch.Tensor
    encode: Written
    decode: Written
    enable_pdl: bool | None


def _row_scale_reference(arguments: RowScaleArguments) -> None:
    encode, decode = reference.row_scales(arguments.a, arguments.inverse_base)
    arguments.encode.copy_(encode)
    arguments.decode.copy_(decode)


def _bind_row_scale(arguments: RowScaleArguments, _plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.a,
        "inverse_base": arguments.inverse_base,
        "encode_scale": arguments.encode,
        "decode_scale": arguments.decode,
        "k": arguments.a.shape[1],
        "x_stride": arguments.a.stride(0),
    }


ROW_SCALE_KERNEL: Kernel[RowScaleArguments, p.RowScaleProblem, p.RowScaleTactic] = Kernel(
    name="quantize/row_scale",
    spec=p.RowScaleSpec,
    params=(
        Ptr("x", "const In", "[m, k], rows x_stride elements apart"),
        Ptr("inverse_base", "const float", "[1], 1 / (448 * 6)"),
        Ptr("encode_scale", "float", "[m]"),
        Ptr("decode_scale", "float", "[m]"),
        I64("k"),
        I64("x_stride"),
    ),
    tactics=tables.ROW_SCALE_TACTICS,
    rejects=lambda _problem, _tactic, _arch: None,
    specialise=lambda problem, _tactic: p.RowScaleSpec(in_dtype=problem.in_dtype),
    geometry=lambda problem, _tactic, _arch: Geometry(grid=(problem.m, 1, 1), block=(p.RowScaleSpec.threads, 1, 1)),
    bind=_bind_row_scale,
)
ROW_SCALE = Operation(
    RowScaleArguments,
    name="row_scale",
    kernels=(ROW_SCALE_KERNEL,),
    problem=lambda arguments: p.RowScaleProblem(ACTIVATIONS[arguments.a.dtype], arguments.a.shape[0]),
    problems=tables.row_scale_problems,
    tables=tables.ROW_SCALE_TABLES,
    reference=_row_scale_reference,
    output="encode",
    aligned=("a",),
    growing=("m",),
)


# ---- back to floats --------------------------------------------------------------------------------------------------


class DequantizeArguments(NamedTuple):
    """Codes and block scales, and the floats [m, k] of ``out``."""

    a_fp4: torch.Tensor
    a_sf: torch.Tensor
    scale: torch.Tensor | None
    out: Written
    format: str
    layout: int
    enable_pdl: bool | None
    names: str


def _dequantize_problem(arguments: DequantizeArguments) -> p.DequantizeProblem:
    out_dtype = FLOATS[arguments.out.dtype]
    layout = SfLayout(arguments.layout)
    return p.DequantizeProblem(BlockFormat(arguments.format), out_dtype, layout, *arguments.out.shape)


def _dequantize_reference(arguments: DequantizeArguments) -> None:
    codes, scales, scale, out, form, layout, *_ = arguments
    out.copy_(reference.dequantize(codes, scales, BlockFormat(form), scale, SfLayout(layout)))


def _bind_dequantize(arguments: DequantizeArguments, plan: Plan) -> dict[str, Any]:
    return {
        "q": arguments.a_fp4,
        "sf": arguments.a_sf,
        "global_scale": arguments.scale,
        "out": arguments.out,
        "m": plan.problem.m,
        "k": plan.problem.k,
    }


DEQUANTIZE_KERNEL: Kernel[DequantizeArguments, p.DequantizeProblem, p.DequantizeTactic] = Kernel(
    name="quantize/dequantize",
    spec=p.DequantizeSpec,
    params=(
        Ptr("q", "const uint8", "[m, k/2], low nibble first"),
        Ptr("sf", "const uint8", "block scales in kSfLayout"),
        Ptr("global_scale", "const float", "[1], decode; null for UE8M0"),
        Ptr("out", "Out", "[m, k]"),
        I64("m"),
        I64("k"),
    ),
    tactics=tables.DEQUANTIZE_TACTICS,
    rejects=lambda _problem, _tactic, _arch: None,
    specialise=lambda problem, _tactic: p.DequantizeSpec(
        block_format=problem.block_format, out_dtype=problem.out_dtype, sf_layout=problem.sf_layout
    ),
    geometry=p.dequantize_geometry,
    bind=_bind_dequantize,
)
DEQUANTIZE = Operation(
    DequantizeArguments,
    name="dequantize",
    kernels=(DEQUANTIZE_KERNEL,),
    problem=_dequantize_problem,
    problems=tables.dequantize_problems,
    tables=tables.DEQUANTIZE_TABLES,
    reference=_dequantize_reference,
    output="out",
    aligned=("a_fp4", "a_sf", "out"),
    exclusive=("out",),
    growing=("m",),
)
