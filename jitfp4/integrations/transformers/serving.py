"""Kernels built and loaded before the first request."""

from __future__ import annotations

from typing import Any

import torch

from jitfp4.families.attention.arguments import Arguments
from jitfp4.integrations.experts import ExpertsModule
from jitfp4.integrations.fp8 import least_tokens
from jitfp4.integrations.kernels import (
    Traffic,
    load_appends,
    load_attention,
    load_experts,
    load_fp8_experts,
    load_fp8_products,
    load_growing,
    load_products,
)
from jitfp4.integrations.layers import Fp4Linear
from jitfp4.integrations.transformers.attention import NAME
from jitfp4.integrations.transformers.cache import PAGE, Nvfp4Cache, Nvfp4Layer
from jitfp4.integrations.transformers.delta_rule import needed as needed_by_delta_nets
from jitfp4.integrations.transformers.glue import needed


def load_kernels(model: Any, *, requests: int, max_cache_len: int, max_tokens: int) -> None:
    """Build what is not in the kernel cache, and load all kernels that a model's steps can need; nothing on a CPU.

    Args:
        model: with FP4 layers; with ``attn_implementation="jitfp4"``, kernels of an Nvfp4Cache are loaded, too.
        requests: the most rows of a batch.
        max_cache_len: of the caches.
        max_tokens: the most new tokens of a step, of all rows together: those of the longest prompts.
    """
    dtype = model.dtype if model.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    config = model.config.get_text_config(decoder=True)
    slots = getattr(config, "num_experts_per_tok", 1)
    for module in model.modules():
        if isinstance(module, Fp4Linear):
            load_products(module.multiplied, dtype, max_tokens)
            if module.in_fp8:
                load_fp8_products(module.multiplied, dtype, max_tokens)
        elif isinstance(module, ExpertsModule):
            taken = slots + module.appended
            load_experts(module.experts, dtype, taken, max_tokens)
            if module.in_fp8:
                least = least_tokens(module.shape.experts, taken)
                load_fp8_experts(module.experts, dtype, taken, least, max_tokens)
        for glue in needed(module, config, dtype, max_tokens):
            load_growing(*glue, like=next(module.parameters()))
        for hybrid in needed_by_delta_nets(module, dtype, requests, max_tokens):
            load_growing(*hybrid, like=next(module.parameters()))
    if config._attn_implementation != NAME:
        return
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    devices = {tensor.device for tensor in model.parameters()}
    for device in devices:
        call = _attention_call(model.config, heads, kv_heads, head_dim, dtype, device)
        load_attention(call, Traffic(max_tokens, requests, max_cache_len))
        load_appends(dtype, kv_heads, head_dim, max_tokens, call.query)


def _attention_call(
    config: Any, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Arguments:
    """The arguments of a step of one token of one request."""
    layer = next(layer for layer in Nvfp4Cache(config, PAGE).layers if isinstance(layer, Nvfp4Layer))
    nothing = torch.empty(1, kv_heads, 0, head_dim, dtype=dtype, device=device)
    layer.lazy_initialization(nothing, nothing)
    query = torch.empty(1, heads, head_dim, dtype=dtype, device=device)
    factor = torch.ones(1, dtype=torch.float32, device=device)
    return Arguments(
        query=query,
        key_cache=layer.keys,
        value_cache=layer.values,
        key_scales=layer.scales[0],
        value_scales=layer.scales[1],
        block_tables=layer.requests.tables,
        seq_lens=layer.requests.lengths,
        page_ends=None,
        cum_seq_lens_q=None,
        sinks=None,
        bmm1_scale=factor,
        bmm2_scale=factor,
        workspace_buffer=layer.requests.workspace,
        out=query,
        lse=None,
        bmm1=1.0,
        bmm2=1.0,
        q_len_per_req=1,
        window_left=-1,
        causal=True,
        max_tokens=PAGE,
        hnd=True,
        interleaved=layer.order == "interleaved4",
        enable_pdl=None,
    )
