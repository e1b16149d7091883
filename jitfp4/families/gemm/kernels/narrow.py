"""Few rows of activations by a prepared weight, by mma.sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.gemm.arguments import Arguments
from jitfp4.families.gemm.problem import Problem
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.narrow import TILE_MS, Groups, indivisible, launch, overfills
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr, fields_of

_X_STAGES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class NarrowTactic:
    """The tunable fields of NarrowSpec, and the number of CTAs of a cluster over which the columns are split.

    ``room``: for how many rows of x there is room, 0 for as many as ``tile_m``. ``x_stages``: for how many chunks of
    them.
    """

    tile_m: int
    warp_blocks: int
    row_warps: int
    groups: int
    stages: int
    ctas: int
    split: int = 1
    room: int = 0
    x_stages: int = 2


_CUTS = {  # by rows of x: blocks and warps of a group, groups, stages, CTAs of an SM
    8: (
        (5, 1, 12, 2, 1),
        (5, 1, 7, 2, 2),
        (4, 1, 16, 2, 1),
        (4, 1, 12, 3, 1),
        (4, 1, 8, 2, 2),
        (4, 1, 4, 2, 4),
        (4, 1, 4, 2, 3),
        (3, 1, 16, 2, 1),
        (3, 1, 10, 2, 2),
        (2, 2, 12, 2, 1),
        (2, 1, 16, 2, 1),
        (2, 1, 16, 3, 1),
        (2, 1, 12, 2, 2),
        (2, 1, 8, 4, 2),
        (1, 1, 16, 2, 2),
        (1, 1, 12, 4, 2),
    ),
    16: (
        (5, 1, 10, 2, 1),
        (5, 1, 8, 3, 1),
        (5, 2, 6, 2, 1),
        (4, 1, 12, 2, 1),
        (4, 1, 8, 3, 1),
        (4, 2, 8, 2, 1),
        (4, 1, 6, 2, 2),
        (4, 2, 4, 2, 2),
        (4, 1, 4, 2, 3),
        (3, 1, 12, 2, 1),
        (3, 1, 7, 2, 2),
        (3, 2, 4, 2, 2),
        (2, 2, 8, 3, 1),
        (2, 1, 8, 2, 2),
        (1, 1, 10, 2, 2),
        (1, 1, 8, 4, 2),
    ),
    32: (
        (4, 1, 8, 2, 1),
        (4, 2, 4, 3, 1),
        (4, 2, 2, 3, 2),
        (2, 2, 6, 2, 1),
        (2, 4, 4, 3, 1),
        (2, 4, 2, 3, 2),
        (2, 2, 3, 2, 2),
    ),
    64: (
        (2, 4, 2, 3, 1),
        (2, 2, 4, 2, 1),
        (2, 4, 1, 3, 2),
        (1, 4, 2, 2, 2),
    ),
}
_ONE_ROW = (  # as above, with room for one row of x
    (5, 1, 12, 3, 1),
    (5, 1, 8, 2, 2),
    (5, 1, 4, 2, 4),
    (4, 1, 14, 3, 1),
    (4, 1, 16, 2, 1),
    (4, 1, 8, 3, 1),
    (4, 1, 8, 2, 2),
    (4, 1, 4, 2, 4),
    (4, 1, 4, 2, 5),
    (4, 1, 4, 3, 3),
    (3, 1, 16, 3, 1),
    (3, 1, 16, 2, 1),
    (3, 1, 12, 2, 2),
    (3, 1, 8, 3, 2),
    (3, 1, 8, 2, 3),
    (2, 1, 16, 5, 1),
    (2, 1, 16, 3, 1),
    (2, 1, 16, 2, 2),
    (2, 1, 8, 4, 2),
    (2, 1, 8, 2, 4),
    (1, 1, 16, 4, 2),
    (1, 1, 16, 2, 4),
    (1, 1, 8, 4, 4),
)
_SPLITS = (1, 2, 3, 4)
_SMALL = (NarrowTactic(tile_m, 1, 4, 4 if tile_m < 32 else 2, 2, 1) for tile_m in TILE_MS)  # little shared memory

TACTICS = (
    *(NarrowTactic(tile_m, *cut, split) for tile_m in TILE_MS for cut in _CUTS[tile_m] for split in _SPLITS),
    *_SMALL,
    NarrowTactic(8, 3, 1, 12, 2, 1, x_stages=4),
    *(NarrowTactic(8, *cut, split, room=1, x_stages=8) for cut in _ONE_ROW for split in _SPLITS[:2]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowSpec(Groups, KernelSpec):
    """A CTA takes ``tile_m`` rows of x, of which ``x_rows`` exist, by 16 * ``warp_blocks`` * ``row_warps`` weight rows.

    A group of warps has a ring of ``x_stages`` chunks of x. ``ctas`` CTAs fit on an SM, of this kernel and of the next
    one. ``gated``: rows of the weight are gates and ups.
    """

    dtype: DType
    out_dtype: DType
    format: BlockFormat
    tile_m: int
    warp_blocks: int
    row_warps: int
    groups: int
    stages: int
    ctas: int
    x_rows: int
    x_stages: int
    gated: bool

    def __post_init__(self) -> None:
        self.check_groups()
        if self.x_stages not in _X_STAGES:
            raise ArgumentError("x_stages", self.x_stages, f"one of {_X_STAGES}")
        if not 0 < self.x_rows <= self.tile_m:
            raise ArgumentError("x_rows", self.x_rows, f"1 to {self.tile_m}, as tile_m")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: the ring of stages, which is later overwritten by the sums."""
        return self.ring_bytes(self.x_stages * self.x_rows)


