"""NVFP4 quantization of batches of matrices, for mixture-of-experts layers: each has a scale, some rows are filled."""

from __future__ import annotations

from collections.abc import Collection

import torch

from jitfp4.dispatch import differ
from jitfp4.dtypes import ACTIVATIONS, HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.quantize.arguments import BatchArguments
from jitfp4.families.quantize.four_over_six import check_recipe, code_of
from jitfp4.families.quantize.operation import QUANTIZE_BATCH
from jitfp4.formats import NVFP4, NVFP44Over6Config
from jitfp4.layouts import SfLayout, ceil_div, padded_numel
from jitfp4.public import public
from jitfp4.reference.quantize import widen_e4m3
from jitfp4.tensors import as_rows, check_contiguous, check_device, check_dtype, check_same_device, scales_f32

_LAYOUT = SfLayout.layout_128x4
_TILE = 512  # bytes of 128 rows by 4 scales


@public
def nvfp4_batched_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor | float,
    sf_vec_size: int = 16,
    nvfp4_4over6: NVFP44Over6Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each matrix of a batch to NVFP4 with 128x4 scales.

    Args:
        a: [b, m, k] fp16, bf16 or float8_e4m3fn, contiguous; k a positive multiple of 16. float8_e4m3fn is first
            converted to fp16 as in nvfp4_quantize(), in a separate pass.
        a_global_sf: the *encode* scale: one float32 on a's device, or m of them, one for each row of every matrix.
        sf_vec_size: 16.
        nvfp4_4over6: as in nvfp4_quantize().
    Returns:
        codes, uint8 [b, m, k/2]; E4M3 block scales, uint8 [b, round_up(m, 128) * round_up(k/16, 4)], each matrix padded
        separately, padding zero. Numerics as in nvfp4_quantize().
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if sf_vec_size != NVFP4.block:
        raise ArgumentError("sf_vec_size", sf_vec_size, "16")
    batch, m, k = _check_batch(a, NVFP4.block, ACTIVATIONS)
    scale = scales_f32("a_global_sf", a_global_sf, (1, m), like=a)
    recipe = check_recipe("nvfp4_4over6", nvfp4_4over6, a.dtype)
    if a.dtype == torch.float8_e4m3fn:
        a = widen_e4m3(a, scale.view(-1, 1))
    q = torch.empty(batch, m, k // 2, dtype=torch.uint8, device=a.device)
    sf = torch.empty(batch, padded_numel(_LAYOUT, m, k // NVFP4.block), dtype=torch.uint8, device=a.device)
    _run(a, None, scale, q, sf, recipe, by_row=scale.numel() > 1)
    return q, sf


@public
def scaled_fp4_grouped_quantize(
    a: torch.Tensor,
    mask: torch.Tensor,
    a_global_sf: torch.Tensor,
    nvfp4_4over6: NVFP44Over6Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the filled rows of each expert's matrix to NVFP4.

    Args:
        a: [b, m, k] fp16 or bf16, contiguous; k a positive multiple of 16.
        mask: int32 [b], the number of filled rows of each matrix; values outside 0 to m are clamped. Read on the
            device.
        a_global_sf: the *encode* scale of each matrix, float32 [b] on a's device.
        nvfp4_4over6: as in nvfp4_quantize().
    Returns:
        codes, uint8 [m, k/2, b], a view of [b, m, k/2]; and E4M3 scales, float8_e4m3fn [32, 4, rm, 4, rk, b], a view of
        [b, rm, rk, 32, 4, 4] with rm = ceil(m/128) and rk = ceil(k/64): the 128x4 layout of each matrix. Rows from
        mask[b] on are not written; padding is zero. Numerics as in nvfp4_quantize().
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _grouped(a, mask, a_global_sf, nvfp4_4over6, silu=False)


@public
def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: torch.Tensor,
    mask: torch.Tensor,
    a_global_sf: torch.Tensor,
    nvfp4_4over6: NVFP44Over6Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``silu(a[..., :k]) * a[..., k:]`` of each expert's filled rows to NVFP4.

    Args:
        a: [b, m, 2k] fp16 or bf16, contiguous; k a positive multiple of 16.
        mask, a_global_sf, nvfp4_4over6: as in scaled_fp4_grouped_quantize().
    Returns:
        As scaled_fp4_grouped_quantize(). Numerics of the activation as in silu_and_mul_nvfp4_quantize().
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _grouped(a, mask, a_global_sf, nvfp4_4over6, silu=True)


def _grouped(
    a: torch.Tensor,
    mask: torch.Tensor,
    a_global_sf: torch.Tensor,
    nvfp4_4over6: NVFP44Over6Config | None,
    *,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, m, width = _check_batch(a, NVFP4.block * (2 if silu else 1))
    k = width // 2 if silu else width
    check_dtype("mask", mask, (torch.int32,))
    check_same_device("mask", mask, a)
    check_contiguous("mask", mask)
    if differ(mask.shape, (batch,)):
        raise ArgumentError("mask", f"shape {tuple(mask.shape)}", f"({batch},)")
    scale = scales_f32("a_global_sf", a_global_sf, (batch,), like=a)
    recipe = check_recipe("nvfp4_4over6", nvfp4_4over6)
    q = torch.empty(batch, m, k // 2, dtype=torch.uint8, device=a.device)
    tiles = ceil_div(m, 128), ceil_div(k, 64)
    sf = torch.empty(batch, *tiles, 32, 4, 4, dtype=torch.uint8, device=a.device)
    _run(a, mask, scale, q, sf.view(batch, tiles[0] * tiles[1] * _TILE), recipe, silu=silu)
    return q.permute(1, 2, 0), sf.view(torch.float8_e4m3fn).permute(3, 4, 1, 5, 2, 0)


def _run(
    a: torch.Tensor,
    mask: torch.Tensor | None,
    scale: torch.Tensor,
    q: torch.Tensor,
    sf: torch.Tensor,
    recipe: NVFP44Over6Config | None,
    *,
    by_row: bool = False,
    silu: bool = False,
) -> None:
    QUANTIZE_BATCH(
        BatchArguments(
            a=a,
            mask=mask,
            scale=scale,
            by_row=by_row,
            out=q,
            out_sf=sf,
            silu=silu,
            four_over_six=code_of(recipe),
            enable_pdl=None,
        )
    )


def _check_batch(a: torch.Tensor, block: int, dtypes: Collection[torch.dtype] = tuple(HALVES)) -> tuple[int, int, int]:
    check_dtype("a", a, dtypes)
    check_device("a", a)
    if a.dim() != 3:
        raise ArgumentError("a", f"shape {tuple(a.shape)}", "[b, m, k]")
    check_contiguous("a", a)
    as_rows("a", a, block)
    batch, m, k = a.shape
    return batch, m, k
