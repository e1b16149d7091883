"""mm_fp4: arguments are checked, outputs allocated, and one operator called."""

from __future__ import annotations

import math

import torch

from jitfp4.arch import Arch
from jitfp4.dispatch import differ
from jitfp4.dtypes import CODE_DTYPES
from jitfp4.errors import ArgumentError, UnsupportedArchError
from jitfp4.families.gemm.api import SCALE_DTYPES
from jitfp4.families.gemm.arguments import Fp4Arguments
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.problem import DTYPES
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.layouts import SfLayout, padded_shape
from jitfp4.public import public
from jitfp4.tensors import as_rows, check_device, check_dtype, check_same_device
from jitfp4.weight import COLS, ROWS

BACKENDS = ("auto", "cudnn", "trtllm", "cutlass", "cute-dsl", "b12x")
_SHUFFLED_ROWS = 128  # the rows of a shuffled b are a multiple of it


@public
def mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    block_size: int = 16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    use_nvfp4: bool = True,
    enable_pdl: bool | None = True,
    *,
    skip_check: bool = False,  # noqa: ARG001 - FlashInfer's name
) -> torch.Tensor:
    """Multiply two FP4 matrices with block scales: ``a @ b``.

    Args:
        a: codes [m, k / 2], uint8 or float4_e2m1fn_x2, element 2j in the low nibble of byte j, as nvfp4_quantize() and
            mxfp4_quantize() return them; k a multiple of 32. 16-byte aligned, bytes of a row adjacent, rows at
            multiples of 16 bytes.
        b: codes [k / 2, n], the transpose ``b_fp4.T`` of a matrix [n, k / 2] like a; n a multiple of 8.
        a_descale: block scales of a in the 128x4 layout, contiguous, 16-byte aligned: E4M3 for blocks of 16, UE8M0 for
            32, or the same bytes as uint8. [m, k / block_size] padded as by SfLayout.shape(), or flat. Values in the
            padding have no effect.
        b_descale: block scales of b likewise, always in 128x4: the transpose ``b_sf.T``, or flat.
        alpha: one float32 on a's device, a factor of the product: for NVFP4 the *decode* factor, the inverse of the
            product of both global encode scales. Read on the device only. None means 1.
        out_dtype: torch.bfloat16 or torch.float16.
        out: [m, n] of out_dtype to fill in place, on a's device, 16-byte aligned; elements of a row adjacent, rows at
            multiples of 16 bytes; sharing no memory with another argument. Allocated when None.
        block_size: 16 with NVFP4, 32 with MXFP4.
        use_8x4_sf_layout: whether a_descale is in the 8x4 layout.
        backend: "auto", or a name of FlashInfer's: cudnn, trtllm, cutlass, cute-dsl, b12x. All run the same kernels of
            jitfp4, without the limits of the named library. Only "trtllm" changes the inputs, as in FlashInfer: b and
            b_descale are shuffled (do_shuffle=True, or shuffle_matrix_a() and shuffle_matrix_sf_a() with a tile of
            128), n is a multiple of 128, and the result is put in order by a copy.
        use_nvfp4: False for MXFP4.
        enable_pdl: programmatic dependent launch; True and None mean wherever the GPU has it.
        skip_check: accepted, without effect: checks protect memory, and repeated calls do not repeat them.
    Returns:
        [m, n] in ``out_dtype``. On sm_90a, which multiplies 16-bit floats, a takes 2 m k bytes until the call ends.
    Numerics:
        ``round(alpha * sum over k of a[m, k] * b[k, n])``, where an element is its code times its block's scale; the
        sign of a scale is ignored. Elements and products are exact, sums and alpha float32;
        ``jitfp4.reference.gemm.error_bound`` bounds the error. The order of a sum depends only on the shapes and the
        GPU: equal calls give equal bits. MXFP4 elements of 2^128 or more may count as infinite.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.

    ``mm_fp4.is_backend_supported(backend, cc)`` says whether the backend's name is known, and whether jitfp4 has
    kernels for the compute capability, such as 100.
    """
    block = NVFP4.block if use_nvfp4 else MXFP4.block
    if backend not in BACKENDS:
        raise ArgumentError("backend", repr(backend), ", ".join(BACKENDS))
    if block_size != block:
        raise ArgumentError("block_size", block_size, f"{block} with use_nvfp4={use_nvfp4}")
    if out_dtype not in DTYPES:
        raise ArgumentError("out_dtype", out_dtype, "torch.bfloat16 or torch.float16")
    a_rows, b_rows = _operands(a, b)
    m, n, cols = a_rows.shape[0], b_rows.shape[0], 2 * a_rows.shape[1] // block
    is_shuffled = backend == "trtllm"
    if is_shuffled and n % _SHUFFLED_ROWS:
        raise ArgumentError("b", f"n = {n}", f"a multiple of {_SHUFFLED_ROWS}, shuffled, with backend trtllm")
    a_layout = SfLayout.layout_8x4 if use_8x4_sf_layout else SfLayout.layout_128x4
    if alpha is not None:
        check_dtype("alpha", alpha, (torch.float32,))
        check_same_device("alpha", alpha, a)
        if alpha.numel() != 1:
            raise ArgumentError("alpha", f"{alpha.numel()} elements", "one")
    result = torch.empty((m, n), dtype=out_dtype, device=a.device) if out is None else _out(out, (m, n), out_dtype, a)
    product = torch.empty((m, n), dtype=out_dtype, device=a.device) if is_shuffled else result
    MM_FP4(
        Fp4Arguments(
            a=a_rows,
            b=b_rows,
            a_descale=_scales("a_descale", a_descale, padded_shape(a_layout, m, cols), block, a),
            b_descale=_scales("b_descale", b_descale, padded_shape(SfLayout.layout_128x4, n, cols), block, a),
            alpha=alpha,
            out=product,
            block_size=block,
            use_8x4_sf_layout=use_8x4_sf_layout,
            enable_pdl=enable_pdl,
        )
    )
    if is_shuffled:  # the shuffle moved row 4 i + j of 32 to 8 j + i
        result.unflatten(-1, (-1, 8, 4)).copy_(product.unflatten(-1, (-1, 4, 8)).transpose(-1, -2))
    return result


