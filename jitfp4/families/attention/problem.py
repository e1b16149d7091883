"""The problem that selects a kernel, the sizes that kernels are made for, and the problem of a call."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import ACTIVATIONS, CODE_DTYPES
from jitfp4.families.attention.arguments import Arguments, heads_and_page, strides
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div

DTYPES = ACTIVATIONS
"""The dtypes of queries and outputs."""

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
TILE = 32  # tokens of a tile of one warp
MAX_PAGE = 128
MAX_TOKENS = 1 << 24  # of a request: up to it, kernels divide by the page size with a multiplication
MAX_Q_LEN = 8  # of a request, that the decode kernel takes
MAX_GROUP = 128
MAX_ROWS = 16  # query rows that the decode kernel takes at a time
DECODE_ROWS = 8 * MAX_ROWS  # of a request and a KV head, for which it reads K and V again
ROW_BLOCK = 64
MANY_ROWS = 32 * ROW_BLOCK  # of a request and a KV head: more are not told apart


class CacheFormat(StrEnum):
    """The format of K and V."""

    NVFP4 = "nvfp4"
    E4M3 = "e4m3"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return {CacheFormat.NVFP4: 4, CacheFormat.E4M3: 8}.get(self, 16)

    @property
    def tile(self) -> str:
        """The type in the template that makes fragments from this format."""
        return {4: "Nvfp4Tile", 8: "E4m3Tile", 16: "HalfTile"}[self.bits]

    @property
    def is_bf16(self) -> bool:
        return self is CacheFormat.BF16


CACHES = {
    **dict.fromkeys(CODE_DTYPES, CacheFormat.NVFP4),
    torch.float8_e4m3fn: CacheFormat.E4M3,
    torch.float16: CacheFormat.F16,
    torch.bfloat16: CacheFormat.BF16,
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

    Where each request has one query token, ``causal`` is True. With ``listed``, requests share one list of pages, and
    ``tiles`` is a mean. With ``whole``, the tokens of a request are not divided among CTAs. With ``masked``, which is
    never causal, a mask of the caller's says which tokens a query sees.
    """

    cache: CacheFormat
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
    soft_cap: bool = False
    listed: bool = False
    whole: bool = False
    masked: bool = False

    def units_per_sm(self, arch: Arch) -> int:
        return ceil_div(self.units, arch.num_sms)

    @property
    def items(self) -> int:
        """Requests, for one KV head, of the greatest length."""
        return self.units // self.tiles

    def items_per_sm(self, arch: Arch) -> int:
        """Requests, for one KV head, of the greatest length."""
        return ceil_div(self.units, self.tiles * arch.num_sms)

    @property
    def width(self) -> int:
        """Elements of a row in shared memory."""
        return power_of_two(self.head_dim)

    @property
    def wide(self) -> bool:
        """Whether the sums of a warp take so many registers that an SM holds few warps."""
        return self.width * self.rows > 128 * 8


class OutputProblem(NamedTuple):
    """Rows of ``cols`` blocks to NVFP4."""

    dtype: DType
    rows: int
    cols: int


def problem_of(a: Arguments) -> Problem:
    heads, page = heads_and_page(a)
    d = a.query.shape[2]
    sides = (a.key_cache, a.value_cache, a.key_scales, a.value_scales)
    packed = all(strides(side, a.hnd)[1] == side.shape[3] * side.element_size() for side in sides if side is not None)
    batch, group = a.seq_lens.shape[0], a.query.shape[1] // heads
    masked, rows = a.mask is not None, group * a.q_len_per_req
    causal = not masked and (a.causal or a.q_len_per_req == 1)
    few = (causal or masked) and a.q_len_per_req <= MAX_Q_LEN and rows <= DECODE_ROWS
    blocks = heads * (power_of_two(ceil_div(a.query.shape[0] * group, ROW_BLOCK)) + 4 * power_of_two(batch))
    tiles = ceil_div(a.max_tokens, TILE)
    if a.page_ends is not None:  # one list for all requests
        tiles = ceil_div(a.block_tables.shape[0] * page, TILE * max(1, batch))
    tiles = power_of_two(tiles)
    return Problem(
        cache=CACHES[a.key_cache.dtype],
        q_dtype=DTYPES[a.query.dtype],
        out_dtype=DTYPES[a.out.dtype],
        head_dim=d,
        rows=(8 if rows <= 8 else MAX_ROWS) if few else min(max(power_of_two(rows), ROW_BLOCK), MANY_ROWS),
        heads=heads & -heads if heads & -heads < 8 else 8,
        interleaved=a.interleaved,
        pages=Pages.of(page),
        packed=packed,
        two_tables=a.block_tables.dim() == 3,
        tiles=tiles,
        units=tiles * power_of_two(batch * heads),
        causal=causal,
        blocks=0 if few else blocks,
        soft_cap=a.soft_cap > 0,
        listed=a.page_ends is not None and batch > 1,
        whole=a.whole,
        masked=masked,
    )


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
