"""The kernels of mm_fp4 for the sm_100 family, and their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitfp4.families.gemm.blockscaled import (
    K64_TACTICS,
    K96_TACTICS,
    BlockScaledSpec,
    K64Spec,
    K96Spec,
    geometry,
    rejects,
    specialise,
)
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout
from jitfp4.spec import I64, Ptr, TensorMapParam, TileMap

if TYPE_CHECKING:
    from jitfp4.families.gemm.fp4_operation import Arguments

_PARAMS = (
    TensorMapParam("left", "[rows, k / 2] bytes; boxes are a CTA's part of what CTAs share"),
    TensorMapParam("right", "likewise"),
    TensorMapParam("left_scales", "[rows / 128, 64 words for each 4 columns of scales], likewise"),
    TensorMapParam("right_scales", "likewise"),
    TensorMapParam("out_map", "[m, n], boxes [32, 64] or with kSwapAb [kPartN, 32]"),
    Ptr("alpha", "const float", "[1]; null: 1"),
    Ptr("out", "Out", "[m, n]"),
    I64("m"),
    I64("n", "a multiple of 8"),
    I64("k", "a multiple of 64"),
    I64("out_stride", "elements"),
)


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    spec: BlockScaledSpec = plan.spec
    problem, out = plan.problem, arguments.out.view(torch.uint16)
    a = arguments.a, atoms(arguments.a_descale, problem.m, problem.k // problem.format.block)
    b = arguments.b, atoms(arguments.b_descale, problem.n, problem.k // problem.format.block)
    (left, left_scales), (right, right_scales) = (b, a) if spec.swap_ab else (a, b)
    boxes, box = spec.boxes, (spec.part_n, 32) if spec.swap_ab else (32, spec.part_n)
    return {
        "left": TileMap(left, boxes["left"], swizzle=128),
        "right": TileMap(right, boxes["right"], swizzle=128),
        "left_scales": TileMap(left_scales, boxes["left_scales"]),
        "right_scales": TileMap(right_scales, boxes["right_scales"]),
        "out_map": TileMap(out, box, swizzle=2 * box[1]),
        "alpha": arguments.alpha,
        "out": arguments.out,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "out_stride": arguments.out.stride(0),
    }


def atoms(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Scales in 128x4 as 8-byte words, where the 64 words of an atom are adjacent: [rows / 128, 64 * cols / 4]."""
    padded_rows, padded_cols = SfLayout.layout_128x4.shape(rows, cols)
    return scales.view(-1).view(torch.int64).view(padded_rows // 128, padded_cols * 128 // 8)


K64 = Kernel(
    name="gemm/blockscaled",
    spec=K64Spec,
    params=_PARAMS,
    tactics=K64_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)

K96 = Kernel(
    name="gemm/blockscaled_k96",
    spec=K96Spec,
    params=_PARAMS,
    tactics=K96_TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
