"""Which tactic a KV cache gets, and the problems that meet every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.families.kv.problem import (
    DTYPES,
    MAX_RUN,
    Addressing,
    DequantizeProblem,
    DequantizeTactic,
    QuantizeProblem,
    QuantizeTactic,
)
from jitfp4.selection import Row, Table

_FEW, _SOME = 1000, 12000  # blocks or chunks for each SM

QUANTIZE = Table(
    (
        Row(QuantizeTactic(1, 128), {"blocks_per_sm": _SOME}),
        Row(QuantizeTactic(2, 64)),
        Row(QuantizeTactic(1, 128)),
    ),
    measured="h200/kv_tactics.csv",
)
DEQUANTIZE = Table(
    (
        Row(DequantizeTactic(2, 128), {"chunks_per_sm": _FEW}),
        Row(DequantizeTactic(4, 128)),
    ),
    measured="h200/kv_tactics.csv",
)

QUANTIZE_TACTICS = tuple(QuantizeTactic(*cut) for cut in product((1, 2, 4), (64, 128, 256)))
DEQUANTIZE_TACTICS = tuple(DequantizeTactic(*cut) for cut in product((1, 2, 4, 8), (64, 128, 256)))

_RUNS = (1, 2, 4, MAX_RUN)
_MANY = 1 << 20  # tokens


def quantize_problems(_: Arch) -> Iterator[QuantizeProblem]:
    """Few and many tokens, in runs of every kind."""
    for in_dtype, addressing, tokens, run in product(DTYPES.values(), Addressing, (1, _MANY), _RUNS):
        if run == MAX_RUN or addressing is Addressing.WHOLE:
            yield QuantizeProblem(in_dtype, addressing, tokens, blocks=64, sides=2, run=run)


def dequantize_problems(_: Arch) -> Iterator[DequantizeProblem]:
    """Few and many tokens, in runs of every kind."""
    for out_dtype, paged, tokens, run in product(DTYPES.values(), (False, True), (1, _MANY), _RUNS):
        if run == MAX_RUN or paged:
            yield DequantizeProblem(out_dtype, paged, 1, tokens, chunks=128, sides=2, run=run)
