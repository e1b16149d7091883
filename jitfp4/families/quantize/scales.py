"""Rearranging scales and weights once, at load time. These are torch permutations: they need no kernel of their own."""

from __future__ import annotations

import torch

from jitfp4.errors import ArgumentError
from jitfp4.layouts import SfLayout
from jitfp4.public import public
from jitfp4.reference.formats import swizzle
from jitfp4.reference.shuffle import shuffle_rows
from jitfp4.tensors import check_device, check_dtype

_ELEMENTS_PER_SF = (16, 32)
_MAX_TILE = 1024


@public
def block_scale_interleave(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    """Linear block scales to the 128x4 layout.

    Args:
        unswizzled_sf: uint8 or bf16, [rows, cols] or [experts, rows, cols], on any device.
    Returns:
        1-D, same dtype and device: ``experts * round_up(rows, 128) * round_up(cols, 4)`` elements, each expert padded
        on its own, padding zero.
    Raises:
        ArgumentError, ArgumentTypeError: another dtype or rank.
    """
    check_dtype("unswizzled_sf", unswizzled_sf, (torch.uint8, torch.bfloat16))
    check_device("unswizzled_sf", unswizzled_sf)
    if unswizzled_sf.dim() not in (2, 3):
        raise ArgumentError(
            "unswizzled_sf", f"shape {tuple(unswizzled_sf.shape)}", "[rows, cols] or [experts, rows, cols]"
        )
    return swizzle(unswizzled_sf, SfLayout.layout_128x4).flatten()


@public
def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """The rows of a weight in the order that TensorRT-LLM's epilogue with this tile expects.

    Args:
        input_tensor: [m, n] of any dtype; m a multiple of 32 (16 when the tile is no multiple of 128).
        epilogue_tile_m: rows of the epilogue tile, a multiple of 8 up to 1024.
    Returns:
        [m, n], a new tensor: source row i of a block goes to ``i // 4 + 8 * (i % 4)`` (``i // 2 + 8 * (i % 2)``).
    Raises:
        ArgumentError: another rank, or m is no multiple of the block of rows.
    """
    _check_matrix("input_tensor", input_tensor)
    _check_tile(epilogue_tile_m)
    return shuffle_rows(input_tensor, epilogue_tile_m)


@public
def shuffle_matrix_sf_a(input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16) -> torch.Tensor:
    """Linear block scales of a weight, shuffled with its rows and then put in the 128x4 layout.

    Args:
        input_tensor: uint8 [m, n/num_elts_per_sf], linear; m a multiple of 128.
        epilogue_tile_m: rows of the epilogue tile, a multiple of 8 up to 1024.
        num_elts_per_sf: 16 or 32 elements of the weight share a scale; checked, the permutation is the same.
    Returns:
        uint8, the shape of input_tensor when its columns are a multiple of 4, else padded to one.
    Raises:
        ArgumentError, ArgumentTypeError: another dtype, rank, number of rows or block size.
    """
    check_dtype("input_tensor", input_tensor, (torch.uint8,))
    _check_matrix("input_tensor", input_tensor)
    _check_tile(epilogue_tile_m)
    if num_elts_per_sf not in _ELEMENTS_PER_SF:
        raise ArgumentError("num_elts_per_sf", num_elts_per_sf, "16 or 32")
    if input_tensor.shape[0] % 128:
        raise ArgumentError("input_tensor", f"{input_tensor.shape[0]} rows", "a multiple of 128 rows")
    return swizzle(shuffle_rows(input_tensor, epilogue_tile_m), SfLayout.layout_128x4)


def _check_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", "[m, n]")


def _check_tile(rows: int) -> None:
    if rows <= 0 or rows % 8 or rows > _MAX_TILE:
        raise ArgumentError("epilogue_tile_m", str(rows)[:40], f"a multiple of 8 from 8 to {_MAX_TILE}")
