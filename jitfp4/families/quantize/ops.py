"""The operators of the quantize family: a kernel on the GPU and in the simulator, the exact reference on the CPU."""

from __future__ import annotations

import functools

import torch

from jitfp4.arch import Arch
from jitfp4.engine import Launch, target_of
from jitfp4.families.quantize import kernels
from jitfp4.formats import NVFP4, BlockFormat, DType
from jitfp4.layouts import SfLayout
from jitfp4.ops import operator
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import swizzle, unswizzle
from jitfp4.spec import Geometry, TileMap

DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16, torch.float8_e4m3fn: DType.E4M3}
HALVES = (torch.bfloat16, torch.float16)

_MAX_ROW = 1 << 36  # elements: kernels count the blocks of a row in 32 bits


# ---- a matrix --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _matrix_plan(
    dtype: torch.dtype, block_format: str, layout: int, silu: bool, by_row: bool, m: int, k: int, arch: Arch
) -> Launch:
    form, in_dtype, sf_layout = BlockFormat(block_format), DTYPES[dtype], SfLayout(layout)
    cols = k // form.block
    chosen = kernels.select(
        block_format=form, in_dtype=in_dtype, sf_layout=sf_layout, silu=silu, by_row=by_row, m=m, k=k, arch=arch
    )
    if isinstance(chosen, kernels.TmaSpec):
        return Launch(kernels.TMA, chosen, kernels.tma_geometry(chosen, m=m, cols=cols, num_sms=arch.num_sms))
    if isinstance(chosen, kernels.TableSpec):
        return Launch(kernels.TABLE, chosen, kernels.table_geometry(chosen, m=m, cols=cols, num_sms=arch.num_sms))
    spec, tuning = chosen
    return Launch(kernels.VECTOR, spec, kernels.vector_geometry(spec, m=m, cols=cols, threads=tuning.threads))


def _matrix_reference(
    a: torch.Tensor,
    scale: torch.Tensor | None,
    q: torch.Tensor,
    sf: torch.Tensor,
    block_format: str,
    layout: int,
    silu: bool,
    _: bool | None,
) -> None:
    x = reference.silu_and_mul(a) if silu else a
    if scale is not None:
        scale = scale.reshape(-1, 1)
        if x.dtype == torch.float8_e4m3fn:
            x = reference.widen_e4m3(x, scale)
    codes, scales = reference.quantize_blocks(x, BlockFormat(block_format), scale)
    q.copy_(codes)
    sf.copy_(swizzle(scales, SfLayout(layout)))


@operator(
    "quantize(Tensor a, Tensor? scale, Tensor(a!) out, Tensor(b!) out_sf, str format, int layout, bool silu,"
    " bool? pdl)",
    reference=_matrix_reference,
    aligned=("a", "out", "out_sf"),
)
def quantize(
    a: torch.Tensor,
    scale: torch.Tensor | None,
    q: torch.Tensor,
    sf: torch.Tensor,
    block_format: str,
    layout: int,
    silu: bool,
    pdl: bool | None,
) -> None:
    """[m, k] rows (of silu_and_mul [m, 2k]) to codes and scales; ``scale`` holds one float32, one for each row, or
    None.
    """
    m, k = q.shape[0], 2 * q.shape[1]
    stride, target = a.stride(0), target_of(a)
    by_row = scale is not None and scale.numel() > 1
    if layout == SfLayout.layout_linear and stride == k and not (by_row or silu) and m * k < _MAX_ROW:
        m, k, stride = 1, m * k, m * k  # the same bytes as one long row: a short row does not fill a warp
    plan = _matrix_plan(a.dtype, block_format, layout, silu, by_row, m, k, target.arch)
    if plan.family is kernels.VECTOR:
        plan.run((a, scale, q, sf, m, k, stride, int(by_row)), target, pdl=pdl)
    elif plan.family is kernels.TABLE:
        plan.run((a, scale, q, sf, m, k, stride), target, pdl=pdl)
    else:
        box = kernels.tma_box_rows(SfLayout(layout)), kernels.TMA_BOX_COLS
        plan.run((TileMap(a.view(torch.uint16), box, swizzle=128), scale, q, sf, m, k), target, pdl=pdl)


