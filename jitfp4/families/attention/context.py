"""Attention of many query tokens: of new requests (prefill), and of chunks that continue a request (extend)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jitfp4 import replay
from jitfp4.dispatch import differ
from jitfp4.errors import ArgumentError
from jitfp4.families.attention import checks
from jitfp4.families.attention.api import check_plain
from jitfp4.families.attention.call import Call, attend
from jitfp4.families.attention.fp4_tensor import FP4Tensor, attend_to_fp4
from jitfp4.families.attention.masks import check_whole_mask, whole_mask
from jitfp4.families.attention.single import single
from jitfp4.layouts import ceil_div
from jitfp4.public import public
from jitfp4.tensors import check_contiguous, check_same_device

_BACKENDS = ("auto", "fa2", "fa3")


@public
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: checks.Pair,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_cache_sf: checks.Pair | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
    *,
    kv_block_scales: checks.Pair | None = None,
    v_scale_layout: str = "interleaved4",
) -> torch.Tensor | FP4Tensor | tuple[torch.Tensor | FP4Tensor, torch.Tensor]:
    """Attention of any number of query tokens of each request over a paged cache that holds their keys and values.

    Args:
        query: [tokens, heads, d], bf16, fp16 or float8_e4m3fn; d 64, 80, 96, 112, 128, 192 or 256; rows of d elements,
            16-byte aligned. Request b has tokens cum_seq_lens_q[b] to cum_seq_lens_q[b + 1] - 1.
        kv_cache: as for trtllm_batch_decode_with_kv_cache().
        workspace_buffer: as there; with less than 32 MiB, fewer requests may be divided among SMs.
        block_tables: as there.
        seq_lens: int32 or uint32 [batch], tokens of each request in the cache, the new ones included. Read on the
            device only.
        max_q_len, max_kv_len: no less than the queries and the tokens of any request; they only help to choose a
            kernel.
        bmm1_scale: q_scale * k_scale * softmax scale; a number or one float32 on query's device.
        bmm2_scale: v_scale / o_scale; a number or one float32 on query's device.
        batch_size: the length of seq_lens.
        cum_seq_lens_q: int32 [batch + 1], where the queries of each request begin and end. Read on the device only.
        cum_seq_lens_kv: int32 [batch + 1]; not read, because seq_lens says the same.
        window_left: how many tokens before its own a query sees; -1: all.
        out, out_dtype, o_sf_scale, o_sf_vec_size: as for trtllm_batch_decode_with_kv_cache(). Other values of all
            parameters below that must be None belong to kernels that FlashInfer ships as binaries, and are errors.
        kv_layout, enable_pdl, sinks, kv_cache_sf: as for trtllm_batch_decode_with_kv_cache().
        skip_softmax_threshold_scale_factor: None.
        uses_shared_paged_kv_idx: whether K and V have the same page numbers.
        causal: whether query i of n in a request of s tokens sees only tokens up to s - n + i. With False it sees all;
            a window begins at the same token as with True.
        lse, return_lse: float32 [tokens, heads], the base-2 logarithm of each softmax's denominator, sinks included.
        multi_ctas_kv_counter_buffer: as for trtllm_batch_decode_with_kv_cache().
        use_fp16_softmax, uses_spcompress: None or False.
        backend: "trtllm-gen" or "cake", which are the same kernels.
        kv_block_scales: an older name of kv_cache_sf.
        v_scale_layout: "interleaved4", the order in which nvfp4_quantize_paged_kv_cache() returns V's scales, or
            "linear".
    Returns:
        out, or ``(out, lse)`` with return_lse. A query that sees nothing gives 0 and -inf.
    Numerics:
        As trtllm_batch_decode_with_kv_cache(), but weights have the dtype of a 16-bit cache, float16 otherwise. Where
        max_q_len is more than 8, tokens are summed in their order, on Hopper for some queries in parts, whose number
        depends on the GPU and on the lengths.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    for name, setting in (
        ("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor),
        ("use_fp16_softmax", use_fp16_softmax or None),
        ("uses_spcompress", uses_spcompress or None),
    ):
        checks.unused(name, setting, None)
    checks.check_backend(backend, ("trtllm-gen", "cake"))
    checks.check_unread("multi_ctas_kv_counter_buffer", multi_ctas_kv_counter_buffer, query)
    checks.check_q_len("max_q_len", max_q_len)
    seq_lens = checks.signed(seq_lens)
    checks.check_ints("seq_lens", seq_lens, (None,), query)
    if len(seq_lens) != batch_size:
        raise ArgumentError("batch_size", batch_size, f"the length of seq_lens, {len(seq_lens)}")
    checks.check_ints("cum_seq_lens_kv", cum_seq_lens_kv, (batch_size + 1,), query)
    if max_kv_len < 0:
        raise ArgumentError("max_kv_len", max_kv_len, "0 or more")
    key, value = checks.pair("kv_cache", kv_cache)
    scales = checks.one_name(kv_cache_sf, kv_block_scales)
    output = checks.output_of(out, out_dtype, o_sf_scale, o_sf_vec_size, query)
    call = Call(
        query=query,
        key=key,
        value=value,
        key_scales=scales[0],
        value_scales=scales[1],
        workspace_buffer=workspace_buffer,
        block_tables=block_tables,
        seq_lens=seq_lens,
        cum_seq_lens_q=cum_seq_lens_q,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=checks.one_tensor("sinks", sinks),
        out=output.out,
        lse=lse,
        max_seq_len=max_kv_len,
        window_left=window_left,
        out_dtype=output.dtype,
        kv_layout=kv_layout,
        v_scale_layout=v_scale_layout,
        q_len=max_q_len,
        causal=causal,
        shared_pages=uses_shared_paged_kv_idx,
        with_lse=return_lse or lse is not None,
        enable_pdl=enable_pdl,
    )
    result = attend_to_fp4(call, out, o_sf_scale, o_sf_vec_size) if output.to_fp4 else attend(call)
    return (result[0], result[1]) if return_lse else result[0]


@public
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: checks.Pair | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request's query tokens over a cache that is not paged.

    Args:
        q: [tokens, heads, d], at least one token, as query of trtllm_batch_context_with_kv_cache().
        k, v: [tokens, kv_heads, d] for "NHD", [kv_heads, tokens, d] for "HND", contiguous; uint8 or
            float4_e2m1fn_x2 with d/2 for NVFP4.
        scale_q, scale_k, scale_v: None.
        o_dtype: bf16, fp16 or float8_e4m3fn; None means q's.
        custom_mask: bool [tokens of q, tokens of k], contiguous: which tokens of k a token of q sees, within its
            window; then causal says nothing.
        packed_custom_mask: the same as bits, uint8 [n / 8, rounded up], the lowest of a byte first; custom_mask is then
            not read.
        causal: as in trtllm_batch_context_with_kv_cache().
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE".
        use_fp16_qk_reduction: accepted; sums are float32.
        sm_scale: None means ``d ** -0.5``.
        window_left: as in trtllm_batch_context_with_kv_cache().
        logits_soft_cap: if positive, a logit x becomes ``logits_soft_cap * tanh(x / logits_soft_cap)``; None or 0: not.
        rope_scale, rope_theta: None.
        backend: "auto", "fa2" or "fa3", which are the same kernels.
        return_lse: return the logarithms too.
        kv_cache_sf: the block scales of NVFP4 k and v, arranged as k and v with d/16, in linear order.
        k_scale, v_scale: factors: numbers, or tensors of one float; None means 1.
    Returns:
        [tokens, heads, d], or with return_lse also the base-2 logarithm of the denominators, float32 [tokens, heads].
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    del use_fp16_qk_reduction
    check_plain(pos_encoding_mode, rope_scale, rope_theta)
    for name, scale in (("scale_q", scale_q), ("scale_k", scale_k), ("scale_v", scale_v)):
        checks.unused(name, scale, None, "scale queries, keys and values by head beforehand, or by k_scale and v_scale")
    checks.check_backend(backend, _BACKENDS)
    if q.dim() != 3:
        raise ArgumentError("q", f"shape {tuple(q.shape)}", "[tokens, heads, d]")
    bmm1 = max(1, q.shape[-1]) ** -0.5 if sm_scale is None else sm_scale
    options = {
        "bmm1_scale": checks.product(q, bmm1, k_scale=k_scale),
        "bmm2_scale": checks.product(q, 1.0, v_scale=v_scale),
        "soft_cap": checks.soft_cap(logits_soft_cap),
        "kv_layout": kv_layout,
        "window_left": window_left,
        "out_dtype": o_dtype,
        "causal": causal,
        "with_lse": return_lse,
    }
    result = single(q, (k, v), kv_cache_sf, options | _mask(q, k, kv_layout, custom_mask, packed_custom_mask))
    return (result[0], result[1]) if return_lse else result[0]


def _mask(
    q: torch.Tensor, k: torch.Tensor, kv_layout: str, custom: torch.Tensor | None, packed: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """The mask of one request, as fields of the Call."""
    tokens = k.shape[1 if kv_layout == "HND" else 0] if k.dim() == 3 else 0
    for name, mask, shape in (
        ("custom_mask", custom if packed is None else None, (q.shape[0], tokens)),
        ("packed_custom_mask", packed, (ceil_div(q.shape[0] * tokens, 8),)),
    ):
        if mask is not None and differ(mask.shape, shape):
            raise ArgumentError(name, f"shape {tuple(mask.shape)}", f"{shape}")
        if mask is not None:
            check_same_device(name, mask, q)
            check_contiguous(name, mask)
    custom = None if custom is None or packed is not None else custom.flatten()
    if custom is None and packed is None:
        return {}
    check_whole_mask(custom, packed)
    replay.note(None)  # what follows is no launch of a kernel
    lengths = (torch.full((1,), size, dtype=torch.int32, device=q.device) for size in (q.shape[0], tokens))
    whole = whole_mask(custom, packed, *lengths)
    return {"mask": whole.data, "mask_ends": whole.ends}
