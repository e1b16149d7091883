"""Parameters that several kernels have, and their values."""

from __future__ import annotations

from typing import Any

from jitfp4 import counters, replay
from jitfp4.errors import ArgumentError
from jitfp4.families.attention.arguments import Arguments, heads_and_page, strides
from jitfp4.spec import F32, I64, Param, Ptr

INPUTS: tuple[Param, ...] = (
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
SIZES: tuple[Param, ...] = (
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

SOFT_CAP = F32("soft_cap", "of logits")
MASK: tuple[Param, ...] = (
    Ptr("mask", "const uint8", "[mask_bytes], the lowest bit of a byte first"),
    Ptr("mask_ends", "const int32", "[batch + 1], bytes; null: rows of mask_row_bytes for each query"),
    I64("mask_bytes"),
    I64("mask_row_bytes", member="int"),
)
SCRATCH = (
    Ptr("workspace", "uint8", "16-byte aligned, of any content"),
    Ptr("counters", "uint32", "zero between launches"),
)


def bind(a: Arguments) -> dict[str, Any]:
    """The parameters that every kernel has."""
    pages, heads, page = a.key_cache.shape[0], *heads_and_page(a)
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
        "soft_cap": a.soft_cap,
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
        steps = (0, 0, 0) if side is None else strides(side, a.hnd)
        bound |= {f"{name}_{of}_stride": stride for of, stride in zip(("page", "token", "head"), steps, strict=True)}
    return bound


def bind_mask(a: Arguments) -> dict[str, Any]:
    """The parameters of a mask."""
    return {
        "mask": a.mask,
        "mask_ends": a.mask_ends,
        "mask_bytes": 0 if a.mask is None else a.mask.numel(),
        "mask_row_bytes": a.mask_row_bytes,
    }


def scratch(arguments: Arguments, needed: int) -> dict[str, Any]:
    """The workspace, of at least so many bytes, and the counters of those who use it."""
    workspace = arguments.workspace_buffer
    if workspace.numel() < needed:
        raise ArgumentError("workspace_buffer", f"{workspace.numel()} bytes", f"{needed} or more")
    return {"workspace": workspace, "counters": replay.companion(counters.of, workspace)}
