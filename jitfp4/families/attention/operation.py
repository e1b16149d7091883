"""The operation behind all functions: its arguments, its kernels, its reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jitfp4 import replay
from jitfp4.errors import ArgumentError
from jitfp4.families.attention import counters, prefill, wgmma
from jitfp4.families.attention.problem import (
    CACHES,
    DTYPES,
    MANY_ROWS,
    MAX_Q_LEN,
    MAX_ROWS,
    ROW_BLOCK,
    TILE,
    Pages,
    Problem,
    Spec,
    geometry,
    rejects,
    specialise,
)
from jitfp4.families.attention.tables import PREFILL_TACTICS, TABLE, TACTICS, WGMMA_TACTICS, problems
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.operation import Operation, Written
from jitfp4.reference import attention as reference
from jitfp4.spec import F32, I64, Param, Ptr


class Arguments(NamedTuple):
    """Queries [tokens, heads, d] over a cache [pages, heads, page, ...] (HND) or [pages, page, heads, ...] (NHD).

    ``key_scales`` and ``value_scales`` are the block scales of an NVFP4 cache, whose dtype is uint8.
    ``block_tables`` has page numbers [batch, columns], or [batch, 2, columns] for K and V; with ``page_ends`` it is one
    list, and request b has the pages block_tables[page_ends[b] : page_ends[b + 1]].
    The factor of the first product is ``bmm1``, times ``bmm1_scale`` where that is a tensor; so for the second.
    Request b has queries cum_seq_lens_q[b] to cum_seq_lens_q[b + 1] - 1, at most ``q_len_per_req`` of them; without
    ``cum_seq_lens_q``, each request has exactly so many. A request has at most ``max_tokens`` tokens. Both bounds only
    select a kernel.
    Where ``causal``, query i of n sees tokens up to seq_lens[b] - n + i; a window begins ``window_left`` tokens before
    that one.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    page_ends: torch.Tensor | None
    cum_seq_lens_q: torch.Tensor | None
    sinks: torch.Tensor | None
    bmm1_scale: torch.Tensor | None
    bmm2_scale: torch.Tensor | None
    workspace_buffer: Written
    out: Written
    lse: Written | None
    bmm1: float
    bmm2: float
    q_len_per_req: int
    window_left: int
    causal: bool
    max_tokens: int
    hnd: bool
    interleaved: bool
    enable_pdl: bool | None
    names: str = (
        "key_cache=kv_cache,value_cache=kv_cache,key_scales=kv_cache_sf,value_scales=kv_cache_sf,page_ends=indptr"
    )


def by_token(tensor: torch.Tensor, hnd: bool) -> torch.Tensor:
    """K or V of a cache as [pages, page, heads, ...]."""
    return tensor.transpose(1, 2) if hnd else tensor


def _strides(tensor: torch.Tensor, hnd: bool) -> tuple[int, int, int]:
    """Bytes from page to page, token to token, head to head."""
    page, first, second, _ = (stride * tensor.element_size() for stride in tensor.stride())
    return (page, second, first) if hnd else (page, first, second)


def _scratch(arguments: Arguments, needed: int) -> dict[str, Any]:
    """The workspace, of at least so many bytes, and the counters of those who use it."""
    workspace = arguments.workspace_buffer
    if workspace.numel() < needed:
        raise ArgumentError("workspace_buffer", f"{workspace.numel()} bytes", f"{needed} or more")
    return {"workspace": workspace, "counters": replay.temporary(counters.of, workspace)}


