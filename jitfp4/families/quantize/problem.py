"""What selection sees of calls of quantization and dequantization."""

from __future__ import annotations

from typing import NamedTuple

from jitfp4.formats import BlockFormat, DType
from jitfp4.layouts import SfLayout

# FlashInfer #2838 measured on a B200 that copies by TMA are faster from log2(m) + log2(k) = 25 on, with these shapes.
_TMA_LOG2_WORK, _TMA_MIN_ROWS, _TMA_K_MULTIPLE = 25, 1024, 512


class Problem(NamedTuple):
    """A matrix [m, k] to quantize; ``by_row``: every row has its own global scale; ``four_over_six``: each block takes
    the better of two scales.
    """

    block_format: BlockFormat
    in_dtype: DType
    sf_layout: SfLayout
    silu: bool
    by_row: bool
    m: int
    k: int
    four_over_six: bool = False

    @property
    def work(self) -> int:
        return self.m * self.k

    @property
    def cols(self) -> int:
        """Blocks of a row."""
        return self.k // self.block_format.block

    @property
    def suits_tma(self) -> bool:
        log2_work = self.m.bit_length() + self.k.bit_length() - 2
        return log2_work >= _TMA_LOG2_WORK and self.m >= _TMA_MIN_ROWS and self.k % _TMA_K_MULTIPLE == 0


class BatchProblem(NamedTuple):
    """Matrices [batch, m, k] to NVFP4 with 128x4 scales; if ``masked``, only the first rows of each are quantized."""

    in_dtype: DType
    masked: bool
    silu: bool
    batch: int
    m: int
    k: int
    four_over_six: bool = False


class TokenProblem(NamedTuple):
    """Rows [m, k] to NVFP4, each with a scale of its own."""

    in_dtype: DType
    sf_layout: SfLayout
    m: int
    k: int
    four_over_six: bool = False


class DequantizeProblem(NamedTuple):
    """Codes and scales to [m, k] floats."""

    block_format: BlockFormat
    out_dtype: DType
    sf_layout: SfLayout
    m: int
    k: int
