"""The tactics for products of E4M3 activations with an FP4 weight, and the problems that reach every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.gemm.kernels.wide_fp8 import Fp8Tactic
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.formats import BlockFormat
from jitfp4.selection import Row, Table

TABLE = Table(
    (
        Row(Fp8Tactic(64, divided=True), {"m": 64}),
        Row(Fp8Tactic(128, divided=True), {"m": 128}),
        Row(Fp8Tactic(256, divided=True)),
    ),
    measured=None,
)


def problems(arch: Arch) -> Iterator[Fp8Problem]:
    """Few and many rows of x, few and many tiles, for both formats."""
    if not arch.has_wgmma:
        return
    sizes = ((64, 2048), (64, 16384), (512, 2112), (512, 4096), (256, 12288), (2048, 8192), (100, 8), (128, 57344))
    for dtype, block_format, (m, n) in product(HALVES.values(), BlockFormat, sizes):
        for k in (128, 4096):
            yield Fp8Problem(dtype, block_format, m=m, n=n, k=k)
