"""The operation behind both functions: its arguments, its kernel, its reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jitfp4.dtypes import HALVES
from jitfp4.families.norm.problem import (
    Problem,
    Scale,
    Spec,
    geometry,
    rejects,
    row_threads,
    specialise,
)
from jitfp4.families.norm.tables import TABLE, TACTICS, problems
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation, Written
from jitfp4.reference import norm as reference
from jitfp4.reference.formats import swizzle
from jitfp4.spec import F32, I64, Ptr


class Arguments(NamedTuple):
    """Rows [m, h], and the outputs. ``block_scale`` has the 128x4 layout, ``block_scale_unswizzled`` the linear one."""

    input: torch.Tensor
    residual: Written | None
    weight: torch.Tensor
    global_scale: torch.Tensor | None
    y_fp4: Written
    block_scale: Written | None
    block_scale_unswizzled: Written | None
    y_out: Written | None
    eps: float
    block_size: int
    scale_format: str
    enable_pdl: bool | None
    names: str


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.input,
        "residual": arguments.residual,
        "weight": arguments.weight,
        "global_scale": arguments.global_scale,
        "q": arguments.y_fp4,
        "sf_128x4": arguments.block_scale,
        "sf_linear": arguments.block_scale_unswizzled,
        "y": arguments.y_out,
        "m": plan.problem.m,
        "h": plan.problem.h,
        "row_threads": row_threads(plan.problem.h, plan.spec),
        "eps": arguments.eps,
    }


def _problem(arguments: Arguments) -> Problem:
    m, h = arguments.input.shape
    return Problem(
        in_dtype=HALVES[arguments.input.dtype],
        block=arguments.block_size,
        scale=Scale(arguments.scale_format),
        add=arguments.residual is not None,
        padded=arguments.block_scale is not None,
        m=m,
        h=h,
    )


def _reference(arguments: Arguments) -> None:
    hidden = arguments.input
    if arguments.residual is not None:
        hidden = reference.add(hidden, arguments.residual)
        arguments.residual.copy_(hidden)
    y = reference.rmsnorm(hidden, arguments.weight, arguments.eps)
    codes, scales = reference.quantize(y, arguments.block_size, arguments.scale_format, arguments.global_scale)
    arguments.y_fp4.copy_(codes)
    if arguments.block_scale is not None:
        arguments.block_scale.copy_(swizzle(scales, SfLayout.layout_128x4).flatten())
    if arguments.block_scale_unswizzled is not None:
        arguments.block_scale_unswizzled.copy_(scales)
    if arguments.y_out is not None:
        arguments.y_out.copy_(y)


KERNEL = Kernel(
    name="norm/rmsnorm_fp4quant",
    spec=Spec,
    params=(
        Ptr("x", "const In", "[m, h]"),
        Ptr("residual", "In", "[m, h], updated in place; null without an addition"),
        Ptr("weight", "const In", "[h]"),
        Ptr("global_scale", "const float", "[1], encode; null means 1"),
        Ptr("q", "uint8", "[m, h/2], low nibble first"),
        Ptr("sf_128x4", "uint8", "scales in the 128x4 layout, or null"),
        Ptr("sf_linear", "uint8", "[m, h/kBlock], or null"),
        Ptr("y", "In", "[m, h], what is quantized, or null"),
        I64("m"),
        I64("h"),
        I64("row_threads"),
        F32("eps"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)

RMSNORM = Operation(
    Arguments,
    name="rmsnorm_fp4quant",
    kernels=(KERNEL,),
    problem=_problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="y_fp4",
    aligned=("input", "residual", "weight", "y_fp4", "y_out"),
    exclusive=("residual", "y_fp4", "block_scale", "block_scale_unswizzled", "y_out"),
    growing=("m",),
)
