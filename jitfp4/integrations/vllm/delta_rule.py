"""Layers of gated delta rules in vLLM's models with FP4 layers: Qwen3-Next and the Qwen3.5 family.

Convolution and rule, of prompts, of tokens, and of drafted tokens, over vLLM's states; and the gated norm behind them.
vLLM's registry of layers gives models these classes: see hybrids.py. Batches that the kernels are not for go to vLLM's
own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from jitfp4.dtypes import HALVES
from jitfp4.families.conv import causal_conv1d_fn, causal_conv1d_update
from jitfp4.families.gdn import chunk_gated_delta_rule, gated_delta_rule_mtp
from jitfp4.families.gdn.problem import MAX_TOKENS, STATE_DTYPES
from jitfp4.families.norm import rmsnorm_gated
from jitfp4.integrations.delta_rule import SILU, Shape, by_part, gated_norm, gates_of_prompts, is_normalised
from jitfp4.integrations.kernels import load_growing
from jitfp4.integrations.vllm.order import OrderedLinearMethod, can_be_ordered
from jitfp4.integrations.vllm.quantization import has_fp4_layers

_NONE = -1  # a slot that is not there; to vLLM, slot 0 and negative ones are not
_SLOTS = "slots_of_jitfp4"  # of a step's metadata, which layers share


class Fp4ModelGatedDeltaNet(QwenGatedDeltaNetAttention):
    """A layer of gated delta rules; in models without FP4 layers, vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads = (self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size)
        self.shape = Shape(*heads, self.head_k_dim, self.head_v_dim, self.conv_kernel_size)
        self.by_jitfp4 = has_fp4_layers() and self.activation in SILU and self.shape.served
        if self.by_jitfp4 and self.gqa_interleaved_layout:
            self._put_side_by_side()
        dtype, state_dtype, *_ = self.get_state_dtype()
        self.warms_up = True
        if self.by_jitfp4 and dtype in HALVES and state_dtype in STATE_DTYPES:
            self.warms_up = self.num_spec > 0 or _leaves_states_at_borders()
            scheduler, drafted = get_current_vllm_config().scheduler_config, min(self.num_spec, MAX_TOKENS[-1] - 1)
            most = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, drafted)
            for step in self.shape.needed(HALVES[dtype], STATE_DTYPES[state_dtype], *most):
                load_growing(*step, self.conv1d.weight)

    def _put_side_by_side(self) -> None:
        """Let projections give queries, keys, values and gates of all heads side by side, as in Qwen3.5.

        Checkpoints of Qwen3-Next have them interleaved by heads of keys, and vLLM would copy each part in each step.
        Where adapters add to them, or a kernel of vLLM's takes what drafts are made of as it lies, they stay.
        """
        layers, config = (self.in_proj_qkvz, self.in_proj_ba), get_current_vllm_config()
        if self.num_spec > 0 or config.lora_config is not None or not all(map(can_be_ordered, layers)):
            return
        ratio = self.shape.value_heads // self.shape.heads
        for layer, sizes in zip(layers, (self.shape.of_a_head, (ratio, ratio)), strict=True):
            layer.quant_method = OrderedLinearMethod(layer.quant_method, by_part(self.shape.heads, sizes))
        self.gqa_interleaved_layout = False

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Fill ``core_attn_out`` [tokens, heads, V] from queries, keys and values [tokens, channels] and the gates."""
        steps = get_forward_context().attn_metadata
        if steps is None and not self.warms_up:  # vLLM would tune or compile its own kernels for prompts
            return
        step: Any = steps.get(self.prefix) if isinstance(steps, dict) else None
        if step is None or not self._serves(step, mixed_qkv):
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        count = step.num_actual_tokens
        rows, b, a, out = mixed_qkv[:count], b[:count], a[:count], core_attn_out[:count]
        if step.spec_sequence_masks is not None:
            self._drafted(step, rows, b, a, out)
        elif step.num_prefills == 0:
            slots = _slots(step, step.non_spec_state_indices_tensor[:count])
            causal_conv1d_update(rows, self._past, self._filters, self.conv1d.bias, "silu", slots)
            self._tokens(rows, b, a, slots, out)
        else:
            self._mixed(step, rows, b, a, out)

    def _serves(self, step: Any, rows: torch.Tensor) -> bool:
        """Whether the kernels are for a step: not for states at borders of prefixes, nor drafts of unequal lengths."""
        if not (self.by_jitfp4 and rows.dtype in HALVES and self.kv_cache[1].dtype in STATE_DTYPES):
            return False
        if self.kv_cache[0].dtype != rows.dtype or self.conv1d.weight.dtype != rows.dtype:
            return False
        if getattr(step, "flashinfer_checkpoint_plan", None) is not None:
            return False
        if step.spec_sequence_masks is None:
            return bool(step.num_actual_tokens > 0)
        length = getattr(step, "uniform_spec_sequence_length", None) or 0
        whole = step.num_spec_decodes * length == step.num_actual_tokens and length <= MAX_TOKENS[-1]
        return step.num_prefills == step.num_decodes == 0 and length > 0 and whole

    def _mixed(self, step: Any, rows: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        """The tokens of some requests, and behind them prompts, or parts of prompts, of others."""
        rows = causal_conv1d_fn(
            rows.T,
            self._filters,
            self.conv1d.bias,
            self._past,
            step.non_spec_query_start_loc,
            step.non_spec_state_indices_tensor,
            step.has_initial_state,
            "silu",
        ).T
        count = step.num_decode_tokens
        if count > 0:
            slots = _slots(step, step.non_spec_state_indices_tensor[:count])
            self._tokens(rows[:count], b[:count], a[:count], slots, out[:count])
        rows, b, a, out = rows[count:], b[count:], a[count:], out[count:]
        state = self.kv_cache[1]
        held = state[step.prefill_state_indices]
        held[~step.prefill_has_initial_state] = 0
        decay, beta = gates_of_prompts(self.A_log, a, self.dt_bias, b)
        chunk_gated_delta_rule(
            *self.shape.split(rows),
            g=decay,
            beta=beta,
            initial_state=held,
            output_final_state=True,
            cu_seqlens=step.prefill_query_start_loc,
            use_qk_l2norm_in_kernel=True,
            output=out,
            output_state=held,
        )
        state[step.prefill_state_indices] = held

    def _tokens(
        self, rows: torch.Tensor, b: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> None:
        """A token of each request."""
        q, k, v = (part.unsqueeze(1) for part in self.shape.split(rows))
        gates = self.A_log.float(), a.unsqueeze(1), self.dt_bias, b.unsqueeze(1)
        gated_delta_rule_mtp(q, k, v, self.kv_cache[1], slots, *gates, output=out.unsqueeze(1))

    def _drafted(self, step: Any, rows: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        """As many tokens of each request; states go to a slot for each token, from that of the last accepted one."""
        requests, length = step.num_spec_decodes, step.uniform_spec_sequence_length
        table, accepted = step.spec_state_indices_tensor[:requests], step.num_accepted_tokens[:requests]
        causal_conv1d_update(
            rows,
            self._past,
            self._filters,
            self.conv1d.bias,
            "silu",
            table[:, 0],
            accepted,
            step.spec_query_start_loc[: requests + 1],
            table.shape[1],
        )
        slots = _slots(step, table)
        first = slots.gather(1, accepted.clamp(min=1).long().unsqueeze(1) - 1).squeeze(1)
        q, k, v, a, b, out = (part.unflatten(0, (requests, length)) for part in (*self.shape.split(rows), a, b, out))
        gates = self.A_log.float(), a, self.dt_bias, b
        each = slots[:, :length].contiguous()
        gated_delta_rule_mtp(q, k, v, self.kv_cache[1], first, *gates, output=out, ssm_state_indices=each)

    @property
    def _past(self) -> torch.Tensor:
        """The convolution's states [slots, channels, inputs]."""
        states: torch.Tensor = self.kv_cache[0]
        return states if is_conv_state_dim_first() else states.transpose(-1, -2)

    @property
    def _filters(self) -> torch.Tensor:
        weight: torch.Tensor = self.conv1d.weight
        return weight.flatten(1)


