"""The kernel of mm_fp4 for sm_90a, and the operation behind the expansion of its left operand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jitfp4.arch import Arch
from jitfp4.families.gemm import fp4_wide
from jitfp4.families.gemm.blockscaled_kernels import atoms
from jitfp4.families.gemm.fp4_wide import ExpandProblem, ExpandSpec, ExpandTactic, Fp4WideSpec
from jitfp4.families.gemm.problem import DTYPES
from jitfp4.families.gemm.tables import WIDE_TACTICS
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.kernel import Before, Kernel, Plan, Scratch
from jitfp4.layouts import SfLayout, round_up
from jitfp4.operation import Operation, Written
from jitfp4.reference import gemm as reference
from jitfp4.selection import Row, Table
from jitfp4.spec import I64, Ptr, TensorMapParam, TileMap
from jitfp4.weight import TILE_COLS, TILE_ROWS

if TYPE_CHECKING:
    from jitfp4.families.gemm.fp4_operation import Arguments

TORCH_DTYPES = {dtype: of for of, dtype in DTYPES.items()}

# ---- the expansion ---------------------------------------------------------------------------------------------------


class ExpandArguments(NamedTuple):
    """a [m, k / 2] and its scales, as those of mm_fp4; x [m, round_up(k, 128)], which becomes a.

    x holds a's values, of NVFP4 times 2^-7, in the order of columns of reference.gemm.expand().
    """

    a: torch.Tensor
    a_descale: torch.Tensor
    x: Written
    block_size: int
    use_8x4_sf_layout: bool
    enable_pdl: bool | None


def _expand_problem(arguments: ExpandArguments) -> ExpandProblem:
    return ExpandProblem(
        format=NVFP4 if arguments.block_size == NVFP4.block else MXFP4,
        a_layout=SfLayout.layout_8x4 if arguments.use_8x4_sf_layout else SfLayout.layout_128x4,
        m=arguments.a.shape[0],
        k=2 * arguments.a.shape[1],
    )


def _expand_reference(arguments: ExpandArguments) -> None:
    problem = _expand_problem(arguments)
    arguments.x.copy_(reference.expand(arguments.a, arguments.a_descale, problem.format, problem.a_layout))


def _bind_expand(arguments: ExpandArguments, plan: Plan) -> dict[str, Any]:
    return {
        "a": arguments.a,
        "scales": arguments.a_descale,
        "x": arguments.x,
        "m": plan.problem.m,
        "k": plan.problem.k,
        "a_stride": arguments.a.stride(0),
        "x_stride": arguments.x.stride(0),
    }


def _expand_problems(arch: Arch) -> Iterator[ExpandProblem]:
    if arch.name == "sm_90a":
        for block_format, layout in product(BlockFormat, (SfLayout.layout_128x4, SfLayout.layout_8x4)):
            yield ExpandProblem(block_format, layout, m=128, k=4096)


_TACTICS = tuple(ExpandTactic(tile_m) for tile_m in (1, 2, 4, 8, 16))

EXPAND = Operation(
    ExpandArguments,
    name="expand_fp4",
    kernels=(
        Kernel(
            name="gemm/expand",
            spec=ExpandSpec,
            params=(
                Ptr("a", "const uint8", "[m, k / 2]"),
                Ptr("scales", "const uint8", "in kLayout"),
                Ptr("x", "Out", "[m, round_up(k, 128)]"),
                I64("m"),
                I64("k", "a multiple of 32"),
                I64("a_stride", "bytes"),
                I64("x_stride", "elements"),
            ),
            tactics=_TACTICS,
            rejects=fp4_wide.rejects_expand,
            specialise=fp4_wide.specialise_expand,
            geometry=fp4_wide.geometry_expand,
            bind=_bind_expand,
        ),
    ),
    problem=_expand_problem,
    problems=_expand_problems,
    tables=(Table((Row(_TACTICS[3]),), measured=None),),
    reference=_expand_reference,
    output="x",
    aligned=("a", "a_descale", "x"),
    exclusive=("x",),
    growing=("m",),
)

# ---- the product -----------------------------------------------------------------------------------------------------


def _scratch(arguments: Arguments, plan: Plan) -> dict[str, Scratch]:  # noqa: ARG001
    """x, which is a expanded, and a workspace for divided tiles."""
    problem, size = plan.problem, plan.spec.workspace_bytes(plan.geometry.grid[0])
    x = Scratch((problem.m, round_up(problem.k, TILE_COLS)), TORCH_DTYPES[plan.spec.dtype])
    return {"x": x, "workspace": Scratch((size,), torch.uint8)} if size else {"x": x}


def _expansion(arguments: Arguments, _plan: Plan, x: torch.Tensor, **_workspace: torch.Tensor) -> ExpandArguments:
    return ExpandArguments(
        a=arguments.a,
        a_descale=arguments.a_descale,
        x=x,
        block_size=arguments.block_size,
        use_8x4_sf_layout=arguments.use_8x4_sf_layout,
        enable_pdl=arguments.enable_pdl,
    )


def _bind(arguments: Arguments, plan: Plan, x: torch.Tensor, workspace: torch.Tensor | None = None) -> dict[str, Any]:
    spec: Fp4WideSpec = plan.spec
    m, n, k = plan.problem.m, plan.problem.n, plan.problem.k
    return {
        "x": TileMap(x.view(torch.uint16), (spec.tile_m // spec.cluster, TILE_COLS // 2), swizzle=128),
        "weight": TileMap(arguments.b, (TILE_ROWS, TILE_COLS // 2), swizzle=64),
        "weight_scales": TileMap(atoms(arguments.b_descale, n, k // spec.format.block), (1, spec.scale_words)),
        "alpha": arguments.alpha,
        "workspace": workspace,
        "out": TileMap(arguments.out.view(torch.uint16), (spec.tile_m // spec.parts, TILE_ROWS), swizzle=128),
        "m": m,
        "n": n,
        "k": k,
    }


FP4_WIDE = Kernel(
    name="gemm/wide_fp4",
    spec=Fp4WideSpec,
    params=(
        TensorMapParam("x", "[m, round_up(k, 128)], boxes [kCopyM, kHalf]"),
        TensorMapParam("weight", "[n, k / 2] bytes, boxes [64, 64]"),
        TensorMapParam("weight_scales", "[n / 128, 64 words for each 4 columns of scales]"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("workspace", "uint8", "of divided tiles, else null"),
        TensorMapParam("out", "[m, n], boxes [kPartM, 64]"),
        I64("m"),
        I64("n", "a multiple of 8"),
        I64("k", "a multiple of 32"),
    ),
    tactics=WIDE_TACTICS,
    rejects=fp4_wide.rejects,
    specialise=fp4_wide.specialise,
    geometry=fp4_wide.geometry,
    bind=_bind,
    scratch=_scratch,
    before=(Before(EXPAND, _expansion),),
)
