"""What kernels of the family share: the parameters of codes and scales, and warps for sectors of scales."""

from __future__ import annotations

from typing import Any

from jitfp4.families.quantize.arguments import Arguments
from jitfp4.kernel import Plan
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.spec import MAX_GRID_YZ, WARP, Geometry, Ptr

Q = Ptr("q", "uint8", "[m, k/2], low nibble first")
SF = Ptr("sf", "uint8", "block scales in kSfLayout")


def sector_geometry(
    sf_layout: SfLayout, *, m: int, cols: int, sectors_per_warp: int, threads: int, batch: int | None = None
) -> Geometry:
    """A CTA is w warps along k by h sectors of 32 scales down the matrix; ``cols`` counts blocks, z the ``batch``."""
    outer, inner, tile_cols = sf_layout.tile
    sector_cols = WARP if sf_layout is SfLayout.layout_linear else tile_cols
    sectors = ceil_div(m, outer * inner) * ceil_div(outer * inner * sector_cols, WARP)
    tasks = ceil_div(cols, sector_cols * sectors_per_warp)
    warps = threads // WARP
    wide = min(warps, 1 << (tasks - 1).bit_length())
    down = ceil_div(sectors, warps // wide)
    z = ceil_div(down, MAX_GRID_YZ) if batch is None else batch
    y = ceil_div(down, z) if batch is None else down
    return Geometry(grid=(ceil_div(tasks, wide), y, z), block=(WARP * wide, warps // wide, 1))


def bind_codes(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    """The values of the parameters that every kernel for a matrix has."""
    return {
        "global_scale": arguments.scale,
        "q": arguments.out,
        "sf": arguments.out_sf,
        "m": plan.problem.m,
        "k": plan.problem.k,
    }


def bind_rows(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    """The same, and those of rows that lie any stride apart."""
    folded = plan.problem.m != arguments.out.shape[0]
    stride = plan.problem.k if folded else arguments.a.stride(0)
    return bind_codes(arguments, plan) | {"x": arguments.a, "x_stride": stride}
