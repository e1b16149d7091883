"""The operation that runs before the product of mm_fp4 on sm_90a: it expands the left operand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.families.gemm.arguments import ExpandArguments
from jitfp4.families.gemm.kernels import expand
from jitfp4.families.gemm.problem import ExpandProblem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation
from jitfp4.reference import gemm as reference
from jitfp4.selection import Row, Table


def _problem(arguments: ExpandArguments) -> ExpandProblem:
    return ExpandProblem(
        format=NVFP4 if arguments.block_size == NVFP4.block else MXFP4,
        a_layout=SfLayout.layout_8x4 if arguments.use_8x4_sf_layout else SfLayout.layout_128x4,
        m=arguments.a.shape[0],
        k=2 * arguments.a.shape[1],
    )


def _reference(arguments: ExpandArguments) -> None:
    problem = _problem(arguments)
    arguments.x.copy_(reference.expand(arguments.a, arguments.a_descale, problem.format, problem.a_layout))


def _problems(arch: Arch) -> Iterator[ExpandProblem]:
    if arch.has_wgmma:
        for block_format, layout in product(BlockFormat, (SfLayout.layout_128x4, SfLayout.layout_8x4)):
            yield ExpandProblem(block_format, layout, m=128, k=4096)


EXPAND = Operation(
    ExpandArguments,
    name="expand_fp4",
    kernels=(expand.KERNEL,),
    problem=_problem,
    problems=_problems,
    tables=(Table((Row(expand.TACTICS[3]),), measured=None),),
    reference=_reference,
    output="x",
    aligned=("a", "a_descale", "x"),
    exclusive=("x",),
    growing=("m",),
)
