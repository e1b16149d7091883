"""The operation behind both functions: its arguments, its kernel, its reference."""

from __future__ import annotations

from jitfp4.dtypes import HALVES
from jitfp4.families.norm.arguments import Arguments
from jitfp4.families.norm.kernels import rmsnorm_fp4quant, rows_fp4quant
from jitfp4.families.norm.problem import Problem, Scale
from jitfp4.families.norm.tables import TABLE, problems
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation
from jitfp4.reference import norm as reference
from jitfp4.reference.formats import swizzle


def _problem(arguments: Arguments) -> Problem:
    m, h = arguments.input.shape
    return Problem(
        in_dtype=HALVES[arguments.input.dtype],
        block=arguments.block_size,
        scale=Scale(arguments.scale_format),
        add=arguments.residual is not None,
        gate=arguments.gate is not None,
        padded=arguments.block_scale is not None,
        m=m,
        h=h,
    )


def _reference(arguments: Arguments) -> None:
    hidden = arguments.input
    if arguments.residual is not None:
        hidden = reference.add(hidden, arguments.residual)
        arguments.residual.copy_(hidden)
    heads = (-1, arguments.weight.shape[0])
    gate = None if arguments.gate is None else arguments.gate.unflatten(1, heads)
    y = reference.rmsnorm(hidden.unflatten(1, heads), arguments.weight, arguments.eps, gate=gate).flatten(1)
    codes, scales = reference.quantize(y, arguments.block_size, arguments.scale_format, arguments.global_scale)
    arguments.y_fp4.copy_(codes)
    if arguments.block_scale is not None:
        arguments.block_scale.copy_(swizzle(scales, SfLayout.layout_128x4).flatten())
    if arguments.block_scale_unswizzled is not None:
        arguments.block_scale_unswizzled.copy_(scales)
    if arguments.y_out is not None:
        arguments.y_out.copy_(y)


RMSNORM = Operation(
    Arguments,
    name="rmsnorm_fp4quant",
    kernels=(rmsnorm_fp4quant.KERNEL, rows_fp4quant.KERNEL),
    problem=_problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="y_fp4",
    aligned=("input", "residual", "weight", "gate", "y_fp4", "y_out"),
    exclusive=("residual", "y_fp4", "block_scale", "block_scale_unswizzled", "y_out"),
    growing=("m",),
)
