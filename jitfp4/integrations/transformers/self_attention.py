"""Layers of attention over an Nvfp4Cache: norms of heads, rotation and append in one launch, then attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jitfp4.dtypes import HALVES
from jitfp4.families.kv import rope_append_paged_kv_cache
from jitfp4.families.kv.kernels.rope_append import HEAD_DIMS, ROTARY
from jitfp4.integrations.layers import regular
from jitfp4.integrations.transformers.attention import NAME, over_pages
from jitfp4.integrations.transformers.cache import Nvfp4Layer
from jitfp4.integrations.transformers.derived import plus


class Attention(nn.Module):
    """With or without norms of heads."""

    head_dim: int
    layer_idx: int
    scaling: float
    config: Any
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: Any
    k_norm: Any

    @staticmethod
    def fits(module: Any) -> bool:
        norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(module, name, None)) is not None]
        kinds = {(tuple(norm.weight.shape), Attention.epsilon(norm)) for norm in norms}
        own = not norms or (len(norms) == 2 and len(kinds) == 1 and norms[0].weight.shape == (module.head_dim,))
        return own and module.head_dim in HEAD_DIMS and module.head_dim % ROTARY == 0

    @staticmethod
    def prepare(module: Any) -> None:
        """Nothing."""

    @staticmethod
    def epsilon(norm: Any) -> float:
        """What a norm adds to the mean of squares."""
        return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon  # type: ignore[no-any-return]

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
        layer = self._pages(past_key_values, hidden_states.dtype, position_embeddings)
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
        query, key, value, gate = self._projected(hidden_states)
        query = self._append(layer, layer.factors, (query, key, value), position_embeddings)
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        out = over_pages(query, layer, count, self.scaling, window, getattr(self, "sinks", None))
        if gate is not None:
            out = out * torch.sigmoid(gate.view(out.shape))
        return plus(self.o_proj, out.view(batch, count, -1), residual), None

    def _pages(
        self, cache: Any, dtype: torch.dtype, rotation: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Nvfp4Layer | None:
        """The layer of the cache, where its pages can be written without transformers' attention function."""
        if cache is None or self.config._attn_implementation != NAME or dtype not in HALVES:
            return None
        if rotation is None or self._rotary(rotation[0]) % ROTARY:
            return None
        layer = cache.layers[self.layer_idx]
        return layer if isinstance(layer, Nvfp4Layer) and layer.is_initialized else None

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values [batch * tokens, heads, d], and the gate of the output, or None."""
        query, key, value = (self._heads(one(x), self.head_dim) for one in (self.q_proj, self.k_proj, self.v_proj))
        return query, key, value, None  # type: ignore[return-value]

    @staticmethod
    def _heads(rows: torch.Tensor, width: int) -> torch.Tensor:
        return regular(rows.unflatten(-1, (-1, width)).flatten(0, 1))

    def _append(
        self,
        layer: Nvfp4Layer,
        factors: tuple[torch.Tensor, torch.Tensor],
        projected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Keys and values go to the pages; returns the rotated queries [batch * tokens, heads, d]."""
        norms: dict[str, Any] = {}
        if hasattr(self, "q_norm"):
            norm, other = self.q_norm, self.k_norm
            norms = {"q_norm_weight": norm.weight, "k_norm_weight": other.weight, "eps": Attention.epsilon(norm)}
            norms["weight_bias"] = getattr(norm, "weight_bias", 0.0)
        return rope_append_paged_kv_cache(
            *projected,
            *layer.requests.rotation(*rotation, self._rotary(rotation[0])),
            layer.requests.slots,
            (layer.keys, layer.values),
            layer.scales,
            *factors,
            is_neox=True,
            kv_layout="HND",
            v_sf_layout=layer.order,
            **norms,
        )

    def _rotary(self, cos: torch.Tensor) -> int:  # noqa: ARG002
        """How many elements of a head are rotated; gpt-oss has half as many cosines."""
        return self.head_dim


class GatedAttention(Attention):
    """With a gate beside the query of each head, by whose sigmoid the output is multiplied; parts of heads rotate."""

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = self._heads(self.q_proj(x), 2 * self.head_dim)
        key, value = (self._heads(one(x), self.head_dim) for one in (self.k_proj, self.v_proj))
        query, gate = both.split(self.head_dim, -1)
        return query, key, value, gate.unflatten(0, x.shape[:2])

    def _rotary(self, cos: torch.Tensor) -> int:
        return cos.shape[-1]
