"""The kernel that normalises rows and quantizes them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import CTA_RESERVE, Arch
from jitfp4.families.norm.arguments import Arguments
from jitfp4.families.norm.problem import TURN, UNIT, Problem, Scale
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.spec import F32, I64, WARP, Geometry, KernelSpec, Ptr

_MAX_CTAS = 8  # of a cluster


@dataclass(frozen=True, slots=True)
class Tactic:
    """The tunable fields of Spec."""

    units: int
    warps: int
    clustered: bool = False
    stream: bool = False


_HELD = ((1, 1), (1, 8), (2, 8), (2, 16), (2, 1), (3, 1), (4, 4), (4, 8), (4, 16))  # in registers
TACTICS = (
    *(Tactic(units, warps) for units, warps in _HELD),
    *(Tactic(units, 16, clustered=True) for units in (2, 4)),
    Tactic(8, 16, stream=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A row is shared by up to ``warps`` warps of a CTA or, if ``clustered``, by the CTAs of a cluster.

    A thread holds ``units`` units of 16 elements in registers or, if ``stream``, reads them twice. With one warp and
    one unit, several rows may share a warp.
    """

    in_dtype: DType
    block: int
    scale: Scale
    add: bool
    units: int
    warps: int
    clustered: bool
    stream: bool

    @property
    def max_threads(self) -> int:
        """The most threads of a CTA. Where one warp takes a row, a CTA has four warps."""
        return WARP * (4 if self.warps == 1 else self.warps)

    @property
    def min_ctas(self) -> int:
        """CTAs that an SM must hold at once. They leave a thread 64, 80, 96 or 128 registers, as its units need."""
        threads = {1: 1024, 2: 768, 3: 512 if self.add else 640}.get(self.units, 512)
        return threads // self.max_threads

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a thread for its inputs, in bytes."""
        return 2 * UNIT * self.units * (2 if self.add else 1)

    @property
    def weight_bytes(self) -> int:
        """Shared memory of a thread for its weights, in bytes: 16-bit floats if there are two inputs, else float32."""
        return (2 if self.add else 4) * UNIT * self.units

    @property
    def common_bytes(self) -> int:
        """Other shared memory of a CTA, in bytes: two sets of partial sums of 32 lanes, and 256 multipliers."""
        return 4 * (2 * (self.warps + (_MAX_CTAS if self.clustered else 1)) * WARP + 256)

    def shared_bytes(self, threads: int) -> int:
        weights = self.weight_bytes * (threads if self.warps > 1 else WARP)
        return self.common_bytes + (0 if self.stream else weights + self.slot_bytes * threads)

    def capacity(self, arch: Arch) -> int:
        """Elements of the longest row that this kernel can take on ``arch``."""
        if self.shared_bytes(self.max_threads) > arch.shared_bytes or (self.clustered and not arch.has_tma):
            return 0
        return TURN * self.units * self.warps * (_MAX_CTAS if self.clustered else 1)


def specialise(problem: Problem, tactic: Tactic) -> Spec:
    """The spec of a tactic for a problem."""
    return Spec(in_dtype=problem.in_dtype, block=problem.block, scale=problem.scale, add=problem.add, **asdict(tactic))


def rejects(problem: Problem, tactic: Tactic, arch: Arch) -> str | None:
    """Why a tactic cannot hold the rows of a problem."""
    if problem.gate:
        return "it has no gate"
    capacity = specialise(problem, tactic).capacity(arch)
    if not tactic.stream and problem.h > capacity:
        return f"it holds rows of at most {capacity} elements"
    return None


def geometry(problem: Problem, tactic: Tactic, arch: Arch) -> Geometry:
    """A persistent grid, with no more CTAs than the rows need."""
    spec = specialise(problem, tactic)
    rows = SfLayout.layout_128x4.shape(problem.m, 1)[0] if problem.padded else problem.m
    share = row_threads(problem.h, spec)
    ctas = ceil_div(ceil_div(problem.h, TURN * spec.units), spec.warps) if spec.clustered else 1
    threads = share if spec.warps > 1 else spec.max_threads
    shared_bytes = spec.shared_bytes(threads)
    by_registers = spec.min_ctas * spec.max_threads // threads
    by_memory = (arch.shared_bytes + CTA_RESERVE) // (shared_bytes + CTA_RESERVE)
    resident = arch.num_sms * max(1, min(by_registers, by_memory)) // ctas * ctas
    needed = ceil_div(rows * share, threads) * ctas
    grid = (min(needed, resident), 1, 1)
    return Geometry(grid, block=(threads, 1, 1), cluster=(ctas, 1, 1), shared_bytes=shared_bytes)


def row_threads(h: int, spec: Spec) -> int:
    """The number of threads of a CTA that share a row."""
    if spec.clustered:
        return spec.max_threads
    if spec.warps > 1 or spec.units > 1:
        return ceil_div(h, TURN * spec.units) * WARP
    # At least 8, which with blocks of 32 have 4 scales: the columns of a tile of the 128x4 layout
    return max(8, 1 << (ceil_div(h, UNIT) - 1).bit_length())


def bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    """The values of PARAMS."""
    return {
        "x": arguments.input,
        "residual": arguments.residual,
        "weight": arguments.weight,
        "global_scale": arguments.global_scale,
        "q": arguments.y_fp4,
        "sf_128x4": arguments.block_scale,
        "sf_linear": arguments.block_scale_unswizzled,
        "y": arguments.y_out,
        "m": plan.problem.m,
        "h": plan.problem.h,
        "eps": arguments.eps,
    }


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return bind(arguments, plan) | {"row_threads": row_threads(plan.problem.h, plan.spec)}


PARAMS = (
    Ptr("x", "const In", "[m, h]"),
    Ptr("residual", "In", "[m, h], updated in place; null without an addition"),
    Ptr("weight", "const In", "[h]"),
    Ptr("global_scale", "const float", "[1], encode; null means 1"),
    Ptr("q", "uint8", "[m, h/2], low nibble first"),
    Ptr("sf_128x4", "uint8", "scales in the 128x4 layout, or null"),
    Ptr("sf_linear", "uint8", "[m, h/kBlock], or null"),
    Ptr("y", "In", "[m, h], what is quantized, or null"),
    I64("m"),
    I64("h"),
    F32("eps"),
)
"""The parameters of every kernel that quantizes normalised rows."""

KERNEL = Kernel(
    name="norm/rmsnorm_fp4quant",
    spec=Spec,
    params=(*PARAMS, I64("row_threads")),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)
