"""Linear layers in FP8 for steps of many tokens: activations become E4M3, with a scale for each row, when asked for.

Numbers change: docs/numerics.md says by how much. So no layer does it by itself.
"""

from __future__ import annotations

import torch

from jitfp4.errors import ArgumentError
from jitfp4.families.gemm import Fp4Weight, fp8_row_scale, mm_bf16_fp4, mm_fp8_fp4
from jitfp4.families.norm import rows_fp8quant
from jitfp4.families.norm.problem import MAX_HIDDEN, MIN_HIDDEN
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.layouts import ceil_div
from jitfp4.tensors import device_arch

LEAST_ROWS = 512
"""Rows of activations from which products are in FP8: below, products in 16 bits are as fast (h200/fp8.csv)."""

LEAST_ROWS_OF_EXPERT = 128
"""The mean number of rows of an expert from which experts are in FP8: with fewer they gain little, or lose."""


def least_tokens(experts: int, slots: int) -> int:
    """Tokens of ``slots`` experts each from which a layer of so many, on all GPUs together, is in FP8."""
    return ceil_div(LEAST_ROWS_OF_EXPERT * experts, slots)


def check_gpu(weight: torch.Tensor) -> None:
    """Raises ArgumentError for a weight on a GPU without products in FP8."""
    if weight.is_cuda and not device_arch(weight.get_device()).has_wgmma:
        raise ArgumentError("activations", "'fp8'", "None on a GPU other than sm_90a")


def row_scale_of(weight: Fp4Weight) -> torch.Tensor | None:
    """What products in FP8 need beside a weight; None where rows have a size that is not quantized.

    Raises ArgumentError on a GPU without such products.
    """
    check_gpu(weight.data)
    return fp8_row_scale(weight) if MIN_HIDDEN <= weight.k <= MAX_HIDDEN else None


def product(
    rows: torch.Tensor,
    weight: Fp4Weight,
    row_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As mm_bf16_fp4(), with "swiglu" for a weight of gates and ups, but in FP8 from LEAST_ROWS rows on.

    While it is traced, the number of rows may be a symbol: the operator decides when it is called.
    """
    run = _operator if torch.compiler.is_dynamo_compiling() else _product
    parts = weight.data, weight.row_scale, row_scale, alpha, bias, residual
    return run(rows, *parts, weight.n, weight.k, weight.gated)


def _product(
    rows: torch.Tensor,
    data: torch.Tensor,
    own_scale: torch.Tensor | None,
    row_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    n: int,
    k: int,
    gated: bool,
) -> torch.Tensor:
    weight = Fp4Weight(data, own_scale, n, k, NVFP4 if own_scale is None else MXFP4, gated)
    activation = "swiglu" if gated else None
    if rows.numel() < LEAST_ROWS * k:
        return mm_bf16_fp4(rows, weight, alpha, bias, activation=activation, residual=residual)
    codes, scales = rows_fp8quant(rows)
    out = mm_fp8_fp4(codes, scales, weight, row_scale, alpha, bias, rows.dtype, activation=activation)
    return out if residual is None else out.add_(residual)


_operator = torch.library.custom_op("jitfp4::product_by_rows", _product, mutates_args=())


@_operator.register_fake
def _(
    rows: torch.Tensor,
    data: torch.Tensor,  # noqa: ARG001 - as of the operator, from here on
    own_scale: torch.Tensor | None,  # noqa: ARG001
    row_scale: torch.Tensor,  # noqa: ARG001
    alpha: torch.Tensor | None,  # noqa: ARG001
    bias: torch.Tensor | None,  # noqa: ARG001
    residual: torch.Tensor | None,  # noqa: ARG001
    n: int,
    k: int,  # noqa: ARG001
    gated: bool,
) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], n // 2 if gated else n)
