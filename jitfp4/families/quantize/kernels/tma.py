"""Rows to NVFP4 by persistent CTAs, whose copies are the copy engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.quantize.arguments import Arguments
from jitfp4.families.quantize.launches import SF, Q, bind_codes
from jitfp4.families.quantize.problem import Problem
from jitfp4.formats import NVFP4, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout, ceil_div, round_up
from jitfp4.spec import I64, WARP, Geometry, KernelSpec, Ptr, TensorMapParam, TileMap

_MAX_MAP_SIZE = 1 << 32  # elements along a dimension of a tensor map


@dataclass(frozen=True, slots=True)
class TmaTactic:
    """Tiles in flight in a CTA, CTAs of an SM, and blocks of a thread in a tile."""

    stages: int
    ctas_per_sm: int
    blocks_per_thread: int


TACTICS = (TmaTactic(6, 1, 2), TmaTactic(3, 2, 2), TmaTactic(6, 2, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TmaSpec(KernelSpec):
    """Persistent CTAs: a producer warp keeps ``stages`` tiles in flight, consumer warps quantize them to NVFP4."""

    in_dtype: DType
    sf_layout: SfLayout
    stages: int
    ctas_per_sm: int
    blocks_per_thread: int

    consumers = 16  # warps, besides the one that copies
    box_cols = 64  # elements of a 128-byte row of a box

    @property
    def box_rows(self) -> int:
        """Rows of a box: those of a tile, or in 128x4 8 neighbouring rows, one box for each of four outer rows."""
        return {SfLayout.layout_128x4: 8, SfLayout.layout_8x4: 32, SfLayout.layout_linear: 16}[self.sf_layout]

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and blocks of a tile."""
        rows, cols = (16, 32) if self.sf_layout is SfLayout.layout_linear else (32, 16)
        return rows, cols * self.blocks_per_thread

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: a ring of tiles of 16-bit elements, then two barriers for each tile."""
        rows, blocks = self.tile
        return round_up(self.stages * (rows * blocks * NVFP4.block * 2 + 16), 1024)


def specialise(problem: Problem, tactic: TmaTactic) -> TmaSpec:
    return TmaSpec(
        in_dtype=problem.in_dtype,
        sf_layout=problem.sf_layout,
        stages=tactic.stages,
        ctas_per_sm=tactic.ctas_per_sm,
        blocks_per_thread=tactic.blocks_per_thread,
    )


def rejects(problem: Problem, tactic: TmaTactic, arch: Arch) -> str | None:
    if not arch.has_tma:
        return "it copies by TMA"
    if problem.block_format is not NVFP4 or problem.in_dtype not in HALVES.values() or problem.silu or problem.by_row:
        return "it takes bf16 or f16 to NVFP4, without silu, with one global scale"
    if problem.four_over_six:
        return "it gives each block one scale"
    if max(problem.m, problem.k) > _MAX_MAP_SIZE:
        return f"a tensor map has at most {_MAX_MAP_SIZE} elements along a dimension"
    if specialise(problem, tactic).shared_bytes * tactic.ctas_per_sm > arch.shared_bytes:
        return "its ring does not fit in shared memory"
    return None


def geometry(problem: Problem, tactic: TmaTactic, arch: Arch) -> Geometry:
    """As many CTAs as run on the GPU at once, but no more than tiles."""
    spec = specialise(problem, tactic)
    rows, blocks = spec.tile
    tiles = ceil_div(problem.m, rows) * ceil_div(problem.cols, blocks)
    return Geometry(
        grid=(min(tiles, spec.ctas_per_sm * arch.num_sms), 1, 1),
        block=((spec.consumers + 1) * WARP, 1, 1),
        shared_bytes=spec.shared_bytes,
    )


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    rows = arguments.a.view(torch.uint16).view(plan.problem.m, plan.problem.k)
    return bind_codes(arguments, plan) | {"x": TileMap(rows, (plan.spec.box_rows, plan.spec.box_cols), swizzle=128)}


KERNEL = Kernel(
    name="quantize/tma",
    spec=TmaSpec,
    params=(
        TensorMapParam("x", "[m, k]"),
        Ptr("global_scale", "const float", "[1], encode"),
        Q,
        SF,
        I64("m"),
        I64("k"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
