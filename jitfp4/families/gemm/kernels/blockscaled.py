"""Two FP4 matrices by tcgen05 products of 64 columns; and what products of 96 columns share with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch

from jitfp4.arch import Arch, names_with, shared_bytes_with
from jitfp4.errors import ArgumentError
from jitfp4.families.gemm.arguments import Fp4Arguments, MaskedArguments, atoms
from jitfp4.families.gemm.problem import Fp4Problem
from jitfp4.formats import NVFP4, BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout, ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr, TensorMapParam, TileMap

NARROW_NS, WIDE_NS = (8, 16, 32), (64, 128, 192, 256)
TILE_ROWS = 128  # left rows of a CTA, and rows of a 128x4 block of scales, an "atom"
_SLICE_BYTES = 128  # one row of a slice: 256 codes
ATOM_BYTES = 512  # 128 rows by four scales
_SHARED_BYTES = shared_bytes_with("has_tcgen05")
WRITERS = 4  # warps that write tiles of the output
_WARP_ROWS = 32
_SUMS_COLUMNS = 464  # columns of tensor memory for two images of the sums of a tile
_STAGES = range(2, 13)
_MAX_CTAS = 16  # of a cluster; more than 8 need a launch attribute, which the driver module sets
_MAX_SIDE = 4  # CTAs of a cluster along either side: a smaller part of an operand is not worth a copy
_SWIZZLE_ROWS = 8  # rows after which the swizzle of shared memory repeats


# ---- what both share -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaledSpec(KernelSpec):
    """A tile is 128 * ``ctas`` rows of the left operand by ``tile_n`` rows of the right one.

    The left operand is a, or b with ``swap_ab``. ``stages`` slices of 256 columns are in flight. With ``tma_store``,
    tiles of the output are written through shared memory, else from registers. A cluster computes ``cluster_m`` tiles
    along the left rows by ``cluster_n`` along the right ones; its CTAs share operands. FlashInfer and CUTLASS count
    CTAs: their cluster of 4 x 2 is here, with two CTAs for a tile, 2 x 2. The columns are in ``split`` parts, for each
    of which the cluster has such CTAs.
    """

    format: BlockFormat
    out_dtype: DType
    tile_n: int
    ctas: int
    stages: int
    swap_ab: bool
    tma_store: bool
    cluster_m: int
    cluster_n: int
    split: int

    threads: ClassVar[int]
    products: ClassVar[int]  # columns that one instruction multiplies
    step: ClassVar[int]  # columns of whole slices and whole instructions

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tile_n", NARROW_NS + WIDE_NS),
            ("ctas", (1, 2)),
            ("stages", _STAGES),
            ("cluster_m", (1, 2, 4)),
            ("cluster_n", (1, 2, 4)),
            ("split", (1, 2, 4, 8)),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {tuple(allowed)}")
        if self.column > _MAX_SIDE:
            raise ArgumentError("cluster_m", self.cluster_m, f"at most {_MAX_SIDE} CTAs along the left rows")
        if self.tile_n % (_SWIZZLE_ROWS * self.column):
            raise ArgumentError("cluster_m", self.cluster_m, f"multiples of {_SWIZZLE_ROWS} right rows for each CTA")
        if self.cluster > _MAX_CTAS:
            raise ArgumentError("split", self.split, f"at most {_MAX_CTAS} CTAs in a cluster")

    @property
    def whole_columns(self) -> int:
        """The columns of which k is a multiple, so that no scale beyond the last column is used."""
        raise NotImplementedError

    @property
    def column(self) -> int:
        """CTAs of the tiles of a cluster that have the same right rows."""
        return self.ctas * self.cluster_m

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.column * self.cluster_n * self.split

    @property
    def part_n(self) -> int:
        """Columns of the sums that a warp writes at a time; fewer where sums of other CTAs need room too."""
        return min(self.tile_n, 64 if self.split == 1 else 32)

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice of both operands in the shared memory of a CTA."""
        return (TILE_ROWS + self.tile_n // self.ctas) * _SLICE_BYTES

    @property
    def pieces(self) -> int:
        """The number of copies in which the scales of a step are loaded."""
        return 1

    @property
    def scale_atoms(self) -> int:
        """Atoms of 128 rows by 4 scales in one of these copies, along the columns."""
        return self.step // (4 * self.format.block * self.pieces)

    @property
    def scale_words(self) -> int:
        """The same in words of 8 bytes, for 128 rows."""
        return ATOM_BYTES // 8 * self.scale_atoms

    @property
    def right_atoms(self) -> int:
        """Atoms along the right rows of a tile. Along the left rows, a CTA has one."""
        return ceil_div(self.tile_n, TILE_ROWS)

    @property
    def boxes(self) -> dict[str, tuple[int, int]]:
        """The boxes that a CTA copies, in rows by bytes of codes or words of scales: its part of what CTAs share."""
        right_words = self.right_atoms * self.scale_words // self.column
        words = min(right_words, self.scale_words)
        return {
            "left": (TILE_ROWS // self.cluster_n, _SLICE_BYTES),
            "right": (self.tile_n // self.column, _SLICE_BYTES),
            "left_scales": (1, self.scale_words // self.cluster_n),
            "right_scales": (right_words // words, words),
        }

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage of the ring of operands with its two barriers, in bytes."""
        return self.slice_bytes + 16

    @property
    def list_bytes(self) -> int:
        """Shared memory behind everything else, for the scheduler of tiles, in bytes."""
        return 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, in bytes."""
        out = WRITERS * 2 * 64 * self.part_n if self.tma_store else 128
        barriers = 1 if 2 * self.tile_n > _SUMS_COLUMNS else 2  # pairs of barriers: images that overlap share one
        rest = 16 * barriers + 8  # and the address of tensor memory
        exchanged = 0 if self.split == 1 else WRITERS * ((self.split - 1) * _WARP_ROWS * self.part_n * 4 + 16)
        return (
            round_up(self.stages * self.stage_bytes + self.scale_bytes + out + rest, 1024) + exchanged + self.list_bytes
        )

    @property
    def scale_bytes(self) -> int:
        """Shared memory of a separate ring for scales with its barriers, in bytes."""
        return 0


def lacks(problem: Fp4Problem, spec: BlockScaledSpec, arch: Arch) -> str | None:
    """The memory that the GPU lacks for a spec, or the reason why the operands do not fit it."""
    if problem.a_layout is not SfLayout.layout_128x4:
        return "scales are copied to tensor memory in the layout 128x4"
    if problem.k % (step := spec.whole_columns):
        return f"its last product would use scales beyond the last column, which may be NaN: k % {step} == 0"
    if (needed := spec.shared_bytes) > arch.shared_bytes:
        return f"its {spec.stages} stages need {needed} bytes of shared memory, a CTA has {arch.shared_bytes}"
    return None


def wastes(problem: Fp4Problem, spec: BlockScaledSpec) -> str | None:
    """Why a spec would be a waste for a problem, or has no code for it."""
    left, right = sides(problem, spec)
    if spec.tile_n in NARROW_NS and not spec.swap_ab:
        return "tiles of fewer than 64 columns are written only by the epilogue of swap_ab"
    if spec.tile_n in NARROW_NS and right > spec.tile_n:
        return f"tiles of {spec.tile_n} columns begin within a word of scales, so that there can be only one"
    if spec.swap_ab and not spec.tma_store:
        return "with swap_ab a thread has columns of out, which only a copy by a tensor map stores well"
    if spec.split > 1 and not (spec.swap_ab and spec.tile_n <= TILE_ROWS):
        return "columns are split for few rows of a, as the right operand"
    if ceil_div(problem.k, spec.step) < spec.split:
        return "a part of the columns would be empty"
    if spec.ctas == 2 and left <= TILE_ROWS:
        return "one CTA of each pair would have nothing to do"
    across = (left, TILE_ROWS * spec.ctas, spec.cluster_m), (right, spec.tile_n, spec.cluster_n)
    if any(2 * ceil_div(rows, tile) <= cluster for rows, tile, cluster in across):
        return "half of the CTAs of each cluster would have nothing to do"
    if spec.tile_n > (NARROW_NS if spec.swap_ab else WIDE_NS)[0] and 2 * right <= spec.tile_n:
        return "half of its columns would be empty"
    return None


def sides(problem: Fp4Problem, spec: BlockScaledSpec) -> tuple[int, int]:
    """The numbers of rows of the left and of the right operand."""
    return (problem.n, problem.m) if spec.swap_ab else (problem.m, problem.n)


def groups(problem: Fp4Problem, spec: BlockScaledSpec) -> int:
    """Number of groups of tiles of the output; a cluster computes one at a time."""
    left, right = sides(problem, spec)
    rows = TILE_ROWS * spec.ctas * spec.cluster_m
    return ceil_div(left, rows) * ceil_div(right, spec.tile_n * spec.cluster_n)


def launch(problem: Fp4Problem, spec: BlockScaledSpec, arch: Arch, entries: int = 1) -> Geometry:
    """A persistent grid: a cluster for each group of tiles, but no more clusters than the GPU runs at once."""
    clusters = min(entries * groups(problem, spec), arch.clusters(spec.cluster))
    grid, cluster = (clusters * spec.cluster, 1, 1), (spec.cluster, 1, 1)
    return Geometry(grid, block=(spec.threads, 1, 1), cluster=cluster, shared_bytes=spec.shared_bytes)


PARAMS = (
    TensorMapParam("left", "[rows, k / 2] bytes; boxes are a CTA's part of what CTAs share"),
    TensorMapParam("right", "likewise"),
    TensorMapParam("left_scales", "[rows / 128, 64 words for each 4 columns of scales], likewise"),
    TensorMapParam("right_scales", "likewise"),
    TensorMapParam("out_map", "[m, n], boxes [32, 64] or with kSwapAb [kPartN, 32]"),
    Ptr("alpha", "const float", "[1]; null: 1"),
    Ptr("out", "Out", "[m, n]"),
    I64("m"),
    I64("n", "a multiple of 8"),
    I64("k", "a multiple of 64"),
    I64("out_stride", "elements"),
)


def bind(arguments: Fp4Arguments, plan: Plan) -> dict[str, Any]:
    """The value of each of PARAMS."""
    return values(arguments, plan)


def values(arguments: Fp4Arguments | MaskedArguments, plan: Plan, entries: int = 1) -> dict[str, Any]:
    """The value of each of PARAMS; the matrices of several entries lie one behind another."""
    spec: BlockScaledSpec = plan.spec
    problem, out = plan.problem, arguments.out.view(torch.uint16)
    cols = problem.k // problem.format.block
    a = arguments.a, atoms(arguments.a_descale, entries * round_up(problem.m, TILE_ROWS), cols)
    b = arguments.b, atoms(arguments.b_descale, entries * round_up(problem.n, TILE_ROWS), cols)
    (left, left_scales), (right, right_scales) = (b, a) if spec.swap_ab else (a, b)
    boxes, box = spec.boxes, (spec.part_n, 32) if spec.swap_ab else (32, spec.part_n)
    return {
        "left": TileMap(left, boxes["left"], swizzle=128),
        "right": TileMap(right, boxes["right"], swizzle=128),
        "left_scales": TileMap(left_scales, boxes["left_scales"]),
        "right_scales": TileMap(right_scales, boxes["right_scales"]),
        "out_map": TileMap(out, box, swizzle=2 * box[1]),
        "alpha": arguments.alpha,
        "out": arguments.out,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "out_stride": arguments.out.stride(0),
    }


class Cut(NamedTuple):
    """The fields of a tactic that its stages follow from."""

    tile_n: int
    ctas: int
    swap_ab: bool = False
    tma_store: bool = True
    cluster_m: int = 1
    cluster_n: int = 1
    split: int = 1

    @classmethod
    def of(cls, tactic: Any) -> Cut:
        return cls(*(getattr(tactic, name) for name in cls._fields))


def cuts() -> Iterator[Cut]:
    """Every tile with its epilogues and clusters."""
    for tile_n, ctas, swap_ab, tma_store in product(NARROW_NS + WIDE_NS, (1, 2), (False, True), (True, False)):
        if (tile_n in NARROW_NS and not swap_ab) or (swap_ab and not tma_store) or tile_n % (8 * ctas):
            continue
        alone = Cut(tile_n, ctas, swap_ab, tma_store)
        yield alone
        if tma_store and tile_n in WIDE_NS:
            for m, n in product((1, 2, 4), repeat=2):
                if m * n > 1 and ctas * m <= _MAX_SIDE:
                    yield alone._replace(cluster_m=m, cluster_n=n)
        if swap_ab and ctas == 1 and tile_n <= WIDE_NS[0]:
            yield from (alone._replace(split=split) for split in (2, 4, 8))


def most_stages(spec: BlockScaledSpec, ring: str = "stages") -> int:
    """The most stages of a ring that fit in shared memory."""
    return max(n for n in _STAGES if replace(spec, **{ring: n}).shared_bytes <= _SHARED_BYTES)  # type: ignore[arg-type]


# ---- products of 64 columns ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSpec(BlockScaledSpec):
    """Instructions of 64 columns. A stage holds a slice and its scales."""

    threads: ClassVar[int] = 32 * (WRITERS + 2)
    products: ClassVar[int] = 64
    step: ClassVar[int] = 256

    @property
    def whole_columns(self) -> int:
        return self.products

    @property
    def stage_bytes(self) -> int:
        return self.slice_bytes + (1 + self.right_atoms) * self.scale_atoms * ATOM_BYTES + 16


@dataclass(frozen=True, slots=True)
class K64Tactic:
    """The tunable fields of K64Spec."""

    tile_n: int
    ctas: int
    stages: int
    swap_ab: bool = False
    tma_store: bool = True
    prefetch: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    split: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class K64Spec(SliceSpec):
    """With ``prefetch``, operands are prefetched into L2, ``stages`` steps ahead of their copies."""

    prefetch: bool


def _tactics() -> Iterator[K64Tactic]:
    """Every tactic, with as many stages as fit with NVFP4, whose scales take more memory than MXFP4's."""
    for cut in cuts():
        fields = cut._asdict()
        short = K64Spec(format=NVFP4, out_dtype=DType.BF16, stages=2, prefetch=False, **fields)
        for prefetch in (False, True) if short.cluster == short.ctas else (False,):
            yield K64Tactic(stages=most_stages(short), prefetch=prefetch, **fields)


def specialise(problem: Fp4Problem, tactic: K64Tactic) -> K64Spec:
    """The spec of a tactic for a problem."""
    return K64Spec(format=problem.format, out_dtype=problem.out_dtype, **asdict(tactic))


def rejects(problem: Fp4Problem, tactic: K64Tactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if not arch.has_tcgen05:
        return f"its products are instructions of {names_with('has_tcgen05')}"
    if tactic.ctas == 2 and tactic.tile_n % 16:
        return "pairs take multiples of 16 rows of the right operand"
    spec = specialise(problem, tactic)
    if why := lacks(problem, spec, arch) or wastes(problem, spec):
        return why
    if tactic.prefetch and ceil_div(problem.k, spec.step) <= tactic.stages:
        return "the ring holds a whole tile: there is nothing to prefetch"
    return None


def geometry(problem: Fp4Problem, tactic: K64Tactic, arch: Arch) -> Geometry:
    """The geometry of a tactic for a problem."""
    return launch(problem, specialise(problem, tactic), arch)


KERNEL = Kernel(
    name="gemm/blockscaled",
    spec=K64Spec,
    params=PARAMS,
    tactics=tuple(_tactics()),
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind,
)
