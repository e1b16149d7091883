"""The public functions: arguments are checked, outputs allocated, and one operator called."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from jitfp4.dispatch import differ
from jitfp4.dtypes import CODE_DTYPES, HALVES, SF_DTYPES
from jitfp4.errors import ArgumentError
from jitfp4.families.norm.arguments import Arguments
from jitfp4.families.norm.kernels import rows_fp4quant
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.norm.problem import MAX_HIDDEN, MIN_HIDDEN, TURN, Scale
from jitfp4.formats import MXFP4
from jitfp4.layouts import SfLayout, padded_numel, padded_shape
from jitfp4.public import public
from jitfp4.tensors import as_rows, check_contiguous, check_dtype, check_same_device, output, scalar_f32

_HEAD_DIMS = (64, 128, 256, 512)
_MAX_GATED = TURN * max(tactic.units for tactic in rows_fp4quant.TACTICS) * rows_fp4quant.RowsSpec.warps
_FP4_DTYPES = tuple(reversed(CODE_DTYPES))  # FlashInfer returns torch's own where there is one


@public
def rmsnorm_fp4quant(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise rows and quantize them to FP4 in one pass.

    Args:
        input: [m, h] or [b, s, h], fp16 or bf16, 16-byte aligned; h a multiple of block_size from 64 to 65536. Leading
            dimensions count as m rows. If it is not contiguous, such as a slice of a packed projection, it is copied.
        weight: [h] of input's dtype. With dependent launch it is read before the kernel ahead has ended: where that one
            computes it, enable_pdl is False.
        y_fp4, block_scale: contiguous tensors on input's device to fill in place, of the shapes below; allocated when
            None. They may also be of dtype uint8, or float8_e8m0fnu for "ue8m0"; scales in the 128x4 layout may also
            have two dimensions.
        global_scale: the *encode* scale, ``448 * 6 / amax(y)``: one float32 on input's device (fp16 and bf16 are
            widened), or a Python float. Read on the device only. None means 1. An error with "ue8m0".
        eps: added to the mean of squares.
        block_size: 16 or 32 elements share a scale.
        scale_format: "e4m3" or "ue8m0"; None means "e4m3" for blocks of 16 and "ue8m0" for 32. Blocks of 16 with
            "ue8m0" are an error.
        is_sf_swizzled_layout: scales in the 128x4 layout instead of the linear one; padding is zero.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        codes, float4_e2m1fn_x2 (uint8 where torch lacks it) [..., h/2], element 2j in the low nibble of byte j; and
        block scales, float8_e4m3fn or, for "ue8m0", uint8: linear [..., h/block_size], or the 128x4 layout as a flat
        tensor of ``SfLayout.layout_128x4.numel(m, h/block_size)``.
    Numerics:
        In float32, every operation correctly rounded::

            rstd = 1 / sqrt(sum(x * x) / h + eps);   y = round((x * rstd) * weight), rounded to input's dtype

        The order of the sum is that of ``jitfp4.reference.norm.sum_of_squares``; it does not depend on m. y is then
        quantized exactly as by nvfp4_quantize() or, with "ue8m0", mxfp4_quantize():
        ``y ~= e2m1(code) * e4m3(scale) / global_scale``, or ``e2m1(code) * 2**(scale - 127)``.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    recipe = _Recipe.of(block_size, scale_format, swizzled=is_sf_swizzled_layout, linear=not is_sf_swizzled_layout)
    outputs = _Outputs(y_fp4=y_fp4, block_scale=block_scale)
    _check_rows(input, None, weight, recipe.block)
    inputs = _Inputs(input, None, weight, None)
    codes, scales = _fused(inputs, global_scale, eps, recipe, outputs, enable_pdl)
    return codes, scales


@public
def add_rmsnorm_fp4quant(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    residual: torch.Tensor,
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    y_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add to the residual in place, normalise the sum, and quantize it to FP4, in one pass.

    Args:
        input: [m, h] or [b, s, h], as in rmsnorm_fp4quant().
        residual: like input, 16-byte aligned, not overlapping it; becomes ``round(input + residual)``. If it is not
            contiguous, it is copied, and the result is copied back.
        weight: [h] of input's dtype. With dependent launch it is read before the kernel ahead has ended: where that one
            computes it, enable_pdl is False.
        y_fp4, block_scale: outputs to fill in place, as in rmsnorm_fp4quant(); with output_both_sf_layouts, block_scale
            has the 128x4 layout.
        global_scale: the *encode* scale, ``448 * 6 / amax(y)``, as in rmsnorm_fp4quant().
        eps: added to the mean of squares.
        block_size, scale_format: the FP4 format, as in rmsnorm_fp4quant().
        is_sf_swizzled_layout: scales in the 128x4 layout instead of the linear one; padding is zero.
        output_both_sf_layouts: return the scales in both layouts; is_sf_swizzled_layout then has no effect.
        block_scale_unswizzled: the linear scales to fill in place with output_both_sf_layouts; allocated when None.
            Without output_both_sf_layouts it is accepted and not written, because engines always pass it.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        y_out: like input, contiguous, 16-byte aligned, overlapping neither input nor residual: receives y as well.
    Returns:
        ``(codes, block_scale)`` as rmsnorm_fp4quant() does, or with output_both_sf_layouts
        ``(codes, swizzled block_scale, linear block_scale)``.
    Numerics:
        ``x = round(input + residual)``, the sum in float32; then as in rmsnorm_fp4quant(), so that the result is that
        of the same steps one by one.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if not output_both_sf_layouts:
        block_scale_unswizzled = None
    recipe = _Recipe.of(
        block_size,
        scale_format,
        swizzled=is_sf_swizzled_layout or output_both_sf_layouts,
        linear=not is_sf_swizzled_layout or output_both_sf_layouts,
    )
    outputs = _Outputs(y_fp4=y_fp4, block_scale=block_scale, block_scale_unswizzled=block_scale_unswizzled, y_out=y_out)
    _check_rows(input, residual, weight, recipe.block)
    inputs = _Inputs(input, residual, weight, None)
    codes, *scales = _fused(inputs, global_scale, eps, recipe, outputs, enable_pdl)
    return (codes, scales[0], scales[1]) if output_both_sf_layouts else (codes, scales[0])


@public
def rmsnorm_gated_fp4quant(
    input: torch.Tensor,  # noqa: A002 - as in rmsnorm_fp4quant()
    gate: torch.Tensor,
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the heads of each row, multiply them by ``silu(gate)`` and quantize the rows to FP4, in one pass.

    It is what Qwen3-Next does with the output of its gated delta rule, before a product of FP4 operands.

    Args:
        input: [m, heads, d], fp16 or bf16, 16-byte aligned; d is 64, 128, 256 or 512, heads * d at most 16384. Heads
            flatten to rows without a copy; if it is not contiguous, it is copied then.
        gate: like input, 16-byte aligned.
        weight: [d] of input's dtype. With dependent launch it is read before the kernel ahead has ended: where that one
            computes it, enable_pdl is False.
        y_fp4, block_scale: outputs to fill in place, as in rmsnorm_fp4quant().
        global_scale: the *encode* scale, ``448 * 6 / amax(y)``, as in rmsnorm_fp4quant().
        eps: added to the mean of squares of a head.
        block_size, scale_format: the FP4 format, as in rmsnorm_fp4quant().
        is_sf_swizzled_layout: scales in the 128x4 layout instead of the linear one; padding is zero.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``(codes, block_scale)`` of m rows of h = heads * d elements, as rmsnorm_fp4quant() gives for [m, h].
    Numerics:
        ``y = round(((x * rstd) * weight) * silu(gate))`` as in rmsnorm_gated(), with rstd of each head, which is then
        quantized as in rmsnorm_fp4quant(), so that the result is that of the same steps one by one.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_dtype("input", input, HALVES)
    if input.dim() != 3:
        raise ArgumentError("input", f"shape {tuple(input.shape)}", "[m, heads, d]")
    m, heads, d = input.shape
    if d not in _HEAD_DIMS or not 0 < heads * d <= _MAX_GATED:
        allowed = f"d of {', '.join(map(str, _HEAD_DIMS))}, heads * d from 64 to {_MAX_GATED}"
        raise ArgumentError("input", f"{heads} heads of d = {d}", allowed)
    _check_like("gate", gate, input, dense=False)
    for name, tensor in (("input", input), ("gate", gate)):
        as_rows(name, tensor, d)
    _check_weight(weight, input)
    recipe = _Recipe.of(block_size, scale_format, swizzled=is_sf_swizzled_layout, linear=not is_sf_swizzled_layout)
    outputs = _Outputs(y_fp4=y_fp4, block_scale=block_scale)
    rows = input.contiguous().view(m, heads * d)
    gates = gate.contiguous().view(m, heads * d)
    codes, scales = _fused(_Inputs(rows, None, weight, gates), global_scale, eps, recipe, outputs, enable_pdl)
    return codes, scales


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """The block size, the type and the layouts of scales with which normalised rows are quantized."""

    block: int
    scale: Scale
    swizzled: bool
    linear: bool

    @staticmethod
    def of(block_size: int, scale_format: str | None, *, swizzled: bool, linear: bool) -> _Recipe:
        if block_size not in (16, 32):
            raise ArgumentError("block_size", block_size, "16 or 32")
        allowed = [Scale.E4M3] if block_size == 16 else [Scale.UE8M0, Scale.E4M3]
        if scale_format is not None and scale_format not in allowed:
            raise ArgumentError(
                "scale_format", repr(scale_format), f"{' or '.join(allowed)} for blocks of {block_size}"
            )
        scale = allowed[0] if scale_format is None else Scale(scale_format)
        return _Recipe(block=block_size, scale=scale, swizzled=swizzled, linear=linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """The caller's buffers, under the names of the public functions."""

    y_fp4: torch.Tensor | None
    block_scale: torch.Tensor | None
    block_scale_unswizzled: torch.Tensor | None = None
    y_out: torch.Tensor | None = None


