"""The operation behind mm_bf16_fp4."""

from __future__ import annotations

from jitfp4.families.gemm.arguments import Arguments
from jitfp4.families.gemm.kernels import narrow, wide
from jitfp4.families.gemm.problem import DTYPES, Problem
from jitfp4.families.gemm.tables import HOPPER, TABLE, problems
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.operation import Operation
from jitfp4.reference import gemm as reference
from jitfp4.weight import Fp4Weight


def _problem(arguments: Arguments) -> Problem:
    m, k = arguments.a.shape
    return Problem(
        dtype=DTYPES[arguments.a.dtype],
        out_dtype=DTYPES[arguments.out.dtype],
        format=NVFP4 if arguments.row_scale is None else MXFP4,
        m=m,
        n=arguments.out.shape[1],
        k=k,
    )


def _reference(arguments: Arguments) -> None:
    n, k = arguments.out.shape[1], arguments.a.shape[1]
    block_format = NVFP4 if arguments.row_scale is None else MXFP4
    weight = Fp4Weight(arguments.data, arguments.row_scale, n, k, block_format).dequantize()
    arguments.out.copy_(reference.matmul(arguments.a, weight, arguments.alpha, arguments.bias))


MM_BF16_FP4 = Operation(
    Arguments,
    name="mm_bf16_fp4",
    kernels=(narrow.KERNEL, wide.KERNEL),
    problem=_problem,
    problems=problems,
    tables=(TABLE, HOPPER),
    reference=_reference,
    output="out",
    aligned=("a", "data", "bias", "out"),
    exclusive=("out",),
    growing=("m",),
)
