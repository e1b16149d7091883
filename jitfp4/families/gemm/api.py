"""The public functions: arguments are checked, outputs allocated, and one operator called."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from jitfp4.dtypes import CODE_DTYPES, SF_DTYPES
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.gemm.arguments import Arguments
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import DTYPES
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.layouts import SfLayout, padded_shape
from jitfp4.public import checked, public
from jitfp4.reference.formats import unswizzle
from jitfp4.tensors import as_rows, check_contiguous, check_device, check_dtype, check_layout, check_same_device
from jitfp4.weight import COLS, ORDERS, ROWS, Fp4Weight, check_still, places_of, prepare

SCALE_DTYPES = {form.block: dtypes for form, dtypes in SF_DTYPES.items()}


@checked
def prepare_fp4_weight(
    weight: torch.Tensor | Fp4Weight,
    scales: torch.Tensor | None = None,
    block_size: int = 16,
    sf_layout: SfLayout | None = None,
    order: str | None = None,
) -> Fp4Weight:
    """Bring an FP4 weight into the order in which the kernels read it; to be done once, when a model is loaded.

    Args:
        weight: codes [n, k / 2], uint8 or float4_e2m1fn_x2, contiguous, element 2j in the low nibble of byte j, as
            nvfp4_quantize() and mxfp4_quantize() return them; n a multiple of 8, k of 32. A weight that is already
            prepared, given without scales, is returned unchanged.
        scales: its block scales in ``sf_layout``, on the same device: E4M3 for blocks of 16, UE8M0 for 32, or the same
            bytes as uint8. [n, k / block_size] padded as by SfLayout.shape(), or flat.
        block_size: 16 for NVFP4, 32 for MXFP4.
        sf_layout: layout of ``scales``: layout_linear for those of a checkpoint; for those of a quantizer the one that
            it was asked for, or its default, layout_128x4. It has no default here, because scales of many shapes have
            the same size in every layout, and another layout gives another weight. None for a prepared weight only.
        order: for a weight of gates and ups, whose products are called with ``activation``: "concatenated gate,up",
            "concatenated up,gate", or "interleaved" (gate and up of a feature follow each other); n a multiple of 16.
            None for other weights.
    Returns:
        The weight on the same device, for any number of rows of activations; see Fp4Weight. It takes as much memory as
        codes and scales, with n rounded up to a multiple of 64 and k to one of 128. Save Fp4Weight.tensors() with
        safetensors, and pass the loaded tensors to Fp4Weight.from_tensors().
    Numerics:
        Exact, except that MXFP4 blocks become zero if their scale is less than 2^-28 of the largest scale in their row.
    Raises:
        ArgumentError, ArgumentTypeError
    """
    if isinstance(weight, Fp4Weight):
        if scales is not None:
            raise ArgumentError("scales", "a tensor", "None with a weight that is prepared already")
        if order is not None:
            raise ArgumentError("order", repr(order), "None with a weight that is prepared already")
        return weight
    if block_size not in SCALE_DTYPES:
        raise ArgumentError("block_size", block_size, "16 or 32")
    check_dtype("weight", weight, CODE_DTYPES)
    check_device("weight", weight)
    if weight.dim() != 2:
        raise ArgumentError("weight", f"shape {tuple(weight.shape)}", "[n, k / 2]")
    check_contiguous("weight", weight)
    n, k = weight.shape[0], 2 * weight.shape[1]
    if n == 0 or n % ROWS:
        raise ArgumentError("weight", f"n = {n}", f"a positive multiple of {ROWS}")
    if order is not None and order not in ORDERS:
        raise ArgumentError("order", repr(order), " or ".join(map(repr, (*ORDERS, None))))
    if order is not None and n % (2 * ROWS):
        raise ArgumentError("weight", f"n = {n}", f"a multiple of {2 * ROWS}, of gates and ups")
    if k == 0 or k % COLS:
        raise ArgumentError("weight", f"k = {k}", f"a positive multiple of {COLS}")
    if scales is None:
        raise ArgumentTypeError("scales", "None", "a torch.Tensor")
    check_dtype("scales", scales, SCALE_DTYPES[block_size])
    if sf_layout is None:
        raise ArgumentTypeError("sf_layout", "None", "layout_linear, as in a checkpoint, or layout_128x4 or layout_8x4")
    check_same_device("scales", scales, weight)
    check_contiguous("scales", scales)
    layout, cols = check_layout("sf_layout", sf_layout), k // block_size
    padded = padded_shape(layout, n, cols)
    if scales.numel() != math.prod(padded):
        raise ArgumentError("scales", f"{scales.numel()} elements", f"{padded[0]} * {padded[1]}")
    linear = unswizzle(scales.view(torch.uint8).view(padded), layout, n, cols)
    codes, block_format = weight.view(torch.uint8), NVFP4 if block_size == NVFP4.block else MXFP4
    if order is None:
        return prepare(codes, linear, block_format)
    places = places_of(order, n // 2, weight.device)
    return replace(prepare(codes[places], linear[places], block_format), gated=True)


def mm_bf16_fp4(
    a: torch.Tensor,
    weight: Fp4Weight,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply bf16 or fp16 activations by the transpose of an FP4 weight: a linear layer.

    Args:
        a: [..., k], bf16 or fp16, 16-byte aligned; elements of a row adjacent, rows at multiples of 16 bytes. Never
            copied.
        weight: [n, k], from prepare_fp4_weight(), on a's device. It must be complete when the call is made: with
            programmatic dependent launch the kernel reads it while its predecessor still runs.
        alpha: one float32 on a's device, a factor of the product: the weight's global *decode* scale. Read on the
            device only. None means 1.
        bias: [n] of the output's dtype, contiguous, 16-byte aligned, added last. None means no bias.
        out_dtype: torch.bfloat16 or torch.float16; None means a's dtype, or out's.
        out: [..., n] to fill in place, on a's device, 16-byte aligned; elements of a row adjacent, rows at multiples of
            16 bytes; sharing no memory with another argument. Allocated when None.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        activation: "swiglu" for a weight that was prepared with an ``order`` of gates and ups, which needs one: the
            output is then [..., n / 2], without bias and residual. None for other weights.
        residual: [..., n] of the output's dtype, aligned as out and with memory of its own, which the product is added
            to. None means none.
    Returns:
        [..., n] in ``out_dtype``.
    Numerics:
        ``y = round(alpha * sum over k of a[m, k] * weight[n, k] + bias[n])``. Weights and products are exact, sums and
        the rest float32; ``jitfp4.reference.gemm.error_bound`` bounds the error. With a residual ``round(y +
        residual)``.
        With "swiglu" ``round(gate / (1 + exp(-gate)) * up)`` of gates and ups that are not rounded, whose exp is within
        2^-22 + |gate| * 2^-23 of itself. The order of a sum depends only on the shapes and the GPU:
        equal calls give equal bits.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_gates(weight, activation, bias)
    if weight.gated and residual is not None:
        raise ArgumentError("residual", "a tensor", "None with an activation")
    return _multiply(
        *(a, weight.data, weight.row_scale, alpha, bias, residual),
        *(out, weight.n, weight.k, weight.gated, out_dtype, enable_pdl),
    )


def check_gates(weight: Fp4Weight, activation: str | None, bias: torch.Tensor | None) -> None:
    """Check the weight of a product, and that an activation is there where it has gates, without a bias."""
    if not isinstance(weight, Fp4Weight):
        raise ArgumentTypeError("weight", type(weight).__name__, "an Fp4Weight, from prepare_fp4_weight()")
    if weight.gated != (activation is not None) or activation not in (None, "swiglu"):
        allowed = '"swiglu" for a weight of gates and ups' if weight.gated else "None: the weight has no gates"
        raise ArgumentError("activation", repr(activation), allowed)
    if weight.gated and bias is not None:
        raise ArgumentError("bias", "a tensor", "None with an activation")


@public
def _multiply(
    a: torch.Tensor,
    data: torch.Tensor,
    row_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    n: int,
    k: int,
    gated: bool,
    out_dtype: torch.dtype | None,
    enable_pdl: bool | None,
) -> torch.Tensor:
    check_dtype("a", a, tuple(DTYPES))
    check_device("a", a)
    check_same_device("weight", data, a)
    check_still("weight", partial(Fp4Weight, data, row_scale, n, k, NVFP4 if row_scale is None else MXFP4))
    if a.dim() == 0 or a.shape[-1] != k:
        raise ArgumentError("a", f"shape {tuple(a.shape)}", f"[..., {k}], as the weight")
    if out_dtype is not None and out_dtype not in DTYPES:
        raise ArgumentError("out_dtype", out_dtype, "torch.bfloat16 or torch.float16")
    if out is not None:
        check_dtype("out", out, tuple(DTYPES) if out_dtype is None else (out_dtype,))
    dtype = out_dtype or (a if out is None else out).dtype
    shape = (*a.shape[:-1], n // 2 if gated else n)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.device)
    check_same_device("out", out, a)
    if tuple(out.shape) != shape:
        raise ArgumentError("out", f"shape {tuple(out.shape)}", f"{shape}")
    if alpha is not None:
        check_dtype("alpha", alpha, (torch.float32,))
        check_same_device("alpha", alpha, a)
        if alpha.numel() != 1:
            raise ArgumentError("alpha", f"{alpha.numel()} elements", "one")
    if bias is not None:
        check_dtype("bias", bias, (dtype,))
        check_same_device("bias", bias, a)
        if tuple(bias.shape) != (n,):
            raise ArgumentError("bias", f"shape {tuple(bias.shape)}", f"({n},)")
        check_contiguous("bias", bias)
    if residual is not None:
        check_dtype("residual", residual, (dtype,))
        check_same_device("residual", residual, a)
        if tuple(residual.shape) != shape:
            raise ArgumentError("residual", f"shape {tuple(residual.shape)}", f"{shape}")
        residual = as_rows("residual", residual if residual.dim() > 1 else residual.unsqueeze(0), ROWS)
    MM_BF16_FP4(
        Arguments(
            a=as_rows("a", a if a.dim() > 1 else a.unsqueeze(0), COLS),
            data=data,
            row_scale=row_scale,
            alpha=alpha,
            bias=bias,
            residual=residual,
            out=as_rows("out", out if out.dim() > 1 else out.unsqueeze(0), ROWS),
            gated=gated,
            enable_pdl=enable_pdl,
            names="data=weight",
        )
    )
    return out
