"""The mma.sync kernel for many query rows: its tactics and spec, which problems it can run, and its launch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.parameters import INPUTS, SIZES, SOFT_CAP, bind
from jitfp4.families.attention.problem import MAX_ROWS, ROW_BLOCK, CacheFormat, Problem, power_of_two
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import I64, Geometry, KernelSpec

_WARP = 32
_MOST_SUMS = 192  # of the 255 registers of a thread: sums of outputs, and scores
_FEWER_SUMS = 160  # where rows are padded, and on Blackwell where products are of float16: more would spill


@dataclass(frozen=True, slots=True)
class PrefillTactic:
    """How the kernel divides the work: fields of PrefillSpec."""

    warps: int
    warp_rows: int
    tile: int
    min_ctas: int


TACTICS = (
    PrefillTactic(8, 32, 64, 1),
    PrefillTactic(8, 32, 32, 1),
    PrefillTactic(4, 32, 64, 2),
    PrefillTactic(8, 16, 64, 1),
    PrefillTactic(8, 16, 32, 1),
    PrefillTactic(4, 16, 64, 2),
    PrefillTactic(4, 16, 32, 1),
    PrefillTactic(4, 16, 16, 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec(KernelSpec):
    """Each CTA has ``warps`` * ``warp_rows`` query rows, and takes tiles of ``tile`` tokens.

    ``interleaved`` is the order of V's scales. An SM holds ``min_ctas`` CTAs.
    """

    cache: CacheFormat
    q_dtype: DType
    out_dtype: DType
    head_dim: int
    interleaved: bool
    soft_cap: bool
    warps: int
    warp_rows: int
    tile: int
    min_ctas: int

    masked = False  # no mask of the caller's

    @property
    def rows(self) -> int:
        return self.warps * self.warp_rows

    @property
    def width(self) -> int:
        """Elements of a row in shared memory: a power of two, so that an exclusive or finds what a step multiplies."""
        return power_of_two(self.head_dim)

    @property
    def shared_bytes(self) -> int:
        """Of a CTA: three tiles as 16-bit floats, two as in the cache, addresses of four, queries, its task."""
        bits = self.cache.bits
        scales = round_up(self.head_dim // 16, 4) if bits == 4 else 0
        raw = 2 * self.tile * (self.head_dim * bits // 8 + scales) if bits < 16 else 0
        halves = 2 * self.tile * self.width * 2
        rows = self.tile * (32 if bits == 4 else 16)
        queries = 0 if self.head_dim * self.warp_rows <= 128 * 16 else self.rows * self.head_dim * 2
        task = 16 * self.warps + (80 if self.masked else 64)
        return round_up(3 * halves + 4 * (rows + 8) + 2 * raw + queries + 32 + task, 1024)


def specialise(problem: Problem, tactic: PrefillTactic, kind: type[PrefillSpec] = PrefillSpec) -> PrefillSpec:
    """The kernel, of a kind of specs, that a tactic makes for a problem."""
    fields = {name: value for name, value in problem._asdict().items() if name in PrefillSpec.__slots__}
    return kind(**fields, **asdict(tactic))


def rejects(problem: Problem, tactic: PrefillTactic, arch: Arch, kind: type[PrefillSpec] = PrefillSpec) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if problem.masked != kind.masked:
        return "it takes no mask" if problem.masked else "it takes a mask"
    if problem.rows <= MAX_ROWS:
        return "few query rows leave most of its products empty"
    sums = (problem.head_dim + tactic.tile) * tactic.warp_rows // _WARP
    padded = problem.head_dim < power_of_two(problem.head_dim)
    halves = arch.has_e2m1_cvt and problem.cache in (CacheFormat.NVFP4, CacheFormat.F16)
    most = _FEWER_SUMS if padded or halves else _MOST_SUMS
    if sums > most:
        return f"{sums} registers of a thread for sums of outputs and scores are more than {most}"
    shared = specialise(problem, tactic, kind).shared_bytes
    if shared > arch.shared_of(tactic.min_ctas):
        return f"{tactic.min_ctas} CTAs need {shared} bytes of shared memory each"
    return None


def geometry(problem: Problem, tactic: PrefillTactic, arch: Arch) -> Geometry:
    """A CTA for each possible block of query rows. CTAs without a block return at once."""
    del arch  # the grid is the same for every one
    spec = specialise(problem, tactic)
    return Geometry(
        grid=(ceil_div(problem.blocks * ROW_BLOCK, spec.rows), 1, 1),
        block=(tactic.warps * _WARP, 1, 1),
        shared_bytes=spec.shared_bytes,
    )


def bind_all(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    """The parameters, but those of a mask."""
    del plan  # no parameter depends on it
    return bind(arguments) | {"causal": int(arguments.causal)}


PARAMS = (*INPUTS, *SIZES, I64("causal", "0 or 1", member="int"), SOFT_CAP)

KERNEL = Kernel(
    name="attention/prefill",
    spec=PrefillSpec,
    params=PARAMS,
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind_all,
)
