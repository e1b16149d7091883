"""Where the scale of row r and scale column c lies in memory, for the three layouts of block scales.

``128x4`` is the tile that tensor-core scale operands expect (PTX ISA, tcgen05 scale-factor layout): 512-byte tiles of
128 rows by 4 columns, in which rows r, r+32, r+64 and r+96 are neighbours. ``8x4`` tiles 8 rows by 4 columns in 32
bytes.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["SfLayout"]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return -(-a // b) * b


class SfLayout(IntEnum):
    """Layout of a matrix of block scales, with FlashInfer's names and values."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2

    __hash__ = int.__hash__  # as a layout equals its number

    @property
    def tag(self) -> str:
        """The layout's name in specs, generated source and file names."""
        return self.name.removeprefix("layout_")

    @property
    def tile(self) -> tuple[int, int, int]:
        """``(outer, inner, cols)``: a tile holds ``outer * inner`` rows by ``cols`` scale columns.

        Inside a tile the order is ``[inner row][outer row][column]``. Both dimensions are padded to whole tiles.
        """
        return tile_of(self)

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Padded [rows, columns] of the buffer that holds ``rows`` x ``cols`` scales."""
        return padded_shape(self, rows, cols)

    def numel(self, rows: int, cols: int) -> int:
        """Bytes of the buffer that holds ``rows`` x ``cols`` scales, one byte each."""
        return padded_numel(self, rows, cols)

    def offset(self, row: int, col: int, cols: int) -> int:
        """Byte offset of scale (row, col) in a buffer for ``cols`` columns."""
        outer, inner, tile_cols = self.tile
        row_tile, r = divmod(row, outer * inner)
        col_tile, c = divmod(col, tile_cols)
        tile = row_tile * ceil_div(cols, tile_cols) + col_tile
        return ((tile * inner + r % inner) * outer + r // inner) * tile_cols + c


_TILES = ((4, 32, 4), (1, 8, 4), (1, 1, 1))  # by a layout's number


# The methods above as functions: torch.compile of torch 2.10 and 2.11 does not trace methods of an enum's members.


def tile_of(layout: SfLayout) -> tuple[int, int, int]:
    """``layout.tile``."""
    return _TILES[int(layout)]


def padded_shape(layout: SfLayout, rows: int, cols: int) -> tuple[int, int]:
    """``layout.shape(rows, cols)``."""
    outer, inner, tile_cols = tile_of(layout)
    return round_up(rows, outer * inner), round_up(cols, tile_cols)


def padded_numel(layout: SfLayout, rows: int, cols: int) -> int:
    """``layout.numel(rows, cols)``."""
    padded_rows, padded_cols = padded_shape(layout, rows, cols)
    return padded_rows * padded_cols
