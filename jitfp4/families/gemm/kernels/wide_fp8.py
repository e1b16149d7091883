"""Many rows of E4M3 activations by a prepared weight, which becomes E4M3 in registers, by wgmma."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from jitfp4.arch import Arch, names_with, shared_bytes_with
from jitfp4.errors import ArgumentError
from jitfp4.families.gemm.arguments import Fp8Arguments
from jitfp4.families.gemm.kernels import wide
from jitfp4.families.gemm.kernels.wide import WideSpec
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr, TensorMapParam, TileMap
from jitfp4.weight import TILE_COLS, TILE_ROWS, tile_bytes

_PRODUCTS = (64, 128)  # rows of x
_MOST_PRODUCTS = 4  # of a step, which decode a quarter of the next one each
_SHARED_BYTES = shared_bytes_with("has_wgmma")
_MOST_SLOTS = 12
_BARRIERS = 16  # bytes of a slot
_PART_ROWS = 64  # 16-bit results of 64 rows of the weight are as large as a decoded tile
_MOST_FLOATS = {2: 192, 3: 112, 4: 64}  # sums of a thread and of a product, by the number of groups


@dataclass(frozen=True, slots=True)
class Fp8Tactic:
    """The tunable fields of Fp8Spec."""

    tile_m: int
    product: int
    groups: int = 2
    split: int = 1
    cluster: int = 1
    divided: bool = False
    band: int = 4
    lead: int = 0


# rows of x, of a product, most splits
_CUTS = ((64, 64, 2), (128, 64, 1), (128, 128, 2), (256, 64, 1), (256, 128, 2))
TACTICS: tuple[Fp8Tactic, ...] = (
    *(Fp8Tactic(tile_m, product, split=split) for tile_m, product, most in _CUTS for split in range(1, most + 1)),
    *(
        Fp8Tactic(tile_m, product, cluster=cluster, divided=divided, band=4 * cluster, lead=lead)
        for tile_m, product, _ in _CUTS
        for cluster, divided, lead in ((1, True, 0), (1, False, 1), (2, False, 0), (2, True, 0))
    ),
    *(Fp8Tactic(tile_m, 64, groups=3) for tile_m in (64, 128)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Spec(KernelSpec):
    """A WideSpec whose x is E4M3, with one warpgroup for each group.

    Sums of 128 columns, by ``product`` rows of x at a time, are added to sums in float32. Each group is ``lead`` steps
    ahead of the next one, so that one stores its results while another multiplies.
    """

    out_dtype: DType
    format: BlockFormat
    tile_m: int
    product: int
    groups: int
    split: int
    cluster: int
    divided: bool
    band: int
    lead: int

    fp8 = True
    packed = False
    dtype = DType.BF16  # in which the weight is decoded
    depth = 1
    step_slots = 1
    product_rows = ()  # of 16-bit products

    def __post_init__(self) -> None:
        _ = self.cut  # it checks the fields that are also its own
        allowed = [product for product in _PRODUCTS if product <= self.tile_m <= _MOST_PRODUCTS * product]
        if self.product not in allowed:
            raise ArgumentError("product", self.product, f"one of {allowed}, with a tile_m of {self.tile_m}")
        if (self.tile_m + self.product) // 2 > _MOST_FLOATS[self.groups]:
            raise ArgumentError("groups", self.groups, "fewer with these rows of x: registers")

    @property
    def cut(self) -> WideSpec:
        """The tiles, warpgroups and clusters."""
        shared = {name: getattr(self, name) for name in ("groups", "split", "cluster", "divided", "band", "tile_m")}
        return WideSpec(dtype=self.dtype, out_dtype=self.out_dtype, format=self.format, depth=self.depth, **shared)

    @property
    def threads(self) -> int:
        return self.cut.threads

    @property
    def sharers(self) -> int:
        """CTAs with partial sums of the same elements."""
        return self.cut.sharers

    @property
    def parts(self) -> int:
        """Parts of the rows of x of a tile: with sharers as in WideSpec, else as many rows as a decoded tile holds."""
        return self.cut.parts if self.sharers > 1 else self.tile_m // _PART_ROWS

    @property
    def slots(self) -> int:
        """Steps of x in flight: as many as fit in shared memory."""
        return max(slots for slots in range(2, _MOST_SLOTS + 1) if self._bytes(slots) <= _SHARED_BYTES)

    @property
    def weight_slots(self) -> int:
        """Steps of the weight in flight: it is decoded a step ahead."""
        return self.slots + 1

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
        """Bytes of the workspace before the sums, as in WideSpec."""
        return self.cut.words_bytes

    def workspace_bytes(self, ctas: int) -> int:
        """Bytes of the workspace in which CTAs leave sums for each other; 0 if they do not."""
        return self.cut.workspace_bytes(ctas)

    def _bytes(self, slots: int) -> int:
        x = slots * (self.tile_m * TILE_COLS + _BARRIERS)
        weights = (slots + 1) * (self.groups * self.tile_bytes + _BARRIERS)
        decoded = self.groups * 2 * TILE_ROWS * TILE_COLS
        return round_up(x + weights + decoded, 1024)


def _specialise(problem: Fp8Problem, tactic: Fp8Tactic) -> Fp8Spec:
    return Fp8Spec(out_dtype=problem.out_dtype, format=problem.format, **asdict(tactic))


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
    """The geometry of a tactic for a problem."""
    return wide.launch(_specialise(problem, tactic), problem, arch)


def _bind(arguments: Fp8Arguments, plan: Plan, workspace: torch.Tensor | None = None) -> dict[str, Any]:
    spec: Fp8Spec = plan.spec
    x, out = arguments.a.view(torch.uint16), arguments.out.view(torch.uint16)
    return {
        "x": TileMap(x, (spec.tile_m // spec.cluster, TILE_COLS // 2), swizzle=128),
        "x_scale": arguments.a_scale,
        "weight": arguments.data,
        "row_scale": arguments.row_scale,
        "alpha": arguments.alpha,
        "bias": arguments.bias,
        "workspace": workspace,
        "out": TileMap(out, (spec.tile_m // spec.parts, TILE_ROWS), swizzle=128),
        "m": plan.problem.m,
        "n": plan.problem.n,
        "k": plan.problem.k,
        "x_scale_step": int(arguments.a_scale.numel() > 1),
    }


KERNEL = Kernel(
    name="gemm/wide_fp8",
    spec=Fp8Spec,
    params=(
        TensorMapParam("x", "[m, k / 2] pairs of E4M3, boxes [kCopyM, kHalf]"),
        Ptr("x_scale", "const float", "[m] or [1]"),
        Ptr("weight", "const uint8", "[ceil(n / 64), ceil(k / 128), kTileBytes]"),
        Ptr("row_scale", "const float", "[round_up(n, 64)], powers of two"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("bias", "const Out", "[n]; null: none"),
        Ptr("workspace", "uint8", "of divided tiles, else null"),
        TensorMapParam("out", "[m, n], boxes [kPartM, 64]"),
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
