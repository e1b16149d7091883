"""Many rows of E4M3 activations by a prepared weight, of which each element becomes E4M3 once, in memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from jitfp4 import counters, replay
from jitfp4.arch import Arch, names_with, shared_bytes_with
from jitfp4.families.gemm.arguments import Fp8Arguments
from jitfp4.families.gemm.kernels.wide_fp8 import bound
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan, Scratch
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr, TensorMapParam, TileMap
from jitfp4.weight import TILE_COLS, TILE_ROWS

_SHARED_BYTES = shared_bytes_with("has_wgmma")
_BARRIERS = 16  # bytes of a slot
TILE_MS = (128, 144, 176, 192, 240, 256)
_MOST_SLOTS = 5
_LEAST_PART = 16  # of the rows of x whose results a warpgroup writes at a time
_GROUPS = 2  # of 64 rows of the weight, one of each warpgroup that multiplies
_ROWS = _GROUPS * TILE_ROWS  # of the weight
_PIECE_STEPS = 4  # of columns, of which there is a counter for each _ROWS
_COUNTERS = counters.COUNTER_BYTES // 4 - 2


@dataclass(frozen=True, slots=True)
class ExpandedTactic:
    """The tunable fields of ExpandedSpec."""

    tile_m: int
    cluster: int


TACTICS: tuple[ExpandedTactic, ...] = tuple(ExpandedTactic(tile_m, cluster) for tile_m in TILE_MS for cluster in (1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedSpec(KernelSpec):
    """A CTA takes tiles of ``tile_m`` rows of x by 128 rows of the weight, and ``cluster`` CTAs share rows of x.

    ``gated``: the rows of the weight are gates and ups.
    """

    out_dtype: DType
    format: BlockFormat
    gated: bool
    tile_m: int
    cluster: int

    product_rows = ()  # of 16-bit products
    expanded = True
    threads = 128 * (_GROUPS + 1)

    @property
    def parts(self) -> int:
        """Parts of the rows of x of a tile: results of one are prepared while those of another are written."""
        return self.tile_m // self._part_rows

    @property
    def slots(self) -> int:
        """Steps in flight: some, or as many as fit in shared memory beside the smallest parts."""
        return self._slots(_LEAST_PART)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, in bytes."""
        return round_up(_results(self._part_rows) + self.slots * self._slot, 1024)

    @property
    def _part_rows(self) -> int:
        """The largest part for which there is room."""
        rows = range(_LEAST_PART, self.tile_m, _LEAST_PART)
        return max(part for part in rows if self.tile_m % part == 0 and self._slots(part) == self.slots)

    @property
    def _slot(self) -> int:
        return (self.tile_m + _ROWS) * TILE_COLS + _BARRIERS

    def _slots(self, part: int) -> int:
        return min(_MOST_SLOTS, (_SHARED_BYTES - _results(part)) // self._slot)


def _results(part: int) -> int:
    """Bytes of two parts for each warpgroup that multiplies."""
    return _GROUPS * 2 * part * TILE_ROWS * 2


def _specialise(problem: Fp8Problem, tactic: ExpandedTactic) -> ExpandedSpec:
    return ExpandedSpec(out_dtype=problem.out_dtype, format=problem.format, gated=problem.gated, **asdict(tactic))


def rejects(problem: Fp8Problem, tactic: ExpandedTactic, arch: Arch) -> str | None:  # noqa: ARG001
    """Why a tactic cannot run a problem on an architecture."""
    if not arch.has_wgmma:
        return f"its products are instructions of {names_with('has_wgmma')}"
    if problem.m <= max(TILE_MS):
        return "the weight is hardly multiplied more than once"
    if ceil_div(problem.n, _ROWS) * ceil_div(problem.k, _PIECE_STEPS * TILE_COLS) > _COUNTERS:
        return f"there are {_COUNTERS} counters, one for {_ROWS} rows by {_PIECE_STEPS * TILE_COLS} columns of a weight"
    return None


def geometry(problem: Fp8Problem, tactic: ExpandedTactic, arch: Arch) -> Geometry:
    """One cluster for each tile, at most as many as fill the GPU."""
    spec = _specialise(problem, tactic)
    tiles = ceil_div(problem.m, spec.tile_m) * ceil_div(problem.n, _ROWS * spec.cluster)
    grid = spec.cluster * min(arch.num_sms // spec.cluster, tiles)
    return Geometry(
        grid=(grid, 1, 1), block=(spec.threads, 1, 1), cluster=(spec.cluster, 1, 1), shared_bytes=spec.shared_bytes
    )


def _scratch(_arguments: Fp8Arguments, plan: Plan) -> dict[str, Scratch]:
    """The weight in E4M3."""
    shape = round_up(plan.problem.n, TILE_ROWS), round_up(plan.problem.k, TILE_COLS)
    return {"expanded": Scratch(shape, torch.uint8)}


def _bind(arguments: Fp8Arguments, plan: Plan, expanded: torch.Tensor) -> dict[str, Any]:
    return {
        **bound(arguments, plan),
        "expanded": expanded,
        "expanded_rows": TileMap(expanded.view(torch.uint16), (_ROWS, TILE_COLS // 2), swizzle=128),
        "counters": replay.companion(counters.of, expanded),
    }


KERNEL = Kernel(
    name="gemm/expanded_fp8",
    spec=ExpandedSpec,
    params=(
        TensorMapParam("x", "[m, k / 2] pairs of E4M3, boxes [kCopyM, 64]"),
        TensorMapParam("expanded_rows", "[round_up(n, 64), round_up(k, 128) / 2], boxes [kTileN, 64]"),
        TensorMapParam("out", "[m, n], boxes [kPartM, 64], or [m, n / 2], boxes [kPartM, 32]"),
        Ptr("x_scale", "const float", "[m] or [1]"),
        Ptr("weight", "const uint8", "[ceil(n / 64), ceil(k / 128), kTileBytes]"),
        Ptr("row_scale", "const float", "[round_up(n, 64)], powers of two"),
        Ptr("expanded", "uint8", "what expanded_rows describes"),
        Ptr("counters", "uint32", "zero between launches"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("bias", "const Out", "[n]; null: none"),
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
    scratch=_scratch,
)
