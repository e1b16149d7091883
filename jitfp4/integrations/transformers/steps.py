"""Steps of one token of one request through all layers of a dense model in one launch, by DecodeStep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from jitfp4.errors import ArgumentError
from jitfp4.families.step import DecodeStep
from jitfp4.formats import NVFP4
from jitfp4.integrations.layers import Fp4Linear
from jitfp4.integrations.swiglu import SwiGlu
from jitfp4.integrations.transformers.cache import Nvfp4Cache, Nvfp4Layer
from jitfp4.weight import Fp4Weight

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")  # whose decoders are written alike


def use_decode_step(model: Any) -> None:
    """Let one launch compute all layers of a dense model for a step of one token of one request over an Nvfp4Cache.

    Prompts, several requests and other caches go layer by layer, as before, with the same weights, which become views
    of one tensor. At its first such step, a cache's pages do, too. Numbers differ by roundings. Call it when the model
    is on its device; moving the model undoes it. While a step runs, it needs all SMs of the GPU.

    Raises:
        ArgumentError: of the model, what DecodeStep has not: layers that are not NVFP4 or not fused (``fuse=False``),
            another family than Llama, Mistral, Qwen2 and Qwen3, windows, head dimensions other than 128.
        UnsupportedArchError: on a GPU other than sm_90a.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    family = type(decoder).__name__.removesuffix("Model")
    if family not in _FAMILIES:
        raise ArgumentError("model", type(decoder).__name__, " or ".join(f"{name}Model" for name in _FAMILIES))
    if isinstance(decoder, _Decoder):
        raise ArgumentError("model", "a model that has a DecodeStep", "one that has none")
    decoder.decode_step = _step_of(decoder)
    own: Any = type(decoder)
    decoder.__class__ = type(own.__name__, (_Decoder, own), {"__module__": own.__module__})


@dataclass(frozen=True)
class _Pages:
    """The pages of all layers of a cache in one tensor, as DecodeStep takes them."""

    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor

    @staticmethod
    def of(layers: Sequence[Nvfp4Layer]) -> _Pages:
        """Moves the pages of layers, which get views of them."""
        codes = torch.stack([torch.stack((layer.keys, layer.values)) for layer in layers])
        scales = torch.stack([torch.stack([side.view(torch.uint8) for side in layer.scales]) for layer in layers])
        factors = torch.stack([torch.cat(layer.factors) for layer in layers if layer.factors is not None])
        for layer, data, sf in zip(layers, codes, scales.view(torch.float8_e4m3fn), strict=True):
            layer.keys, layer.values = data[0], data[1]
            layer.scales = sf[0], sf[1]
        return _Pages(codes, scales, factors)


