"""RMSNorm of a few rows and the product by a small matrix in one launch: the operation and its public functions."""

from __future__ import annotations

import torch

from jitfp4.dispatch import reaches
from jitfp4.errors import ArgumentError
from jitfp4.families.norm.kernels.linear import (
    KERNEL,
    MOST_ELEMENTS,
    MOST_EXPERTS,
    MOST_HIDDEN,
    MOST_PRODUCTS,
    MOST_ROWS,
    MOST_TAKEN,
    TABLE,
    Arguments,
    problem,
    problems,
)
from jitfp4.families.norm.plain import check_rows
from jitfp4.operation import Operation
from jitfp4.public import public
from jitfp4.reference import norm as reference
from jitfp4.reference import routing
from jitfp4.tensors import check_contiguous, check_dtype, check_same_device, output


def _reference(arguments: Arguments) -> None:
    a = arguments
    y = reference.rmsnorm(a.input, a.weight, a.eps, a.weight_bias)
    logits = y.float() @ a.matrix.float().T
    if a.bias is not None:
        logits += a.bias.float()
    a.out.copy_(y)
    a.product.copy_(logits)
    if a.ids is None or a.weights is None:
        return
    if a.shared:
        ids, weights = routing.choose_with_shared(logits, a.top_k, renormalize=a.renormalize)
    else:
        ids = routing.choose(logits, a.top_k, None, 1, 1)
        weights = routing.weights_of(logits, ids, softmax=True, renormalize=a.renormalize, scale=1.0)
    a.ids.copy_(ids)
    a.weights.copy_(weights)


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
    exclusive=("out", "product", "ids", "weights"),
    growing=("m",),
)


def joins_norm(rows: int, hidden: int) -> bool:
    """Whether rmsnorm_linear() and rmsnorm_route_experts() take so many rows of so many elements."""
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
    _check(input, weight, "matrix", matrix, bias, eps)
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
            ids=None,
            weights=None,
            eps=float(eps),
            weight_bias=float(weight_bias),
            top_k=0,
            shared=False,
            renormalize=False,
            enable_pdl=enable_pdl,
            names="",
        )
    )
    return normed, products


@public
def rmsnorm_route_experts(
    input: torch.Tensor,  # noqa: A002 - as in rmsnorm()
    weight: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    eps: float,
    *,
    weight_bias: float,
    renormalize: bool,
    shared: bool,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise a few rows, multiply them by a router, and choose their experts by a softmax, in one launch.

    Args:
        input, weight: as in rmsnorm_linear().
        router: ``matrix`` of rmsnorm_linear(), a row for each of up to 1024 experts, and where ``shared`` one more.
        top_k: experts of a token, 1 to 31. They are in the order of their logits, the highest first.
        eps, weight_bias: as in rmsnorm_linear().
        renormalize: divide the scores of the experts of a token by their sum.
        shared: the last row of the router is the gate of an expert that all tokens have, such as Qwen3-Next's shared
            expert. Behind the ``top_k`` slots is one with the number of that row, whose weight is the sigmoid of its
            product.
        bias, out: as in rmsnorm_linear().
        logits: ``product`` of rmsnorm_linear(), float32.
        out_ids: [m, top_k or, with a shared expert, top_k + 1] int32 to fill in place, contiguous.
        out_weights: the same of float32. What is None is allocated; all four are memory of their own.
        enable_pdl: as in rmsnorm_linear().
    Returns:
        ``(out, logits, out_ids, out_weights)``: the rows, and what fp4_experts() takes.
    Numerics:
        As of rmsnorm_linear(), and of route_experts() with "softmax" for float32 logits.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _check(input, weight, "router", router, bias, eps)
    (m, n), slots = (input.shape[0], router.shape[0]), top_k + shared
    experts = n - shared
    if experts > MOST_EXPERTS or reaches(m * n, MOST_PRODUCTS + 1):
        raise ArgumentError("router", f"{experts} experts", f"at most {min(MOST_EXPERTS, MOST_PRODUCTS // max(1, m))}")
    if not 0 < top_k <= min(experts, MOST_TAKEN):
        raise ArgumentError("top_k", top_k, f"1 to {min(experts, MOST_TAKEN)}")
    normed = output("out", out, tuple(input.shape), (input.dtype,), like=input)
    products = output("logits", logits, (m, n), (torch.float32,), like=input)
    ids = output("out_ids", out_ids, (m, slots), (torch.int32,), like=input)
    weights = output("out_weights", out_weights, (m, slots), (torch.float32,), like=input)
    RMSNORM_LINEAR(
        Arguments(
            input=input,
            weight=weight,
            matrix=router,
            bias=bias,
            out=normed,
            product=products,
            ids=ids,
            weights=weights,
            eps=float(eps),
            weight_bias=float(weight_bias),
            top_k=top_k,
            shared=shared,
            renormalize=renormalize,
            enable_pdl=enable_pdl,
            names="matrix=router,product=logits,ids=out_ids,weights=out_weights",
        )
    )
    return normed, products, ids, weights


def _check(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    name: str,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> None:
    """What both functions take; ``name`` is the matrix's."""
    check_rows(input, weight, eps)
    if input.dim() != 2:
        raise ArgumentError("input", f"shape {tuple(input.shape)}", "[m, h]")
    m, h = input.shape
    if reaches(m, MOST_ROWS + 1) or h > MOST_HIDDEN or reaches(m * h, MOST_ELEMENTS + 1):
        allowed = f"up to {MOST_ROWS} rows of up to {MOST_HIDDEN} elements, {MOST_ELEMENTS} together"
        raise ArgumentError("input", f"shape {tuple(input.shape)}", allowed)
    check_dtype(name, matrix, (input.dtype,))
    check_same_device(name, matrix, input)
    if matrix.dim() != 2 or not matrix.shape[0] or matrix.shape[1] != h:
        raise ArgumentError(name, f"shape {tuple(matrix.shape)}", f"[n, {h}], as input's rows")
    check_contiguous(name, matrix)
    if bias is not None:
        check_dtype("bias", bias, (input.dtype,))
        check_same_device("bias", bias, input)
        if tuple(bias.shape) != (matrix.shape[0],):
            raise ArgumentError("bias", f"shape {tuple(bias.shape)}", f"({matrix.shape[0]},)")
        check_contiguous("bias", bias)
