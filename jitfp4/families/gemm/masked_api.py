"""grouped_gemm_nt_masked: arguments are checked, and one operator called."""

from __future__ import annotations

import torch

from jitfp4.dispatch import differ
from jitfp4.dtypes import CODE_DTYPES
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.gemm.api import SCALE_DTYPES
from jitfp4.families.gemm.arguments import MaskedArguments
from jitfp4.families.gemm.masked_operation import MM_FP4_MASKED
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.layouts import SfLayout, padded_shape
from jitfp4.public import public
from jitfp4.tensors import as_rows, check_contiguous, check_device, check_dtype, check_same_device, check_strided
from jitfp4.weight import COLS, ROWS

Operand = tuple[torch.Tensor, torch.Tensor]

_BLOCKS = {("float8_e4m3fn", NVFP4.block): NVFP4.block, ("float8_e8m0fnu", MXFP4.block): MXFP4.block}
_OUT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_SF_ORDER = (5, 2, 4, 0, 1, 3)  # of scales [32, 4, rm, 4, rk, l], as they lie in memory


@public
def grouped_gemm_nt_masked(
    lhs: Operand,
    rhs: Operand,
    out: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    ab_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
    topk_weights: torch.Tensor | None = None,
    idx_src_info: torch.Tensor | None = None,
    rank_src_info: torch.Tensor | None = None,
    out_ptrs: torch.Tensor | None = None,
    num_ranks: int = 0,
    dst_signals: torch.Tensor | None = None,
    sm_count: int | None = None,
    barrier_flag_local: torch.Tensor | None = None,
    barrier_flag_multicast: torch.Tensor | None = None,
    is_combine_fusion: bool = False,
    is_swap_ab: bool = False,
    alpha: torch.Tensor | None = None,
    alpha_dtype: str | None = None,
    mma_tiler_mn: tuple[int, int] | None = None,
    cluster_shape_mn: tuple[int, int] | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Multiply a batch of FP4 matrices with block scales, of each the filled rows: ``out[e] = lhs[e] @ rhs[e].T``.

    The product of mixture-of-experts layers whose tokens are sorted into a matrix for each expert, as
    scaled_fp4_grouped_quantize() and silu_and_mul_scaled_nvfp4_experts_quantize() quantize them.

    Args:
        lhs: codes and block scales of activations. Codes [m, k / 2, l], uint8 or float4_e2m1fn_x2, element 2j in the
            low nibble of byte j, a view of [l, m, k / 2] whose rows are at equal distances, a multiple of 16 bytes;
            k a multiple of 32. Scales [32, 4, ceil(m / 128), 4, ceil(k / sf_vec_size / 4), l], a view of the 128x4
            layout of each matrix, or in another shape as they lie there, dense, l first. E4M3 for blocks of 16, UE8M0
            for 32, or the same bytes as uint8. All 16-byte aligned.
        rhs: codes [n, k / 2, l] and block scales of the weights likewise; n a multiple of 8.
        out: [m, n, l] of c_dtype to fill in place, a view of [l, m, n] whose rows are at equal distances, a multiple of
            16 bytes; 16-byte aligned, sharing no memory with another argument.
        masked_m: int32 [l], the number of filled rows of each matrix; values outside 0 to m are clamped. Read on the
            device.
        ab_dtype: "float4_e2m1fn".
        sf_dtype: "float8_e4m3fn", of NVFP4, or "float8_e8m0fnu", of MXFP4.
        c_dtype: "bfloat16" or "float16".
        sf_vec_size: 16 for NVFP4, 32 for MXFP4.
        topk_weights, idx_src_info, rank_src_info, out_ptrs, num_ranks, dst_signals: the defaults. Rows of other ranks
            are not combined, and nobody is told of an entry that is complete.
        sm_count: accepted, without effect.
        barrier_flag_local, barrier_flag_multicast, is_combine_fusion: the defaults, likewise.
        is_swap_ab: whether out is given as its transpose [n, m, l].
        alpha: float32 with l elements, contiguous: a factor of each product, for NVFP4 the *decode* factor. None is 1.
        alpha_dtype: "float32", or None.
        mma_tiler_mn, cluster_shape_mn: accepted, without effect: jitfp4 chooses its own.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``out``. Rows from masked_m[e] on are not written.
    Numerics:
        As mm_fp4() for each matrix. What rows from masked_m[e] on of lhs and of its scales hold has no effect.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    foreign = {
        "topk_weights": topk_weights,
        "idx_src_info": idx_src_info,
        "rank_src_info": rank_src_info,
        "out_ptrs": out_ptrs,
        "num_ranks": num_ranks or None,
        "dst_signals": dst_signals,
        "barrier_flag_local": barrier_flag_local,
        "barrier_flag_multicast": barrier_flag_multicast,
        "is_combine_fusion": is_combine_fusion or None,
    }
    for name, value in foreign.items():
        if value is not None:
            raise ArgumentError(name, "a tensor" if isinstance(value, torch.Tensor) else value, "its default")
    if ab_dtype != "float4_e2m1fn":
        raise ArgumentError("ab_dtype", repr(ab_dtype), "'float4_e2m1fn'")
    if (sf_dtype, sf_vec_size) not in _BLOCKS:
        raise ArgumentError("sf_dtype, sf_vec_size", (sf_dtype, sf_vec_size), " or ".join(map(str, _BLOCKS)))
    if c_dtype not in _OUT_DTYPES:
        raise ArgumentError("c_dtype", repr(c_dtype), " or ".join(map(repr, _OUT_DTYPES)))
    if alpha_dtype not in (None, "float32"):
        raise ArgumentError("alpha_dtype", repr(alpha_dtype), "'float32' or None")
    _check_pair("mma_tiler_mn", mma_tiler_mn)
    _check_pair("cluster_shape_mn", cluster_shape_mn)
    if sm_count is not None and sm_count < 1:
        raise ArgumentError("sm_count", sm_count, "a positive number, or None")
    check_dtype("out", out, (_OUT_DTYPES[c_dtype],))
    if out.dim() != 3:
        raise ArgumentError("out", f"shape {tuple(out.shape)}", "[m, n, l]")
    (a, a_sf), (b, b_sf), block = _operand("lhs", lhs), _operand("rhs", rhs), _BLOCKS[sf_dtype, sf_vec_size]
    return _multiply(a, a_sf, b, b_sf, out, masked_m, alpha, block, is_swap_ab, enable_pdl)


def _check_pair(name: str, value: object) -> None:
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    if value is not None and not is_pair:
        raise ArgumentError(name, repr(value)[:80], "two positive numbers, or None")


def _operand(name: str, operand: object) -> Operand:
    """Codes and scales."""
    if not (isinstance(operand, (tuple, list)) and len(operand) == 2):
        raise ArgumentTypeError(name, type(operand).__name__, "a pair of tensors, codes and scales")
    codes, scales = operand
    for part in (codes, scales):
        if not isinstance(part, torch.Tensor):
            raise ArgumentTypeError(name, type(part).__name__, "a pair of tensors, codes and scales")
        check_strided(name, part)
    return codes, scales


def _multiply(
    lhs: torch.Tensor,
    lhs_sf: torch.Tensor,
    rhs: torch.Tensor,
    rhs_sf: torch.Tensor,
    out: torch.Tensor,
    masked_m: torch.Tensor,
    alpha: torch.Tensor | None,
    block: int,
    is_swap_ab: bool,
    enable_pdl: bool | None,
) -> torch.Tensor:
    for name, codes in (("lhs", lhs), ("rhs", rhs)):
        check_dtype(name, codes, CODE_DTYPES)
        check_device(name, codes)
        if codes.dim() != 3:
            raise ArgumentError(name, f"shape {tuple(codes.shape)}", "[rows, k / 2, l]")
    check_same_device("rhs", rhs, lhs)
    (m, half, entries), n = lhs.shape, rhs.shape[0]
    if half == 0 or 2 * half % COLS:
        raise ArgumentError("lhs", f"k = {2 * half}", f"a positive multiple of {COLS}")
    if differ(rhs.shape[1:], (half, entries)):
        shapes = f"shapes {tuple(lhs.shape)} and {tuple(rhs.shape)}"
        raise ArgumentError("lhs, rhs", shapes, "[m, k / 2, l] and [n, k / 2, l]")
    if differ((n % ROWS,), (0,)):
        raise ArgumentError("rhs", f"n = {n}", f"a multiple of {ROWS}")
    check_dtype("masked_m", masked_m, (torch.int32,))
    check_same_device("masked_m", masked_m, lhs)
    if differ(masked_m.shape, (entries,)):
        raise ArgumentError("masked_m", f"shape {tuple(masked_m.shape)}", f"({entries},)")
    check_contiguous("masked_m", masked_m)
    if alpha is not None:
        check_dtype("alpha", alpha, (torch.float32,))
        check_same_device("alpha", alpha, lhs)
        if differ((alpha.numel(),), (entries,)):
            raise ArgumentError("alpha", f"{alpha.numel()} elements", f"{entries}")
        check_contiguous("alpha", alpha)
    check_same_device("out", out, lhs)
    straight = out.transpose(0, 1) if is_swap_ab else out
    if differ(straight.shape, (m, n, entries)):
        shape = (n, m, entries) if is_swap_ab else (m, n, entries)
        raise ArgumentError("out", f"shape {tuple(out.shape)}", f"{shape}")
    MM_FP4_MASKED(
        MaskedArguments(
            a=_rows("lhs", lhs.view(torch.uint8), COLS // 2),
            b=_rows("rhs", rhs.view(torch.uint8), COLS // 2),
            a_descale=_scales("lhs", lhs_sf, (m, 2 * half // block, entries), block, lhs),
            b_descale=_scales("rhs", rhs_sf, (n, 2 * half // block, entries), block, lhs),
            alpha=None if alpha is None else alpha.view(entries),
            masked_m=masked_m,
            out=_rows("out", straight, ROWS),
            block_size=block,
            enable_pdl=enable_pdl,
            names="a=lhs,b=rhs,a_descale=lhs,b_descale=rhs",
        )
    )
    return out


def _rows(name: str, batch: torch.Tensor, block: int) -> torch.Tensor:
    """[rows, columns, l] as the rows of all matrices, one matrix behind another."""
    return as_rows(name, batch.permute(2, 0, 1), block)


def _scales(
    name: str, scales: torch.Tensor, sizes: tuple[int, int, int], block: int, like: torch.Tensor
) -> torch.Tensor:
    """The bytes of the scales of all matrices, of rows, columns and number ``sizes``."""
    check_dtype(name, scales, SCALE_DTYPES[block])
    check_same_device(name, scales, like)
    rows, cols = padded_shape(SfLayout.layout_128x4, *sizes[:2])
    if scales.dim() == len(_SF_ORDER):
        tiles = 32, 4, rows // 128, 4, cols // 4, sizes[2]
        if differ(scales.shape, tiles):
            raise ArgumentError(name, f"scales of shape {tuple(scales.shape)}", f"{tiles}")
        scales = scales.permute(_SF_ORDER)
    elif differ((scales.numel(),), (rows * cols * sizes[2],)):
        raise ArgumentError(name, f"scales of shape {tuple(scales.shape)}", f"{sizes[2]} * {rows} * {cols} elements")
    if not scales.is_contiguous():
        raise ArgumentError(name, f"scales of strides {scales.stride()}", "a dense buffer, l outermost")
    return scales.view(torch.uint8).view(-1)