def _bind_decode(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    bound = _bind(arguments) | _scratch(arguments, plan.spec.workspace_bytes(plan.geometry.grid[0]))
    return bound | {"group_inverse": ceil_div(1 << 30, bound["group"])}


def _bind_prefill(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    del plan  # no parameter depends on it
    return _bind(arguments) | {"causal": int(arguments.causal)}


def _bind_wgmma(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    bound = _bind_prefill(arguments, plan) | _scratch(arguments, plan.spec.part_bytes)
    return bound | {"most_parts": plan.spec.most_parts(arguments.workspace_buffer.numel())}


def _bind(a: Arguments) -> dict[str, Any]:
    """The parameters that every kernel has."""
    pages, heads, page = a.key_cache.shape[0], *_heads_and_page(a)
    bound = {
        "q": a.query,
        "k": a.key_cache,
        "v": a.value_cache,
        "k_scales": a.key_scales,
        "v_scales": a.value_scales,
        "tables": a.block_tables,
        "seq_lens": a.seq_lens,
        "page_ends": a.page_ends,
        "cum_q": a.cum_seq_lens_q,
        "sinks": a.sinks,
        "bmm1_tensor": a.bmm1_scale,
        "bmm2_tensor": a.bmm2_scale,
        "out": a.out,
        "lse": a.lse,
        "bmm1": a.bmm1,
        "bmm2": a.bmm2,
        "batch": a.seq_lens.shape[0],
        "kv_heads": heads,
        "group": a.query.shape[1] // heads,
        "q_len": a.q_len_per_req,
        "total_q": a.query.shape[0],
        "num_pages": pages,
        "page": page,
        "max_pages": a.block_tables.shape[-1],
        "window_left": a.window_left,
        "q_token_stride": a.query.stride(0),
        "q_head_stride": a.query.stride(1),
        "table_stride": a.block_tables.stride(0) if a.block_tables.dim() > 1 else 0,
        "v_table": a.block_tables.stride(1) if a.block_tables.dim() == 3 else 0,
    }
    sides = {"k": a.key_cache, "v": a.value_cache, "k_scales": a.key_scales, "v_scales": a.value_scales}
    for name, side in sides.items():
        strides = (0, 0, 0) if side is None else _strides(side, a.hnd)
        bound |= {f"{name}_{of}_stride": stride for of, stride in zip(("page", "token", "head"), strides, strict=True)}
    return bound


def _heads_and_page(a: Arguments) -> tuple[int, int]:
    _, first, second, _ = a.key_cache.shape
    return (first, second) if a.hnd else (second, first)


def _problem(a: Arguments) -> Problem:
    heads, page = _heads_and_page(a)
    d = a.query.shape[2]
    sides = (a.key_cache, a.value_cache, a.key_scales, a.value_scales)
    packed = all(_strides(side, a.hnd)[1] == side.shape[3] * side.element_size() for side in sides if side is not None)
    batch, group = a.seq_lens.shape[0], a.query.shape[1] // heads
    causal = a.causal or a.q_len_per_req == 1
    few, rows = causal and a.q_len_per_req <= MAX_Q_LEN, group * a.q_len_per_req
    blocks = heads * (ceil_div(a.query.shape[0] * group, ROW_BLOCK) + 2 * batch)
    tiles = ceil_div(a.max_tokens, TILE)
    if a.page_ends is not None:  # one list for all requests
        tiles = ceil_div(a.block_tables.shape[0] * page, TILE * max(1, batch))
    tiles = _power_of_two(tiles)
    return Problem(
        cache=CACHES[a.key_cache.dtype],
        q_dtype=DTYPES[a.query.dtype],
        out_dtype=DTYPES[a.out.dtype],
        head_dim=d,
        rows=(8 if rows <= 8 else MAX_ROWS) if few else min(max(_power_of_two(rows), ROW_BLOCK), MANY_ROWS),
        heads=heads & -heads if heads & -heads < 8 else 8,
        interleaved=a.interleaved,
        pages=Pages.of(page),
        packed=packed,
        two_tables=a.block_tables.dim() == 3,
        tiles=tiles,
        units=tiles * _power_of_two(batch * heads),
        causal=causal,
        blocks=0 if few else _power_of_two(blocks),
    )


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def _reference(a: Arguments) -> None:
    k = reference.Side(by_token(a.key_cache, a.hnd))
    v = reference.Side(by_token(a.value_cache, a.hnd))
    if a.key_scales is not None and a.value_scales is not None:
        k = reference.Side(k.data, by_token(a.key_scales, a.hnd))
        v = reference.Side(v.data, by_token(a.value_scales, a.hnd), a.interleaved)
    batch = a.seq_lens.shape[0]
    tables = a.block_tables
    lengths = a.seq_lens
    if a.page_ends is not None:
        ends = a.page_ends.clamp(0, tables.shape[0])
        lengths = torch.minimum(lengths, (ends[1:] - ends[:-1]).clamp(min=0) * _heads_and_page(a)[1])
        tables = reference.pad_lists(tables, ends)
    if tables.dim() == 2:
        tables = tables.unsqueeze(1).expand(-1, 2, -1)
    q_ends = a.cum_seq_lens_q
    if q_ends is None:
        q_ends = torch.arange(batch + 1, device=a.query.device) * a.q_len_per_req
    out, lse = reference.paged_attention(
        a.query,
        k,
        v,
        tables,
        lengths,
        q_ends,
        bmm1_scale=a.bmm1 * (1.0 if a.bmm1_scale is None else a.bmm1_scale.double()),
        bmm2_scale=a.bmm2 * (1.0 if a.bmm2_scale is None else a.bmm2_scale.double()),
        causal=a.causal,
        window_left=a.window_left,
        sinks=a.sinks,
    )
    a.out.copy_(reference.rounded(out, a.out.dtype))
    if a.lse is not None:
        a.lse.copy_(lse)


_INPUTS: tuple[Param, ...] = (
    Ptr("q", "const Query", "[tokens, heads, D], rows aligned to 16 bytes (E4M3: 8)"),
    Ptr("k", "const uint8", "rows aligned to 16 bytes"),
    Ptr("v", "const uint8"),
    Ptr("k_scales", "const uint8", "rows aligned to D / 16 bytes"),
    Ptr("v_scales", "const uint8"),
    Ptr("tables", "const int32", "[batch, max_pages], twice with v_table, or one list"),
    Ptr("seq_lens", "const int32", "[batch]"),
    Ptr("page_ends", "const int32", "[batch + 1], where requests end in the list; null: a row for each"),
    Ptr("cum_q", "const int32", "[batch + 1]; null: q_len of each request"),
    Ptr("sinks", "const float", "[heads] or null"),
    Ptr("bmm1_tensor", "const float", "[1] or null: multiplies bmm1"),
    Ptr("bmm2_tensor", "const float", "[1] or null: multiplies bmm2"),
)
_SIZES: tuple[Param, ...] = (
    Ptr("out", "Out", "[tokens, heads, D]"),
    Ptr("lse", "float", "[tokens, heads] or null; base 2"),
    F32("bmm1"),
    F32("bmm2"),
    I64("batch", member="int"),
    I64("kv_heads", member="int"),
    I64("group", "heads / kv_heads", member="int"),
    I64("q_len", member="int"),
    I64("total_q", "tokens of q", member="int"),
    I64("num_pages", member="int"),
    I64("page", "tokens", member="int"),
    I64("max_pages", "columns of tables, or the length of the list", member="int"),
    I64("window_left", "negative: none", member="int"),
    I64("q_token_stride", "elements"),
    I64("q_head_stride"),
    I64("k_page_stride", "bytes, as all of the cache", member="int"),
    I64("k_token_stride", member="int"),
    I64("k_head_stride"),
    I64("v_page_stride", member="int"),
    I64("v_token_stride", member="int"),
    I64("v_head_stride"),
    I64("k_scales_page_stride", member="int"),
    I64("k_scales_token_stride", member="int"),
    I64("k_scales_head_stride"),
    I64("v_scales_page_stride", member="int"),
    I64("v_scales_token_stride", member="int"),
    I64("v_scales_head_stride"),
    I64("table_stride", "elements", member="int"),
    I64("v_table", "elements from a request's K pages to its V pages", member="int"),
)

_SCRATCH = (
    Ptr("workspace", "uint8", "16-byte aligned, of any content"),
    Ptr("counters", "uint32", "zero between launches"),
)

KERNEL = Kernel(
    name="attention/decode",
    spec=Spec,
    params=(
        *_INPUTS,
        *_SCRATCH,
        *_SIZES,
        I64("group_inverse", "2^30 / group, rounded up", member="int"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind_decode,
)

KERNEL_PREFILL = Kernel(
    name="attention/prefill",
    spec=prefill.PrefillSpec,
    params=(*_INPUTS, *_SIZES, I64("causal", "0 or 1", member="int")),
    tactics=PREFILL_TACTICS,
    rejects=prefill.rejects,
    specialise=prefill.specialise,
    geometry=prefill.geometry,
    bind=_bind_prefill,
)

KERNEL_WGMMA = Kernel(
    name="attention/prefill_wgmma",
    spec=wgmma.WgmmaSpec,
    params=(*KERNEL_PREFILL.params, *_SCRATCH, I64("most_parts", "that the workspace holds", member="int")),
    tactics=WGMMA_TACTICS,
    rejects=wgmma.rejects,
    specialise=wgmma.specialise,
    geometry=wgmma.geometry,
    bind=_bind_wgmma,
)

ATTENTION = Operation(
    Arguments,
    name="attention",
    kernels=(KERNEL, KERNEL_PREFILL, KERNEL_WGMMA),
    problem=_problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="out",
    aligned=("query", "key_cache", "value_cache", "key_scales", "value_scales", "workspace_buffer", "out"),
    exclusive=("workspace_buffer", "out", "lse"),
)
