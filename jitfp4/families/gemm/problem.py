"""What selection sees of a product with an FP4 weight, of one of two FP4 matrices, and of an expansion."""

from __future__ import annotations

import math
from typing import NamedTuple

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.formats import BlockFormat, DType
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.weight import TILE_ROWS

DTYPES = HALVES
TORCH_DTYPES = {dtype: of for of, dtype in DTYPES.items()}


class Problem(NamedTuple):
    """x [m, k] times the transpose of a weight [n, k].

    ``gated``: the weight is n / 2 gates and as many ups.
    """

    dtype: DType
    out_dtype: DType
    format: BlockFormat
    m: int
    n: int
    k: int
    gated: bool = False

    def tiles_per_sm(self, arch: Arch) -> float:
        """Tiles of 64 rows of the weight, for each SM."""
        return ceil_div(self.n, TILE_ROWS) / arch.num_sms

    def waves(self, arch: Arch) -> float:
        """Waves of tiles of 128 rows of the weight by 256 rows of x, with one tile on each SM."""
        return ceil_div(self.n, 128) * ceil_div(self.m, 256) / arch.num_sms

    def idle(self, arch: Arch) -> float:
        """The share of SMs without a tile in these waves."""
        return 1 - self.waves(arch) / math.ceil(self.waves(arch))


class Fp8Problem(NamedTuple):
    """x [m, k] in E4M3 times the transpose of a weight [n, k].

    ``gated``: the weight is n / 2 gates and as many ups.
    """

    out_dtype: DType
    format: BlockFormat
    m: int
    n: int
    k: int
    gated: bool = False

    def waves(self, arch: Arch) -> float:
        """Waves of tiles of 128 rows of the weight by 256 rows of x, with one tile on each SM."""
        return ceil_div(self.n, 128) * ceil_div(self.m, 256) / arch.num_sms


class Fp4Problem(NamedTuple):
    """a [m, k] times the transpose of b [n, k], both FP4 with block scales; the scales of b are in 128x4."""

    format: BlockFormat
    a_layout: SfLayout  # 128x4 or 8x4
    out_dtype: DType
    m: int
    n: int
    k: int

    def tiles_per_sm(self, arch: Arch) -> float:
        """Tiles of 128 rows of a by 128 rows of b, for each SM."""
        return ceil_div(self.m, 128) * ceil_div(self.n, 128) / arch.num_sms

    def idle(self, arch: Arch) -> float:
        """The share of SMs without a tile in waves of tiles of 256 rows of a by 128 rows of b, one on each SM."""
        waves = ceil_div(self.m, 256) * ceil_div(self.n, 128) / arch.num_sms
        return 1 - waves / math.ceil(waves)


class MaskedProblem(NamedTuple):
    """``entries`` products of a [m, k] and b [n, k], both FP4 with block scales in 128x4; some rows of a are filled."""

    format: BlockFormat
    out_dtype: DType
    entries: int
    m: int
    n: int
    k: int

    @property
    def entry(self) -> Fp4Problem:
        """One product, with all rows."""
        return Fp4Problem(self.format, SfLayout.layout_128x4, self.out_dtype, self.m, self.n, self.k)

    def tiles_per_sm(self, arch: Arch) -> float:
        """Those of all entries, if all rows were filled."""
        return self.entries * self.entry.tiles_per_sm(arch)


class ExpandProblem(NamedTuple):
    """x [m, k] in fp16 or bf16 from FP4 with block scales."""

    format: BlockFormat
    a_layout: SfLayout
    m: int
    k: int
