"""The operation behind mm_bf16_fp4: its arguments, its kernels, its reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jitfp4.families.gemm import wide
from jitfp4.families.gemm.problem import DTYPES, NarrowSpec, Problem, geometry, rejects, specialise
from jitfp4.families.gemm.tables import HOPPER, TABLE, TACTICS, WIDE_TACTICS, problems
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.kernel import Kernel, Plan, Scratch
from jitfp4.operation import Operation, Written
from jitfp4.reference import gemm as reference
from jitfp4.spec import I64, Ptr, TensorMapParam, TileMap
from jitfp4.weight import TILE_COLS, TILE_ROWS, Fp4Weight


class Arguments(NamedTuple):
    """a [m, k], a prepared weight of n rows, and out [m, n]. ``row_scale`` is None for NVFP4."""

    a: torch.Tensor
    data: torch.Tensor
    row_scale: torch.Tensor | None
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    out: Written
    enable_pdl: bool | None
    names: str


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.a,
        "weight": arguments.data,
        "row_scale": arguments.row_scale,
        "alpha": arguments.alpha,
        "bias": arguments.bias,
        "out": arguments.out,
        "m": plan.problem.m,
        "n": plan.problem.n,
        "k": plan.problem.k,
        "x_stride": arguments.a.stride(0),
        "out_stride": arguments.out.stride(0),
    }


def _bind_wide(arguments: Arguments, plan: Plan, workspace: torch.Tensor | None = None) -> dict[str, Any]:
    spec: wide.WideSpec = plan.spec
    a, out = arguments.a.view(torch.uint16), arguments.out.view(torch.uint16)
    return {
        "x": TileMap(a, (spec.tile_m // spec.cluster, TILE_COLS // 2), swizzle=128),
        "weight": arguments.data,
        "row_scale": arguments.row_scale,
        "alpha": arguments.alpha,
        "bias": arguments.bias,
        "workspace": workspace,
        "out": TileMap(out, (spec.tile_m // spec.parts, TILE_ROWS), swizzle=128),
        "m": plan.problem.m,
        "n": plan.problem.n,
        "k": plan.problem.k,
    }


def _scratch_wide(_arguments: Arguments, plan: Plan) -> dict[str, Scratch]:
    size = plan.spec.workspace_bytes(plan.geometry.grid[0])
    return {"workspace": Scratch((size,), torch.uint8)} if size else {}


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


NARROW = Kernel(
    name="gemm/narrow",
    spec=NarrowSpec,
    params=(
        Ptr("x", "const In", "[m, k]"),
        Ptr("weight", "const uint8", "[ceil(n / 64), ceil(k / 128), kTileBytes]"),
        Ptr("row_scale", "const float", "[round_up(n, 64)] of MXFP4, else null"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("bias", "const Out", "[n]; null: none"),
        Ptr("out", "Out", "[m, n]"),
        I64("m"),
        I64("n", "a multiple of 8"),
        I64("k", "a multiple of 32"),
        I64("x_stride", "elements, as all strides"),
        I64("out_stride"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)

WIDE = Kernel(
    name="gemm/wide",
    spec=wide.WideSpec,
    params=(
        TensorMapParam("x", "[m, k], boxes [kCopyM, kHalf]"),
        Ptr("weight", "const uint8", "[ceil(n / 64), ceil(k / 128), kTileBytes]"),
        Ptr("row_scale", "const float", "[round_up(n, 64)] of MXFP4, else null"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("bias", "const Out", "[n]; null: none"),
        Ptr("workspace", "uint8", "of divided tiles, else null"),
        TensorMapParam("out", "[m, n], boxes [kPartM, 64]"),
        I64("m"),
        I64("n", "a multiple of 8"),
        I64("k", "a multiple of 32"),
    ),
    tactics=WIDE_TACTICS,
    rejects=wide.rejects,
    specialise=wide.specialise,
    geometry=wide.geometry,
    bind=_bind_wide,
    scratch=_scratch_wide,
)

MM_BF16_FP4 = Operation(
    Arguments,
    name="mm_bf16_fp4",
    kernels=(NARROW, WIDE),
    problem=_problem,
    problems=problems,
    tables=(TABLE, HOPPER),
    reference=_reference,
    output="out",
    aligned=("a", "data", "bias", "out"),
    exclusive=("out",),
    growing=("m",),
)
