"""Row orders that TensorRT-LLM's epilogues expect of the A operand and of its scales."""

from __future__ import annotations

import torch

from jitfp4.errors import ArgumentError


def shuffle_rows(matrix: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """[m, n] with the rows of every block permuted, as a new tensor.

    Tiles of a multiple of 128 use blocks of 32 rows, where source row i goes to ``i // 4 + 8 * (i % 4)``; other tiles
    use blocks of 16, where it goes to ``i // 2 + 8 * (i % 2)``. Raises ArgumentError when m is not a multiple of the
    block.
    """
    group = 4 if epilogue_tile_m % 128 == 0 else 2
    m, n = matrix.shape
    if m % (8 * group):
        raise ArgumentError(
            "input_tensor",
            f"{m} rows",
            f"a multiple of {8 * group} rows to shuffle for an epilogue tile of {epilogue_tile_m}",
        )
    return matrix.view(m // (8 * group), 8, group, n).transpose(1, 2).reshape(m, n)
