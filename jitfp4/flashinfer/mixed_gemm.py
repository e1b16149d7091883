"""The order in which FlashInfer's MXFP4 experts on Hopper keep codes and scales, and the way back.

It is that of moe_gemm_mixed_utils.cu and fused_moe/prepare.py of FlashInfer 0.7.2.post1. A word of codes is four bytes
of the matrix, of two rows that are 8 apart and at two places in them that are 4 apart, with its bits permuted; 64 rows
by 128 columns have their scales together.
"""

from __future__ import annotations

import torch

from jitfp4.errors import ArgumentError
from jitfp4.public import checked
from jitfp4.tensors import check_contiguous, check_dtype

_ROWS, _BYTES = 16, 32  # of the smallest piece that is brought into another order by itself
_SCALE_ROWS, _SCALE_COLS, _SCALE_BYTES = 64, 128, 16
# For each bit of a stored word, its place in a word of the four bytes
_FIELDS = (
    *((16, 3), (8, 3), (0, 3), (19, 1), (25, 2), (11, 1), (24, 1), (27, 1), (3, 1)),
    *((20, 3), (12, 3), (4, 3), (23, 1), (29, 2), (15, 1), (28, 1), (31, 1), (7, 1)),
)
_SOURCE = [first + bit for first, count in _FIELDS for bit in range(count)]
_STORED = [_SOURCE.index(bit) for bit in range(32)]


@checked
def interleave_moe_weights_for_sm90_mixed_gemm(weight: torch.Tensor, quant_type: str = "fp4") -> torch.Tensor:
    """MXFP4 codes in the order of FlashInfer's experts on Hopper; cutlass_fused_moe() takes them.

    Args:
        weight: uint8 [experts, n, k / 2], contiguous, n a multiple of 16, k of 64.
        quant_type: "fp4".
    Returns:
        The same shape.
    """
    if quant_type != "fp4":
        raise ArgumentError("quant_type", repr(quant_type), "'fp4'")
    experts, n, half_k = _sizes("weight", weight)
    # [expert, piece, row half, row, piece, column quarter (2), column half, column]
    pieces = weight.view(experts, n // _ROWS, 2, 8, half_k // _BYTES, 2, 2, 2, 4)
    words = pieces.permute(0, 1, 6, 3, 4, 5, 8, 7, 2).flatten(-2)
    return _permuted(words, _SOURCE).view(weight.shape)


def deinterleave_weights(weight: torch.Tensor) -> torch.Tensor:
    """The inverse of interleave_moe_weights_for_sm90_mixed_gemm(), an expert at a time to bound temporary memory."""
    experts, n, half_k = _sizes("weight", weight)
    found = torch.empty_like(weight)
    for expert in range(experts):
        words = weight[expert].view(n // _ROWS, 2, 8, half_k // _BYTES, 2, 4, 4)
        # [piece, column quarter 0, row, piece, column quarter 1, column, column half, row half]
        pieces = _permuted(words, _STORED).unflatten(-1, (2, 2)).permute(0, 7, 2, 3, 4, 1, 6, 5)
        found[expert] = pieces.reshape(n, half_k)
    return found


@checked
def interleave_moe_scales_for_sm90_mixed_gemm(scales: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """MXFP4 scales in the order of FlashInfer's experts on Hopper; cutlass_fused_moe() takes them.

    Args:
        scales: uint8 [experts, n, k / 32], contiguous, n a multiple of 64, k of 128.
        group_size: 32.
    Returns:
        uint8 [experts, n / 64, k / 128, 16, 16].
    """
    check_dtype("scales", scales, (torch.uint8,))
    if group_size != 32:
        raise ArgumentError("group_size", group_size, "32")
    if scales.dim() != 3 or scales.shape[1] % _SCALE_ROWS or scales.shape[2] % (_SCALE_COLS // 32):
        raise ArgumentError("scales", f"shape {tuple(scales.shape)}", "[experts, multiple of 64, multiple of 4]")
    pieces = scales.unflatten(2, (-1, 4)).unflatten(1, (-1, 4, 16))
    folded: torch.Tensor = pieces.permute(0, 1, 4, 3, 2, 5).flatten(-2).contiguous()
    return folded


def deinterleave_scales(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of interleave_moe_scales_for_sm90_mixed_gemm()."""
    pieces = scales.unflatten(-1, (4, 4)).permute(0, 1, 4, 3, 2, 5)
    found: torch.Tensor = pieces.flatten(4, 5).flatten(1, 3).contiguous()
    return found


def _sizes(name: str, weight: torch.Tensor) -> tuple[int, int, int]:
    check_dtype(name, weight, (torch.uint8,))
    if weight.dim() != 3 or weight.shape[1] % _ROWS or weight.shape[2] % _BYTES:
        raise ArgumentError(name, f"shape {tuple(weight.shape)}", "[experts, multiple of 16, multiple of 32]")
    check_contiguous(name, weight)
    return weight.shape[0], weight.shape[1], weight.shape[2]


def _permuted(words: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Words of four bytes whose bit i is bit ``places[i]``."""
    shifts = torch.arange(8, device=words.device, dtype=torch.uint8)
    bits = (words.unsqueeze(-1) >> shifts & 1).flatten(-2)[..., places]
    found: torch.Tensor = (bits.unflatten(-1, (4, 8)) << shifts).sum(-1, dtype=torch.uint8)
    return found
