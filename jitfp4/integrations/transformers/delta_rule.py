"""Layers of gated delta rules, as models of the kinds Qwen3-Next and Qwen3.5 have them, by jitfp4's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.conv import causal_conv1d_fn, causal_conv1d_update
from jitfp4.families.gdn import (
    chunk_gated_delta_rule,
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
)
from jitfp4.families.norm import rmsnorm_gated, rmsnorm_linear
from jitfp4.formats import DType
from jitfp4.integrations.checkpoints import aligned
from jitfp4.integrations.delta_rule import SILU, Shape, by_part, gated_norm, gates_of_prompts, in_order
from jitfp4.integrations.layers import Fp4Linear, regular
from jitfp4.integrations.transformers.derived import become, plus
from jitfp4.integrations.transformers.norms import GemmaNorm, joined_product, joins
from jitfp4.weight import TILE_ROWS

_FAMILIES = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")  # what names of classes begin with


def use_gated_delta_rule(model: nn.Module) -> int:
    """Let jitfp4 compute the layers of gated delta rules of a model, and the norms of models that have such layers.

    Prompts and single tokens: the convolution before the rule, the rule, the gated norm behind it. States of a new
    cache lie as the kernels like them. Numbers are rounded less often than by transformers. What the kernels are not
    for stays transformers': float32, packed sequences, modules whose inputs hooks move between devices. A second call
    changes nothing.

    Returns:
        How many layers of gated delta rules there are.
    Raises:
        ArgumentError: if there is none.
    """
    count = fuse_delta_nets(model)
    if count == 0:
        raise ArgumentError("model", type(model).__name__, f"a model with layers of {', '.join(_LAYERS)}")
    return count


def fuse_delta_nets(model: nn.Module) -> int:
    """As use_gated_delta_rule(); 0 where there are no such layers."""
    count = 0
    module: Any
    for module in model.modules():
        kind = _KINDS.get(type(module).__name__)
        if kind is None or hasattr(module, "_hf_hook") or not kind.fits(module):
            continue
        count += kind is DeltaNet
        if not isinstance(module, kind):
            kind.prepare(module)
            become(module, kind)
    return count


class DeltaNet(nn.Module):
    """A layer of gated delta rules."""

    shape: Shape
    layer_idx: int
    conv1d: nn.Conv1d
    dt_bias: torch.Tensor
    A_log: torch.Tensor
    norm: Any
    in_proj_qkvz: nn.Module  # this one, or the next two
    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    out_proj: nn.Module
    gates: torch.Tensor  # rows of in_proj_ba, or of in_proj_b and in_proj_a: all of b, all of a

    @staticmethod
    def fits(module: Any) -> bool:
        found = [getattr(module, name) for name in ("in_proj_ba", "in_proj_b", "in_proj_a") if hasattr(module, name)]
        mixed = getattr(module, "in_proj_qkvz", None)
        known = mixed is None or isinstance(mixed, Fp4Linear) or type(mixed) is nn.Linear
        plain = all(type(one) is nn.Linear and one.bias is None for one in found)
        return known and plain and module.activation in SILU and DeltaNet.shape_of(module).served

    @staticmethod
    def shape_of(module: Any) -> Shape:
        dims = (module.head_k_dim, module.head_v_dim)
        return Shape(module.num_k_heads, module.num_v_heads, *dims, module.conv_kernel_size)

    @staticmethod
    def prepare(module: Any) -> None:
        """Gates' numbers become float32, weights of kernels aligned.

        The rows of in_proj_qkvz are brought into the order of their use, but not in state dicts.
        """
        module.shape = DeltaNet.shape_of(module)
        module.A_log = nn.Parameter(module.A_log.data.float(), requires_grad=False)
        for owner in (module.conv1d, module.norm):
            owner.weight = nn.Parameter(aligned(owner.weight.data), requires_grad=False)
        if not hasattr(module, "in_proj_qkvz"):
            gates = torch.cat((module.in_proj_b.weight.data, module.in_proj_a.weight.data))
            module.register_buffer("gates", gates, persistent=False)
            return
        ratio = module.num_v_heads // module.num_k_heads
        order = by_part(module.num_k_heads, (ratio, ratio)).to(module.A_log.device)
        module.register_buffer("gates", module.in_proj_ba.weight.data[order], persistent=False)
        _use_order(module.in_proj_qkvz, DeltaNet.order_of(module.shape))
        module.register_state_dict_post_hook(_in_old_order)
        module.register_load_state_dict_pre_hook(_in_new_order)

    @staticmethod
    def order_of(shape: Shape) -> torch.Tensor:
        """For each row of in_proj_qkvz, where it was."""
        return by_part(shape.heads, shape.of_a_head)

    def fix_query_key_value_ordering(self, mixed: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As the parent's, of this order of rows."""
        shape = self.shape
        ratio = shape.value_heads // shape.heads
        *qkv, z = mixed.split((*shape.sizes, shape.sizes[-1]), -1)
        b, a = gates.unflatten(-1, (shape.heads, 2 * ratio)).split(ratio, -1)
        heads = shape.split(torch.cat(qkv, -1))
        return *heads, z.unflatten(-1, heads[2].shape[-2:]), b.flatten(-2), a.flatten(-2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        norm: Any = None,
        residual: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the parent's; with ``norm``, of rows before it; ``residual`` is added to the result."""
        dtype = hidden_states.dtype
        if dtype not in HALVES or dtype != self.conv1d.weight.dtype or kwargs.get("cu_seq_lens_q") is not None:
            given = {"cache_params": cache_params, "attention_mask": attention_mask}
            normed = hidden_states if norm is None else norm(hidden_states)
            out = super().forward(normed, **given, **kwargs)
            return out if residual is None else residual + out  # type: ignore[no-any-return]
        layer: Any = None if cache_params is None else cache_params.layers[self.layer_idx]
        continued = layer is not None and bool(layer.has_previous_state[0])
        mixed, z, b, a = self._project(*self._normed(hidden_states, attention_mask, norm))
        if continued and mixed.shape[1] == 1 and not layer.record_past:
            out = self._token(layer, mixed, b, a)
        else:
            out = self._prompt(layer, layer.recurrent_states[0] if continued else None, mixed, b, a)
        gate = z.flatten(0, 1).unflatten(-1, (-1, self.shape.value_dim))
        out = rmsnorm_gated(out.view(gate.shape), gate, self.norm.weight, self.norm.variance_epsilon)
        return plus(self.out_proj, out.view(*mixed.shape[:2], -1), residual)

    def _normed(
        self, x: torch.Tensor, attention_mask: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is projected, and its products with ``gates``."""
        rows = regular(x.flatten(0, 1))
        if attention_mask is None and joins(norm, rows, self.gates):
            gates = x.new_empty(*x.shape[:-1], self.gates.shape[0])
            normed, _ = rmsnorm_linear(
                rows, norm.weight, self.gates, norm.epsilon, weight_bias=norm.weight_bias, product=gates.flatten(0, 1)
            )
            return normed.view(x.shape), gates
        x = x if norm is None else norm(x)
        if attention_mask is not None:
            x = (x * attention_mask[:, :, None]).to(x.dtype)
        return x, functional.linear(x, self.gates)

    def _project(self, x: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values side by side, the output's gate, and b and a, the rule's."""
        b, a = gates.chunk(2, -1)
        if not hasattr(self, "in_proj_qkvz"):
            return self.in_proj_qkv(x), self.in_proj_z(x), b, a
        return *self.in_proj_qkvz(x).tensor_split((-self.shape.sizes[-1],), -1), b, a

    def _token(self, layer: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """The next token of each sequence; the states of the cache's layer are updated in place."""
        rows, past = regular(mixed.squeeze(1)), _by_token(layer)[..., 1 - self.shape.width :]
        causal_conv1d_update(rows, past, self._filters(), None, "silu", null_block_id=None)
        state = layer.recurrent_states[0]
        q, k, v = self.shape.split(rows.unsqueeze(1))
        gates = self.A_log.float(), a, self.dt_bias, b
        if state.mT.is_contiguous():
            return gated_delta_rule_decode_pretranspose(q, k, v, state.mT, *gates)[0]
        return gated_delta_rule_decode(q, k, v, state, *gates)[0]  # after beams changed places

    def _prompt(
        self, layer: Any, state: torch.Tensor | None, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor
    ) -> torch.Tensor:
        """Many tokens of each sequence, behind a state or none; a layer's states are updated."""
        batch, tokens, _ = mixed.shape
        if layer is not None:
            mixed = layer.update_conv_state(mixed.mT, conv_kernel_size=self.shape.width).mT
            _by_token(layer)  # now, as tokens may be captured in a graph
        length, device = mixed.shape[1], mixed.device  # with tokens before these
        ends = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        unused = mixed.new_empty(batch, mixed.shape[-1], self.shape.width - 1)
        rows = regular(mixed.flatten(0, 1))
        out = causal_conv1d_fn(rows.T, self._filters(), None, unused, ends, activation="silu", null_block_id=None).T
        new = out.unflatten(0, (batch, length))[:, length - tokens :].flatten(0, 1)
        decay, beta = gates_of_prompts(self.A_log, a.flatten(0, 1), self.dt_bias, b.flatten(0, 1))
        result: Any = chunk_gated_delta_rule(
            *self.shape.split(new),
            g=decay,
            beta=beta,
            initial_state=None if state is None else state.mT.contiguous(),
            output_final_state=layer is not None,
            cu_seqlens=torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device),
            use_qk_l2norm_in_kernel=True,
        )
        if layer is None:
            return result  # type: ignore[no-any-return]
        layer.update_recurrent_state(result[1].mT)  # of a new cache, strides like these, too
        return result[0]  # type: ignore[no-any-return]

    def _filters(self) -> torch.Tensor:
        return self.conv1d.weight.squeeze(1)


def _by_token(layer: Any) -> torch.Tensor:
    """The last inputs of a convolution in a cache's layer, which from now on lie with channels adjacent."""
    states = layer.conv_states[0]
    if not layer.record_past and not states.mT.is_contiguous():
        states = layer.conv_states[0] = states.mT.contiguous().mT
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(states)  # as transformers does
    return states  # type: ignore[no-any-return]


def _use_order(layer: Any, rows: torch.Tensor) -> None:
    """Bring the rows of a layer into another order."""
    if isinstance(layer, Fp4Linear):
        in_fp8 = layer.in_fp8
        layer.assign(in_order(layer.prepared, rows), layer.alpha)
        if in_fp8:
            layer.multiply_in_fp8()
    else:
        layer.weight = nn.Parameter(layer.weight.data[rows.to(layer.weight.device)], requires_grad=False)


def _in_old_order(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    _reorder(module, state, prefix, DeltaNet.order_of(module.shape).argsort())


def _in_new_order(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    _reorder(module, state, prefix, DeltaNet.order_of(module.shape))


def _reorder(module: Any, state: dict[str, Any], prefix: str, rows: torch.Tensor) -> None:
    """Bring the rows of in_proj_qkvz in a state dict into another order."""
    tiles = rows[::TILE_ROWS] // TILE_ROWS
    for kind in ("weight", "weight_row_scale"):
        name = f"{prefix}in_proj_qkvz.{kind}"
        if name in state:
            is_tiled = kind == "weight" and isinstance(module.in_proj_qkvz, Fp4Linear)
            state[name] = state[name][(tiles if is_tiled else rows).to(state[name].device)]


def needed(
    module: nn.Module, dtype: torch.dtype, requests: int, max_tokens: int
) -> Iterator[tuple[Any, Any, str, int]]:
    """What load_growing() needs for a layer of a gated delta rule that use_gated_delta_rule() changed."""
    if not isinstance(module, DeltaNet):
        return
    kind, (rows, hidden) = HALVES[dtype], module.gates.shape
    yield from joined_product(kind, hidden, rows, max_tokens)
    yield from module.shape.needed(kind, DType.F32, requests, max_tokens)
    yield gated_norm(kind, module.shape.value_dim, module.shape.value_heads * max_tokens)


_LAYERS = tuple(f"{family}GatedDeltaNet" for family in _FAMILIES)
_KINDS: dict[str, Any] = dict.fromkeys(_LAYERS, DeltaNet) | {f"{family}RMSNorm": GemmaNorm for family in _FAMILIES}
