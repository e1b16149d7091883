"""The call behind all public functions: check, allocate, call one operator."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.dispatch import differ
from jitfp4.errors import ArgumentError
from jitfp4.families.attention import checks
from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.attention.problem import DTYPES
from jitfp4.tensors import output

V_SCALE_LAYOUTS = ("interleaved4", "linear")


class Mask(NamedTuple):
    """``mask``, ``mask_ends`` and ``mask_row_bytes`` of Arguments; without ``data`` there is no mask."""

    data: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    row_bytes: int = 0


class Call(NamedTuple):
    """The arguments of a call, with K and V as two tensors.

    Each request has ``q_len`` query tokens; with ``cum_seq_lens_q``, at most so many. With ``page_ends``,
    ``block_tables`` is one list of pages for all requests. With a ``mask``, ``causal`` says nothing.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    workspace_buffer: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    bmm1_scale: torch.Tensor | float
    bmm2_scale: torch.Tensor | float
    max_seq_len: int
    window_left: int
    kv_layout: str
    v_scale_layout: str
    q_len: int
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    page_ends: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    soft_cap: float = 0.0
    causal: bool = True
    whole: bool = False
    shared_pages: bool = True
    with_lse: bool = False
    enable_pdl: bool | None = None
    mask: torch.Tensor | None = None
    mask_ends: torch.Tensor | None = None
    mask_row_bytes: int = 0


def attend(call: Call) -> tuple[torch.Tensor, ...]:
    """Attention of a call whose types are checked. Returns (out,), or (out, lse) with ``with_lse``.

    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    query = call.query
    if call.v_scale_layout not in V_SCALE_LAYOUTS:
        raise ArgumentError("v_scale_layout", repr(call.v_scale_layout), " or ".join(map(repr, V_SCALE_LAYOUTS)))
    hnd = checks.check_layout(call.kv_layout)
    checks.check_query(query)
    sides = call.key, call.value, call.key_scales, call.value_scales
    cache = checks.check_cache(*sides, query, hnd=hnd, interleaved=call.v_scale_layout == "interleaved4")
    max_seq_len = _check_lists(call, cache.page)
    checks.check_work(query, call.q_len, max_seq_len)
    if call.window_left < -1:
        raise ArgumentError("window_left", call.window_left, "-1 or more")
    checks.check_sinks(call.sinks, query)
    out, lse = _outputs(call)
    bmm1, bmm1_tensor = checks.scale("bmm1_scale", call.bmm1_scale, query)
    bmm2, bmm2_tensor = checks.scale("bmm2_scale", call.bmm2_scale, query)
    ATTENTION(
        Arguments(
            query=query,
            key_cache=cache.key,
            value_cache=cache.value,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            block_tables=call.block_tables,
            seq_lens=call.seq_lens,
            page_ends=call.page_ends,
            cum_seq_lens_q=call.cum_seq_lens_q,
            sinks=call.sinks,
            bmm1_scale=bmm1_tensor,
            bmm2_scale=bmm2_tensor,
            workspace_buffer=checks.check_workspace(call.workspace_buffer, query),
            out=out,
            lse=lse,
            bmm1=bmm1,
            bmm2=bmm2,
            soft_cap=call.soft_cap,
            q_len_per_req=call.q_len,
            window_left=call.window_left,
            causal=call.causal and call.mask is None,
            whole=call.whole,
            mask=call.mask,
            mask_ends=call.mask_ends,
            mask_row_bytes=call.mask_row_bytes,
            max_tokens=max_seq_len,
            hnd=hnd,
            interleaved=cache.interleaved,
            enable_pdl=call.enable_pdl,
        )
    )
    return (out,) if lse is None else (out, lse)


def _check_lists(call: Call, page: int) -> int:
    """Check the lists of pages, tokens and queries. Returns the most tokens that a request can have."""
    query, tables = call.query, call.block_tables
    checks.check_ints("seq_lens", call.seq_lens, (None,), query)
    batch, most = call.seq_lens.shape[0], call.max_seq_len
    if call.page_ends is not None:
        checks.check_ints("indptr", call.page_ends, (batch + 1,), query)
        checks.check_ints("indices", tables, (None,), query)
    else:
        checks.check_ints("block_tables", tables, (batch, None) if call.shared_pages else (batch, 2, None), query)
        most = min(most, tables.shape[-1] * page)
    if call.cum_seq_lens_q is not None:
        checks.check_ints("cum_seq_lens_q", call.cum_seq_lens_q, (batch + 1,), query)
    elif differ(query.shape[:1], (batch * call.q_len,)):
        raise ArgumentError("query", f"{query.shape[0]} tokens", f"{batch} requests of {call.q_len}")
    return most


def _outputs(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors for outputs and, with_lse, for logarithms: given or new."""
    query, dtype = call.query, call.out_dtype
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError("out_dtype", dtype, " or ".join(map(str, DTYPES)))
    dtypes = tuple(DTYPES) if call.out is not None and dtype is None else (dtype or query.dtype,)
    out = output("out", call.out, tuple(query.shape), dtypes, like=query)
    if not call.with_lse:
        return out, None
    return out, output("lse", call.lse, tuple(query.shape[:2]), (torch.float32,), like=query)
