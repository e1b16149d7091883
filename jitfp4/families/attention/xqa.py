"""Decode attention under the name and with the defaults of XQA's function."""

from __future__ import annotations

import torch

from jitfp4.errors import ArgumentError, renamed
from jitfp4.families.attention import checks
from jitfp4.families.attention.call import Call, Mask, attend
from jitfp4.families.attention.masks import draft_mask
from jitfp4.public import public


@public
def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: checks.Pair,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: checks.Pair | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """trtllm_batch_decode_with_kv_cache() with backend "xqa": the same kernels, and V's block scales linear.

    Args:
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len: as there.
        bmm1_scale, bmm2_scale, window_left, out: as there.
        sinks: float32 [heads], logits that take part in each softmax and have no value.
        kv_layout: "NHD" or "HND".
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        q_len_per_req: query tokens of each request, 1 or more; with q_cu_seq_lens, a bound.
        o_scale: what bmm2_scale is divided by already, for a float8_e4m3fn output; 1 for others.
        mask: as there; with q_cu_seq_lens, [tokens, 2 w]. None is a causal one.
        kv_cache_sf: the block scales of an NVFP4 cache, arranged like kv_cache.
        q_cu_seq_lens: int32 or uint32 [batch + 1], where each request's queries end; a request may have none.
    Returns:
        out, allocated with query's dtype when None.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    q_len = 1 if q_len_per_req is None else q_len_per_req
    checks.check_q_len("q_len_per_req", q_len)
    checks.check_o_scale(o_scale, out, query.dtype)
    ends = None if q_cu_seq_lens is None else checks.signed(q_cu_seq_lens)
    key, value = checks.pair("kv_cache", kv_cache)
    scales = (None, None) if kv_cache_sf is None else checks.pair("kv_cache_sf", kv_cache_sf)
    try:
        drafted = Mask() if mask is None else draft_mask(mask, q_len, ends, query)
        return attend(
            Call(
                query=query,
                key=key,
                value=value,
                key_scales=scales[0],
                value_scales=scales[1],
                workspace_buffer=workspace_buffer,
                block_tables=block_tables,
                seq_lens=checks.signed(seq_lens),
                cum_seq_lens_q=ends,
                bmm1_scale=bmm1_scale,
                bmm2_scale=bmm2_scale,
                sinks=sinks,
                out=out,
                max_seq_len=max_seq_len,
                window_left=window_left,
                kv_layout=kv_layout,
                v_scale_layout="linear",
                q_len=q_len,
                enable_pdl=enable_pdl,
                mask=drafted.data,
                mask_row_bytes=drafted.row_bytes,
            )
        )[0]
    except ArgumentError as error:
        raise renamed(error, {"cum_seq_lens_q": "q_cu_seq_lens"}) from None
