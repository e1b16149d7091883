"""Two FP4 matrices by mma.sync, on every architecture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import Arch, names_with
from jitfp4.errors import ArgumentError
from jitfp4.families.gemm.arguments import Fp4Arguments
from jitfp4.families.gemm.problem import Fp4Problem
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout, ceil_div, round_up
from jitfp4.spec import I64, MAX_GRID_YZ, Geometry, KernelSpec, Ptr

CHUNK = 128  # columns that a group of warps takes at a time
_ROW_BYTES = CHUNK // 2
_SCALE_ROWS = 128  # rows of a tile of scales
_MAX_CLUSTER = 8
_MAX_THREADS = 1024
_WARP_TILES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class PortableTactic:
    """The tunable fields of PortableSpec, and the number of CTAs of a cluster over which the columns are split."""

    tile_m: int
    tile_n: int
    warp_m: int
    warp_n: int
    groups: int
    stages: int
    split: int = 1
    scaled_mma: bool = False


_CUTS = (  # tile_m, tile_n, warp_m, warp_n, groups, stages
    (16, 32, 16, 32, 2, 3),
    (16, 64, 16, 32, 4, 3),
    (16, 128, 16, 32, 1, 4),
    (16, 128, 16, 32, 2, 3),
    (16, 128, 16, 64, 4, 2),
    (32, 64, 32, 32, 2, 3),
    (32, 128, 32, 32, 2, 3),
    (64, 64, 32, 32, 1, 4),
    (64, 128, 32, 32, 1, 3),
    (64, 128, 64, 32, 1, 4),
    (128, 64, 64, 32, 1, 4),
    (128, 128, 32, 64, 1, 4),
    (128, 128, 64, 32, 1, 3),
    (128, 128, 64, 32, 1, 4),
)

TACTICS = tuple(
    PortableTactic(*cut, split, scaled) for cut in _CUTS for split in (1, 2, 4, 8) for scaled in (False, True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableSpec(KernelSpec):
    """A CTA takes ``tile_m`` rows of a and ``tile_n`` rows of b; a warp takes ``warp_m`` by ``warp_n`` of them.

    ``groups`` groups of warps take chunks of 128 columns in turn, one chunk each in a step; ``stages`` steps are in
    flight. Products are of bf16 or, with ``scaled_mma``, of codes with block scales.
    """

    format: BlockFormat
    a_layout: SfLayout
    out_dtype: DType
    tile_m: int
    tile_n: int
    warp_m: int
    warp_n: int
    groups: int
    stages: int
    scaled_mma: bool

    def __post_init__(self) -> None:
        for name, allowed in (
            ("a_layout", (SfLayout.layout_128x4, SfLayout.layout_8x4)),
            ("tile_m", (16, 32, 64, 128)),
            ("tile_n", (32, 64, 128)),
            ("stages", (2, 3, 4, 5, 6)),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")
        for name, tile in (("warp_m", self.tile_m), ("warp_n", self.tile_n)):
            if getattr(self, name) not in _WARP_TILES or tile % getattr(self, name):
                raise ArgumentError(name, getattr(self, name), f"one of {_WARP_TILES} that divides {tile}")
        if self.warp_m * self.warp_n > 64 * 32:
            raise ArgumentError("warp_n", self.warp_n, "few enough for warp_m * warp_n <= 2048: registers")
        if not 0 < self.threads <= _MAX_THREADS:
            raise ArgumentError("groups", self.groups, f"few enough for at most {_MAX_THREADS} threads")

    @property
    def threads(self) -> int:
        return 32 * self.groups * (self.tile_m // self.warp_m) * (self.tile_n // self.warp_n)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: the ring of stages, which is later overwritten by the sums."""
        a_rows = self.tile_m if self.a_layout is SfLayout.layout_8x4 else _SCALE_ROWS
        scales = (a_rows + _SCALE_ROWS) * CHUNK // self.format.block
        chunk = (self.tile_m + self.tile_n) * _ROW_BYTES + scales
        ring = self.stages * self.groups * chunk
        sums = 4 * self.groups * self.tile_m * (self.tile_n + 8)
        return round_up(max(ring, sums), 128)


def specialise(problem: Fp4Problem, tactic: PortableTactic) -> PortableSpec:
    """The spec of a tactic for a problem."""
    cut = asdict(tactic)
    del cut["split"]
    return PortableSpec(format=problem.format, a_layout=problem.a_layout, out_dtype=problem.out_dtype, **cut)


def rejects(problem: Fp4Problem, tactic: PortableTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    spec = specialise(problem, tactic)
    if tactic.scaled_mma and not arch.has_scaled_mma:
        return f"mma.sync with block scales is an instruction of {names_with('has_scaled_mma')}"
    if spec.shared_bytes > arch.shared_bytes:
        return f"a CTA of {spec.shared_bytes} bytes of shared memory does not fit on an SM"
    if tactic.split > 1 and not arch.has_tma:
        return "it needs clusters"
    if not 0 < tactic.split <= min(_MAX_CLUSTER, ceil_div(problem.k, CHUNK)):
        return f"a cluster has 1 to {_MAX_CLUSTER} CTAs with {CHUNK} columns each"
    for rows, tile, least in ((problem.m, tactic.tile_m, 16), (problem.n, tactic.tile_n, 32)):
        if tile > least and tile >= 2 * rows:
            return "half of its tile would be empty"
    if ceil_div(problem.n, tactic.tile_n) > MAX_GRID_YZ:
        return f"its grid has at most {MAX_GRID_YZ} tiles of b"
    return None


def geometry(problem: Fp4Problem, tactic: PortableTactic, arch: Arch) -> Geometry:  # noqa: ARG001
    """Grid: x over tiles of a's rows, with a cluster of ``split`` CTAs for each; y over tiles of b's rows."""
    spec = specialise(problem, tactic)
    grid = (tactic.split * ceil_div(problem.m, spec.tile_m), ceil_div(problem.n, spec.tile_n), 1)
    return Geometry(grid=grid, block=(spec.threads, 1, 1), cluster=(tactic.split, 1, 1), shared_bytes=spec.shared_bytes)


def _bind(arguments: Fp4Arguments, plan: Plan) -> dict[str, Any]:
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


KERNEL = Kernel(
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
