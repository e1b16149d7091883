"""What stands between the products of transformers' models, by jitfp4's kernels: norms, routers, rotations, sums.

transformers has no registry for these. So a module gets a class derived from the one that it has, whose forward calls
the kernels where they fit, and its parent's where they do not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jitfp4.dtypes import HALVES
from jitfp4.families.experts import route_experts, route_tokens
from jitfp4.families.experts.kernels.router import most_tokens
from jitfp4.families.experts.router_operation import EXPERTS_ROUTER
from jitfp4.families.experts.router_problem import RouterProblem
from jitfp4.families.experts.topk_operation import EXPERTS_TOPK
from jitfp4.families.experts.topk_problem import Method, TopkProblem
from jitfp4.families.kv import rope_append_paged_kv_cache
from jitfp4.families.kv.kernels.rope_append import HEAD_DIMS, ROTARY, CacheType
from jitfp4.families.kv.kernels.rope_append import Problem as RopeProblem
from jitfp4.families.kv.rope import ROPE_APPEND
from jitfp4.families.norm import rmsnorm
from jitfp4.families.norm.kernels.rmsnorm import Problem as NormProblem
from jitfp4.families.norm.plain import RMSNORM
from jitfp4.formats import DType
from jitfp4.integrations.checkpoints import aligned
from jitfp4.integrations.experts import ExpertsModule
from jitfp4.integrations.layers import Fp4Linear, regular
from jitfp4.integrations.swiglu import SwiGlu
from jitfp4.integrations.transformers.attention import NAME, over_pages
from jitfp4.integrations.transformers.cache import Nvfp4Layer

# What names of classes begin with; these families are written alike.
_FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "GptOss")
_NORM_SIZES = range(64, 65537, 16)


def fuse_glue(model: nn.Module) -> int:
    """Let jitfp4 compute norms, routers of FP4 experts, rotations and sums of a model. Returns of how many modules.

    Numbers are rounded less often than by transformers: a norm once instead of twice, a rotation once instead of three
    times. Modules whose inputs hooks move between devices stay as they are, and so do other families of models. A
    second call changes nothing.
    """
    blocks = (module for module in model.modules() if isinstance(getattr(module, "experts", None), ExpertsModule))
    routers = {child for block in blocks for child in block.children()}
    count = 0
    module: Any
    for module in model.modules():
        kind = _KINDS.get(type(module).__name__)
        if kind is None or isinstance(module, kind) or hasattr(module, "_hf_hook") or not kind.fits(module):
            continue
        if kind is _Router and module not in routers:
            continue
        if kind in (_Norm, _Router):  # read from a file, it may begin anywhere
            module.weight = nn.Parameter(aligned(module.weight.data), requires_grad=False)
        own: Any = type(module)
        module.__class__ = derived(kind, own)
        count += 1
    return count


def needed(module: nn.Module, config: Any, dtype: torch.dtype, max_tokens: int) -> Iterator[tuple[Any, Any, str, int]]:
    """What load_growing() needs for up to ``max_tokens`` tokens of a module that fuse_glue() changed.

    ``config`` is that of the model's decoder.
    """
    kind, heads = HALVES[dtype], config.num_attention_heads
    if isinstance(module, _Norm):
        yield RMSNORM, NormProblem(kind, False, False, 1, module.weight.shape[0]), "m", heads * max_tokens
    elif isinstance(module, _Router):
        experts, hidden = module.weight.shape
        yield EXPERTS_TOPK, TopkProblem(kind, DType.F32, Method.SOFTMAX, 1, experts), "tokens", max_tokens
        if few := min(most_tokens(experts, hidden), max_tokens):
            problem = RouterProblem(kind, kind, kind, DType.F32, Method.SOFTMAX, 1, experts, hidden, False)
            yield EXPERTS_ROUTER, problem, "tokens", few
    elif isinstance(module, _Attention):
        rope = RopeProblem(kind, CacheType.NVFP4, module.head_dim, 1)
        yield ROPE_APPEND, rope, "rows", (heads + 2 * config.num_key_value_heads) * max_tokens


@functools.cache
def derived(kind: Any, base: Any) -> Any:
    """The class ``base`` with the methods of ``kind`` before its own."""
    return type(base.__name__, (kind, base), {"__module__": base.__module__})


class _Norm(nn.Module):
    """RMSNorm: rows are rounded once, after the weight."""

    weight: torch.Tensor
    variance_epsilon: float

    @staticmethod
    def fits(module: Any) -> bool:
        return module.weight.shape[0] in _NORM_SIZES

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        if x.dtype not in HALVES or x.dtype != self.weight.dtype:
            return super().forward(x)  # type: ignore[no-any-return]
        rows = regular(x.flatten(0, -2))
        return rmsnorm(rows, self.weight, self.variance_epsilon).view(x.shape)


class _Router(nn.Module):
    """Top-k of the softmax of a linear layer, for few tokens in one launch. Weights are float32, ids int32."""

    weight: torch.Tensor
    top_k: int

    @staticmethod
    def fits(_module: Any) -> bool:
        return True

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, bias = hidden_states.reshape(-1, hidden_states.shape[-1]), getattr(self, "bias", None)
        # the softmax of the top-k logits is the top-k of the softmax, renormalised
        rules: dict[str, Any] = {"method": "softmax", "renormalize": bool(getattr(self, "norm_topk_prob", True))}
        if x.dtype in HALVES and x.dtype == self.weight.dtype:
            logits = x.new_empty(len(x), len(self.weight))
            ids, weights = route_tokens(regular(x), self.weight, self.top_k, logit_bias=bias, logits=logits, **rules)
        else:
            logits = nn.functional.linear(x, self.weight, bias)
            ids, weights = route_experts(logits, self.top_k, **rules)
        return logits, weights, ids


class _Attention(nn.Module):
    """Over an Nvfp4Cache: norms of heads, rotation and append in one launch, then attention."""

    head_dim: int
    layer_idx: int
    scaling: float
    config: Any
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: _Norm
    k_norm: _Norm

    @staticmethod
    def fits(module: Any) -> bool:
        norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(module, name, None)) is not None]
        kinds = {(tuple(norm.weight.shape), norm.variance_epsilon) for norm in norms}
        own = not norms or (len(norms) == 2 and len(kinds) == 1 and norms[0].weight.shape == (module.head_dim,))
        return own and module.head_dim in HEAD_DIMS and module.head_dim % ROTARY == 0

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        residual: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """As the parent's; ``residual`` is added to the result."""
        layer = self._pages(past_key_values, hidden_states.dtype)
        if layer is None or layer.factors is None or position_embeddings is None:
            out, weights = super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            return out if residual is None else residual + out, weights
        batch, count, _ = hidden_states.shape
        layer.count(count)
        layer.step(count, attention_mask)
        query = self._append(layer, layer.factors, hidden_states, position_embeddings)
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        out = over_pages(query, layer, count, self.scaling, window, getattr(self, "sinks", None))
        return _plus(self.o_proj, out.view(batch, count, -1), residual), None

    def _pages(self, cache: Any, dtype: torch.dtype) -> Nvfp4Layer | None:
        """The layer of the cache, where its pages can be written without transformers' attention function."""
        if cache is None or self.config._attn_implementation != NAME or dtype not in HALVES:
            return None
        layer = cache.layers[self.layer_idx]
        return layer if isinstance(layer, Nvfp4Layer) and layer.is_initialized else None

    def _append(
        self,
        layer: Nvfp4Layer,
        factors: tuple[torch.Tensor, torch.Tensor],
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Keys and values go to the pages; returns the rotated queries [batch * tokens, heads, d]."""
        query, key, value = (
            regular(projection(hidden_states).unflatten(-1, (-1, self.head_dim)).flatten(0, 1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        norms: dict[str, Any] = {}
        if hasattr(self, "q_norm"):
            norm, other = self.q_norm, self.k_norm
            norms = {"q_norm_weight": norm.weight, "k_norm_weight": other.weight, "eps": norm.variance_epsilon}
        return rope_append_paged_kv_cache(
            query,
            key,
            value,
            *layer.requests.rotation(*rotation, self.head_dim),
            layer.requests.slots,
            (layer.keys, layer.values),
            layer.scales,
            *factors,
            is_neox=True,
            kv_layout="HND",
            v_sf_layout=layer.order,
            **norms,
        )


class _Layer(nn.Module):
    """A layer of a decoder, whose residuals are added by the products before them."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    @staticmethod
    def fits(module: Any) -> bool:
        return type(module.self_attn).__name__ in _KINDS and not hasattr(module.self_attn, "_hf_hook")

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the parent's, which has its arguments by name."""
        if args or not isinstance(self.self_attn, _Attention):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        normed = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=normed, residual=hidden_states, **kwargs)
        return _plus(self.mlp, self.post_attention_layernorm(hidden_states), hidden_states)


def _plus(module: nn.Module, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """``module(x)``, or its first result, and the residual."""
    if isinstance(module, (Fp4Linear, SwiGlu)):
        return module(x, residual)  # type: ignore[no-any-return]
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    return out if residual is None else residual + out  # type: ignore[no-any-return]


_KINDS: dict[str, Any] = {
    f"{family}{name}": kind
    for family in _FAMILIES
    for name, kind in {"RMSNorm": _Norm, "TopKRouter": _Router, "Attention": _Attention, "DecoderLayer": _Layer}.items()
} | dict.fromkeys(("Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter"), _Router)
