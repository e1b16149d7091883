"""Which tactic a problem gets, and the problems that meet every row.

Twelve warps with a ring of two tiles each keep an SM busy. They take several heads of the same tokens: then requests
end less often, and fewer parts are added up. Where an SM has no more than one request and head, they take one, so that
all SMs have work. Short requests end often: two CTAs then fill each other's pauses. Little work is over sooner with
fewer parts to add up, and fewer tiles in flight; soonest where a cluster takes each item, and adds up its parts in
shared memory. That is so while a warp has few tiles of an item, since requests may have very different lengths. E4M3
and bfloat16, whose tiles are larger, want smaller clusters; float16 follows bfloat16. Where the rows of a head do not
follow each other, four heads also share sectors of scales: two tiles leave room for L1 to keep them until the last has
come.

From 128 query rows on sm_90a takes its warpgroup products, in three teams of 64 rows with one warpgroup that expands or
copies K and V. Two CTAs share the expansion of NVFP4 and E4M3, and copies of rows of more than 128 elements. A few
hundred rows are better cut into 128 than into 192, of which more would be empty, and so is NVFP4 where requests are
short. Elsewhere mma.sync takes as many rows as there are and fit: 256 rows decode a tile half as often as 128, and 32
rows of a warp read it half as often as 16. That was timed on an H200; other architectures have what fits in their
memory and registers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.attention.kernels import (
    decode,
    decode_masked,
    prefill,
    prefill_masked,
    prefill_wgmma,
    prefill_wgmma_masked,
)
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.kernels.prefill import PrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.attention.problem import MANY_ROWS, ROW_BLOCK, CacheFormat, Pages, Problem
from jitfp4.formats import DType
from jitfp4.kernel import AnyKernel
from jitfp4.selection import Row, Table, rows

_DECODED = (CacheFormat.NVFP4, CacheFormat.E4M3)  # whose values become 16-bit floats
_FEW_UNITS = 32  # for each SM
_SOME_UNITS = 256
_SHORT = 64  # tiles of a request
_FEW_TILES = 32  # of a request
_SOME_ROWS = 16 * ROW_BLOCK  # of a request and a KV head

_SMALL = (  # items, and tiles of a request, that clusters are done with first
    (DecodeTactic(4, 2, 1, cluster=8), {"items": 8, "tiles": 32}),
    (DecodeTactic(8, 2, 1, cluster=8), {"items": 8, "tiles": 256}),
    (DecodeTactic(4, 2, 3, cluster=8), {"items": 16, "tiles": 128}),
    (DecodeTactic(4, 2, 3, cluster=8), {"items": 32, "tiles": 64}),
    (DecodeTactic(8, 2, 1, cluster=2), {"items": 64, "tiles": 128}),
    (DecodeTactic(8, 2, 1, cluster=1), {"items": 128, "tiles": 64}),
    (DecodeTactic(4, 2, 1, cluster=1), {"items": 256, "tiles": 32}),
)
_SMALL_BYTES = (
    (DecodeTactic(4, 2, 1, cluster=8), {"items": 8, "tiles": 256}),
    (DecodeTactic(4, 2, 1, cluster=8), {"items": 16, "tiles": 32}),
    (DecodeTactic(8, 2, 1, cluster=2), {"items": 64, "tiles": 128}),
    (DecodeTactic(8, 2, 1, cluster=1), {"items": 128, "tiles": 64}),
    (DecodeTactic(4, 2, 1, cluster=1), {"items": 256, "tiles": 32}),
)
_SMALL_HALVES = (
    (DecodeTactic(4, 2, 1, cluster=8), {"items": 8, "tiles": 256}),
    (DecodeTactic(4, 2, 1, cluster=2), {"items": 64, "tiles": 128}),
    (DecodeTactic(4, 2, 1, cluster=1), {"items": 128, "tiles": 64}),
)
_SMALL_OF = {
    CacheFormat.NVFP4: (_SMALL, "h200/attention_search.csv"),
    CacheFormat.E4M3: (_SMALL_BYTES, "h200/attention_search_small.csv"),
    CacheFormat.BF16: (_SMALL_HALVES, "h200/attention_search_small.csv"),
    CacheFormat.F16: (_SMALL_HALVES, "h200/attention_search_small.csv"),
}

# Heads of 256 elements in NVFP4, two for keys: tried for 1 to 64 requests of 2,048 to 32,768 tokens, without a record
_WIDE = (
    (DecodeTactic(8, 2, 1, cluster=8), {"items": 8, "tiles": 256}),
    (DecodeTactic(8, 2, 1, cluster=8), {"items": 2, "tiles": 512}),
    (DecodeTactic(8, 2, 1, cluster=2), {"items": 32, "tiles": 128}),
    (DecodeTactic(8, 2, 1, cluster=1), {"items": 128, "tiles": 128}),
    (DecodeTactic(8, 2, 1), {"items": 128, "tiles": 4096}),
)

_ROWS: tuple[Row[Any], ...] = (
    *rows(*_WIDE, cache=CacheFormat.NVFP4, rows=8, wide=True, listed=False),
    *(
        Row(tactic, {"cache": cache, "wide": False, "listed": False} | most_of, measured)
        for cache, (small, measured) in _SMALL_OF.items()
        for tactic, most_of in small
    ),
    *rows(
        (DecodeTactic(8, 2, 1), {"cache": CacheFormat.E4M3, "wide": False}),
        (DecodeTactic(4, 3, 1), {"cache": CacheFormat.E4M3}),
        (DecodeTactic(4, 3, 1), {"cache": CacheFormat.BF16}),
        (DecodeTactic(4, 3, 1), {"cache": CacheFormat.F16}),
    ),
    *rows(
        (DecodeTactic(8, 2, 1), {"units_per_sm": _FEW_UNITS}),
        (DecodeTactic(12, 2, 1), {"packed": True, "items_per_sm": 1}),
        (DecodeTactic(6, 2, 2, head_warps=2), {"packed": True, "tiles": _SHORT}),
        (DecodeTactic(6, 2, 2), {"packed": True, "tiles": _SHORT}),
        (DecodeTactic(8, 2, 1), {"packed": False, "items_per_sm": 1, "units_per_sm": _SOME_UNITS}),
        (DecodeTactic(12, 2, 1, head_warps=4), {}),
        (DecodeTactic(12, 2, 1, head_warps=2), {}),
        (DecodeTactic(12, 2, 1), {}),
        (DecodeTactic(4, 3, 1), {}),
        wide=False,
    ),
    Row(DecodeTactic(4, 3, 2)),
    Row(DecodeTactic(4, 2, 2)),
    Row(DecodeTactic(4, 2, 1)),
    Row(DecodeTactic(2, 2, 1)),
    Row(DecodeTactic(1, 2, 1)),
    *rows(*((DecodeTactic(warps, 2, 1, cluster=1), {}) for warps in (8, 4, 2, 1)), whole=True),
    # Many query rows, wgmma: read from h200/prefill_search.csv for d = 128, prefill_search_widths.csv for 64 and 256
    *rows(
        (WgmmaTactic(stages=4, turns=True), {"width": 64, "rows": _SOME_ROWS}),
        *(
            (WgmmaTactic(3, 1, 64, 3, turns=True), {"width": 64, "cache": cache, "tiles": _FEW_TILES})
            for cache in _DECODED
        ),
        (WgmmaTactic(3, 1, 64, 4, turns=True, ctas=2), {"width": 64, "cache": CacheFormat.NVFP4}),
        (WgmmaTactic(3, 1, 64, 4, turns=True), {"width": 64}),
        (WgmmaTactic(2, 1, 128, 2, turns=True), {"width": 128, "cache": CacheFormat.E4M3, "rows": 2 * ROW_BLOCK}),
        (WgmmaTactic(2, 1, 128, 3, turns=True, ctas=2), {"width": 128, "cache": CacheFormat.E4M3, "rows": _SOME_ROWS}),
        (WgmmaTactic(3, 1, 64, 4, turns=True, ctas=2), {"width": 128, "cache": CacheFormat.E4M3}),
        (WgmmaTactic(2, 2, 128, 2, turns=True), {"width": 128, "rows": 2 * ROW_BLOCK}),
        (
            WgmmaTactic(2, 2, 128, 3, turns=True, ctas=2),
            {"width": 128, "cache": CacheFormat.NVFP4, "packed": True, "rows": _SOME_ROWS},
        ),
        (WgmmaTactic(2, 2, 128, 2, turns=True), {"width": 128, "rows": _SOME_ROWS}),
        (WgmmaTactic(2, 2, 128, 2, turns=True), {"width": 128, "cache": CacheFormat.NVFP4, "tiles": _FEW_TILES}),
        (WgmmaTactic(3, 1, 64, 4, turns=True, ctas=2), {"width": 128, "cache": CacheFormat.NVFP4}),
        (WgmmaTactic(3, 1, 64, 3, turns=True), {"width": 128}),
        *((WgmmaTactic(tile=64, turns=True, ctas=2), {"cache": cache}) for cache in _DECODED),
        (WgmmaTactic(tile=64), {}),
        rows=MANY_ROWS,
    ),
    # Many query rows, mma.sync: drafts of the kernel were timed on an H200, with 4 x 4,096 tokens, and with 8 x 16 at
    # ends of 8,192. No record has these; the times in h200/prefill_search.csv and prefill_search_widths.csv are older.
    Row(PrefillTactic(4, 16, 32, 1), {"rows": ROW_BLOCK}),
    *rows(
        (PrefillTactic(8, 16, 64, 1), {"rows": 2 * ROW_BLOCK}),
        (PrefillTactic(8, 16, 32, 1), {"rows": 2 * ROW_BLOCK}),
        (PrefillTactic(8, 32, 64, 1), {}),
        (PrefillTactic(8, 32, 32, 1), {}),
        width=128,
    ),
    Row(PrefillTactic(8, 16, 32, 1)),
    Row(PrefillTactic(4, 16, 32, 1)),
    Row(PrefillTactic(4, 16, 16, 1)),
)


_MASKS: dict[AnyKernel, AnyKernel] = {
    decode.KERNEL: decode_masked.KERNEL,
    prefill.KERNEL: prefill_masked.KERNEL,
    prefill_wgmma.KERNEL: prefill_wgmma_masked.KERNEL,
}
_MASKED: dict[Any, tuple[AnyKernel, Any]] = {
    plain: (kernel, tactic)
    for of, kernel in _MASKS.items()
    for plain, tactic in zip(of.tactics, kernel.tactics, strict=True)
}
"""The kernel and its tactic that do under a mask what a tactic does without one."""


def _with_mask(problem: Problem, arch: Arch) -> Any:
    """What the same problem gets without a mask; where registers do not suffice, the next that fits."""
    plain = problem._replace(masked=False, causal=problem.blocks == 0)
    for row in _ROWS:
        kernel, tactic = _MASKED.get(row.of(plain, arch), (None, None))
        if kernel is not None and kernel.rejects(problem, tactic, arch) is None:
            return tactic
    return None


TABLE: Table[Any] = Table(
    (*_ROWS, Row(_with_mask, {"masked": True})),
    measured="h200/attention_search.csv",
    elsewhere=dict.fromkeys(kernel.tactic for kernel in _MASKS.values()),
)


def problems(arch: Arch) -> Iterator[Problem]:
    """bf16 queries: each order of heads and scales, few, short and many requests; the odd sizes; many query tokens."""
    pages, most = (Pages.HALVES, Pages.WHOLE), MANY_ROWS
    loads = ((32, _FEW_UNITS), (_SHORT, 2 * _SOME_UNITS), (4096, 4096), (256, 4096))
    for page in pages:
        for packed, interleaved in ((True, False), (True, True), (False, False)):
            for tiles, units in loads:
                yield _problem(arch, page, tiles, units, packed=packed, interleaved=interleaved)
            for _, most_of in _SMALL:
                small = _problem(arch, page, most_of["tiles"], 1, packed=packed, interleaved=interleaved)
                yield small._replace(units=most_of["items"] * most_of["tiles"])
        yield _problem(arch, page, *loads[3], rows=16)
        yield _problem(arch, page, *loads[3], head_dim=64)
        yield _problem(arch, page, *loads[3], head_dim=256)
    for _, most_of in _WIDE:
        small = _problem(arch, Pages.WHOLE, most_of["tiles"], 1, interleaved=True, head_dim=256)
        yield small._replace(units=most_of["items"] * most_of["tiles"])
    for heads in (1, 2, 4):
        yield _problem(arch, Pages.HALVES, *loads[3], packed=False, heads=heads)
    yield _problem(arch, Pages.HALVES, *loads[1], heads=1)
    yield _problem(arch, Pages.HALVES, 4096, _SOME_UNITS, packed=False)
    yield _problem(arch, Pages.HALVES, *loads[3], two_tables=True)
    yield _problem(arch, Pages.HALVES, *loads[3], cache=CacheFormat.E4M3, rows=16)
    yield _problem(arch, Pages.HALVES, *loads[3], head_dim=256, rows=16)
    for cache in (CacheFormat.E4M3, CacheFormat.F16, CacheFormat.BF16):
        for _, most_of in _SMALL_OF[cache][0]:
            small = _problem(arch, Pages.HALVES, most_of["tiles"], 1, cache=cache)
            yield small._replace(units=most_of["items"] * most_of["tiles"])
        yield _problem(arch, Pages.HALVES, *loads[3], cache=cache)
        yield _problem(arch, Pages.HALVES, *loads[3], cache=cache, head_dim=256, rows=16)
    for block in (ROW_BLOCK, 2 * ROW_BLOCK, most):
        yield _problem(arch, Pages.HALVES, *loads[0], rows=block)
        yield _problem(arch, Pages.HALVES, *loads[0], rows=block, interleaved=True)
        yield _problem(arch, Pages.HALVES, *loads[0], rows=block, head_dim=256)
    yield _problem(arch, Pages.HALVES, *loads[0], rows=2 * ROW_BLOCK, head_dim=64)
    for cache, head_dim, load in itertools.product(CacheFormat, (64, 256), (loads[0], loads[3])):
        yield _problem(arch, Pages.HALVES, *load, rows=most, head_dim=head_dim, cache=cache)
    yield _problem(arch, Pages.HALVES, *loads[0], rows=most, two_tables=True)
    yield _problem(arch, Pages.HALVES, *loads[0], rows=most, packed=False)
    for cache, rows_ in itertools.product(CacheFormat, (2 * ROW_BLOCK, _SOME_ROWS, most)):
        yield _problem(arch, Pages.HALVES, *loads[3], rows=rows_, cache=cache)
    for head_dim, rows_ in itertools.product((80, 96), (8, most)):
        yield _problem(arch, Pages.HALVES, *loads[3], rows=rows_, head_dim=head_dim)
    yield _problem(arch, Pages.HALVES, *loads[3], head_dim=192, cache=CacheFormat.BF16)
    for rows_ in (8, 16, ROW_BLOCK, most):
        yield _problem(arch, Pages.HALVES, *loads[3], rows=rows_, soft_cap=True)
    for cache in CacheFormat:
        yield _problem(arch, Pages.HALVES, *loads[3], cache=cache)._replace(whole=True)
    yield _problem(arch, Pages.HALVES, *loads[3], cache=CacheFormat.BF16, head_dim=256, rows=16)._replace(whole=True)
    for cache, rows_ in itertools.product(CacheFormat, (16, _SOME_ROWS)):
        yield _problem(arch, Pages.HALVES, *loads[3], rows=rows_, cache=cache)._replace(masked=True, causal=False)
    for rows_ in (8, ROW_BLOCK):
        yield _problem(arch, Pages.HALVES, *loads[3], rows=rows_)._replace(masked=True, causal=False)
    for rows_ in (8, _SOME_ROWS):  # all that a spec tells apart
        every = _problem(
            arch, Pages.WHOLE, *loads[3], rows=rows_, head_dim=64, interleaved=True, packed=False, two_tables=True
        )
        yield every._replace(soft_cap=True, masked=True, causal=False)
    for rows_ in (_SOME_ROWS, most):
        yield _problem(arch, Pages.HALVES, *loads[3], rows=rows_, interleaved=True)
        yield _problem(arch, Pages.HALVES, *loads[3], rows=rows_, two_tables=True)
        yield _problem(arch, Pages.HALVES, *loads[3], rows=rows_, packed=False)


def _problem(
    arch: Arch,
    pages: Pages,
    tiles: int,
    units: int,
    *,
    packed: bool = True,
    interleaved: bool = False,
    rows: int = 8,
    head_dim: int = 128,
    heads: int = 8,
    cache: CacheFormat = CacheFormat.NVFP4,
    two_tables: bool = False,
    soft_cap: bool = False,
) -> Problem:
    dtype = DType.F16 if cache is CacheFormat.F16 else DType.BF16
    return Problem(
        cache=cache,
        q_dtype=dtype,
        out_dtype=dtype,
        head_dim=head_dim,
        rows=rows,
        heads=heads,
        interleaved=interleaved,
        pages=pages,
        packed=packed,
        two_tables=two_tables,
        soft_cap=soft_cap,
        tiles=tiles,
        units=units * arch.num_sms,
        blocks=0 if rows < ROW_BLOCK else units,
    )
