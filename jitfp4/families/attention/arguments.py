"""The arguments of the operator."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.operation import Written


class Arguments(NamedTuple):
    """Queries [tokens, heads, d] over a cache [pages, heads, page, ...] (HND) or [pages, page, heads, ...] (NHD).

    ``key_scales`` and ``value_scales`` are the block scales of an NVFP4 cache, whose dtype is uint8.
    ``block_tables`` has page numbers [batch, columns], or [batch, 2, columns] for K and V; with ``page_ends`` it is one
    list, and request b has the pages block_tables[page_ends[b] : page_ends[b + 1]].
    The factor of the first product is ``bmm1``, times ``bmm1_scale`` where that is a tensor; so for the second.
    Request b has queries cum_seq_lens_q[b] to cum_seq_lens_q[b + 1] - 1, at most ``q_len_per_req`` of them; without
    ``cum_seq_lens_q``, each request has exactly so many. A request has at most ``max_tokens`` tokens. Both bounds only
    select a kernel.
    With ``soft_cap``, which is 0 or positive, a logit x becomes ``soft_cap * tanh(x / soft_cap)``.
    Where ``causal``, query i of n sees tokens up to seq_lens[b] - n + i; a window begins ``window_left`` tokens before
    that one. Where ``whole``, no request's tokens are divided among CTAs: its results depend on no other request.
    ``mask`` is None, or the bytes of a mask, the lowest bit of each first; ``causal`` is then False. With
    ``mask_ends``, the bits of request b begin at byte mask_ends[b], a row of bits for each query, a bit for each token.
    Without it, each query has a row of ``mask_row_bytes``, with a bit for each of its request's new tokens; it sees all
    tokens before those.
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
    soft_cap: float = 0.0
    whole: bool = False
    mask: torch.Tensor | None = None
    mask_ends: torch.Tensor | None = None
    mask_row_bytes: int = 0
    names: str = (
        "key_cache=kv_cache,value_cache=kv_cache,key_scales=kv_cache_sf,value_scales=kv_cache_sf,page_ends=indptr"
    )


class OutputArguments(NamedTuple):
    """Outputs [rows, k] of 16 bits, and their NVFP4 codes. Their scales are rows ``first_row`` and more of
    ``out_scales``, a matrix in the 128x4 layout, whose other rows are not touched.
    """

    x: torch.Tensor
    out: Written
    out_scales: Written
    first_row: int
    encode_scale: float
    enable_pdl: bool | None
    names: str = "out=out.data,out_scales=out.scale"


def by_token(tensor: torch.Tensor, hnd: bool) -> torch.Tensor:
    """K or V of a cache as [pages, page, heads, ...]."""
    return tensor.transpose(1, 2) if hnd else tensor


def strides(tensor: torch.Tensor, hnd: bool) -> tuple[int, int, int]:
    """Bytes from page to page, token to token, head to head."""
    page, first, second, _ = (stride * tensor.element_size() for stride in tensor.stride())
    return (page, second, first) if hnd else (page, first, second)


def heads_and_page(a: Arguments) -> tuple[int, int]:
    _, first, second, _ = a.key_cache.shape
    return (first, second) if a.hnd else (second, first)
