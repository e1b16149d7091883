"""Problems, tactics and specs of the norm kernel, and the geometry of its launches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NamedTuple

from jitfp4.arch import CTA_RESERVE, Arch
from jitfp4.formats import DType
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.spec import Geometry, KernelSpec

MIN_HIDDEN, MAX_HIDDEN = 64, 65536

_UNIT = 16  # elements of a unit, which one thread takes
_WARP = 32
TURN = _UNIT * _WARP
"""Elements of a turn: a unit for each lane of a warp."""

_FEW_ELEMENTS = 8192  # of each SM
_MAX_CTAS = 8  # of a cluster


class Scale(StrEnum):
    """Type of a block scale."""

    E4M3 = "e4m3"
    UE8M0 = "ue8m0"


class Problem(NamedTuple):
    """m rows of h elements. ``padded``: the padding rows of the 128x4 layout must be written too."""

    in_dtype: DType
    block: int
    scale: Scale
    add: bool
    padded: bool
    m: int
    h: int

    def few(self, arch: Arch) -> bool:
        """Whether there is so little work that each row should be spread over many threads."""
        return self.m * self.h <= _FEW_ELEMENTS * arch.num_sms or 2 * self.m <= arch.num_sms

    def elements_per_sm(self, arch: Arch) -> int:
        return ceil_div(self.m * self.h, arch.num_sms)


@dataclass(frozen=True, slots=True)
class Tactic:
    """The tunable fields of Spec."""

    units: int
    warps: int
    clustered: bool = False
    stream: bool = False


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
        return _WARP * (4 if self.warps == 1 else self.warps)

    @property
    def min_ctas(self) -> int:
        """CTAs that an SM must hold at once. They leave a thread 64, 80, 96 or 128 registers, as its units need."""
        threads = {1: 1024, 2: 768, 3: 512 if self.add else 640}.get(self.units, 512)
        return threads // self.max_threads

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a thread for its inputs, in bytes."""
        return 2 * _UNIT * self.units * (2 if self.add else 1)

    @property
    def weight_bytes(self) -> int:
        """Shared memory of a thread for its weights, in bytes: 16-bit floats if there are two inputs, else float32."""
        return (2 if self.add else 4) * _UNIT * self.units

    @property
    def common_bytes(self) -> int:
        """Other shared memory of a CTA, in bytes: two sets of partial sums of 32 lanes, and 256 multipliers."""
        return 4 * (2 * (self.warps + (_MAX_CTAS if self.clustered else 1)) * _WARP + 256)

    def shared_bytes(self, threads: int) -> int:
        weights = self.weight_bytes * (threads if self.warps > 1 else _WARP)
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
        return ceil_div(h, TURN * spec.units) * _WARP
    # At least 8, which with blocks of 32 have 4 scales: the columns of a tile of the 128x4 layout
    return max(8, 1 << (ceil_div(h, _UNIT) - 1).bit_length())