class Fp4ModelRMSNormGated(RMSNormGated):
    """The norm of heads before a gate by SiLU; vLLM's own for others and in other models."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        h, whole = self.weight.shape[0], self.group_size in (None, self.weight.shape[0])
        kind = self.norm_before_gate and self.activation in SILU and whole and is_normalised(h)
        self.by_jitfp4 = bool(has_fp4_layers() and kind and self.weight.dtype in HALVES)
        if self.by_jitfp4:
            config = get_current_vllm_config()
            heads = getattr(config.model_config.hf_text_config, "linear_num_value_heads", 1)
            rows = heads * config.scheduler_config.max_num_batched_tokens
            load_growing(*gated_norm(HALVES[self.weight.dtype], h, rows), self.weight)

    def forward_cuda(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """``x / sqrt(mean(x * x) + eps) * weight * silu(z)``, rounded once."""
        if z is None or not self.by_jitfp4 or {x.dtype, z.dtype} != {self.weight.dtype} or x.shape != z.shape:
            return super().forward_cuda(x, z)  # type: ignore[no-any-return]
        shape = x.shape
        x, z = (rows.reshape(-1, shape[-1]).contiguous() for rows in (x, z))
        return rmsnorm_gated(x, z, self.weight.data, self.eps).view(shape)


def _leaves_states_at_borders() -> bool:
    """Whether prompts may leave states where prefixes end, which vLLM's own kernels do, since 0.33."""
    mode = getattr(get_current_vllm_config().cache_config, "mamba_cache_mode", "none")
    return mode != "none" and hasattr(GDNAttentionMetadata, "flashinfer_checkpoint_plan")


def _slots(step: Any, slots: torch.Tensor) -> torch.Tensor:
    """Slots as the rule's kernel takes them: made by the first layer of a step, and kept for the others."""
    held: dict[tuple[int, ...], torch.Tensor] = vars(step).setdefault(_SLOTS, {})
    if slots.shape not in held:
        held[slots.shape] = torch.where(slots > 0, slots, _NONE)
    return held[slots.shape]


LAYERS = {"QwenGatedDeltaNetAttention": Fp4ModelGatedDeltaNet, "RMSNormGated": Fp4ModelRMSNormGated}
