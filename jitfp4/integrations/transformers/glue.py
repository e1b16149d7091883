"""What stands between the products of transformers' models, by jitfp4's kernels: norms, routers, rotations, sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jitfp4.dtypes import HALVES
from jitfp4.families.experts.kernels.router import most_tokens
from jitfp4.families.experts.router_operation import EXPERTS_ROUTER
from jitfp4.families.experts.router_problem import RouterProblem
from jitfp4.families.experts.topk_operation import EXPERTS_TOPK
from jitfp4.families.experts.topk_problem import Method, TopkProblem
from jitfp4.families.kv.kernels.rope_append import CacheType
from jitfp4.families.kv.kernels.rope_append import Problem as RopeProblem
from jitfp4.families.kv.rope import ROPE_APPEND
from jitfp4.families.norm.kernels.rmsnorm import Problem as NormProblem
from jitfp4.families.norm.plain import RMSNORM
from jitfp4.formats import DType
from jitfp4.integrations.experts import ExpertsModule
from jitfp4.integrations.transformers.delta_rule import DeltaNet
from jitfp4.integrations.transformers.derived import become, plus
from jitfp4.integrations.transformers.mixtures import Block, Router
from jitfp4.integrations.transformers.norms import Norm
from jitfp4.integrations.transformers.self_attention import Attention, GatedAttention

# What names of classes begin with; these families are written alike.
_FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "GptOss")
_HYBRIDS = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")  # whose other layers have a delta rule, and whose norms it changes


def fuse_glue(model: nn.Module) -> int:
    """Let jitfp4 compute norms, routers of FP4 experts, rotations and sums of a model. Returns of how many modules.

    Numbers are rounded less often than by transformers: a norm once instead of twice, a rotation once instead of three
    times. Modules whose inputs hooks move between devices stay as they are, and so do other families of models. A
    second call changes nothing.
    """
    blocks = (module for module in model.modules() if isinstance(getattr(module, "experts", None), ExpertsModule))
    routers = {child for block in blocks for child in block.children()}
    found = []
    module: Any
    for module in model.modules():
        kind = _KINDS.get(type(module).__name__)
        if kind is None or isinstance(module, kind) or hasattr(module, "_hf_hook") or not kind.fits(module):
            continue
        if kind is Router and module not in routers:
            continue
        found.append((module, kind))
    for module, kind in sorted(found, key=lambda one: one[1] is Block):  # its router comes first
        kind.prepare(module)
        become(module, kind)
    return len(found)


def needed(module: nn.Module, config: Any, dtype: torch.dtype, max_tokens: int) -> Iterator[tuple[Any, Any, str, int]]:
    """What load_growing() needs for up to ``max_tokens`` tokens of a module that fuse_glue() changed.

    ``config`` is that of the model's decoder.
    """
    kind, heads = HALVES[dtype], config.num_attention_heads
    if isinstance(module, Norm):
        yield RMSNORM, NormProblem(kind, False, False, 1, module.weight.shape[0]), "m", heads * max_tokens
    elif isinstance(module, Router):
        experts, hidden = module.weight.shape
        yield EXPERTS_TOPK, TopkProblem(kind, DType.F32, Method.SOFTMAX, 1, experts), "tokens", max_tokens
        shared = module.with_shared is not None
        if few := min(most_tokens(experts + shared, hidden), max_tokens):
            router = RouterProblem(kind, kind, kind, DType.F32, Method.SOFTMAX, 1, experts, hidden, shared)
            yield EXPERTS_ROUTER, router, "tokens", few
    elif isinstance(module, Attention):
        problem = RopeProblem(kind, CacheType.NVFP4, module.head_dim, 1)
        yield ROPE_APPEND, problem, "rows", (heads + 2 * config.num_key_value_heads) * max_tokens


class Layer(nn.Module):
    """A layer of a decoder, whose residuals are added by the products before them."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    @staticmethod
    def fits(module: Any) -> bool:
        attention = getattr(module, "self_attn", None)
        return attention is None or (type(attention).__name__ in _KINDS and not hasattr(attention, "_hf_hook"))

    @staticmethod
    def prepare(module: Any) -> None:
        """Nothing."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the parent's, which has its arguments by name."""
        if args or not isinstance(getattr(self, "self_attn", None), Attention):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        normed = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=normed, residual=hidden_states, **kwargs)
        return self._through_mlp(hidden_states)

    def _through_mlp(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self.post_attention_layernorm(hidden_states)
        if not isinstance(self.mlp, Block):
            return plus(self.mlp, normed, hidden_states)
        out = self.mlp(normed, residual=hidden_states)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


class HybridLayer(Layer):
    """A layer of attention or of a gated delta rule."""

    linear_attn: nn.Module

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """As the parent's."""
        if args or not isinstance(getattr(self, "linear_attn", None), DeltaNet):
            return super().forward(hidden_states, *args, past_key_values=past_key_values, **kwargs)
        kwargs.pop("position_embeddings", None), kwargs.pop("position_ids", None)
        hidden_states = self.linear_attn(
            hidden_states=hidden_states,
            cache_params=past_key_values,
            norm=self.input_layernorm,
            residual=hidden_states,
            **kwargs,
        )
        return self._through_mlp(hidden_states)


_KINDS: dict[str, Any] = {
    f"{family}{name}": kind
    for family in _FAMILIES
    for name, kind in {"RMSNorm": Norm, "Attention": Attention, "DecoderLayer": Layer}.items()
}
_KINDS |= {
    f"{family}{name}": kind
    for family in _HYBRIDS
    for name, kind in {"Attention": GatedAttention, "DecoderLayer": HybridLayer}.items()
}
_KINDS |= {
    f"{family}{name}": kind
    for family in (*_FAMILIES, *_HYBRIDS)
    for name, kind in {"TopKRouter": Router, "SparseMoeBlock": Block}.items()
} | {"GptOssMLP": Block}
