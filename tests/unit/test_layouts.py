"""Scale layouts: the index formula, the torch permutation and the padding agree."""

from __future__ import annotations

import pytest
import torch

from jitfp4.layouts import SfLayout, ceil_div, round_up
from jitfp4.reference.formats import swizzle, unswizzle

SHAPES = [(1, 1), (7, 3), (8, 4), (127, 5), (128, 4), (129, 8), (300, 17)]


@pytest.mark.parametrize("layout", SfLayout)
@pytest.mark.parametrize("shape", SHAPES)
def test_offset_is_where_swizzle_puts_a_scale(layout: SfLayout, shape: tuple[int, int]) -> None:
    rows, cols = shape
    scales = torch.arange(rows * cols, dtype=torch.int32).view(rows, cols)
    flat = swizzle(scales, layout).flatten()
    assert len(flat) == layout.numel(rows, cols)
    for row in range(rows):
        for col in range(cols):
            assert flat[layout.offset(row, col, cols)] == scales[row, col]


@pytest.mark.parametrize("layout", SfLayout)
@pytest.mark.parametrize("shape", SHAPES)
def test_unswizzle_inverts_swizzle_and_padding_is_zero(layout: SfLayout, shape: tuple[int, int]) -> None:
    scales = torch.randint(1, 256, shape, dtype=torch.uint8)
    buffer = swizzle(scales, layout)
    assert buffer.shape == layout.shape(*shape)
    assert torch.equal(unswizzle(buffer, layout, *shape), scales)
    assert int(buffer.count_nonzero()) == scales.numel()


def test_128x4_offset_is_the_published_formula() -> None:
    cols, padded = 10, 12
    for row in (0, 1, 31, 32, 127, 128, 200):
        for col in (0, 3, 4, 9):
            published = (
                row // 128 * (padded // 4) * 512 + col // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4
            )
            assert SfLayout.layout_128x4.offset(row, col, cols) == published


def test_batches_are_swizzled_one_by_one() -> None:
    scales = torch.randint(0, 256, (3, 130, 6), dtype=torch.uint8)
    together = swizzle(scales, SfLayout.layout_128x4)
    for batch in range(3):
        assert torch.equal(together[batch], swizzle(scales[batch], SfLayout.layout_128x4))


def test_values_are_those_of_flashinfer() -> None:
    assert [(m.name, m.value) for m in SfLayout] == [("layout_128x4", 0), ("layout_8x4", 1), ("layout_linear", 2)]


def test_rounding_helpers() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
