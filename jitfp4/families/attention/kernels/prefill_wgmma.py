"""The prefill kernel of sm_90a's warpgroup products: how it can be cut, where it runs, and how it is launched.

What a tile of t tokens and r query rows costs an SM at d = 128. The tensor cores take r * t / 8 cycles (256 * r * t
multiplications and additions, 2048 a cycle), 1536 for 192 x 64. Beside that run, four instructions a cycle, as the
machine code counts them for 192 x 64:

- the expansion of NVFP4 by four producer warps, 350 instructions each: 2.7 for an element of K or V (1.9 make float16
  of a code and multiply it by its scale, 0.1 store it, the rest are addresses, pages, barriers). Of two CTAs that share
  it, each expands one of K and V: two warps with 376 instructions each, which start the copies to the other as well;
- the softmax, 226 instructions in each of twelve consumer warps: 7.1 for a score (1 each for exponent, power of two and
  sum, 0.5 each for the maximum and to round it, the rest are descriptors and barriers), and 256 cycles of the unit for
  powers of two.

That is 67 % of the issue slots at the full rate of the tensor cores, 56 % where CTAs share the expansion. An H200
reaches 0.55 to 0.65 of that rate: a warp issues an instruction every five to ten cycles, as accumulators pass through
the register file beside it, and teams wait a fifth of the time for their turn, which another team keeps until its
products are queued. What a lane works out for each row that it expands (page, address, scales) weighs so much that one
lane takes a row, although its loads coalesce less.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import Arch, names_with, shared_bytes_with
from jitfp4.counters import COUNTER_BYTES
from jitfp4.errors import ArgumentError
from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.parameters import INPUTS, SCRATCH, SIZES, SOFT_CAP, bind, scratch
from jitfp4.families.attention.problem import ROW_BLOCK, CacheFormat, Problem
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import round_up
from jitfp4.spec import I64, Geometry, KernelSpec

TILES = (64, 128)
_TEAM_ROWS = 64
_WARPGROUP = 128  # threads
_REGISTERS = 65536  # of an SM
_LEAST_REGISTERS = 56  # of a producer: one of them finds the items
_PRODUCT_REGISTERS = 30  # of the largest product, beside its sums
_SHARED_BYTES = shared_bytes_with("has_wgmma")  # of a CTA
_BARRIER_BYTES = 8
_PLACES = 16  # of items in shared memory
_PARTS_BYTES = 32 << 20  # of a workspace that suffices


@dataclass(frozen=True, slots=True)
class WgmmaTactic:
    """How the kernel is cut: fields of its Spec."""

    teams: int = 2
    producers: int = 1
    tile: int = 128
    stages: int = 2
    turns: bool = False
    ctas: int = 1


TACTICS = tuple(
    dict.fromkeys(
        (
            WgmmaTactic(stages=4, turns=True),
            WgmmaTactic(2, 1, 128, 2, turns=True),
            WgmmaTactic(2, 1, 128, 3, turns=True, ctas=2),
            WgmmaTactic(3, 1, 64, 4, turns=True, ctas=2),
            WgmmaTactic(2, 2, 128, 2, turns=True),
            WgmmaTactic(2, 2, 128, 3, turns=True, ctas=2),
            WgmmaTactic(3, 1, 64, 3, turns=True),
            WgmmaTactic(tile=64),
            *(WgmmaTactic(2, 1, 64, 2, turns, 2) for turns in (False, True)),
            *(WgmmaTactic(3, 1, 64, stages, turns) for stages in (3, 4) for turns in (True, False)),
            *(WgmmaTactic(2, producers, 128, stages, True) for producers in (1, 2) for stages in (2, 3)),
            *(WgmmaTactic(3, 1, 64, stages, True, 2) for stages in (3, 4)),
            *(WgmmaTactic(2, producers, 128, stages, True, 2) for producers in (1, 2) for stages in (2, 3)),
        )
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaSpec(KernelSpec):
    """A CTA takes 64 * ``teams`` query rows of one KV head and tiles of ``tile`` tokens.

    ``producers`` warpgroups expand K and V, ``stages`` tiles of each ahead. With ``turns``, the teams start their
    products one after the other. Two ``ctas`` are a cluster and take neighbouring rows: one expands K for both, the
    other V. ``interleaved`` tells the order of V's scales; with ``two_tables``, K and V have pages of their own.
    """

    cache: CacheFormat
    q_dtype: DType
    out_dtype: DType
    head_dim: int
    interleaved: bool
    two_tables: bool
    soft_cap: bool
    teams: int
    producers: int
    tile: int
    stages: int
    turns: bool
    ctas: int

    masked = False  # no mask of the caller's
    item_bytes = 64
    work_registers = 32  # of a consumer, beside outputs, scores and weights
    other_registers = 44  # of a producer, beside what is on its way

    def __post_init__(self) -> None:
        fields = (("teams", (2, 3)), ("producers", (1, 2)), ("tile", TILES), ("stages", (2, 3, 4)), ("ctas", (1, 2)))
        for name, allowed in fields:
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")

    @property
    def mma(self) -> str:
        """What K, V, queries and weights are in products: float16 holds NVFP4 and E4M3 exactly."""
        return "bf16" if self.cache is CacheFormat.BF16 else "f16"

    @property
    def width(self) -> int:
        """Elements of a row in shared memory, and columns of outputs: whole blocks of 128 bytes."""
        return round_up(self.head_dim, 64)

    @property
    def threads(self) -> int:
        return _WARPGROUP * (self.teams + self.producers)

    @property
    def tile_warps(self) -> int:
        """That expand a tile of K or V: all of a CTA's where they have one of the two, and its rows are long."""
        return self.tile // (16 if self.shares_rows else 32)

    @property
    def shares_rows(self) -> bool:
        """Whether two lanes share a row that they expand, so that registers hold a tile's next."""
        return self.ctas > 1 and self.width > 128 and self.cache.bits < 16 and self.tile == 64

    @property
    def sides(self) -> int:
        """Of K and V, those that a producer warp expands."""
        return 2 if self.producers * 4 == self.tile_warps and self.ctas == 1 else 1

    @property
    def producer_registers(self) -> int:
        """Of a thread: what it has of the next tile of K, of V or of both, and what it works with."""
        units = self.width * self.cache.bits // 128  # of 16 bytes, of a row
        unit = {CacheFormat.NVFP4: 5, CacheFormat.E4M3: 4}.get(self.cache, 0)
        own = units * unit * self.sides // (2 if self.shares_rows else 1)
        return max(_LEAST_REGISTERS, round_up(self.other_registers + own, 8))

    @property
    def launch_registers(self) -> int:
        """Of a thread, in eights, before producers pass some of theirs to consumers."""
        return _REGISTERS // self.threads // 8 * 8

    @property
    def consumer_registers(self) -> int:
        """Of a thread: what the producers leave."""
        left = self.launch_registers * self.threads - _WARPGROUP * self.producers * self.producer_registers
        return left // (_WARPGROUP * self.teams) // 8 * 8

    @property
    def sums(self) -> int:
        """Registers of a consumer that hold outputs, scores and weights."""
        return self.width // 2 + self.tile // 2 + self.tile // 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a CTA uses."""
        queries = self.teams * _TEAM_ROWS * self.width * 2
        tiles = 2 * self.stages * (self.tile * self.width * 2 + 2 * _BARRIER_BYTES)
        places = _PLACES * (self.item_bytes + _BARRIER_BYTES)
        return round_up(queries + tiles + self.stages * self.tile_warps * 4 + places, 1024)

    @property
    def part_bytes(self) -> int:
        """Bytes of a partial result: outputs, references and sums of each row, those twice for each of four lanes."""
        return self.ctas * self.teams * _TEAM_ROWS * (self.width + 8) * 4

    def most_parts(self, workspace_bytes: int) -> int:
        """Partial results that a workspace holds, of those that have a counter for each warp that has rows of them."""
        warps = self.ctas * self.teams * _TEAM_ROWS // 16
        return min(min(workspace_bytes, _PARTS_BYTES) // self.part_bytes, (COUNTER_BYTES // 4 - 1) // warps)


def specialise(problem: Problem, tactic: WgmmaTactic, kind: type[WgmmaSpec] = WgmmaSpec) -> WgmmaSpec:
    """The kernel, of a kind of specs, that a tactic makes for a problem."""
    fields = {name: value for name, value in problem._asdict().items() if name in WgmmaSpec.__slots__}
    return kind(**fields, **asdict(tactic))


def rejects(problem: Problem, tactic: WgmmaTactic, arch: Arch, kind: type[WgmmaSpec] = WgmmaSpec) -> str | None:
    """Why a tactic cannot run a problem."""
    if problem.masked != kind.masked:
        return "it takes no mask" if problem.masked else "it takes a mask"
    if not arch.has_wgmma:
        return f"its products are instructions of {names_with('has_wgmma')}"
    if problem.whole:
        return "it divides the tokens of the last items among clusters"
    if problem.rows <= ROW_BLOCK:
        return "half of its query rows would be empty"
    spec = specialise(problem, tactic, kind)
    if spec.sums + spec.work_registers > spec.consumer_registers:
        needed = f"{spec.sums} for outputs, scores and weights, {spec.work_registers} for the rest"
        return f"a thread has {spec.consumer_registers} registers, and needs {needed}"
    if spec.width // 2 + _PRODUCT_REGISTERS > spec.launch_registers:
        return f"one product has {spec.width // 2} sums, and a launch gives a thread {spec.launch_registers} registers"
    if spec.shared_bytes > _SHARED_BYTES:
        return f"a CTA needs {spec.shared_bytes} bytes of shared memory"
    return None


def geometry(problem: Problem, tactic: WgmmaTactic, arch: Arch, kind: type[WgmmaSpec] = WgmmaSpec) -> Geometry:
    """CTAs that stay, one on each SM, and take items one after the other."""
    spec = specialise(problem, tactic, kind)
    return Geometry(
        grid=(arch.num_sms // spec.ctas * spec.ctas, 1, 1),
        block=(spec.threads, 1, 1),
        cluster=(spec.ctas, 1, 1),
        shared_bytes=spec.shared_bytes,
    )


def bind_all(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    """The parameters, but those of a mask."""
    bound = bind(arguments) | {"causal": int(arguments.causal)} | scratch(arguments, plan.spec.part_bytes)
    return bound | {"most_parts": plan.spec.most_parts(arguments.workspace_buffer.numel())}


PARAMS = (
    *INPUTS,
    *SIZES,
    I64("causal", "0 or 1", member="int"),
    *SCRATCH,
    I64("most_parts", "that the workspace holds", member="int"),
    SOFT_CAP,
)

KERNEL = Kernel(
    name="attention/prefill_wgmma",
    spec=WgmmaSpec,
    params=PARAMS,
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind_all,
)
