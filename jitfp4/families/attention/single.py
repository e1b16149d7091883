"""Attention of one request whose K and V are not paged."""

from __future__ import annotations

from typing import Any

import torch

from jitfp4 import replay
from jitfp4.errors import ArgumentError, renamed
from jitfp4.families.attention import checks
from jitfp4.families.attention.api import WORKSPACE_BYTES, check_plain
from jitfp4.families.attention.call import Call, attend
from jitfp4.families.attention.problem import MAX_PAGE, TILE
from jitfp4.public import public
from jitfp4.tensors import counting_i32


@public
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    kv_cache_sf: checks.Pair | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token over a cache that is not paged.

    Args:
        q: [heads, d], as a row of trtllm_batch_decode_with_kv_cache()'s query.
        k, v: [tokens, kv_heads, d] for "NHD", [kv_heads, tokens, d] for "HND", contiguous; uint8 or
            float4_e2m1fn_x2 with d/2 for NVFP4.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE".
        use_tensor_cores: accepted; every kernel uses them.
        q_scale, k_scale, v_scale: factors: numbers, or tensors of one float; None means 1.
        window_left: as in trtllm_batch_decode_with_kv_cache().
        logits_soft_cap: if positive, a logit x becomes ``logits_soft_cap * tanh(x / logits_soft_cap)``; None or 0: not.
        sm_scale: None means ``d ** -0.5``.
        rope_scale, rope_theta: None.
        return_lse: give the logarithms too.
        kv_cache_sf: the block scales of NVFP4 k and v, arranged likewise with d/16, linear.
    Returns:
        [heads, d] of q's dtype, or with return_lse also the base-2 logarithm of the denominators, float32 [heads].
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    del use_tensor_cores
    check_plain(pos_encoding_mode, rope_scale, rope_theta)
    if q.dim() != 2:
        raise ArgumentError("q", f"shape {tuple(q.shape)}", "[heads, d]")
    bmm1 = max(1, q.shape[-1]) ** -0.5 if sm_scale is None else sm_scale
    options = {
        "bmm1_scale": checks.product(q, bmm1, q_scale=q_scale, k_scale=k_scale),
        "bmm2_scale": checks.product(q, 1.0, v_scale=v_scale),
        "soft_cap": checks.soft_cap(logits_soft_cap),
        "kv_layout": kv_layout,
        "window_left": window_left,
        "with_lse": return_lse,
    }
    result = single(q.unsqueeze(0), (k, v), kv_cache_sf, options)
    return (result[0][0], result[1][0]) if return_lse else result[0][0]


def single(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: checks.Pair | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    """One request of queries [tokens, heads, d] whose K and V are not paged: as pages of the size that divides them.

    ``options`` are further fields of the Call.
    """
    hnd = checks.check_layout(options["kv_layout"])
    sides = (*kv, *(() if kv_cache_sf is None else checks.pair("kv_cache_sf", kv_cache_sf)))
    for name, side in zip(("k", "v", "kv_cache_sf", "kv_cache_sf"), sides, strict=False):
        if side.dim() != 3 or not side.shape[0] or not side.shape[1]:
            raise ArgumentError(name, f"shape {tuple(side.shape)}", "three dimensions, at least one token and head")
    tokens = kv[0].shape[1 if hnd else 0]
    if kv[1].shape[1 if hnd else 0] != tokens:
        raise ArgumentError("v", f"shape {tuple(kv[1].shape)}", f"{tokens} tokens, as k")
    page = next(page for page in _pages() if tokens % page == 0)
    paged = [side.unflatten(1, (-1, page)).transpose(0, 1) if hnd else side.unflatten(0, (-1, page)) for side in sides]
    try:
        return attend(
            Call(
                query=q,
                key=paged[0],
                value=paged[1],
                key_scales=paged[2] if len(paged) > 2 else None,
                value_scales=paged[3] if len(paged) > 2 else None,
                workspace_buffer=replay.scratch((WORKSPACE_BYTES,), torch.uint8, q),
                block_tables=counting_i32(0, tokens // page, q).unsqueeze(0),
                seq_lens=counting_i32(tokens, tokens + 1, q),
                max_seq_len=tokens,
                v_scale_layout="linear",
                q_len=q.shape[0],
                **options,
            )
        )
    except ArgumentError as error:
        raise renamed(error, _SINGLE_NAMES) from None


def _pages() -> tuple[int, ...]:
    """Pages to try, the largest first. A traced number of tokens has a graph for each, so that there are only three."""
    if torch.compiler.is_dynamo_compiling():
        return MAX_PAGE, TILE // 2, 1
    return tuple(1 << bit for bit in reversed(range(MAX_PAGE.bit_length())))


_SINGLE_NAMES = {
    "query": "q",
    "kv_cache": "k, v",
    "bmm1_scale": "sm_scale, q_scale, k_scale",
    "bmm2_scale": "v_scale",
    "max_seq_len": "k",
    "out_dtype": "o_dtype",
}
"""What attend() calls the arguments of single_decode_with_kv_cache() and single_prefill_with_kv_cache()."""
