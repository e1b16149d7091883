"""Layers of gated delta rules, as models of the kinds Qwen3-Next and Qwen3.5 have them, by jitfp4's kernels.

transformers has a registry of such functions for the package ``kernels`` only. So a layer gets a class derived from the
one that it has, as in glue.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.conv import causal_conv1d_fn, causal_conv1d_update
from jitfp4.families.gdn import (
    chunk_gated_delta_rule,
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
)
from jitfp4.families.norm import gemma_rmsnorm, rmsnorm_gated
from jitfp4.families.norm.kernels.rmsnorm import Problem as NormProblem
from jitfp4.families.norm.plain import RMSNORM
from jitfp4.formats import DType
from jitfp4.integrations.checkpoints import aligned
from jitfp4.integrations.delta_rule import SILU, Shape, gated_norm, gates_of_prompts, is_normalised
from jitfp4.integrations.layers import regular
from jitfp4.integrations.transformers.glue import derived

_FAMILIES = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")  # what names of classes begin with
_UNIT = 4  # elements that are brought into another order together


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
            own: Any = type(module)
            module.__class__ = derived(kind, own)
    return count


class _Norm(nn.Module):
    """RMSNorm whose weights are what is added to 1."""

    weight: torch.Tensor
    eps: float

    @staticmethod
    def fits(module: Any) -> bool:
        return is_normalised(module.weight.shape[0])

    @staticmethod
    def prepare(module: Any) -> None:
        module.weight = nn.Parameter(aligned(module.weight.data), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in HALVES or x.dtype != self.weight.dtype:
            return super().forward(x)  # type: ignore[no-any-return]
        return gemma_rmsnorm(regular(x.flatten(0, -2)), self.weight, self.eps).view(x.shape)


class DeltaNet(nn.Module):
    """A layer of gated delta rules."""

    shape: Shape
    layer_idx: int
    conv1d: nn.Conv1d
    dt_bias: torch.Tensor
    A_log: torch.Tensor
    norm: Any
    in_proj_qkvz: nn.Module  # these two, or the next four
    in_proj_ba: nn.Module
    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module
    out_proj: nn.Module
    order: torch.Tensor
    gate_order: torch.Tensor

    @staticmethod
    def fits(module: Any) -> bool:
        return module.activation in SILU and DeltaNet.shape_of(module).served

    @staticmethod
    def shape_of(module: Any) -> Shape:
        dims = (module.head_k_dim, module.head_v_dim)
        return Shape(module.num_k_heads, module.num_v_heads, *dims, module.conv_kernel_size)

    @staticmethod
    def prepare(module: Any) -> None:
        """Gates' numbers become float32, weights of kernels aligned; finds where projections have what."""
        module.shape = DeltaNet.shape_of(module)
        module.A_log = nn.Parameter(module.A_log.data.float(), requires_grad=False)
        for owner in (module.conv1d, module.norm):
            owner.weight = nn.Parameter(aligned(owner.weight.data), requires_grad=False)
        if not hasattr(module, "in_proj_qkvz"):
            return
        ratio, dim = module.num_v_heads // module.num_k_heads, module.head_v_dim
        sizes = (module.head_k_dim, module.head_k_dim, ratio * dim, ratio * dim)
        units = _by_part(module.num_k_heads, [size // _UNIT for size in sizes])
        device = module.A_log.device
        module.register_buffer("order", units.to(device), persistent=False)
        module.register_buffer("gate_order", _by_part(module.num_k_heads, [ratio, ratio]).to(device), persistent=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the parent's."""
        dtype = hidden_states.dtype
        if dtype not in HALVES or dtype != self.conv1d.weight.dtype or kwargs.get("cu_seq_lens_q") is not None:
            given = {"cache_params": cache_params, "attention_mask": attention_mask}
            return super().forward(hidden_states, **given, **kwargs)  # type: ignore[no-any-return]
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(dtype)
        layer: Any = None if cache_params is None else cache_params.layers[self.layer_idx]
        continued = layer is not None and bool(layer.has_previous_state[0])
        mixed, z, b, a = self._project(hidden_states)
        if continued and mixed.shape[1] == 1 and not layer.record_past:
            out = self._token(layer, mixed, b, a)
        else:
            out = self._prompt(layer, layer.recurrent_states[0] if continued else None, mixed, b, a)
        rows = z.unflatten(-1, (-1, self.shape.value_dim)).flatten(0, -2)
        out = rmsnorm_gated(out.view_as(rows), rows, self.norm.weight, self.norm.variance_epsilon)
        return self.out_proj(out.view(*mixed.shape[:2], -1))  # type: ignore[no-any-return]

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values side by side, the output's gate, and b and a, the rule's."""
        if not hasattr(self, "in_proj_qkvz"):
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        units = self.in_proj_qkvz(x).view(torch.int64).index_select(-1, self.order)
        gates = self.in_proj_ba(x).index_select(-1, self.gate_order)
        *_, values = self.shape.sizes
        mixed, z = units.view(x.dtype).tensor_split((-values,), -1)
        return mixed, z, *gates.chunk(2, -1)

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


def _by_part(heads: int, sizes: list[int]) -> torch.Tensor:
    """Where each element is, when all heads' first parts come first: from heads of parts of ``sizes``."""
    places = torch.arange(heads * sum(sizes)).view(heads, -1).split(sizes, -1)
    return torch.cat([part.flatten() for part in places])


def needed(
    module: nn.Module, dtype: torch.dtype, heads: int, requests: int, max_tokens: int
) -> Iterator[tuple[Any, Any, str, int]]:
    """What load_growing() needs for a module that use_gated_delta_rule() changed; ``heads`` of norms for a token."""
    kind = HALVES[dtype]
    if isinstance(module, _Norm):
        yield RMSNORM, NormProblem(kind, False, False, 1, module.weight.shape[0]), "m", heads * max_tokens
    if not isinstance(module, DeltaNet):
        return
    yield from module.shape.needed(kind, DType.F32, requests, max_tokens)
    yield gated_norm(kind, module.shape.value_dim, module.shape.value_heads * max_tokens)


_LAYERS = tuple(f"{family}GatedDeltaNet" for family in _FAMILIES)
_KINDS: dict[str, Any] = dict.fromkeys(_LAYERS, DeltaNet) | {f"{family}RMSNorm": _Norm for family in _FAMILIES}
