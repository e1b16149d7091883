"""The public decode function, a workspace, and what is checked for all functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jitfp4.errors import ArgumentError
from jitfp4.families.attention import checks
from jitfp4.families.attention.call import Call, Mask, attend
from jitfp4.families.attention.fp4_tensor import FP4Tensor, attend_to_fp4
from jitfp4.families.attention.masks import draft_mask
from jitfp4.public import public

BACKENDS = ("auto", "trtllm-gen", "xqa", "cake")


@public
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: checks.Pair,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: checks.Pair | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: object = None,
    *,
    kv_block_scales: checks.Pair | None = None,
    v_scale_layout: str | None = None,
) -> torch.Tensor | FP4Tensor | tuple[torch.Tensor | FP4Tensor, torch.Tensor]:
    """Attention of a few query tokens of each request over a paged cache: NVFP4, E4M3 or 16-bit floats.

    Args:
        query: [tokens, heads, d], bf16, fp16 or float8_e4m3fn; d 64, 80, 96, 112, 128, 192 or 256; rows of d elements,
            16-byte aligned. Each request has ``q_len_per_req`` tokens, in order, or those that cum_seq_lens_q gives.
        kv_cache: a pair (K, V), or one tensor with both along dimension 1. NVFP4 is uint8 or float4_e2m1fn_x2 [pages,
            kv_heads, page, d/2] for "HND", [pages, page, kv_heads, d/2] for "NHD", element 2j in the low nibble of byte
            j. float8_e4m3fn, and 16-bit floats of query's dtype, have d in the last dimension. The last stride is 1,
            the others are multiples of 16 bytes, or of 8 for NVFP4 with d = 80 or 112; data are 16-byte aligned. Pages
            have 1 to 128 tokens, and each KV head 1 to 128 query heads.
        workspace_buffer: contiguous, 16-byte aligned, of any dtype and content. It is scratch: a call reads only what
            it wrote. Calls on one stream may share it, also with other libraries; calls that may run at the same time
            may not. If it is too small, the error says the size that is needed; 32 MiB are enough on every GPU so far.
        block_tables: int32 [batch, columns], the pages of each request in order; with uses_shared_paged_kv_idx False,
            [batch, 2, columns] for K and for V. A page that does not exist is never read: its tokens count as absent.
        seq_lens: int32 or uint32 [batch], tokens of each request including the new ones. Read on the device only.
        max_seq_len: no less than any of them; it only helps to choose a kernel.
        bmm1_scale: q_scale * k_scale * softmax scale; a number or one float32 on query's device.
        bmm2_scale: v_scale / o_scale; a number or one float32 on query's device.
        window_left: how many tokens before its own a query sees; -1: all.
        out: [tokens, heads, d] to fill in place, 16-byte aligned; allocated when None, of out_dtype or query's dtype.
            Or an FP4Tensor, also FlashInfer's: data uint8 [tokens, heads, d/2], scale float8_e4m3fn [rows, heads *
            d/16 rounded up to a multiple of 4]; rows of scale from scale_start_index on are filled, one for each token.
        out_dtype: bf16, fp16, float8_e4m3fn, or "nvfp4" for an FP4Tensor.
        o_sf_scale, o_sf_vec_size: of NVFP4 output, the *encode* scale, as a_global_sf of nvfp4_quantize(); None or 16.
            Otherwise None. Other values of all parameters below that must be None or False belong to kernels that
            FlashInfer ships as binaries, and are errors.
        sinks: float32 [heads], logits that take part in each softmax but have no value; or a list of one such tensor.
        kv_layout: "HND" or "NHD".
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        backend: "auto", "trtllm-gen", "xqa" or "cake", which are the same kernels: see v_scale_layout.
        q_len_per_req: 1 or more. The last token of a request sees all of it, each one before it one token less. More
            than 8 are for the kernels of trtllm_batch_context_with_kv_cache().
        o_scale: what bmm2_scale is divided by already, for a float8_e4m3fn output; 1 for others.
        mask: XQA's draft mask, uint16 [batch, q_len_per_req, 2 w] or, with cum_seq_lens_q, [tokens, 2 w], where w is
            ceil(q_len_per_req / 32), or of max_q_len. Bit j of a token's elements, from the lowest of the first on,
            says whether it sees token j of its request's new ones; it sees all that are older. None is a causal one.
        max_q_len, cum_seq_lens_q: instead of q_len_per_req (which is then None or 1), a bound of 1 or more, and int32
            [batch + 1], where each request's queries end.
        skip_softmax_threshold_scale_factor: None.
        kv_cache_sf: block scales of NVFP4, float8_e4m3fn or uint8, arranged as kv_cache with d/16 in the last
            dimension. The other strides are multiples of the largest power of two that divides d/16 bytes; K's and V's
            data are each 16-byte aligned.
        uses_shared_paged_kv_idx: whether K and V have the same page numbers.
        lse, return_lse: float32 [tokens, heads], the base-2 logarithm of each softmax's denominator, sinks included.
        bmm1_scale_log2: None.
        multi_ctas_kv_counter_buffer: None, or a tensor on query's device, which is not needed and not touched.
        enable_block_sparse_attention: False.
        cp_world, cp_rank, causal_seqlens_kv_global: 1, 0 and None: a request's cache is not divided among processes.
        bf16q_fp8kv_transform_mode: None.
        request_order, request_order_plan: None, or int32 [batch], the order in which FlashInfer's kernels take the
            requests, and a plan made from it. No result depends on them, and they are not read.
        kv_block_scales: the older name of kv_cache_sf.
        v_scale_layout: "interleaved4", as nvfp4_quantize_paged_kv_cache() gives V's scales (pages of a multiple of 4
            tokens, d of 64), or "linear". None: as FlashInfer's backends have them, linear for "xqa", interleaved for
            others.
    Returns:
        out, or ``(out, lse)`` with return_lse. A query that sees nothing gives 0 and -inf.
    Numerics:
        ``softmax(bmm1_scale * q k) v * bmm2_scale`` with ``k = e2m1(code) * e4m3(scale)``. Products of codes and scales
        are exact; q keeps all bits of elements down to 2**-28 of its row's largest; weights are float16, or bf16 over a
        bf16 cache, sums float32. The order of the sums depends on the GPU and on the lengths, because the division of
        the work does.
        NVFP4 output is the output rounded to query's dtype, to bf16 where that is E4M3, and then quantized as
        nvfp4_quantize() does it, by a second launch.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    for name, value, default in (
        ("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor, None),
        ("bmm1_scale_log2", bmm1_scale_log2, None),
        ("enable_block_sparse_attention", enable_block_sparse_attention, False),
        ("cp_world", cp_world, 1),
        ("cp_rank", cp_rank, 0),
        ("causal_seqlens_kv_global", causal_seqlens_kv_global, None),
        ("bf16q_fp8kv_transform_mode", bf16q_fp8kv_transform_mode, None),
    ):
        checks.unused(name, value, default)
    checks.check_unread("multi_ctas_kv_counter_buffer", multi_ctas_kv_counter_buffer, query)
    if request_order is not None:
        checks.check_ints("request_order", request_order, (seq_lens.numel(),), query)
    elif request_order_plan is not None:
        raise ArgumentError("request_order_plan", "a plan without request_order", "None, or both")
    checks.check_backend(backend, BACKENDS)
    if (cum_seq_lens_q is None) != (max_q_len is None):
        got = "one without the other"
        raise ArgumentError("max_q_len, cum_seq_lens_q", got, "a number and a tensor, or None for both")
    if max_q_len is not None and q_len_per_req not in (None, 1):
        raise ArgumentError("q_len_per_req", q_len_per_req, "None or 1 together with max_q_len")
    q_len = (1 if q_len_per_req is None else q_len_per_req) if max_q_len is None else max_q_len
    checks.check_q_len("q_len_per_req" if max_q_len is None else "max_q_len", q_len)
    output = checks.output_of(out, out_dtype, o_sf_scale, o_sf_vec_size, query)
    checks.check_o_scale(o_scale, output.out, output.dtype or query.dtype)
    drafted = Mask() if mask is None else draft_mask(mask, q_len, cum_seq_lens_q, query)
    if v_scale_layout is None:
        v_scale_layout = "linear" if backend == "xqa" else "interleaved4"
    key, value = checks.pair("kv_cache", kv_cache)
    scales = checks.one_name(kv_cache_sf, kv_block_scales)
    call = Call(
        query=query,
        key=key,
        value=value,
        key_scales=scales[0],
        value_scales=scales[1],
        workspace_buffer=workspace_buffer,
        block_tables=block_tables,
        seq_lens=checks.signed(seq_lens),
        cum_seq_lens_q=cum_seq_lens_q,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=checks.one_tensor("sinks", sinks),
        out=output.out,
        lse=lse,
        max_seq_len=max_seq_len,
        window_left=window_left,
        out_dtype=output.dtype,
        kv_layout=kv_layout,
        v_scale_layout=v_scale_layout,
        q_len=q_len,
        shared_pages=uses_shared_paged_kv_idx,
        with_lse=return_lse or lse is not None,
        enable_pdl=enable_pdl,
        mask=drafted.data,
        mask_row_bytes=drafted.row_bytes,
    )
    result = attend_to_fp4(call, out, o_sf_scale, o_sf_vec_size) if output.to_fp4 else attend(call)
    return (result[0], result[1]) if return_lse else result[0]


WORKSPACE_BYTES = 32 << 20
"""Enough for every kernel on every GPU so far."""


def new_workspace(device: torch.device) -> torch.Tensor:
    """A workspace_buffer, of any content."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def check_plain(pos_encoding_mode: str, rope_scale: float | None, rope_theta: float | None) -> None:
    """Check that no rotation of queries and keys is asked for. Raises ArgumentError."""
    if pos_encoding_mode != "NONE":
        raise ArgumentError("pos_encoding_mode", repr(pos_encoding_mode), "'NONE': rotate queries and keys beforehand")
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if value is not None:
            raise ArgumentError(name, value, "None: rotate queries and keys beforehand")
