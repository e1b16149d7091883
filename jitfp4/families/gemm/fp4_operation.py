"""The operation behind mm_fp4: its arguments, its kernels, its reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.families.gemm.blockscaled_kernels import K64, K96
from jitfp4.families.gemm.fp4_problem import Fp4Problem
from jitfp4.families.gemm.fp4_tables import TABLE, problems
from jitfp4.families.gemm.problem import DTYPES
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation, Written
from jitfp4.reference import gemm as reference
from jitfp4.reference.quantize import dequantize


class Arguments(NamedTuple):
    """a [m, k / 2] and b [n, k / 2] to out [m, n]: a times the transpose of b.

    Codes and scales are uint8. Rows of a, b and out lie at multiples of 16 bytes, their elements are neighbours. Scales
    are contiguous: those of b in 128x4, those of a in 8x4 if ``use_8x4_sf_layout``, else in 128x4.
    """

    a: torch.Tensor
    b: torch.Tensor
    a_descale: torch.Tensor
    b_descale: torch.Tensor
    alpha: torch.Tensor | None
    out: Written
    block_size: int
    use_8x4_sf_layout: bool
    enable_pdl: bool | None


def _problem(arguments: Arguments) -> Fp4Problem:
    return Fp4Problem(
        format=NVFP4 if arguments.block_size == NVFP4.block else MXFP4,
        a_layout=SfLayout.layout_8x4 if arguments.use_8x4_sf_layout else SfLayout.layout_128x4,
        out_dtype=DTYPES[arguments.out.dtype],
        m=arguments.a.shape[0],
        n=arguments.b.shape[0],
        k=2 * arguments.a.shape[1],
    )


def _reference(arguments: Arguments) -> None:
    problem = _problem(arguments)
    a = dequantize(arguments.a, arguments.a_descale, problem.format, None, problem.a_layout)
    b = dequantize(arguments.b, arguments.b_descale, problem.format, None, SfLayout.layout_128x4)
    arguments.out.copy_(reference.matmul(a, b, arguments.alpha, None))


MM_FP4 = Operation(
    Arguments,
    name="mm_fp4",
    kernels=(K64, K96),
    problem=_problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="out",
    aligned=("a", "b", "a_descale", "b_descale", "out"),
    exclusive=("out",),
)
