"""Load-time rearrangements against their published index formulas."""

from __future__ import annotations

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    SfLayout,
    block_scale_interleave,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_interleave_places_every_scale(dtype: torch.dtype) -> None:
    sf = torch.randint(1, 200, (2, 130, 6)).to(dtype)
    out = block_scale_interleave(sf)
    assert out.dtype == dtype and out.shape == (2 * 256 * 8,)
    assert int(out.count_nonzero()) == sf.numel()
    for expert, row, col in [(0, 0, 0), (0, 33, 5), (1, 129, 3), (1, 127, 4)]:
        at = expert * 256 * 8 + SfLayout.layout_128x4.offset(row, col, 6)
        assert out[at] == sf[expert, row, col]
    assert torch.equal(block_scale_interleave(sf[1]), out[256 * 8 :])


@pytest.mark.parametrize(("tile", "rows", "place"), [(128, 64, lambda i: i // 4 + 8 * (i % 4)),
                                                     (64, 48, lambda i: i // 2 + 8 * (i % 2))])  # fmt: skip
def test_shuffle_moves_rows_inside_their_block(tile: int, rows: int, place) -> None:
    block = 32 if tile == 128 else 16
    matrix = torch.arange(rows * 3).view(rows, 3)
    out = shuffle_matrix_a(matrix, tile)
    for row in range(rows):
        assert torch.equal(out[row // block * block + place(row % block)], matrix[row])


def test_scales_are_shuffled_like_rows_and_then_swizzled() -> None:
    sf = torch.randint(0, 256, (256, 8), dtype=torch.uint8)
    got = shuffle_matrix_sf_a(sf, 128)
    assert got.shape == (2048,)
    assert torch.equal(got, block_scale_interleave(shuffle_matrix_a(sf, 128)))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ArgumentTypeError, match="unswizzled_sf"):
        block_scale_interleave(torch.zeros(4, 4))
    with pytest.raises(ArgumentError, match="unswizzled_sf"):
        block_scale_interleave(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match="input_tensor: got 33 rows"):
        shuffle_matrix_a(torch.zeros(33, 4), 128)
    with pytest.raises(ArgumentError, match="input_tensor"):
        shuffle_matrix_a(torch.zeros(32), 128)
    with pytest.raises(ArgumentError, match="num_elts_per_sf"):
        shuffle_matrix_sf_a(torch.zeros(128, 4, dtype=torch.uint8), 128, 8)
    with pytest.raises(ArgumentError, match="128 rows"):
        shuffle_matrix_sf_a(torch.zeros(64, 4, dtype=torch.uint8), 128)
