"""The operation behind mm_fp8_fp4."""

from __future__ import annotations

import torch

from jitfp4.families.gemm.arguments import Fp8Arguments, weight_rows
from jitfp4.families.gemm.fp8_tables import TABLE, problems
from jitfp4.families.gemm.kernels import expanded_fp8, wide_fp8
from jitfp4.families.gemm.problem import DTYPES, Fp8Problem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.operation import Operation
from jitfp4.reference import gemm as reference
from jitfp4.weight import Fp4Weight, rounded_to_e4m3, tile_bytes


def _format(arguments: Fp8Arguments) -> BlockFormat:
    return NVFP4 if arguments.data.shape[-1] == tile_bytes(NVFP4) else MXFP4


def _problem(arguments: Fp8Arguments) -> Fp8Problem:
    m, k = arguments.a.shape
    return Fp8Problem(
        out_dtype=DTYPES[arguments.out.dtype],
        format=_format(arguments),
        m=m,
        n=weight_rows(arguments),
        k=k,
        gated=arguments.gated,
    )


def _reference(arguments: Fp8Arguments) -> None:
    n, k, block_format = weight_rows(arguments), arguments.a.shape[1], _format(arguments)
    own = None if block_format is NVFP4 else arguments.row_scale
    weight = Fp4Weight(arguments.data, own, n, k, block_format, arguments.gated)
    a = arguments.a.view(torch.float8_e4m3fn).double() * arguments.a_scale.double().reshape(-1, 1)
    out = reference.matmul(a, rounded_to_e4m3(weight, arguments.row_scale), arguments.alpha, arguments.bias)
    arguments.out.copy_(reference.swiglu(out) if arguments.gated else out)


MM_FP8_FP4 = Operation(
    Fp8Arguments,
    name="mm_fp8_fp4",
    kernels=(wide_fp8.KERNEL, expanded_fp8.KERNEL),
    problem=_problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="out",
    aligned=("a", "data", "bias", "out"),
    exclusive=("out",),
    growing=("m",),
)
