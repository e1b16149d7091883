"""The operation behind mm_bf16_fp4."""

from __future__ import annotations

from jitfp4.families.gemm.arguments import Arguments, weight_rows
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
        n=weight_rows(arguments),
        k=k,
        gated=arguments.gated,
    )


def _reference(arguments: Arguments) -> None:
    n, k = weight_rows(arguments), arguments.a.shape[1]
    block_format = NVFP4 if arguments.row_scale is None else MXFP4
    weight = Fp4Weight(arguments.data, arguments.row_scale, n, k, block_format, arguments.gated).dequantize()
    out = reference.matmul(arguments.a, weight, arguments.alpha, arguments.bias)
    if arguments.gated:
        out = reference.swiglu(out)
    if arguments.residual is not None:
        out = out.to(arguments.out.dtype).float() + arguments.residual.float()
    arguments.out.copy_(out)


MM_BF16_FP4 = Operation(
    Arguments,
    name="mm_bf16_fp4",
    kernels=(narrow.KERNEL, wide.KERNEL),
    problem=_problem,
    problems=problems,
    tables=(TABLE, HOPPER),
    reference=_reference,
    output="out",
    aligned=("a", "data", "bias", "residual", "out"),
    exclusive=("out",),
    growing=("m",),
)
