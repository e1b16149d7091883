"""The tables that select tactics for a KV cache, and problems that together reach every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.kv.kernels.dequantize import DequantizeTactic
from jitfp4.families.kv.kernels.quantize import QuantizeTactic
from jitfp4.families.kv.problem import Addressing, DequantizeProblem, QuantizeProblem
from jitfp4.selection import Row, Table

_FEW, _SOME = 1000, 12000  # blocks or chunks of an SM

QUANTIZE = Table(
    (
        Row(QuantizeTactic(2, 128), {"addressing": Addressing.POSITIONS, "blocks_per_sm": _FEW}),
        Row(QuantizeTactic(1, 128), {"blocks_per_sm": _FEW}),
        Row(QuantizeTactic(1, 128), {"addressing": Addressing.WHOLE, "blocks_per_sm": _SOME}),
        Row(QuantizeTactic(4, 256), {"blocks_per_sm": _SOME}),
        Row(QuantizeTactic(8, 128), {"addressing": Addressing.POSITIONS}),
        Row(QuantizeTactic(2, 128)),
    ),
    measured="h200/kv_tactics.csv",
)
DEQUANTIZE = Table(
    (
        Row(DequantizeTactic(2, 128), {"chunks_per_sm": _FEW}),
        Row(DequantizeTactic(1, 256), {"chunks_per_sm": _FEW}),
        Row(DequantizeTactic(4, 128)),
        Row(DequantizeTactic(8, 128, by_cta=True)),
    ),
    measured="h200/kv_tactics.csv",
)

_MANY = 1 << 20  # tokens


def quantize_problems(_: Arch) -> Iterator[QuantizeProblem]:
    """Few, some and many tokens."""
    for in_dtype, addressing, tokens in product(HALVES.values(), Addressing, (1, 4096, _MANY)):
        yield QuantizeProblem(in_dtype, addressing, tokens, blocks=64, sides=2)


def dequantize_problems(_: Arch) -> Iterator[DequantizeProblem]:
    """Few and many tokens, without pages and with every page size that the tactics distinguish."""
    for out_dtype, page_size, tokens in product(HALVES.values(), (0, 1, 2, 4), (1, _MANY)):
        yield DequantizeProblem(out_dtype, page_size, 1, tokens, chunks=128, sides=2)
