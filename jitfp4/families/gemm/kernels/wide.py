"""Many rows of activations by a prepared weight, by wgmma."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from jitfp4.arch import CTA_RESERVE, Arch, names_with, shared_bytes_with
from jitfp4.errors import ArgumentError
from jitfp4.families.gemm.arguments import Arguments
from jitfp4.families.gemm.problem import Fp4Problem, Problem
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan, Scratch
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr, TensorMapParam, TileMap
from jitfp4.weight import TILE_COLS, TILE_ROWS, tile_bytes

TILE_MS = (16, 32, 64, 128, 256)
_LEAST_PART = 8  # rows of x
_SHARED_BYTES = shared_bytes_with("has_wgmma")
_MOST_SLOTS = 24
_HALF_ROW_BYTES = TILE_COLS  # half a step of 16-bit elements
_BARRIERS = 16  # bytes of a slot
_MAX_TEAMS = 4
_MAX_ROWS = 512  # of x, over all warpgroups
_MAX_CLUSTER = 8
_SHORT = 64  # rows of x


@dataclass(frozen=True, slots=True)
class WideTactic:
    """The tunable fields of WideSpec."""

    tile_m: int
    groups: int
    depth: int = 1
    split: int = 1
    cluster: int = 1
    divided: bool = False
    band: int = 4
    ctas: int = 1
    common: bool = False


# rows of x, groups, depth, splits
_CUTS = (
    (128, 1, 2, (1, 2, 3, 4)),
    (128, 2, 1, (1, 2, 3, 4)),
    (128, 3, 1, (1, 2, 3, 4)),
    (256, 1, 2, (1, 2)),
    (256, 2, 1, (1, 2)),
)
# for up to 64 rows of x: groups, depth, splits, clusters, CTAs of an SM
_SHORT_CUTS = (
    (1, 2, (1, 2, 3, 4), (1, 2), (1, 2)),
    (1, 4, (1, 2, 4), (1, 2, 4), (1,)),
    (2, 2, (1, 2), (1, 2), (1,)),
    (2, 1, (1, 2, 3), (1, 2), (2,)),
    (3, 1, (2,), (1,), (1,)),
    (4, 1, (1,), (1, 2), (1,)),
)
_whole = (WideTactic(tile_m, groups, depth, split) for tile_m, groups, depth, splits in _CUTS for split in splits)
_divided = (
    WideTactic(tile_m, groups, cluster=cluster, divided=True, band=band)
    for tile_m, groups in ((128, 2), (128, 3), (256, 2))
    for cluster, band in (((1, 4), (2, 8)) if tile_m == 256 else ((1, 4),))
)
LONG: tuple[WideTactic, ...] = (*_whole, *_divided)
_short = (
    WideTactic(tile_m, groups, depth, split, cluster, ctas=ctas)
    for tile_m in (16, 32, 64)
    for groups, depth, *others in _SHORT_CUTS
    for split, cluster, ctas in product(*others)
    if cluster * _LEAST_PART <= tile_m and split * cluster <= _MAX_CLUSTER
)
_few_tiles = (
    tactic
    for tile_m in (16, 32, 64)
    for tactic in (
        WideTactic(tile_m, 4, divided=True),
        *(WideTactic(tile_m, groups, cluster=2, common=True) for groups in (2, 3, 4)),
    )
)
TACTICS: tuple[WideTactic, ...] = (*_short, *_few_tiles, *LONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideSpec(KernelSpec):
    """A CTA takes tiles of ``tile_m`` rows of x by 64 * ``groups`` rows of the weight.

    ``depth`` warpgroups share the columns of a group, and ``split`` CTAs of a cluster share the columns of a tile.
    ``cluster`` CTAs of a cluster share rows of x. Where columns are not shared, the last tiles may be ``divided`` among
    all clusters. Tiles follow each other in bands of ``band`` along the rows of x. ``ctas`` CTAs fit on an SM.
    With ``common``, the last groups of two CTAs have the same rows of the weight, and take the steps in turn.
    """

    dtype: DType
    out_dtype: DType
    format: BlockFormat
    tile_m: int
    groups: int
    depth: int
    split: int
    cluster: int
    divided: bool
    band: int

    packed = False  # the weight is prepared
    gated = False
    ctas = 1
    common = False

    def __post_init__(self) -> None:
        for name, allowed in zip(
            ("tile_m", "depth", "cluster", "groups", "split", "ctas"),
            (TILE_MS, (1, 2, 4), (1, 2, 4), range(1, _MAX_TEAMS + 1), range(1, _MAX_CLUSTER + 1), (1, 2)),
            strict=True,
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {tuple(allowed)}")
        if self.sharers > 1 and (self.divided or (self.cluster > 1 and not self.whole)):
            wanted = f"1, with a depth of 1, where divided, or more than {_SHORT} rows and cluster, are used"
            raise ArgumentError("split", self.split, wanted)
        if self.split * self.cluster > _MAX_CLUSTER or self.cluster * _LEAST_PART > self.tile_m:
            wanted = f"at most {_MAX_CLUSTER // self.split}, and {_LEAST_PART} rows of x for each"
            raise ArgumentError("cluster", self.cluster, wanted)
        if self.common and not (self.whole and self.cluster == 2 and self.groups > 1 and self.sharers == 1):
            wanted = f"False, but for clusters of two, several groups, at most {_SHORT} rows and a split of 1"
            raise ArgumentError("common", self.common, wanted)
        if not 2 <= self.teams <= _MAX_TEAMS or self.teams * self.tile_m > _MAX_ROWS:
            enough = f"groups * depth from 2 to {_MAX_TEAMS}, times tile_m at most {_MAX_ROWS}: registers"
            raise ArgumentError("groups", self.groups, enough)
        if not self._slot_counts:
            raise ArgumentError("ctas", self.ctas, "1, for so large a tile: two slots for each turn have to fit")

    @property
    def teams(self) -> int:
        """Warpgroups that multiply."""
        return self.groups * self.depth

    @property
    def product_rows(self) -> tuple[int, ...]:
        """The rows of x of a product on the tensor cores."""
        return (self.tile_m,)

    @property
    def threads(self) -> int:
        return 128 * (self.teams + 1)

    @property
    def sharers(self) -> int:
        """Warpgroups with partial sums of the same elements."""
        return self.split * self.depth

    @property
    def parts(self) -> int:
        """Parts of the rows of x of a tile, a power of two; each part is added up and written by one sharer.

        Without sharers, the second part is prepared while the first is written.
        """
        return min(max(2, 1 << self.sharers.bit_length() - 1), _MAX_CLUSTER, self.tile_m // _LEAST_PART)

    @property
    def whole(self) -> bool:
        """Whether a slot has a whole step, where short products leave little time for barriers."""
        return self.tile_m <= _SHORT and not self.packed

    @property
    def slots(self) -> int:
        """Half steps of x in flight, or whole ones: as many as fit in shared memory."""
        return self._slot_counts[-1]

    @property
    def weight_slots(self) -> int:
        """Steps of the weight in flight."""
        return self._weight_slots(self.slots)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, in bytes."""
        return self._bytes(self.slots)

    @property
    def tile_bytes(self) -> int:
        """Bytes of 64 rows of a step of the weight: codes and scales."""
        return tile_bytes(self.format)

    @property
    def words_bytes(self) -> int:
        """Bytes of the workspace before the sums, where each warpgroup has a word."""
        return 16384

    def workspace_bytes(self, ctas: int) -> int:
        """Bytes of the workspace in which CTAs leave sums for each other; 0 if they do not."""
        return self.words_bytes + ctas * self._sums if self.divided else 0

    @property
    def _slot_counts(self) -> list[int]:
        """How many slots fit. Each warpgroup with the same rows has its own, and frees one after it began another."""
        turns = 2 if self.common else self.depth
        room = (_SHARED_BYTES + CTA_RESERVE) // self.ctas - CTA_RESERVE
        return [slots for slots in range(2 * turns, _MOST_SLOTS + 1, turns) if self._bytes(slots) <= room]

    def _weight_slots(self, slots: int) -> int:
        return slots if self.whole else slots // 2 + max(1, self.depth // 2)

    @property
    def _slot(self) -> int:
        return self.tile_m * _HALF_ROW_BYTES * (2 if self.whole else 1)

    @property
    def _sums(self) -> int:
        return 4 * self.teams * TILE_ROWS * self.tile_m

    def _bytes(self, slots: int) -> int:
        rings = slots + (1 if self.whole else self._weight_slots(slots))
        weights = self._weight_slots(slots) * self.groups * self.tile_bytes
        out = self.teams * self.tile_m * 2 * TILE_ROWS if self.sharers == 1 else 0
        exchanged = 4 * TILE_ROWS * self.tile_m + _BARRIERS if self.common else 1  # an empty struct has a byte
        return round_up(slots * self._slot + rings * _BARRIERS + weights + out + exchanged, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWideSpec(WideSpec):
    """A WideSpec whose weight is prepared; ``gated``: its rows are gates and ups."""

    ctas: int
    common: bool
    gated: bool


def specialise(problem: Problem, tactic: WideTactic) -> PreparedWideSpec:
    """The spec of a tactic for a problem."""
    return PreparedWideSpec(
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        format=problem.format,
        gated=problem.gated,
        **asdict(tactic),
    )


def rejects(problem: Problem | Fp4Problem, tactic: WideTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if not arch.has_wgmma:
        return f"its products are instructions of {names_with('has_wgmma')}"
    if 2 * problem.m <= tactic.tile_m:
        return "half of its rows of x would be empty"
    turns = tactic.depth if tactic.tile_m <= _SHORT and isinstance(problem, Problem) else max(1, tactic.depth // 2)
    turns = 2 if tactic.common else turns
    if tactic.split * turns > ceil_div(problem.k, TILE_COLS):
        return f"each CTA of a cluster needs {turns} steps of {TILE_COLS} columns"
    return None


def geometry(problem: Problem, tactic: WideTactic, arch: Arch) -> Geometry:
    """The geometry of a tactic for a problem."""
    return launch(specialise(problem, tactic), problem, arch)


def launch(spec: WideSpec, problem: Problem | Fp4Problem, arch: Arch) -> Geometry:
    """One cluster for each tile, or for each step of divided tiles; persistent ones at most as many as fill the GPU."""
    width = spec.cluster * spec.split
    rows = TILE_ROWS * ((spec.groups - spec.common) * spec.cluster + spec.common)
    clusters = ceil_div(problem.m, spec.tile_m) * ceil_div(problem.n, rows)
    if spec.sharers == 1:
        most = spec.ctas * arch.num_sms // spec.cluster
        steps = clusters * ceil_div(problem.k, TILE_COLS)
        clusters = min(most, steps if spec.divided else clusters)
    grid, cluster = (clusters * width, 1, 1), (width, 1, 1)
    return Geometry(grid=grid, block=(spec.threads, 1, 1), cluster=cluster, shared_bytes=spec.shared_bytes)


def scratch(_arguments: Any, plan: Plan) -> dict[str, Scratch]:
    """The memory in which CTAs leave sums of divided tiles for each other."""
    size = plan.spec.workspace_bytes(plan.geometry.grid[0])
    return {"workspace": Scratch((size,), torch.uint8)} if size else {}


def _bind(arguments: Arguments, plan: Plan, workspace: torch.Tensor | None = None) -> dict[str, Any]:
    spec: PreparedWideSpec = plan.spec
    a, out, residual = arguments.a.view(torch.uint16), arguments.out.view(torch.uint16), arguments.residual
    columns = TILE_ROWS // 2 if spec.gated else TILE_ROWS
    return {
        "x": TileMap(a, (spec.tile_m // spec.cluster, TILE_COLS // 2), swizzle=128),
        "weight": arguments.data,
        "row_scale": arguments.row_scale,
        "alpha": arguments.alpha,
        "bias": arguments.bias,
        "workspace": workspace,
        "residual": residual,
        "residual_stride": 0 if residual is None else residual.stride(0),
        "out": TileMap(out, (spec.tile_m // spec.parts, columns), swizzle=2 * columns),
        "m": plan.problem.m,
        "n": plan.problem.n,
        "k": plan.problem.k,
    }


KERNEL = Kernel(
    name="gemm/wide",
    spec=PreparedWideSpec,
    params=(
        TensorMapParam("x", "[m, k], boxes [kCopyM, kHalf]"),
        Ptr("weight", "const uint8", "[ceil(n / 64), ceil(k / 128), kTileBytes]"),
        Ptr("row_scale", "const float", "[round_up(n, 64)] of MXFP4, else null"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("bias", "const Out", "[n]; null: none"),
        Ptr("residual", "const Out", "as out; null: none"),
        I64("residual_stride", "elements"),
        Ptr("workspace", "uint8", "of divided tiles, else null"),
        TensorMapParam("out", "[m, n], boxes [kPartM, 64], or of gates [m, n / 2], boxes [kPartM, 32]"),
        I64("m"),
        I64("n", "a multiple of 8"),
        I64("k", "a multiple of 32"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
    scratch=scratch,
)