class _Decoder(nn.Module):
    """The layers of a model, its embedding and its last norm."""

    decode_step: DecodeStep
    layers: Any
    embed_tokens: nn.Module
    rotary_emb: nn.Module
    norm: nn.Module
    config: Any

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent's."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or given.shape[:2] != (1, 1) or not self._takes(past_key_values, kwargs):
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.tensor([[past_key_values.get_seq_length()]], device=h.device)
        cos, sin = self.rotary_emb(h, position_ids)
        h = self._run(h.view(1, -1), past_key_values, cos, sin)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(h.view(1, 1, -1)), past_key_values=past_key_values)

    def _takes(self, cache: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a step over this cache can be one launch."""
        if not isinstance(cache, Nvfp4Cache) or len(cache.layers) != len(self.layers):
            return False
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name, getattr(self.config, name, False)):
                return False
        first, step = cache.layers[0], self.decode_step
        ready = all(isinstance(one, Nvfp4Layer) and one.is_initialized and one.factors for one in cache.layers)
        return ready and first.requests.batch == 1 and first.keys.device == step.data.device

    def _run(self, x: torch.Tensor, cache: Nvfp4Cache, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Hidden values behind the last layer; the new token is counted and appended."""
        layers = cache.layers
        if not hasattr(cache, "pages"):
            cache.pages = _Pages.of(layers)
        for layer in layers:
            layer.count(1)
        requests = layers[0].requests
        requests.step(1, None)
        table, at = requests.rotation(cos, sin, cos.shape[-1])
        return self.decode_step.run(
            x,
            cache.pages.codes,
            cache.pages.scales,
            requests.tables,
            requests.lengths,
            table,
            kv_scales=cache.pages.factors,
            positions=at,
            v_scale_layout=layers[0].order,
            sm_scale=self.layers[0].self_attn.scaling,
        )


def _step_of(decoder: Any) -> DecodeStep:
    """A DecodeStep of a decoder's layers, whose weights become views of its own. Raises ArgumentError."""
    layers, config = list(decoder.layers), decoder.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for number, layer in enumerate(layers):
        _check(f"layer {number} of the model", layer, heads)
    attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    parts = [_parts(attention) for attention in attentions]
    norms = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in layers]
    heads_norms = [(one.q_norm, one.k_norm) for one in attentions if hasattr(one, "q_norm")]
    alphas = [
        [*(part.alpha for part in of), one.o_proj.alpha, mlp.gate_up.alpha, mlp.gate_up.alpha, mlp.down_proj.alpha]
        for of, one, mlp in zip(parts, attentions, mlps, strict=True)
    ]
    biases = None
    if all(part.bias is not None for of in parts for part in of):
        biases = torch.stack([torch.cat([part.bias for part in of]) for of in parts])
    step = DecodeStep(
        [_joined([part.prepared for part in of]) for of in parts],
        [one.o_proj.prepared for one in attentions],
        [mlp.gate_up.prepared for mlp in mlps],
        [mlp.down_proj.prepared for mlp in mlps],
        _weights(norms),
        torch.stack([torch.cat(of) for of in alphas]),
        heads=heads,
        kv_heads=kv_heads,
        eps=norms[0][0].variance_epsilon,
        biases=biases,
        head_norms=_weights(heads_norms) if heads_norms else None,
    )
    for number, (of, one, mlp) in enumerate(zip(parts, attentions, mlps, strict=True)):
        qkv, o, gate_up, down = step.weights(number)
        _share(of, qkv)
        one.o_proj.prepared, mlp.gate_up.prepared, mlp.down_proj.prepared = o, gate_up, down
    return step


def _check(name: str, layer: Any, heads: int) -> None:
    """Raises ArgumentError for what DecodeStep does not check itself."""
    attention, mlp = layer.self_attn, layer.mlp
    products = [*_parts(attention), attention.o_proj]
    if not isinstance(mlp, SwiGlu) or not all(isinstance(one, Fp4Linear) for one in [*products, mlp.down_proj]):
        raise ArgumentError(name, "layers in floats, or not fused", "all in NVFP4, with gates and ups in one product")
    if any(one.alpha is None for one in [*products, mlp.gate_up, mlp.down_proj]):
        raise ArgumentError(name, "weights in another format", "NVFP4")
    has = [one.bias is not None for one in products[:3]]
    if attention.o_proj.bias is not None or mlp.down_proj.bias is not None or len(set(has)) != 1:
        raise ArgumentError(name, "biases", "none but of queries, keys and values, of all three")
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    if window is not None:
        raise ArgumentError(name, f"a window of {window}", "none")
    if attention.head_dim != 128 or products[0].out_features != heads * 128:
        raise ArgumentError(name, f"heads of {attention.head_dim}", "heads of 128")


def _parts(attention: Any) -> list[Any]:
    return [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]


def _joined(weights: Sequence[Fp4Weight]) -> Fp4Weight:
    return Fp4Weight(torch.cat([one.data for one in weights]), None, sum(one.n for one in weights), weights[0].k, NVFP4)


def _share(parts: Sequence[Fp4Linear], whole: Fp4Weight) -> None:
    """Let layers have views of a weight that was joined from theirs."""
    tiles = whole.data.split([part.prepared.data.shape[0] for part in parts])
    for part, data in zip(parts, tiles, strict=True):
        part.prepared = replace(part.prepared, data=data)
        if part._siblings is not None:
            part._siblings.weight = replace(part._siblings.weight, data=whole.data)


def _weights(norms: Sequence[tuple[Any, Any]]) -> torch.Tensor:
    """[layers, 2, n] of pairs of norms."""
    return torch.stack([torch.stack([norm.weight.detach() for norm in pair]) for pair in norms])
