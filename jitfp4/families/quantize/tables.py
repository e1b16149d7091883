"""The tactics for quantization and dequantization, and the problems that reach every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.dtypes import ACTIVATIONS, FLOATS, HALVES
from jitfp4.families.quantize.kernels import dequantize, grouped, tma
from jitfp4.families.quantize.kernels.e4m3 import TableTactic
from jitfp4.families.quantize.kernels.per_token import TokenTactic
from jitfp4.families.quantize.kernels.tma import TmaTactic
from jitfp4.families.quantize.kernels.vector import VectorTactic
from jitfp4.families.quantize.problem import BatchProblem, DequantizeProblem, Problem, TokenProblem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.layouts import SfLayout
from jitfp4.selection import Row, Table, rows

_MEASURED = "h200/quantize_variants.csv"

Tactic = VectorTactic | TmaTactic | TableTactic
Rows = tuple[Row[Tactic], ...]

_MXFP4: Rows = rows(
    (VectorTactic(1, 128), {"work": (1 << 27) - 1}),
    (VectorTactic(2, 128), {}),
    block_format=MXFP4,
)
_FOUR_OVER_SIX: Rows = tuple(
    Row(tactic, {"four_over_six": True} | when, "h200/quantize_better.csv")
    for tactic, when in (
        (VectorTactic(1, 128), {"silu": True}),
        (VectorTactic(1, 128), {"work": (1 << 21) - 1}),
        (VectorTactic(2, 128), {}),
    )
)
_SILU: Rows = rows(
    (VectorTactic(1, 64), {"work": (1 << 24) - 1}),
    (VectorTactic(2, 128), {}),
    silu=True,
)
_SMALL: Row[Tactic] = Row(VectorTactic(1, 128), {"work": (1 << 23) - 1})
_E4M3: Rows = (  # without an instruction for E2M1, other kernels are bound by instructions
    Row(TableTactic(2, 1024, ctas_per_sm=1), {"work": (1 << 25) - 1}),
    Row(TableTactic(4, 768, ctas_per_sm=1)),
)
_NVFP4: Rows = (Row(VectorTactic(2, 128), {"work": (1 << 25) - 1}), Row(VectorTactic(4, 256)))
_TMA: Row[Tactic] = Row(tma.TACTICS[0], {"suits_tma": True})

# On an H200 the vector kernel is the fastest at every size. On sm_100a and sm_103a, copies by TMA are selected where
# FlashInfer #2838 measured them to be faster on a B200; we have not measured that.
MATRIX_TABLES = (
    Table(
        (*_MXFP4, *_FOUR_OVER_SIX, *_SILU, _SMALL, *_E4M3, *_NVFP4),
        _MEASURED,
        elsewhere={TableTactic: "h200/quantize_others.csv"},
    ),
    Table((*_MXFP4, *_FOUR_OVER_SIX, *_SILU, _SMALL, _TMA, *_NVFP4), _MEASURED, needs="has_tcgen05"),
)
BATCH_TABLES = (Table((Row(grouped.TACTICS[0]),), _MEASURED),)
TOKEN_TABLES = (
    Table(
        (
            Row(TokenTactic(1, 1), {"k": 512}),
            Row(TokenTactic(2, 1), {"k": 1024}),
            Row(TokenTactic(2, 8), {"k": 4096}),
            Row(TokenTactic(4, 16)),
            Row(TokenTactic(4, 16, stream=True)),
        ),
        "h200/quantize_others.csv",
    ),
)
DEQUANTIZE_TABLES = (Table((Row(dequantize.TACTICS[0]),), "h200/quantize_others.csv"),)


def matrix_problems(_arch: Arch) -> Iterator[Problem]:
    """Each kind of input in each layout, in several sizes; those of 16 bits to NVFP4 with the better scales, too."""
    kinds = [(NVFP4, in_dtype, False) for in_dtype in ACTIVATIONS.values()]
    kinds += [(NVFP4, in_dtype, True) for in_dtype in HALVES.values()]
    kinds += [(MXFP4, in_dtype, False) for in_dtype in HALVES.values()]
    sizes = (1 << 10, 1 << 13, 1 << 14, 1 << 16)
    for (block_format, in_dtype, silu), layout, by_row, m in product(kinds, SfLayout, (False, True), sizes):
        yield Problem(block_format, in_dtype, layout, silu, by_row, m, 2048)
    for in_dtype, silu, layout, m in product(HALVES.values(), (False, True), SfLayout, (1 << 9, 1 << 10)):
        yield Problem(NVFP4, in_dtype, layout, silu, False, m, 2048, four_over_six=True)


def batch_problems(_arch: Arch) -> Iterator[BatchProblem]:
    """Masked batches with and without silu, and plain batches without silu."""
    kinds = ((False, False), (True, False), (True, True))
    for in_dtype, (masked, silu), better in product(HALVES.values(), kinds, (False, True)):
        yield BatchProblem(in_dtype, masked, silu, batch=8, m=128, k=2048, four_over_six=better)


def token_problems(_arch: Arch) -> Iterator[TokenProblem]:
    """The longest row of each row of the table."""
    lengths = (512, 1024, 4096, 32768, 65536)
    for in_dtype, layout, k, better in product(HALVES.values(), SfLayout, lengths, (False, True)):
        yield TokenProblem(in_dtype, layout, 128, k, four_over_six=better)


def dequantize_problems(_arch: Arch) -> Iterator[DequantizeProblem]:
    for block_format, out_dtype, layout in product(BlockFormat, FLOATS.values(), SfLayout):
        yield DequantizeProblem(block_format, out_dtype, layout, 128, 2048)
