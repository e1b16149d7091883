"""RMSNorm to 16-bit floats, between two products: the operation and its public functions."""

from __future__ import annotations

import torch

from jitfp4.dispatch import differ
from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.norm.kernels.rmsnorm import KERNEL, TABLE, Arguments, problem, problems
from jitfp4.families.norm.problem import MAX_HIDDEN, MIN_HIDDEN
from jitfp4.operation import Operation
from jitfp4.public import public
from jitfp4.reference import norm as reference
from jitfp4.tensors import as_rows, check_contiguous, check_dtype, check_same_device, output

_MULTIPLE = 16  # of the elements of a row
_ALIGNED = 16  # bytes


def _reference(arguments: Arguments) -> None:
    x = arguments.out if arguments.input is None else arguments.input
    if arguments.residual is not None:
        x = reference.add(x, arguments.residual)
        arguments.residual.copy_(x)
    gate = None if arguments.gate is None else arguments.gate.flatten(0, 1)
    y = reference.rmsnorm(x, arguments.weight, arguments.eps, arguments.weight_bias, gate)
    arguments.out.copy_(y)


RMSNORM = Operation(
    Arguments,
    name="rmsnorm",
    kernels=(KERNEL,),
    problem=problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="out",
    aligned=("input", "residual", "weight", "gate", "out"),
    exclusive=("residual", "out"),
    growing=("m",),
)


@public
def rmsnorm(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Normalise rows.

    Args:
        input: [m, h] or [b, s, h], fp16 or bf16, 16-byte aligned; h a multiple of 16 from 64 to 65536. Leading
            dimensions flatten without a copy; rows may lie apart, as in a slice of a packed projection.
        weight: [h] of input's dtype.
        eps: added to the mean of squares.
        out: contiguous, of input's shape and dtype, to fill in place; input itself, or memory of its own.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        out, of input's shape and dtype.
    Numerics:
        In float32, every operation correctly rounded:
        ``rstd = 1 / sqrt(sum(x * x) / h + eps);  y = round((x * rstd) * weight)``. The order of the sum is that of
        ``jitfp4.reference.norm.sum_of_squares``, as in rmsnorm_fp4quant().
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _normalise(input, weight, None, eps, 0.0, out, enable_pdl)


@public
def gemma_rmsnorm(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Normalise rows as rmsnorm() does, with ``weight + 1``, the sum in float32, in place of ``weight``.

    Args:
        input, weight, eps, out, enable_pdl: as in rmsnorm().
    Returns:
        out, of input's shape and dtype.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _normalise(input, weight, None, eps, 1.0, out, enable_pdl)


@public
def rmsnorm_gated(
    input: torch.Tensor,  # noqa: A002 - as in rmsnorm()
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Normalise rows and multiply them by ``silu(gate)``, as Qwen3-Next's gated delta rule does with its output.

    Args:
        input: as in rmsnorm().
        gate: of input's shape and dtype, 16-byte aligned; elements of a row adjacent, both other strides any multiples
            of 16 bytes, as of heads in a slice of a packed projection.
        weight, eps, out, enable_pdl: as in rmsnorm().
    Returns:
        out, of input's shape and dtype.
    Numerics:
        ``round(((x * rstd) * weight) * silu(gate))`` in float32, rounded once. The exp of silu, as in
        silu_and_mul_nvfp4_quantize(), is the one step in which CPU and GPU may differ.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _normalise(input, weight, gate, eps, 0.0, out, enable_pdl)


@public
def fused_add_rmsnorm(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add to the residual in place, and replace the input by the normalised sum.

    Args:
        input: contiguous [m, h] or [b, s, h], as in rmsnorm(); becomes the normalised sum.
        residual: like input, of memory of its own; becomes ``round(input + residual)``.
        weight, eps, enable_pdl: as in rmsnorm().
    Returns:
        None: both are updated in place.
    Numerics:
        ``x = round(input + residual)``, the sum in float32; then as in rmsnorm().
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _add_and_normalise(input, residual, weight, eps, 0.0, enable_pdl)


@public
def gemma_fused_add_rmsnorm(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """As fused_add_rmsnorm(), with ``weight + 1``, the sum in float32, in place of ``weight``.

    Args:
        input, residual, weight, eps, enable_pdl: as in fused_add_rmsnorm().
    Returns:
        None: both are updated in place.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _add_and_normalise(input, residual, weight, eps, 1.0, enable_pdl)


def check_rows(input: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:  # noqa: A002
    """The input as rows, after checks of what all functions take; ``weight`` is None where nothing is normalised."""
    check_dtype("input", input, HALVES)
    rows = as_rows("input", input, _MULTIPLE)
    h = rows.shape[1]
    if not MIN_HIDDEN <= h <= MAX_HIDDEN:
        raise ArgumentError("input", f"h = {h}", f"a multiple of {_MULTIPLE} from {MIN_HIDDEN} to {MAX_HIDDEN}")
    if weight is None:
        return rows
    check_dtype("weight", weight, (input.dtype,))
    check_same_device("weight", weight, input)
    if tuple(weight.shape) != (h,):
        raise ArgumentError("weight", f"shape {tuple(weight.shape)}", f"({h},)")
    check_contiguous("weight", weight)
    if not eps >= 0:
        raise ArgumentError("eps", eps, "a finite number that is not negative")
    return rows


def check_like(name: str, tensor: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
    """Check that ``tensor`` has input's shape, dtype and device."""
    check_dtype(name, tensor, (input.dtype,))
    check_same_device(name, tensor, input)
    if differ(tensor.shape, input.shape):
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{tuple(input.shape)}, as the input")


def _by_two(gate: torch.Tensor) -> torch.Tensor:
    """A gate [m, h] or [b, s, h] as [b, s, h]."""
    if gate.dim() > 3:
        gate = as_rows("gate", gate, _MULTIPLE)
    strides = [stride for stride, size in zip(gate.stride()[:-1], gate.shape, strict=False) if size > 1]
    if gate.stride(-1) != 1 or any(stride * gate.element_size() % _ALIGNED for stride in strides):
        raise ArgumentError("gate", f"strides {gate.stride()}", "rows of adjacent elements at multiples of 16 bytes")
    return gate.unsqueeze(1) if gate.dim() == 2 else gate


def _normalise(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    gate: torch.Tensor | None,
    eps: float,
    weight_bias: float,
    out: torch.Tensor | None,
    enable_pdl: bool | None,
) -> torch.Tensor:
    rows = check_rows(input, weight, eps)
    if gate is not None:
        check_like("gate", gate, input)
        gate = _by_two(gate)
    result = output("out", out, tuple(input.shape), (input.dtype,), like=input)
    RMSNORM(
        Arguments(
            input=None if out is input else rows,
            residual=None,
            weight=weight,
            gate=gate,
            out=result.view(-1, rows.shape[1]),
            eps=eps,
            weight_bias=weight_bias,
            enable_pdl=enable_pdl,
            names="",
        )
    )
    return result


def _add_and_normalise(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    enable_pdl: bool | None,
) -> None:
    """The call behind both functions."""
    rows = check_rows(input, weight, eps)
    check_contiguous("input", input)
    check_like("residual", residual, input)
    check_contiguous("residual", residual)
    RMSNORM(
        Arguments(
            input=None,
            residual=residual.view(rows.shape),
            weight=weight,
            gate=None,
            out=rows,
            eps=eps,
            weight_bias=weight_bias,
            enable_pdl=enable_pdl,
            names="out=input",
        )
    )
