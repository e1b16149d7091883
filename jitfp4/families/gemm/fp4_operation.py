"""The operation behind mm_fp4."""

from __future__ import annotations

from jitfp4.families.gemm.arguments import Fp4Arguments
from jitfp4.families.gemm.fp4_tables import BLOCKSCALED, HOPPER, SCALED, TABLE, problems
from jitfp4.families.gemm.kernels import blockscaled, blockscaled_k96, portable, wide_fp4
from jitfp4.families.gemm.problem import DTYPES, Fp4Problem
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation
from jitfp4.reference import gemm as reference


def _problem(arguments: Fp4Arguments) -> Fp4Problem:
    return Fp4Problem(
        format=NVFP4 if arguments.block_size == NVFP4.block else MXFP4,
        a_layout=SfLayout.layout_8x4 if arguments.use_8x4_sf_layout else SfLayout.layout_128x4,
        out_dtype=DTYPES[arguments.out.dtype],
        m=arguments.a.shape[0],
        n=arguments.b.shape[0],
        k=2 * arguments.a.shape[1],
    )


def _reference(arguments: Fp4Arguments) -> None:
    problem = _problem(arguments)
    a = reference.decode(arguments.a, arguments.a_descale, problem.format, problem.a_layout)
    b = reference.decode(arguments.b, arguments.b_descale, problem.format, SfLayout.layout_128x4)
    arguments.out.copy_(reference.matmul(a, b, arguments.alpha, None))


MM_FP4 = Operation(
    Fp4Arguments,
    name="mm_fp4",
    kernels=(portable.KERNEL, wide_fp4.KERNEL, blockscaled.KERNEL, blockscaled_k96.KERNEL),
    problem=_problem,
    problems=problems,
    tables=(TABLE, SCALED, HOPPER, BLOCKSCALED),
    reference=_reference,
    output="out",
    aligned=("a", "b", "a_descale", "b_descale", "out"),
    exclusive=("out",),
    growing=("m",),
)
