"""The operation behind mm_fp4: its arguments, its kernels, its reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jitfp4.families.gemm.blockscaled_kernels import K64, K96
from jitfp4.families.gemm.fp4_problem import Fp4Problem, PortableSpec, geometry, rejects, specialise
from jitfp4.families.gemm.fp4_tables import BLOCKSCALED, HOPPER, SCALED, TABLE, TACTICS, problems
from jitfp4.families.gemm.fp4_wide_kernels import FP4_WIDE
from jitfp4.families.gemm.problem import DTYPES
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation, Written
from jitfp4.reference import gemm as reference
from jitfp4.spec import I64, Ptr


class Arguments(NamedTuple):
    """a [m, k / 2], b [n, k / 2] and out [m, n], which becomes a times the transpose of b.

    Codes and scales are uint8. Rows of a, b and out begin at multiples of 16 bytes, and their elements are adjacent.
    Scales are contiguous: those of b in 128x4, those of a in 8x4 if ``use_8x4_sf_layout``, else in 128x4.
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
    a = reference.decode(arguments.a, arguments.a_descale, problem.format, problem.a_layout)
    b = reference.decode(arguments.b, arguments.b_descale, problem.format, SfLayout.layout_128x4)
    arguments.out.copy_(reference.matmul(a, b, arguments.alpha, None))


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return {
        "a": arguments.a,
        "b": arguments.b,
        "a_scales": arguments.a_descale,
        "b_scales": arguments.b_descale,
        "alpha": arguments.alpha,
        "out": arguments.out,
        "m": plan.problem.m,
        "n": plan.problem.n,
        "k": plan.problem.k,
        "a_stride": arguments.a.stride(0),
        "b_stride": arguments.b.stride(0),
        "out_stride": arguments.out.stride(0),
    }


PORTABLE = Kernel(
    name="gemm/portable",
    spec=PortableSpec,
    params=(
        Ptr("a", "const uint8", "[m, k / 2]"),
        Ptr("b", "const uint8", "[n, k / 2]"),
        Ptr("a_scales", "const uint8", "in kALayout"),
        Ptr("b_scales", "const uint8", "in 128x4"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("out", "Out", "[m, n]"),
        I64("m"),
        I64("n", "a multiple of 8"),
        I64("k", "a multiple of 32"),
        I64("a_stride", "elements, as all strides: bytes of codes"),
        I64("b_stride"),
        I64("out_stride"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)


MM_FP4 = Operation(
    Arguments,
    name="mm_fp4",
    kernels=(PORTABLE, FP4_WIDE, K64, K96),
    problem=_problem,
    problems=problems,
    tables=(TABLE, SCALED, HOPPER, BLOCKSCALED),
    reference=_reference,
    output="out",
    aligned=("a", "b", "a_descale", "b_descale", "out"),
    exclusive=("out",),
    growing=("m",),
)
