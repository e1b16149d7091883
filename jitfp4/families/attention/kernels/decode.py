"""The kernel for few query rows: each CTA takes an equal share of all tiles of all requests and KV heads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import Arch, names_with
from jitfp4.counters import COUNTER_BYTES
from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.parameters import INPUTS, SCRATCH, SIZES, SOFT_CAP, bind, scratch
from jitfp4.families.attention.problem import MAX_ROWS, TILE, CacheFormat, Pages, Problem, power_of_two
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec

_WARP = 32
_LINE = 128  # bytes
_WIDE_WARPS = 8  # of an SM
_MOST_CTAS = _WARP**2
_MOST_ITEMS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class DecodeTactic:
    """How the kernel divides the work: fields of DecodeSpec."""

    warps: int
    stages: int
    min_ctas: int
    head_warps: int = 1
    cluster: int = 0


TACTICS = (
    DecodeTactic(4, 2, 1, cluster=8),
    DecodeTactic(8, 2, 1, cluster=8),
    DecodeTactic(4, 2, 3, cluster=8),
    DecodeTactic(8, 2, 1, cluster=2),
    DecodeTactic(4, 2, 1, cluster=2),
    DecodeTactic(8, 2, 1, cluster=1),
    DecodeTactic(4, 2, 1, cluster=1),
    DecodeTactic(2, 2, 1, cluster=1),
    DecodeTactic(1, 2, 1, cluster=1),
    DecodeTactic(8, 2, 1),
    DecodeTactic(4, 3, 1),
    DecodeTactic(12, 2, 1),
    DecodeTactic(6, 2, 2, head_warps=2),
    DecodeTactic(6, 2, 2),
    DecodeTactic(12, 2, 1, head_warps=4),
    DecodeTactic(12, 2, 1, head_warps=2),
    DecodeTactic(4, 3, 2),
    DecodeTactic(4, 2, 2),
    DecodeTactic(4, 2, 1),
    DecodeTactic(2, 2, 1),
    DecodeTactic(1, 2, 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec(KernelSpec):
    """A warp takes tiles of 32 tokens of one KV head for ``rows`` query rows, and copies later tiles meanwhile.

    ``interleaved`` is the order of V's scales. In a ``packed`` cache the rows of a page and head follow each other
    without gaps. With ``two_tables``, K and V have different page numbers. A warp has ``stages`` tiles in shared
    memory. An SM holds ``min_ctas`` CTAs of ``warps`` warps; ``head_warps`` warps of a CTA take the same tokens for
    different KV heads. With a ``cluster``, so many CTAs share an item, one for each query token of a KV head; with 0,
    all CTAs share all items.
    """

    cache: CacheFormat
    q_dtype: DType
    out_dtype: DType
    head_dim: int
    rows: int
    interleaved: bool
    pages: Pages
    packed: bool
    two_tables: bool
    soft_cap: bool
    warps: int
    stages: int
    min_ctas: int
    head_warps: int
    cluster: int

    masked = False  # no mask of the caller's

    @property
    def width(self) -> int:
        """Elements of a row in shared memory and in products: a power of two, by which lanes share and permute rows."""
        return power_of_two(self.head_dim)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a tile: K and V, their scales."""
        scales = self.width // 16 if self.cache is CacheFormat.NVFP4 else 0
        return 2 * TILE * (self.width * self.cache.bits // 8 + scales)

    @property
    def ring_bytes(self) -> int:
        """Shared memory of a warp's tiles, with 8 bytes about each, in whole lines."""
        return round_up(self.stages * (self.stage_bytes + 8), _LINE)

    @property
    def part_bytes(self) -> int:
        """Bytes of a warp's results in shared memory: padded rows of outputs, with their references and sums."""
        return 4 * self.rows * (self.width + 4 + 2)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a CTA uses: rings, results and three positions in the work for each warp; its share."""
        of_warps = self.warps * (self.ring_bytes + self.part_bytes + 3 * 56)
        share = 4 * self.head_warps * self.rows * (self.width + 2) if self.cluster else _share_bytes(self.warps)
        return round_up(round_up(of_warps, 16) + share, _LINE)

    def workspace_bytes(self, grid: int) -> int:
        """Bytes of two partial results of each CTA: for the first and the last item of its share."""
        if self.cluster:
            return 0
        return 2 * grid * self.head_warps * self.rows * (self.width + 2) * 4


def _share_bytes(warps: int) -> int:
    """What the warps of a CTA have counted, and where its share begins."""
    return round_up(warps * 4, 16) + 48


def specialise(problem: Problem, tactic: DecodeTactic, kind: type[DecodeSpec] = DecodeSpec) -> DecodeSpec:
    """The kernel, of a kind of specs, that a tactic makes for a problem."""
    fields = {name: value for name, value in problem._asdict().items() if name in DecodeSpec.__slots__}
    return kind(**fields, **asdict(tactic))


def rejects(problem: Problem, tactic: DecodeTactic, arch: Arch, kind: type[DecodeSpec] = DecodeSpec) -> str | None:
    """Why a tactic cannot run a problem; None where it can."""
    if problem.masked != kind.masked:
        return "it takes no mask" if problem.masked else "it takes a mask"
    if problem.rows > MAX_ROWS:
        return f"it takes {MAX_ROWS} query rows at a time, and reads K and V again for more"
    if problem.heads % tactic.head_warps:
        return f"{tactic.head_warps} warps take different heads"
    if arch.num_sms * tactic.min_ctas > _MOST_CTAS:
        return f"parts of {_MOST_CTAS} CTAs are added up in two steps, of a warp each"
    if problem.wide and tactic.warps * tactic.min_ctas > _WIDE_WARPS:
        return f"registers suffice for {_WIDE_WARPS} warps"
    if problem.whole and tactic.cluster != 1:
        return "it divides the tokens of a request among CTAs"
    lines = tactic.head_warps * problem.rows
    if tactic.cluster > 1 and not arch.has_tma:
        return f"clusters are on {names_with('has_tma')}"
    if tactic.cluster and tactic.cluster * _items(problem, tactic) > _MOST_ITEMS:
        return f"a launch has {_MOST_ITEMS} CTAs at most"
    if 2 * arch.num_sms * tactic.min_ctas * lines > COUNTER_BYTES:
        return f"there are {COUNTER_BYTES} bytes of counters, two for each line of a CTA"
    shared = specialise(problem, tactic, kind).shared_bytes
    if shared > arch.shared_of(tactic.min_ctas):
        return f"{tactic.min_ctas} CTAs need {shared} bytes of shared memory each"
    return None


def _items(problem: Problem, tactic: DecodeTactic) -> int:
    """A bound of the requests, for all groups of KV heads that a CTA takes together."""
    return problem.items // tactic.head_warps


def geometry(problem: Problem, tactic: DecodeTactic, arch: Arch) -> Geometry:
    """As many CTAs as the GPU holds at once; each finds its share of the work. Or a cluster for each item."""
    own = tactic.cluster * _items(problem, tactic)
    return Geometry(
        grid=(own or arch.num_sms * tactic.min_ctas, 1, 1),
        block=(tactic.warps * _WARP, 1, 1),
        cluster=(max(1, tactic.cluster), 1, 1),
        shared_bytes=specialise(problem, tactic).shared_bytes,
    )


def bind_all(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    """The parameters, but those of a mask."""
    bound = bind(arguments) | scratch(arguments, plan.spec.workspace_bytes(plan.geometry.grid[0]))
    return bound | {"group_inverse": ceil_div(1 << 30, bound["group"])}


PARAMS = (*INPUTS, *SCRATCH, *SIZES, I64("group_inverse", "2^30 / group, rounded up", member="int"), SOFT_CAP)

KERNEL = Kernel(
    name="attention/decode",
    spec=DecodeSpec,
    params=PARAMS,
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind_all,
)
