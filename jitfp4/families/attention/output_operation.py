"""The operation behind attention with NVFP4 output: blocks to codes, and scales to rows of a larger matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.attention.arguments import OutputArguments
from jitfp4.families.attention.kernels.quantize import KERNEL, OutputTactic
from jitfp4.families.attention.problem import OutputProblem
from jitfp4.formats import NVFP4
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation
from jitfp4.reference.formats import swizzle, unswizzle
from jitfp4.reference.quantize import quantize_blocks
from jitfp4.selection import Row, Table

_LAYOUT = SfLayout.layout_128x4


def _problem(arguments: OutputArguments) -> OutputProblem:
    rows, width = arguments.x.shape
    return OutputProblem(HALVES[arguments.x.dtype], rows, width // NVFP4.block)


def _problems(_arch: Arch) -> Iterator[OutputProblem]:
    for dtype in HALVES.values():
        yield OutputProblem(dtype, rows=64, cols=256)


def _reference(arguments: OutputArguments) -> None:
    a = arguments
    codes, scales = quantize_blocks(a.x, NVFP4, torch.tensor(a.encode_scale, dtype=torch.float32, device=a.x.device))
    a.out.copy_(codes)
    shape = a.out_scales.shape
    linear = unswizzle(a.out_scales, _LAYOUT, *shape).clone()
    linear[a.first_row : a.first_row + len(scales), : scales.shape[1]] = scales
    a.out_scales.copy_(swizzle(linear, _LAYOUT))


ATTENTION_QUANTIZE = Operation(
    OutputArguments,
    name="attention_quantize",
    kernels=(KERNEL,),
    problem=_problem,
    problems=_problems,
    tables=(Table((Row(OutputTactic()),), measured=None),),
    reference=_reference,
    output="out",
    aligned=("x", "out", "out_scales"),
    exclusive=("out", "out_scales"),
    growing=("rows",),
)
