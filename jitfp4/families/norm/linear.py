"""RMSNorm of a few rows and the product by a small matrix in one launch: the operation and its public functions."""

from __future__ import annotations

import torch

from jitfp4.dispatch import reaches
from jitfp4.errors import ArgumentError
from jitfp4.families.norm.kernels.linear import (
    KERNEL,
    MOST_ELEMENTS,
    MOST_HIDDEN,
    MOST_ROWS,
    TABLE,
    Arguments,
    problem,
    problems,
)
from jitfp4.families.norm.plain import check_rows
from jitfp4.operation import Operation
from jitfp4.public import public
from jitfp4.reference import norm as reference
from jitfp4.tensors import check_contiguous, check_dtype, check_same_device, output


def _reference(arguments: Arguments) -> None:
    a = arguments
    y = reference.rmsnorm(a.input, a.weight, a.eps, a.weight_bias)
    logits = y.float() @ a.matrix.float().T
    if a.bias is not None:
        logits += a.bias.float()
    a.out.copy_(y)
    a.product.copy_(logits)


RMSNORM_LINEAR = Operation(
    Arguments,
    name="rmsnorm_linear",
    kernels=(KERNEL,),
    problem=problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="out",
    aligned=("input", "weight", "matrix", "out"),
    exclusive=("out", "product"),
    growing=("m",),
)


def joins_norm(rows: int, hidden: int) -> bool:
    """Whether rmsnorm_linear() takes so many rows of so many elements."""
    return 0 < rows <= MOST_ROWS and 64 <= hidden <= MOST_HIDDEN and rows * hidden <= MOST_ELEMENTS


@public
def rmsnorm_linear(
    input: torch.Tensor,  # noqa: A002 - as in rmsnorm()
    weight: torch.Tensor,
    matrix: torch.Tensor,
    eps: float,
    *,
    weight_bias: float,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    product: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise a few rows, and multiply them by a small matrix of 16-bit floats, in one launch.

    Args:
        input: [m, h], fp16 or bf16, 16-byte aligned; up to 16 rows, h a multiple of 16 from 64 to 4096, m * h up to
            49152. Rows may lie apart, at multiples of 16 bytes.
        weight: [h] of input's dtype.
        matrix: [n, h] of input's dtype, contiguous, 16-byte aligned. As ``weight``, it must be complete at the call,
            because with programmatic dependent launch the kernel reads it while its predecessor still runs.
        eps: added to the mean of squares.
        weight_bias: added to ``weight`` in float32: 0, or 1 as norms of Gemma and Qwen3-Next have it.
        bias: [n] of input's dtype, contiguous.
        out: [m, h] of input's dtype to fill in place, contiguous; allocated when None.
        product: [m, n] to fill in place, contiguous, float32 or of input's dtype; allocated as float32 when None. Both
            are memory of their own.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``(out, product)``.
    Numerics:
        ``out`` as by rmsnorm(); ``product = round(out @ matrix.T + bias)``, the sum in float32, in an order that
        depends on h alone. Equal calls give equal bits.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _check(input, weight, matrix, bias, eps)
    m, n = input.shape[0], matrix.shape[0]
    normed = output("out", out, tuple(input.shape), (input.dtype,), like=input)
    products = output("product", product, (m, n), (torch.float32, input.dtype), like=input)
    RMSNORM_LINEAR(
        Arguments(
            input=input,
            weight=weight,
            matrix=matrix,
            bias=bias,
            out=normed,
            product=products,
            eps=float(eps),
            weight_bias=float(weight_bias),
            enable_pdl=enable_pdl,
        )
    )
    return normed, products


def _check(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> None:
    check_rows(input, weight, eps)
    if input.dim() != 2:
        raise ArgumentError("input", f"shape {tuple(input.shape)}", "[m, h]")
    m, h = input.shape
    if reaches(m, MOST_ROWS + 1) or h > MOST_HIDDEN or reaches(m * h, MOST_ELEMENTS + 1):
        allowed = f"up to {MOST_ROWS} rows of up to {MOST_HIDDEN} elements, {MOST_ELEMENTS} together"
        raise ArgumentError("input", f"shape {tuple(input.shape)}", allowed)
    check_dtype("matrix", matrix, (input.dtype,))
    check_same_device("matrix", matrix, input)
    if matrix.dim() != 2 or not matrix.shape[0] or matrix.shape[1] != h:
        raise ArgumentError("matrix", f"shape {tuple(matrix.shape)}", f"[n, {h}], as input's rows")
    check_contiguous("matrix", matrix)
    if bias is not None:
        check_dtype("bias", bias, (input.dtype,))
        check_same_device("bias", bias, input)
        if tuple(bias.shape) != (matrix.shape[0],):
            raise ArgumentError("bias", f"shape {tuple(bias.shape)}", f"({matrix.shape[0]},)")
        check_contiguous("bias", bias)
