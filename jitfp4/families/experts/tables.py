"""The tactics for layers of experts, and the problems that reach every row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import Any

from jitfp4 import replay
from jitfp4.arch import Arch
from jitfp4.families.experts.kernels.combine import CombineTactic
from jitfp4.families.experts.kernels.few_down import FewTactic
from jitfp4.families.experts.kernels.narrow import NarrowTactic
from jitfp4.families.experts.kernels.route import RouteTactic
from jitfp4.families.experts.kernels.stream import STREAMED, StreamTactic
from jitfp4.families.experts.kernels.wide import WideTactic
from jitfp4.families.experts.problem import DTYPES, FEW, Problem, Product, RouteProblem
from jitfp4.formats import BlockFormat
from jitfp4.selection import Row, Table, rows

_STREAMED_ROWS = 2  # the mean number of rows of an expert up to which weights go through a CTA as one stream
# With weights from this size on, and more assignments, wgmma over a list costs no more, and much less where routings
# are skewed: a stream decodes a weight again for every eight rows
_LARGE, _STREAMED_LARGE, _LEAST_WIDE = 1 << 22, 128, 16
_TOKENS = (1, 2, 8, 64, 128, 256, 512, 1024, 2048, 8192)
# Rows of an item, and the mean number of rows of an expert up to which they hold nearly all rows of most experts
_ITEM_ROWS = ((8, 2), (16, 8), (32, 16), (48, 32), (80, 64), (160, 128), (256, math.inf))
_FP8_ITEM_ROWS = ((16, 8), (32, 16), (48, 32), (96, 64), (160, 128), (256, math.inf))

_forced: ContextVar[int | None] = ContextVar("jitfp4_item_rows", default=None)


def item_rows_of(assignments: int, experts: int, size: int, arch: Arch | None, *, fp8: bool = False) -> int:
    """Rows of an item of the list; 0 for no list. It depends on nothing else, so that both products have one list.

    ``size``: elements of the weight down of an expert. ``arch`` is None where it is not known: on a CPU, and while
    torch.compile traces.
    """
    if (forced := _forced.get()) is not None:
        return forced
    mean = assignments / experts
    found, least = FEW, 0
    if arch is not None and arch.has_wgmma and mean <= _STREAMED_ROWS:
        found, least = (STREAMED, 0) if size < _LARGE else (_STREAMED_LARGE, _LEAST_WIDE)
    if assignments <= found and not fp8:
        return 0
    return next(rows for rows, most in (_FP8_ITEM_ROWS if fp8 else _ITEM_ROWS) if mean <= most and rows >= least)


def weight_down(product: Product, n: int, k: int) -> int:
    """Elements of the weight down of an expert, by the size [n, k] of one of its weights."""
    return n * k // 2 if product is Product.GATED else n * k


@contextmanager
def forced_item_rows(item_rows: int) -> Iterator[None]:
    """Layers inside the block have a list of items of so many rows, 0: none. For tests and measurements."""
    token = _forced.set(item_rows)
    with replay.suspended():
        try:
            yield
        finally:
            _forced.reset(token)


# The CTAs of a cluster: more than one where a thread would have several assignments
ROUTE_TABLE = Table(
    (Row(RouteTactic(1), {"assignments": 2048}), Row(RouteTactic(8)), Row(RouteTactic(1))), measured=None
)

# experts_search_few, experts_search_many: as many bytes in flight as an SM needs, in many small CTAs. Rows by
# tiles_per_sm follow experts_search_warm, of 1, 2 and 4 tokens with warm replays; cuts with two warps in a group, and
# those of Qwen3's two tokens, are of a later run of these cases, which is no record. A cut is fast where SMs have
# equally many rows: for one token of gpt-oss 240 CTAs of 96 rows, up to two on an SM, where 360 of 64 lie unevenly
_SMALL_CTAS = NarrowTactic(8, 4, 1, 4, 2, 4)
_UP: tuple[Row[Any], ...] = (
    *rows(
        (NarrowTactic(8, 2, 1, 8, 2, 3), {"tiles_per_sm": 0.5}),  # the more warps, where CTAs are few
        (NarrowTactic(8, 2, 2, 8, 2, 1), {"tiles_per_sm": 1.0}),
        (_SMALL_CTAS, {"k": 2048, "tiles_per_sm": 2.0}),
        (NarrowTactic(8, 3, 1, 4, 2, 4), {"k": 2048}),
        (NarrowTactic(8, 4, 1, 8, 2, 2), {"tiles_per_sm": 2.0}),
        (NarrowTactic(8, 3, 2, 4, 2, 2), {"k": 4096, "tiles_per_sm": 3.0}),
        (_SMALL_CTAS, {"tiles_per_sm": 4.0}),
        (NarrowTactic(8, 4, 1, 2, 3, 6), {"k": 4096, "tiles_per_sm": 8.0}),
        item_rows=0,
    ),
    Row(_SMALL_CTAS, {"item_rows": 8}),
)
_DOWN: tuple[Row[Any], ...] = (
    *rows(
        (FewTactic(1, 16, 3, 2), {"k": 1024}),
        (NarrowTactic(8, 4, 1, 3, 2, 5), {"k": 1024}),
        (FewTactic(4, 8, 2, 2), {"tiles_per_sm": 1.0}),
        (FewTactic(4, 16, 2, 1), {"k": 2048}),
        (FewTactic(3, 8, 2, 2, split=4), {"tiles_per_sm": 2.0}),
        (NarrowTactic(8, 4, 1, 8, 2, 2), {"tiles_per_sm": 2.0}),
        (_SMALL_CTAS, {"k": 2048}),
        (NarrowTactic(8, 4, 1, 4, 3, 3), {"tiles_per_sm": 3.0}),
        (NarrowTactic(8, 4, 1, 2, 3, 6), {}),
        item_rows=0,
    ),
    Row(NarrowTactic(8, 4, 1, 2, 3, 6), {"item_rows": 8, "k": 1024}),
    Row(_SMALL_CTAS, {"item_rows": 8}),
)
_NARROW: tuple[Row[Any], ...] = (
    Row(NarrowTactic(16, 4, 1, 3, 3, 3), {"item_rows": 16}),
    Row(NarrowTactic(64, 2, 4, 2, 3, 1)),
    # less shared memory
    *(Row(NarrowTactic(tile_m, 1, 4, 4 if tile_m < 32 else 2, 2, 1), {"item_rows": tile_m}) for tile_m in (8, 16, 32)),
    Row(NarrowTactic(32, 1, 4, 2, 2, 1)),
)
UP_TABLE: Table[Any] = Table((*_UP, *_NARROW), measured=None)
DOWN_TABLE: Table[Any] = Table((*_DOWN, *_NARROW), measured=None)

# experts_search_many: the more warpgroups, the better, where their tiles fill the last wave
_WIDE: tuple[Row[Any], ...] = (
    *rows(
        (WideTactic(16, 8, 5), {"n": 2048}),
        (WideTactic(16, 8, 4, 2), {"n": 4096}),
        (WideTactic(16, 8, 6), {}),
        item_rows=16,
    ),
    Row(WideTactic(32, 8, 5), {"item_rows": 32}),
    Row(WideTactic(48, 8, 4, 2), {"item_rows": 48}),
    Row(WideTactic(80, 8, 4, 2), {"item_rows": 80}),
    Row(WideTactic(160, 16, 3, 2), {"item_rows": 160}),
    Row(WideTactic(256, 64, 2, 2)),
)
# Searched for 2048 tokens, without a record; h200/experts_fp8.csv has the times of the rows before that. Tensor cores
# take half as long, and the weight becomes E4M3 at a higher cost
_WIDE_FP8: tuple[Row[Any], ...] = (
    *rows(
        (WideTactic(16, 8, 4), {"item_rows": 16}),
        (WideTactic(32, 8, 4), {"item_rows": 32}),
        (WideTactic(48, 8, 4, 2), {"item_rows": 48}),
        (WideTactic(96, 8, 4), {"item_rows": 96}),
        (WideTactic(160, 16, 3, 2), {"item_rows": 160}),
        (WideTactic(256, 64, 2, 2), {}),
        fp8=True,
    ),
)
# experts_stream, with more stages and sums than the kernel has now, which did not help: the more warps, the better,
# where each has a chunk of every unit of work
_STREAM = Row(StreamTactic(4, 12, 1), {"item_rows": 0, "is_few": False})
_SHORT_STREAM = Row(StreamTactic(4, 4, 2), {"item_rows": 0, "is_few": False, "k": 1024})
HOPPER_UP: Table[Any] = Table((*_WIDE_FP8, _STREAM, *_UP, *_WIDE), measured=None, needs="has_wgmma")
HOPPER_DOWN: Table[Any] = Table(
    (_SHORT_STREAM, _STREAM, *_DOWN, Row(CombineTactic(128))), measured=None, needs="has_wgmma"
)


def route_problems(_arch: Arch) -> Iterator[RouteProblem]:
    for tokens in (64, 2048):
        yield RouteProblem(tokens, slots=8, experts=128)


def up_problems(arch: Arch) -> Iterator[Problem]:
    for n, k in ((1536, 2048), (4096, 7168), (5760, 2880)):
        yield from _problems(arch, (Product.GATED, Product.PLAIN), n, k)


def down_problems(arch: Arch) -> Iterator[Problem]:
    for n, k in ((2048, 768), (2880, 2880), (7168, 2048)):
        yield from _problems(arch, (Product.DOWN,), n, k)


def _problems(arch: Arch, products: tuple[Product, ...], n: int, k: int) -> Iterator[Problem]:
    """One, few and many rows of each expert, of a layer, of the same with fewer slots, and of a small one."""
    experts = 128
    for kind, dtype, block_format, tokens, (size, slots) in product(
        products, DTYPES.values(), BlockFormat, _TOKENS, ((n, 8), (n, 4), (n, 1), (n // 64, 8))
    ):
        for fp8 in (False, True) if arch.has_wgmma else (False,):
            item_rows = item_rows_of(tokens * slots, experts, weight_down(kind, size, k), arch, fp8=fp8)
            yield Problem(kind, dtype, block_format, tokens, slots, experts, size, k, item_rows, fp8)