def specialise(problem: Problem, tactic: NarrowTactic) -> NarrowSpec:
    """The spec of a tactic for a problem."""
    cut: dict[str, Any] = fields_of(tactic)
    del cut["split"]
    cut["x_rows"] = cut.pop("room") or tactic.tile_m
    return NarrowSpec(
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        format=problem.format,
        gated=problem.gated,
        **cut,
    )


def rejects(problem: Problem, tactic: NarrowTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    spec = specialise(problem, tactic)
    if why := overfills(spec.shared_bytes, tactic.ctas, arch) or indivisible(problem.k, tactic.split, arch):
        return why
    if min(problem.m, tactic.tile_m) > spec.x_rows:
        return f"it has room for {spec.x_rows} rows of x"
    if tactic.x_stages > tactic.stages and not arch.has_tma:
        return "without barriers, copies of the weight are complete when later ones of x are"
    if tactic.tile_m > TILE_MS[0] and tactic.tile_m >= 2 * problem.m:
        return "half of its rows of x would be empty"
    if tactic.tile_m < TILE_MS[-1] and problem.m > 2 * tactic.tile_m:
        return "tiles of more rows of x read the weight less often"
    return None


def geometry(problem: Problem, tactic: NarrowTactic, arch: Arch) -> Geometry:
    """Grid: x over the CTAs of a cluster, which split the columns; y over rows of the weight; z over rows of x.

    A grid that is smaller than the GPU is filled up. CTAs of the next kernel start beside those of this one, and on an
    SM that this one left free there would be two of them: the others would wait for them.
    """
    spec = specialise(problem, tactic)
    down, deep = ceil_div(problem.n, spec.rows), ceil_div(problem.m, spec.tile_m)
    if arch.has_pdl and deep == 1:
        down = max(down, arch.num_sms // tactic.split)
    return launch(tactic.split, down, deep, spec.threads, spec.shared_bytes)


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    residual = arguments.residual
    return {
        "x": arguments.a,
        "weight": arguments.data,
        "row_scale": arguments.row_scale,
        "alpha": arguments.alpha,
        "bias": arguments.bias,
        "residual": residual,
        "out": arguments.out,
        "m": plan.problem.m,
        "n": plan.problem.n,
        "k": plan.problem.k,
        "x_stride": arguments.a.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "out_stride": arguments.out.stride(0),
    }


KERNEL = Kernel(
    name="gemm/narrow",
    spec=NarrowSpec,
    params=(
        Ptr("x", "const In", "[m, k]"),
        Ptr("weight", "const uint8", "[ceil(n / 64), ceil(k / 128), kTileBytes]"),
        Ptr("row_scale", "const float", "[round_up(n, 64)] of MXFP4, else null"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("bias", "const Out", "[n]; null: none"),
        Ptr("residual", "const Out", "as out; null: none"),
        Ptr("out", "Out", "[m, n], or [m, n / 2] of gates"),
        I64("m"),
        I64("n", "a multiple of 8"),
        I64("k", "a multiple of 32"),
        I64("x_stride", "elements, as all strides"),
        I64("residual_stride"),
        I64("out_stride"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
