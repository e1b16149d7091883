"""Rows to E4M3 with a scale for each, alone or behind RMSNorm: the operation and its public functions."""

from __future__ import annotations

import math

import torch

from jitfp4.families.norm.kernels.rows_fp8quant import KERNEL, TABLE, Fp8Arguments, problem, problems
from jitfp4.families.norm.plain import check_like, check_rows
from jitfp4.operation import Operation
from jitfp4.public import public
from jitfp4.reference import norm as reference
from jitfp4.tensors import check_contiguous, output


def _reference(arguments: Fp8Arguments) -> None:
    y = arguments.input
    if arguments.residual is not None:
        y = reference.add(y, arguments.residual)
        arguments.residual.copy_(y)
    if arguments.weight is not None:
        y = reference.rmsnorm(y, arguments.weight, arguments.eps)
    for to, values in zip((arguments.y_fp8, arguments.y_scale), reference.quantize_rows(y), strict=True):
        to.copy_(values)


ROWS_FP8QUANT = Operation(
    Fp8Arguments,
    name="rows_fp8quant",
    kernels=(KERNEL,),
    problem=problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="y_fp8",
    aligned=("input", "residual", "weight", "y_fp8"),
    exclusive=("residual", "y_fp8", "y_scale"),
    growing=("m",),
)


@public
def rows_fp8quant(
    input: torch.Tensor,  # noqa: A002 - as in rmsnorm()
    y_fp8: torch.Tensor | None = None,
    y_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to E4M3, with a scale for each: the activations of mm_fp8_fp4().

    Args:
        input: [m, h] or [b, s, h], fp16 or bf16, 16-byte aligned; h a multiple of 16 from 64 to 65536. Leading
            dimensions flatten without a copy; rows may lie apart, as in a slice of a packed projection.
        y_fp8: float8_e4m3fn, of input's shape, contiguous, 16-byte aligned, to fill in place; allocated when None.
        y_scale: float32, of input's shape but for its last dimension, contiguous, likewise.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``(y_fp8, y_scale)``: the *decode* scale of each row.
    Numerics:
        In float32, every operation correctly rounded: ``scale = amax / 448`` of a row's largest magnitude, and
        ``e4m3(x * (1 / scale))``, ties to even. NaN is quantized to NaN and does not count for a scale. Rows whose
        scale is less than 2^-126 become zeros with a scale of zero.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _quantize(input, None, None, 0.0, y_fp8, y_scale, enable_pdl)


@public
def rmsnorm_fp8quant(
    input: torch.Tensor,  # noqa: A002 - as in rmsnorm()
    weight: torch.Tensor,
    eps: float = 1e-6,
    y_fp8: torch.Tensor | None = None,
    y_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise rows and quantize them to E4M3, with a scale for each, in one pass: what mm_fp8_fp4() multiplies.

    Args:
        input: as in rows_fp8quant().
        weight: [h] of input's dtype. With dependent launch it is read before the kernel ahead has ended: where that one
            computes it, enable_pdl is False.
        eps: added to the mean of squares.
        y_fp8, y_scale, enable_pdl: as in rows_fp8quant().
    Returns:
        ``(y_fp8, y_scale)`` as rows_fp8quant() gives them, of what rmsnorm() gives: the result is that of both, one by
        one.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _quantize(input, None, weight, eps, y_fp8, y_scale, enable_pdl)


@public
def add_rmsnorm_fp8quant(
    input: torch.Tensor,  # noqa: A002 - as in rmsnorm()
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    y_fp8: torch.Tensor | None = None,
    y_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual in place, normalise the sum, and quantize it to E4M3, with a scale for each row, in one pass.

    Args:
        input: as in rmsnorm_fp8quant().
        residual: like input, contiguous, 16-byte aligned, of memory of its own; becomes ``round(input + residual)``,
            the sum in float32.
        weight, eps, y_fp8, y_scale, enable_pdl: as in rmsnorm_fp8quant().
    Returns:
        ``(y_fp8, y_scale)`` of the sum, as in rmsnorm_fp8quant().
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _quantize(input, residual, weight, eps, y_fp8, y_scale, enable_pdl)


def _quantize(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    y_fp8: torch.Tensor | None,
    y_scale: torch.Tensor | None,
    enable_pdl: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = check_rows(input, weight, eps)
    if residual is not None:
        check_like("residual", residual, input)
        check_contiguous("residual", residual)
    codes = output("y_fp8", y_fp8, tuple(input.shape), (torch.float8_e4m3fn,), like=input)
    scales = output("y_scale", y_scale, tuple(input.shape[:-1]), (torch.float32,), like=input)
    ROWS_FP8QUANT(
        Fp8Arguments(
            input=rows,
            residual=None if residual is None else residual.view(rows.shape),
            weight=weight,
            y_fp8=codes.view(torch.uint8).view(rows.shape),
            y_scale=scales.view(math.prod(scales.shape)),
            eps=eps,
            enable_pdl=enable_pdl,
            names="",
        )
    )
    return codes, scales
