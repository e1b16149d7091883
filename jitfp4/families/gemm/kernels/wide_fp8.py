"""Many rows of E4M3 activations by a prepared weight, which becomes E4M3 in registers, by wgmma."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from jitfp4.arch import Arch, names_with, shared_bytes_with
from jitfp4.errors import ArgumentError
from jitfp4.families.gemm.arguments import Fp8Arguments
from jitfp4.families.gemm.kernels import wide
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr, TensorMapParam, TileMap
from jitfp4.weight import TILE_COLS, TILE_ROWS, tile_bytes

_SHARED_BYTES = shared_bytes_with("has_wgmma")
TILE_MS = (64, 128, 256)
_MOST_SLOTS = 12
_BARRIERS = 16  # bytes of a slot
_PART_ROWS = 32  # of x, whose results a warpgroup writes at a time
_GROUPS = 2  # of 64 rows of the weight, one of each consumer warpgroup
_SPLITS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Fp8Tactic:
    """The tunable fields of Fp8Spec."""

    tile_m: int
    split: int = 1
    cluster: int = 1
    divided: bool = False
    band: int = 4


TACTICS: tuple[Fp8Tactic, ...] = (
    *(Fp8Tactic(tile_m, split) for tile_m in TILE_MS for split in _SPLITS),
    *(Fp8Tactic(tile_m, divided=True) for tile_m in TILE_MS),
    *(Fp8Tactic(256, cluster=2, divided=divided, band=8) for divided in (False, True)),
    Fp8Tactic(256, band=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Spec(KernelSpec):
    """A CTA takes tiles of ``tile_m`` rows of x by 128 rows of the weight.

    ``split`` CTAs of a cluster share the columns of a tile. Alternatively, ``cluster`` CTAs share rows of x, and the
    last tiles may be ``divided`` among all clusters. Tiles follow each other in bands of ``band`` along the rows of x.
    ``gated``: the rows of the weight are gates and ups.
    """

    out_dtype: DType
    format: BlockFormat
    gated: bool
    tile_m: int
    split: int
    cluster: int
    divided: bool
    band: int

    product_rows = ()  # of 16-bit products
    expanded = False  # the weight becomes E4M3 in registers

    def __post_init__(self) -> None:
        for name, allowed in (("tile_m", TILE_MS), ("split", _SPLITS), ("cluster", (1, 2))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")
        if self.split > 1 and (self.cluster > 1 or self.divided):
            raise ArgumentError("split", self.split, "1, where cluster or divided are used")

    @property
    def threads(self) -> int:
        return 128 * (_GROUPS + 1)

    @property
    def parts(self) -> int:
        """Parts of the rows of x of a tile.

        Each is added up and written by one CTA, or results of one are prepared while those of another are written.
        """
        return self.tile_m // _PART_ROWS if self.split == 1 else 1 << self.split.bit_length() - 1

    @property
    def slots(self) -> int:
        """Steps of x in flight: as many as fit in shared memory."""
        return max(slots for slots in range(2, _MOST_SLOTS + 1) if self._bytes(slots) <= _SHARED_BYTES)

    @property
    def weight_slots(self) -> int:
        """Steps of the weight in flight."""
        return self.slots

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, in bytes."""
        return self._bytes(self.slots)

    @property
    def words_bytes(self) -> int:
        """Bytes of the workspace before the sums, where each warpgroup has a word."""
        return 16384

    def workspace_bytes(self, ctas: int) -> int:
        """Bytes of the workspace in which CTAs leave sums for each other; 0 if they do not."""
        return self.words_bytes + ctas * 4 * _GROUPS * TILE_ROWS * self.tile_m if self.divided else 0

    def _bytes(self, slots: int) -> int:
        step = self.tile_m * TILE_COLS + _GROUPS * tile_bytes(self.format) + 2 * _BARRIERS
        return round_up(slots * step + _GROUPS * 2 * _PART_ROWS * TILE_ROWS * 2, 1024)


def _specialise(problem: Fp8Problem, tactic: Fp8Tactic) -> Fp8Spec:
    return Fp8Spec(out_dtype=problem.out_dtype, format=problem.format, gated=problem.gated, **asdict(tactic))


def rejects(problem: Fp8Problem, tactic: Fp8Tactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture. The smallest tiles take any number of rows."""
    if not arch.has_wgmma:
        return f"its products are instructions of {names_with('has_wgmma')}"
    if tactic.tile_m > 64 and 2 * problem.m <= tactic.tile_m:
        return "half of its rows of x would be empty"
    if tactic.split > ceil_div(problem.k, TILE_COLS):
        return f"each CTA of a cluster needs a step of {TILE_COLS} columns"
    return None


def geometry(problem: Fp8Problem, tactic: Fp8Tactic, arch: Arch) -> Geometry:
    """One cluster for each tile, or each step of divided tiles; at most as many as fill the GPU, unless they split."""
    spec, steps = _specialise(problem, tactic), ceil_div(problem.k, TILE_COLS)
    clusters = ceil_div(problem.m, spec.tile_m) * ceil_div(problem.n, TILE_ROWS * _GROUPS * spec.cluster)
    if spec.split == 1:
        clusters = min(arch.num_sms // spec.cluster, clusters * steps if spec.divided else clusters)
    width = spec.split * spec.cluster
    return Geometry(
        grid=(clusters * width, 1, 1), block=(spec.threads, 1, 1), cluster=(width, 1, 1), shared_bytes=spec.shared_bytes
    )


def bound(arguments: Fp8Arguments, plan: Plan) -> dict[str, Any]:
    """What the kernels of these products have in common."""
    spec = plan.spec
    x, out = arguments.a.view(torch.uint16), arguments.out.view(torch.uint16)
    columns = TILE_ROWS // 2 if spec.gated else TILE_ROWS
    return {
        "x": TileMap(x, (spec.tile_m // spec.cluster, TILE_COLS // 2), swizzle=128),
        "x_scale": arguments.a_scale,
        "weight": arguments.data,
        "row_scale": arguments.row_scale,
        "alpha": arguments.alpha,
        "bias": arguments.bias,
        "out": TileMap(out, (spec.tile_m // spec.parts, columns), swizzle=2 * columns),
        "m": plan.problem.m,
        "n": plan.problem.n,
        "k": plan.problem.k,
        "x_scale_step": int(arguments.a_scale.numel() > 1),
    }


def _bind(arguments: Fp8Arguments, plan: Plan, workspace: torch.Tensor | None = None) -> dict[str, Any]:
    return {**bound(arguments, plan), "workspace": workspace}


KERNEL = Kernel(
    name="gemm/wide_fp8",
    spec=Fp8Spec,
    params=(
        TensorMapParam("x", "[m, k / 2] pairs of E4M3, boxes [kCopyM, 64]"),
        Ptr("x_scale", "const float", "[m] or [1]"),
        Ptr("weight", "const uint8", "[ceil(n / 64), ceil(k / 128), kTileBytes]"),
        Ptr("row_scale", "const float", "[round_up(n, 64)], powers of two"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("bias", "const Out", "[n]; null: none"),
        Ptr("workspace", "uint8", "of divided tiles, else null"),
        TensorMapParam("out", "[m, n], boxes [kPartM, 64], or [m, n / 2], boxes [kPartM, 32]"),
        I64("m"),
        I64("n", "a multiple of 8"),
        I64("k", "a multiple of 32"),
        I64("x_scale_step", "from one row of x to the next: 1, or 0"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=_specialise,
    geometry=geometry,
    bind=_bind,
    scratch=wide.scratch,
)