class _Inputs(NamedTuple):
    """The caller's tensors; those of a gate as rows."""

    input: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    gate: torch.Tensor | None


def _fused(
    inputs: _Inputs,
    global_scale: torch.Tensor | float | None,
    eps: float,
    recipe: _Recipe,
    outputs: _Outputs,
    enable_pdl: bool | None,
) -> tuple[torch.Tensor, ...]:
    input, residual, weight, gate = inputs  # noqa: A001
    if not eps >= 0:
        raise ArgumentError("eps", eps, "a finite number that is not negative")
    if global_scale is not None and recipe.scale is Scale.UE8M0:
        raise ArgumentError("global_scale", "a scale", "None with scale_format 'ue8m0'")
    scale = None if global_scale is None else scalar_f32("global_scale", global_scale, like=input)
    if outputs.y_out is not None:
        _check_like("y_out", outputs.y_out, input)
    codes, swizzled, linear = _results(input, recipe, outputs)
    added = None if residual is None else residual.contiguous()
    *lead, h = input.shape
    m = math.prod(lead)
    RMSNORM(
        Arguments(
            input=input.contiguous().view(m, h),
            residual=None if added is None else added.view(m, h),
            weight=weight,
            gate=gate,
            global_scale=scale,
            y_fp4=codes.view(torch.uint8).view(m, h // 2),
            block_scale=None if swizzled is None else swizzled.view(torch.uint8).flatten(),
            block_scale_unswizzled=None if linear is None else linear.view(torch.uint8).view(m, h // recipe.block),
            y_out=None if outputs.y_out is None else outputs.y_out.view(m, h),
            eps=eps,
            block_size=recipe.block,
            scale_format=recipe.scale.value,
            enable_pdl=enable_pdl,
            names="" if recipe.swizzled else "block_scale_unswizzled=block_scale",
        )
    )
    if residual is not None and added is not None and added is not residual:
        residual.copy_(added)
    return tuple(out for out in (codes, swizzled, linear) if out is not None)


def _check_rows(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    block: int,
) -> None:
    """Check the rows that are normalised, what is added to them, and their weights."""
    check_dtype("input", input, HALVES)
    if input.dim() not in (2, 3):
        raise ArgumentError("input", f"shape {tuple(input.shape)}", "[m, h] or [b, s, h]")
    h = input.shape[-1]
    if h % block or not MIN_HIDDEN <= h <= MAX_HIDDEN:
        raise ArgumentError("input", f"h = {h}", f"a multiple of {block} from {MIN_HIDDEN} to {MAX_HIDDEN}")
    as_rows("input", input, block)
    if residual is not None:
        _check_like("residual", residual, input, dense=False)
        as_rows("residual", residual, block)
    _check_weight(weight, input)


def _check_weight(weight: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
    """Check the weights of what is normalised together."""
    h = input.shape[-1]
    check_dtype("weight", weight, (input.dtype,))
    check_same_device("weight", weight, input)
    if tuple(weight.shape) != (h,):
        raise ArgumentError("weight", f"shape {tuple(weight.shape)}", f"({h},)")
    check_contiguous("weight", weight)


def _results(
    input: torch.Tensor,  # noqa: A002
    recipe: _Recipe,
    outputs: _Outputs,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Codes, scales in the 128x4 layout, and linear scales: the caller's tensors, checked, or new ones."""
    *lead, h = input.shape
    m, cols = math.prod(lead), h // recipe.block
    dtypes = (torch.float8_e4m3fn, torch.uint8) if recipe.scale is Scale.E4M3 else SF_DTYPES[MXFP4]
    codes = output("y_fp4", outputs.y_fp4, (*lead, h // 2), _FP4_DTYPES, like=input)
    swizzled = linear = None
    if recipe.swizzled:
        out, shape = outputs.block_scale, padded_shape(SfLayout.layout_128x4, m, cols)
        flat = (padded_numel(SfLayout.layout_128x4, m, cols),)
        swizzled = output("block_scale", out, flat if out is None or out.dim() != 2 else shape, dtypes, like=input)
    if recipe.linear:
        name = "block_scale_unswizzled" if recipe.swizzled else "block_scale"
        linear = output(name, getattr(outputs, name), (*lead, cols), dtypes, like=input)
    return codes, swizzled, linear


def _check_like(name: str, tensor: torch.Tensor, input: torch.Tensor, *, dense: bool = True) -> None:  # noqa: A002
    """Check that ``tensor`` has input's shape, dtype and device, and is contiguous if it has to be ``dense``."""
    check_dtype(name, tensor, (input.dtype,))
    check_same_device(name, tensor, input)
    if differ(tensor.shape, input.shape):
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{tuple(input.shape)}, as the input")
    if dense:
        check_contiguous(name, tensor)
