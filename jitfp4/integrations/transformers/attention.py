"""``attn_implementation="jitfp4"``: attention over an Nvfp4Cache, and torch's over any other cache, or none."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from jitfp4.families.attention import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from jitfp4.families.attention.problem import MAX_Q_LEN
from jitfp4.integrations.layers import regular
from jitfp4.integrations.transformers.cache import Appended, Capacity, Nvfp4Layer

NAME = "jitfp4"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[batch, tokens, heads, d], as transformers calls its attention functions; queries [batch, heads, tokens, d].

    ``s_aux`` are sinks [heads]. Over an Nvfp4Cache, new keys and values are appended first, and ``attention_mask``
    [batch, tokens so far] is read for the left padding among several new tokens, and not for a single one.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, Appended):
        return _over_nvfp4(query, key, attention_mask, scaling, sliding_window, s_aux), None
    if s_aux is not None:
        return _with_sinks(query, key, value, attention_mask, scaling, s_aux), None
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return out, None


def mask(*args: Any, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The padding mask [batch, tokens] for an Nvfp4Cache; sdpa's mask for others, and always one where it has sinks."""
    if isinstance(kv_length, Capacity):
        return attention_mask
    return sdpa_mask(  # type: ignore[no-any-return]
        *args, kv_length=kv_length, attention_mask=attention_mask, **kwargs | {"allow_is_causal_skip": False}
    )


def register_attention() -> None:
    """Give transformers the name."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def _over_nvfp4(
    query: torch.Tensor,
    appended: Appended,
    padding: torch.Tensor | None,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    layer, count = appended.layer, query.shape[2]
    layer.step(count, padding)
    key, value, rows = (by_token(states) for states in (appended.key, appended.value, query))
    layer.append(key, value)
    return over_pages(rows, layer, count, scaling, window, sinks)


def over_pages(
    rows: torch.Tensor, layer: Nvfp4Layer, count: int, scaling: float, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[batch, tokens, heads, d] of the ``count`` newest tokens of each request, whose queries are ``rows``."""
    requests = layer.requests
    bmm1, bmm2 = layer.products(scaling)
    if sinks is not None and layer.sinks is None:
        layer.sinks = sinks.detach().float()
    first = (rows, (layer.keys, layer.values), requests.workspace, requests.tables, requests.lengths)
    options: dict[str, Any] = {
        "window_left": -1 if window is None else window - 1,
        "sinks": layer.sinks,
        "kv_cache_sf": layer.scales,
        "v_scale_layout": layer.order,
    }
    out: Any
    if count <= MAX_Q_LEN:
        out = trtllm_batch_decode_with_kv_cache(*first, requests.tokens, bmm1, bmm2, q_len_per_req=count, **options)
    else:
        ends = requests.ends
        out = trtllm_batch_context_with_kv_cache(
            *first, count, requests.tokens, bmm1, bmm2, requests.batch, ends, ends, **options
        )
    return (out if isinstance(out, torch.Tensor) else out[0]).view(requests.batch, count, *rows.shape[1:])


def by_token(states: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, d] to [batch * tokens, heads, d], rows 16-byte aligned; a copy where it must be one."""
    return regular(states.transpose(1, 2).flatten(0, 1))


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention whose softmax has one more logit for each head; ``seen`` is True where a query sees a key."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    logits = (query @ key.transpose(2, 3)).float() * scaling
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    sink = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    weights = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()
