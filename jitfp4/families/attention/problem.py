"""The problem that selects a kernel; and of the kernel for few query rows tactics, spec and launch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import ACTIVATIONS, CODE_DTYPES
from jitfp4.families.attention.counters import COUNTER_BYTES
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import Geometry, KernelSpec

DTYPES = ACTIVATIONS
"""The dtypes of queries and outputs."""

HEAD_DIMS = (64, 128, 256)
TILE = 32  # tokens of a tile of one warp
MAX_PAGE = 128
MAX_TOKENS = 1 << 24  # of a request: up to it, kernels divide by the page size with a multiplication
MAX_Q_LEN = 8  # of a decode call
MAX_GROUP = 16
MAX_ROWS = 16  # query rows that the decode kernel takes at a time
ROW_BLOCK = 64
MANY_ROWS = 32 * ROW_BLOCK  # of a request and a KV head: more are not told apart

_WARP = 32
_LINE = 128  # bytes
_WIDE_WARPS = 8  # of an SM
_MOST_CTAS = _WARP**2


class Cache(StrEnum):
    """The format of K and V."""

    NVFP4 = "nvfp4"
    E4M3 = "e4m3"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return {Cache.NVFP4: 4, Cache.E4M3: 8}.get(self, 16)

    @property
    def tile(self) -> str:
        """The namespace in the template that makes fragments from this format."""
        return {4: "nvfp4_tile", 8: "byte_tile", 16: "half_tile"}[self.bits]

    @property
    def is_bf16(self) -> bool:
        return self is Cache.BF16


CACHES = {
    **dict.fromkeys(CODE_DTYPES, Cache.NVFP4),
    torch.float8_e4m3fn: Cache.E4M3,
    torch.float16: Cache.F16,
    torch.bfloat16: Cache.BF16,
}
"""From the dtype of the tensors to the format."""


class Pages(StrEnum):
    """How a tile lies in pages: in one page, with each half in one page, or in any number of pages."""

    WHOLE = "whole"
    HALVES = "halves"
    MANY = "many"

    @staticmethod
    def of(page: int) -> Pages:
        """The case for pages of ``page`` tokens."""
        return Pages.WHOLE if page % TILE == 0 else Pages.HALVES if page % (TILE // 2) == 0 else Pages.MANY


class Problem(NamedTuple):
    """What selection sees of an attention. A query row is one query token of one head.

    ``rows`` query rows of a KV head are taken at a time: 8 or 16 for few query tokens, 64 to MANY_ROWS for more.
    ``heads`` is a power of two that divides the number of KV heads.

    Lengths are known on the device only, so the sizes are bounds, rounded up to powers of two: then growing contexts
    give few problems. A request has at most ``tiles`` tiles of 32 tokens. A call has at most ``units`` units, each a
    tile for one KV head, and with many rows at most ``blocks`` blocks of ROW_BLOCK rows; with few rows that is 0.

    Where each request has one query token, ``causal`` is True.
    """

    cache: Cache
    q_dtype: DType
    out_dtype: DType
    head_dim: int
    rows: int
    heads: int
    interleaved: bool
    pages: Pages
    packed: bool
    two_tables: bool
    tiles: int
    units: int
    causal: bool = True
    blocks: int = 0

    def units_per_sm(self, arch: Arch) -> int:
        return ceil_div(self.units, arch.num_sms)

    def items_per_sm(self, arch: Arch) -> int:
        """Requests, for one KV head, of the greatest length."""
        return ceil_div(self.units, self.tiles * arch.num_sms)

    @property
    def wide(self) -> bool:
        """Whether the sums of a warp take so many registers that an SM holds few warps."""
        return self.head_dim * self.rows > 128 * 8


@dataclass(frozen=True, slots=True)
class Tactic:
    """How the kernel divides the work: fields of Spec."""

    warps: int
    stages: int
    min_ctas: int
    head_warps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A warp takes tiles of 32 tokens of one KV head for ``rows`` query rows, and copies later tiles meanwhile.

    ``interleaved`` is the order of V's scales. In a ``packed`` cache the rows of a page and head follow each other
    without gaps. With ``two_tables``, K and V have different page numbers. A warp has ``stages`` tiles in shared
    memory. An SM holds ``min_ctas`` CTAs of ``warps`` warps; ``head_warps`` warps of a CTA take the same tokens for
    different KV heads.
    """

    cache: Cache
    q_dtype: DType
    out_dtype: DType
    head_dim: int
    rows: int
    interleaved: bool
    pages: Pages
    packed: bool
    two_tables: bool
    warps: int
    stages: int
    min_ctas: int
    head_warps: int

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a tile: K and V, their scales."""
        scales = self.head_dim // 16 if self.cache is Cache.NVFP4 else 0
        return 2 * TILE * (self.head_dim * self.cache.bits // 8 + scales)

    @property
    def ring_bytes(self) -> int:
        """Shared memory of a warp's tiles, with 8 bytes about each, in whole lines."""
        return round_up(self.stages * (self.stage_bytes + 8), _LINE)

    @property
    def part_bytes(self) -> int:
        """Bytes of a warp's results in shared memory: padded rows of outputs, with their references and sums."""
        return 4 * self.rows * (self.head_dim + 4 + 2)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a CTA uses: rings, results and three positions in the work for each warp."""
        of_warps = self.warps * (self.ring_bytes + self.part_bytes + 3 * 56)
        return round_up(round_up(of_warps, 16) + round_up(self.warps * 4, 16) + 48, _LINE)

    def workspace_bytes(self, grid: int) -> int:
        """Bytes of two partial results of each CTA: for the first and the last item of its share."""
        return 2 * grid * self.head_warps * self.rows * (self.head_dim + 2) * 4


def specialise(problem: Problem, tactic: Tactic) -> Spec:
    """The kernel that a tactic makes for a problem."""
    fields = {name: value for name, value in problem._asdict().items() if name in Spec.__slots__}
    return Spec(**fields, **asdict(tactic))


def rejects(problem: Problem, tactic: Tactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem; None where it can."""
    if problem.rows > MAX_ROWS:
        return f"it takes {MAX_ROWS} query rows at a time, and reads K and V again for more"
    if problem.heads % tactic.head_warps:
        return f"{tactic.head_warps} warps take different heads"
    if arch.num_sms * tactic.min_ctas > _MOST_CTAS:
        return f"parts of {_MOST_CTAS} CTAs are added up in two steps, of a warp each"
    if problem.wide and tactic.warps * tactic.min_ctas > _WIDE_WARPS:
        return f"registers suffice for {_WIDE_WARPS} warps"
    lines = tactic.head_warps * problem.rows
    if 2 * arch.num_sms * tactic.min_ctas * lines > COUNTER_BYTES:
        return f"there are {COUNTER_BYTES} bytes of counters, two for each line of a CTA"
    shared = specialise(problem, tactic).shared_bytes
    if shared > arch.shared_of(tactic.min_ctas):
        return f"{tactic.min_ctas} CTAs need {shared} bytes of shared memory each"
    return None


def geometry(problem: Problem, tactic: Tactic, arch: Arch) -> Geometry:
    """As many CTAs as the GPU holds at once; each finds its share of the work."""
    return Geometry(
        grid=(arch.num_sms * tactic.min_ctas, 1, 1),
        block=(tactic.warps * _WARP, 1, 1),
        shared_bytes=specialise(problem, tactic).shared_bytes,
    )
