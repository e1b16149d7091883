"""mm_fp8_fp4: arguments are checked, outputs allocated, and one operator called."""

from __future__ import annotations

from functools import partial

import torch

from jitfp4.dispatch import differ, known
from jitfp4.errors import ArgumentError
from jitfp4.families.gemm.api import check_gates
from jitfp4.families.gemm.arguments import Fp8Arguments
from jitfp4.families.gemm.fp8_operation import MM_FP8_FP4
from jitfp4.families.gemm.problem import DTYPES
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.layouts import round_up
from jitfp4.public import public
from jitfp4.tensors import as_rows, check_contiguous, check_device, check_dtype, check_same_device
from jitfp4.weight import COLS, ROWS, TILE_ROWS, Fp4Weight, check_still


def mm_fp8_fp4(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    weight: Fp4Weight,
    row_scale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """Multiply E4M3 activations by the transpose of an FP4 weight, on the FP8 tensor cores of sm_90a.

    Args:
        a: [..., k], float8_e4m3fn, 16-byte aligned; elements of a row adjacent, rows at multiples of 16 bytes.
        a_scale: the *decode* scale of each row of ``a``, float32 with as many elements as ``a`` has rows, contiguous;
            or one element for all of ``a``.
        weight: [n, k], from prepare_fp4_weight(), on a's device. It must be complete when the call is made, as
            ``row_scale`` must be, because with programmatic dependent launch the kernel reads both while its
            predecessor still runs.
        row_scale: float32 [round_up(n, 64)], from fp8_row_scale(weight).
        alpha: one float32 on a's device, a factor of the product: the weight's global *decode* scale. Read on the
            device only. None means 1.
        bias: [n] of the output's dtype, contiguous, 16-byte aligned, added last. None means no bias.
        out_dtype: torch.bfloat16 or torch.float16, also of ``out``.
        out: [..., n] to fill in place, on a's device, 16-byte aligned; elements of a row adjacent, rows at multiples of
            16 bytes; sharing no memory with another argument. Allocated when None.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        activation: "swiglu" for a weight that was prepared with an ``order`` of gates and ups, which needs one: the
            output is then [..., n / 2], without bias. None for other weights.
    Returns:
        [..., n] in ``out_dtype``.
        More than 512 rows of ``a`` take n * k bytes, rounded up to multiples of 64 and 128, while they are multiplied:
        the weight in E4M3, of which each element is then expanded once. Weights of more than 2^30 elements are not.
    Numerics:
        ``round(alpha * row[n] * a_scale[m] * sum over k of a[m, k] * w[n, k] + bias[n])``, where ``w`` is the weight
        divided by its row's scale and rounded to E4M3, ties to even: an element is off by at most 1 / 21 of itself, and
        one that is less than 2^-6 then by less than 2^-9. MXFP4 blocks whose scale is at least 2^-14 of the largest of
        their row are exact. Sums stay in the tensor cores, which keep about 14 bits of them: of normal operands the
        error of a sum is 0.12 % of its root mean square for 4096 columns, and 0.38 % for 28672, beside 2.2 % of a
        rounded NVFP4 weight and 2.7 % of activations in E4M3 (``bench/results/cpu/fp8_accuracy.csv``). The order of a
        sum depends only on the shapes and the GPU: equal calls give equal bits. "swiglu" as in mm_bf16_fp4().
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
        UnsupportedArchError: on a GPU other than sm_90a.
    """
    check_gates(weight, activation, bias)
    return _multiply(
        *(a, a_scale, weight.data, weight.row_scale, row_scale, alpha, bias),
        *(out, weight.n, weight.k, weight.gated, out_dtype, enable_pdl),
    )


@public
def _multiply(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    data: torch.Tensor,
    own_scale: torch.Tensor | None,
    row_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    n: int,
    k: int,
    gated: bool,
    out_dtype: torch.dtype,
    enable_pdl: bool | None,
) -> torch.Tensor:
    check_dtype("a", a, (torch.float8_e4m3fn,))
    check_device("a", a)
    check_same_device("weight", data, a)
    check_still("weight", partial(Fp4Weight, data, own_scale, n, k, NVFP4 if own_scale is None else MXFP4))
    if a.dim() == 0 or a.shape[-1] != k:
        raise ArgumentError("a", f"shape {tuple(a.shape)}", f"[..., {k}], as the weight")
    if out_dtype not in DTYPES:
        raise ArgumentError("out_dtype", out_dtype, "torch.bfloat16 or torch.float16")
    rows = as_rows("a", a if a.dim() > 1 else a.unsqueeze(0), COLS)
    one = known(a_scale.numel() == 1)
    _check_vector("a_scale", a_scale, 1 if one else rows.shape[0], a)
    _check_vector("row_scale", row_scale, round_up(n, TILE_ROWS), a)
    if row_scale.dim() != 1:
        raise ArgumentError("row_scale", f"shape {tuple(row_scale.shape)}", f"({round_up(n, TILE_ROWS)},)")
    if alpha is not None:
        _check_vector("alpha", alpha, 1, a)
    if bias is not None:
        check_dtype("bias", bias, (out_dtype,))
        check_same_device("bias", bias, a)
        if tuple(bias.shape) != (n,):
            raise ArgumentError("bias", f"shape {tuple(bias.shape)}", f"({n},)")
        check_contiguous("bias", bias)
    shape = (*a.shape[:-1], n // 2 if gated else n)
    result = torch.empty(shape, dtype=out_dtype, device=a.device) if out is None else out
    check_dtype("out", result, (out_dtype,))
    check_same_device("out", result, a)
    if tuple(result.shape) != shape:
        raise ArgumentError("out", f"shape {tuple(result.shape)}", f"{shape}")
    MM_FP8_FP4(
        Fp8Arguments(
            a=rows.view(torch.uint8),
            a_scale=a_scale,
            data=data,
            row_scale=row_scale,
            alpha=alpha,
            bias=bias,
            out=as_rows("out", result if result.dim() > 1 else result.unsqueeze(0), ROWS),
            gated=gated,
            enable_pdl=enable_pdl,
            names="data=weight",
        )
    )
    return result


def _check_vector(name: str, given: torch.Tensor, size: int, like: torch.Tensor) -> None:
    check_dtype(name, given, (torch.float32,))
    check_same_device(name, given, like)
    if differ((given.numel(),), (size,)):
        raise ArgumentError(name, f"{given.numel()} elements", f"{size}")
    check_contiguous(name, given)