def _operands(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a, [m, k / 2], and of b's transpose, [n, k / 2], after checks."""
    for name, codes, shape in (("a", a, "[m, k / 2]"), ("b", b, "[k / 2, n]")):
        check_dtype(name, codes, CODE_DTYPES)
        check_device(name, codes)
        if codes.dim() != 2:
            raise ArgumentError(name, f"shape {tuple(codes.shape)}", shape)
    check_same_device("b", b, a)
    k, n = 2 * a.shape[1], b.shape[1]
    if k == 0 or k % COLS:
        raise ArgumentError("a", f"k = {k}", f"a positive multiple of {COLS}: K % {COLS} == 0")
    if differ(b.shape[:1], a.shape[1:]):
        raise ArgumentError("b", f"shape {tuple(b.shape)}", f"[{k // 2}, n], as a of shape {tuple(a.shape)}")
    if differ((n % ROWS,), (0,)):
        raise ArgumentError("b", f"n = {n}", f"a multiple of {ROWS}: N % {ROWS} == 0")
    if b.stride(0) != 1:
        raise ArgumentError("b", f"strides {b.stride()}", "the transpose of a matrix [n, k / 2] of adjacent bytes")
    bytes_a, bytes_b = a.view(torch.uint8), b.view(torch.uint8).T
    return as_rows("a", bytes_a, COLS // 2), as_rows("b", bytes_b, COLS // 2)


def _scales(name: str, scales: torch.Tensor, shape: tuple[int, int], block: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes of block scales, which must be of ``shape`` (those of b of its transpose) or flat."""
    check_dtype(name, scales, SCALE_DTYPES[block])
    check_same_device(name, scales, like)
    buffer = scales.T if name == "b_descale" and scales.dim() == 2 else scales
    if differ(buffer.shape, shape if buffer.dim() == 2 else (math.prod(shape),)):
        allowed = shape if buffer is scales else shape[::-1]
        raise ArgumentError(name, f"shape {tuple(scales.shape)}", f"{allowed}, or flat")
    if not buffer.is_contiguous():
        raise ArgumentError(name, f"strides {scales.stride()}", "a dense buffer, that of b transposed: b_sf.T")
    return buffer.view(torch.uint8)


def _out(out: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    check_dtype("out", out, (dtype,))
    check_same_device("out", out, like)
    if differ(out.shape, shape):
        raise ArgumentError("out", f"shape {tuple(out.shape)}", f"{shape}")
    return as_rows("out", out, ROWS)


def _is_backend_supported(backend: str, cc: int | None = None) -> bool:
    """Whether mm_fp4() takes this backend and, if ``cc`` is given, has kernels for this compute capability."""
    try:
        return backend in BACKENDS and (cc is None or bool(Arch.of_capability(*divmod(cc, 10))))
    except UnsupportedArchError:
        return False


mm_fp4.is_backend_supported = _is_backend_supported  # type: ignore[attr-defined]
