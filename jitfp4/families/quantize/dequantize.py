"""NVFP4 and MXFP4 back to floats."""

from __future__ import annotations

import torch

from jitfp4.dispatch import differ
from jitfp4.dtypes import CODE_DTYPES, FLOATS, SF_DTYPES
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.quantize.arguments import DequantizeArguments
from jitfp4.families.quantize.operation import DEQUANTIZE
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.layouts import SfLayout, padded_numel, padded_shape
from jitfp4.public import public
from jitfp4.tensors import (
    check_contiguous,
    check_device,
    check_dtype,
    check_layout,
    check_same_device,
    layout_of_flags,
    output,
    scalar_f32,
)


@public
def nvfp4_dequantize(
    a_fp4: torch.Tensor,
    a_sf: torch.Tensor,
    global_decode_scale: torch.Tensor | float,
    sfLayout: SfLayout = SfLayout.layout_128x4,  # noqa: N803 - FlashInfer's name
    sf_vec_size: int = 16,
    out_dtype: torch.dtype = torch.float32,
    enable_pdl: bool | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize NVFP4 codes and scales, as nvfp4_quantize() returns them.

    Args:
        a_fp4: uint8 or float4_e2m1fn_x2 [..., k/2], contiguous, element 2j in the low nibble of byte j; leading
            dimensions count as m rows.
        a_sf: E4M3 block scales, uint8 or float8_e4m3fn, contiguous, ``sfLayout.shape(m, k/16)``.
        global_decode_scale: the *decode* scale, the inverse of nvfp4_quantize()'s encode scale: one float32 on a_fp4's
            device (fp16 and bf16 are widened), or a Python float.
        sfLayout: the layout of the block scales.
        sf_vec_size: 16, the block size of NVFP4.
        out_dtype: float32, bfloat16 or float16.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        out: contiguous tensor [..., k] of out_dtype to fill in place; allocated when None.
    Returns:
        [..., k] of out_dtype, on the device of a_fp4.
    Numerics:
        ``x = e2m1(code) * (dec8(b) * global_decode_scale)`` in float32, both products rounded to nearest, then rounded
        once to out_dtype.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if sf_vec_size != NVFP4.block:
        raise ArgumentError("sf_vec_size", sf_vec_size, "16")
    scale = scalar_f32("global_decode_scale", global_decode_scale, like=a_fp4)
    return _to_float(
        NVFP4, a_fp4, a_sf, scale=scale, sf_layout=sfLayout, out_dtype=out_dtype, enable_pdl=enable_pdl, out=out
    )


@public
def mxfp4_dequantize(
    a_fp4: torch.Tensor,
    a_sf: torch.Tensor,
    sfLayout: SfLayout = SfLayout.layout_128x4,  # noqa: N803 - FlashInfer's name
    *,
    out_dtype: torch.dtype = torch.float32,
    enable_pdl: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize MXFP4 codes and scales, as mxfp4_quantize() returns them.

    Args:
        a_fp4: uint8 or float4_e2m1fn_x2 [..., k/2], contiguous, element 2j in the low nibble of byte j; leading
            dimensions count as m rows; k is a multiple of 32.
        a_sf: UE8M0 block scales, uint8 or float8_e8m0fnu, contiguous, ``sfLayout.shape(m, k/32)``.
        sfLayout: the layout of the block scales.
        out_dtype, enable_pdl, out: as in nvfp4_dequantize().
    Returns:
        [..., k] of out_dtype, on the device of a_fp4 (FlashInfer returns it on the CPU).
    Numerics:
        ``x = e2m1(code) * 2^(b - 127)``, rounded once to out_dtype; byte 0 is 2^-127, byte 255 NaN.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _to_float(MXFP4, a_fp4, a_sf, sf_layout=sfLayout, out_dtype=out_dtype, enable_pdl=enable_pdl, out=out)


def _to_float(
    block_format: BlockFormat,
    q: torch.Tensor,
    sf: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    sf_layout: SfLayout,
    out_dtype: torch.dtype = torch.float32,
    enable_pdl: bool | None = None,
    out: torch.Tensor | None = None,
    names: tuple[str, str] = ("a_fp4", "a_sf"),
) -> torch.Tensor:
    """Check the arguments that both formats have, and run the operation. ``names``: of codes and scales, for errors."""
    codes_name, scales_name = names
    check_dtype(scales_name, sf, SF_DTYPES[block_format])
    layout = check_layout("sfLayout", sf_layout)
    if out_dtype not in FLOATS:
        raise ArgumentTypeError("out_dtype", out_dtype, " or ".join(map(str, FLOATS)))
    check_dtype(codes_name, q, CODE_DTYPES)
    check_device(codes_name, q)
    check_contiguous(codes_name, q)
    block = block_format.block
    if q.dim() < 2 or q.shape[-1] == 0 or q.shape[-1] % (block // 2):
        raise ArgumentError(
            codes_name, f"shape {tuple(q.shape)}", f"[..., m, k/2] with k a positive multiple of {block}"
        )
    k = 2 * q.shape[-1]
    m = q.numel() * 2 // k
    check_same_device(scales_name, sf, q)
    check_contiguous(scales_name, sf)
    if differ((sf.numel(),), (padded_numel(layout, m, k // block),)):
        raise ArgumentError(
            scales_name, f"shape {tuple(sf.shape)}", f"{padded_shape(layout, m, k // block)} for {layout.name}"
        )
    result = output("out", out, (*q.shape[:-1], k), (out_dtype,), like=q)
    DEQUANTIZE(
        DequantizeArguments(
            a_fp4=q.view(torch.uint8).view(m, k // 2),
            a_sf=sf.view(torch.uint8),
            scale=scale,
            out=result.view(m, k),
            format=block_format.value,
            layout=int(layout),
            enable_pdl=enable_pdl,
            names=f"a_fp4={codes_name},a_sf={scales_name}",
        )
    )
    return result


@public
def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> torch.Tensor:
    """Dequantize FP4 codes and scales to float32, with FlashInfer's general signature.

    Args:
        e2m1_tensor: uint8 or float4_e2m1fn_x2 [..., k/2], contiguous.
        ufp8_scale_tensor: block scales in the layout that the two flags name.
        global_scale_tensor: the *decode* scale, one float32; required for E4M3 scales, ignored for UE8M0 scales.
        sf_vec_size: 16 with E4M3 scales, 32 with UE8M0 scales.
        ufp8_type: 1 for E4M3 scales (NVFP4), 0 for UE8M0 scales (MXFP4).
        is_sf_swizzled_layout, is_sf_8x4_layout: 128x4, 8x4 (both flags) or linear (neither).
    Returns:
        float32 [..., k] on the device of e2m1_tensor (FlashInfer returns it on the CPU). Numerics as in
        nvfp4_dequantize() and mxfp4_dequantize().
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    layout = layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    if (ufp8_type, sf_vec_size) not in ((0, MXFP4.block), (1, NVFP4.block)):
        raise ArgumentError(
            "ufp8_type, sf_vec_size", (ufp8_type, sf_vec_size), "(1, 16) for NVFP4 or (0, 32) for MXFP4"
        )
    block_format = NVFP4 if ufp8_type else MXFP4
    if block_format is NVFP4 and global_scale_tensor is None:
        raise ArgumentError("global_scale_tensor", None, "a decode scale with ufp8_type 1")
    check_dtype("e2m1_tensor", e2m1_tensor, CODE_DTYPES)
    scale = None
    if block_format is NVFP4 and global_scale_tensor is not None:
        scale = scalar_f32("global_scale_tensor", global_scale_tensor, like=e2m1_tensor)
    names = "e2m1_tensor", "ufp8_scale_tensor"
    return _to_float(block_format, e2m1_tensor, ufp8_scale_tensor, scale=scale, sf_layout=layout, names=names)


@public
def mxfp4_dequantize_host(weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """Dequantize MXFP4 with linear scales to float32, under FlashInfer's name; unlike FlashInfer's, on any device.

    Args:
        weight: uint8 or float4_e2m1fn_x2 [n, k/2], contiguous.
        scale: UE8M0, uint8 or float8_e8m0fnu, [n, k/32], contiguous.
        group_size: 32.
    Returns:
        float32 [n, k] on weight's device. Numerics as in mxfp4_dequantize().
    Raises:
        ArgumentError, ArgumentTypeError
    """
    if group_size != MXFP4.block:
        raise ArgumentError("group_size", group_size, "32")
    layout, names = SfLayout.layout_linear, ("weight", "scale")
    return _to_float(MXFP4, weight, scale, sf_layout=layout, names=names)