# ---- a batch ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _batch_plan(dtype: torch.dtype, masked: bool, silu: bool, batch: int, m: int, k: int) -> Launch:
    spec = kernels.grouped_spec(DTYPES[dtype], masked=masked, silu=silu)
    return Launch(kernels.GROUPED, spec, kernels.grouped_geometry(spec, batch=batch, m=m, cols=k // NVFP4.block))


def _batch_reference(
    a: torch.Tensor,
    mask: torch.Tensor | None,
    scale: torch.Tensor,
    by_row: bool,
    q: torch.Tensor,
    sf: torch.Tensor,
    silu: bool,
    _: bool | None,
) -> None:
    batch, m = a.shape[:2]
    layout, cols = SfLayout.layout_128x4, 2 * q.shape[2] // NVFP4.block
    padded = layout.shape(m, cols)
    scales = scale.reshape(1, -1, 1).expand(batch, -1, 1) if by_row else scale.reshape(-1, 1, 1).expand(batch, 1, 1)
    for b in range(batch):
        filled = m if mask is None else min(max(int(mask[b]), 0), m)
        x = reference.silu_and_mul(a[b, :filled]) if silu else a[b, :filled]
        codes, bytes_ = reference.quantize_blocks(x, NVFP4, scales[b, :filled] if by_row else scales[b])
        q[b, :filled] = codes
        linear = unswizzle(sf[b].view(padded), layout, *padded).clone()  # rows from filled to m stay as they are
        linear[:filled], linear[m:] = 0, 0
        linear[:filled, :cols] = bytes_
        sf[b] = swizzle(linear, layout).view(sf[b].shape)


@operator(
    "quantize_batch(Tensor a, Tensor? mask, Tensor scale, bool by_row, Tensor(a!) out, Tensor(b!) out_sf, bool silu,"
    " bool? pdl)",
    reference=_batch_reference,
    aligned=("a", "out", "out_sf"),
)
def quantize_batch(
    a: torch.Tensor,
    mask: torch.Tensor | None,
    scale: torch.Tensor,
    by_row: bool,
    q: torch.Tensor,
    sf: torch.Tensor,
    silu: bool,
    pdl: bool | None,
) -> None:
    """[batch, m, k] to NVFP4 with 128x4 scales. ``scale``: one float32, one for each matrix, or (``by_row``) each
    row.
    """
    batch, m, k = q.shape[0], q.shape[1], 2 * q.shape[2]
    by_matrix = scale.numel() > 1 and not by_row
    plan = _batch_plan(a.dtype, mask is not None, silu, batch, m, k)
    args = (a, mask, scale, q, sf, m, k, a.stride(1), a.stride(0), int(by_row), int(by_matrix))
    plan.run(args, target_of(a), pdl=pdl)


# ---- the scale of each row -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _row_scale_plan(dtype: torch.dtype, m: int) -> Launch:
    geometry = Geometry(grid=(m, 1, 1), block=(256, 1, 1))
    return Launch(kernels.ROW_SCALE, kernels.RowScaleSpec(in_dtype=DTYPES[dtype]), geometry)


def _row_scale_reference(
    a: torch.Tensor, inverse_base: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor, _: bool | None
) -> None:
    for out, value in zip((encode, decode), reference.row_scales(a, inverse_base), strict=True):
        out.copy_(value)


@operator(
    "row_scale(Tensor a, Tensor inverse_base, Tensor(a!) encode, Tensor(b!) decode, bool? pdl)",
    reference=_row_scale_reference,
    aligned=("a",),
)
def row_scale(
    a: torch.Tensor, inverse_base: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor, pdl: bool | None
) -> None:
    """Per-token encode and decode scales of [m, k] rows."""
    m, k = a.shape
    _row_scale_plan(a.dtype, m).run((a, inverse_base, encode, decode, k, a.stride(0)), target_of(a), pdl=pdl)
