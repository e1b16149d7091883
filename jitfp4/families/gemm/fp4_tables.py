"""Which tactic a product of two FP4 matrices gets, and the problems that meet every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.gemm.fp4_problem import Fp4Problem
from jitfp4.formats import BlockFormat, DType
from jitfp4.layouts import SfLayout
from jitfp4.selection import Table

TABLE: Table[Any] = Table((), measured="")


def problems(arch: Arch) -> Iterator[Fp4Problem]:
    """Few, some and many tiles of the output, for every number of rows of a that differs."""
    layouts, dtypes = (SfLayout.layout_128x4, SfLayout.layout_8x4), (DType.BF16, DType.F16)
    for block_format, layout, dtype, m, load in product(BlockFormat, layouts, dtypes, (16, 64, 128), (0.25, 4.0)):
        yield Fp4Problem(block_format, layout, dtype, m=m, n=round(load * arch.num_sms) * 128, k=4096)
