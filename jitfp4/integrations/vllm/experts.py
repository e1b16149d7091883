"""Mixtures of FP4 experts: vLLM routes and loads a checkpoint's tensors, jitfp4 prepares the weights and multiplies.

Experts may be divided over ranks by columns (tensor parallelism) or by number (expert parallelism); a rank then gets
the tokens of all. Kernels that exchange tokens between ranks are not used.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from jitfp4.families.experts import fp4_experts
from jitfp4.formats import BlockFormat
from jitfp4.integrations.checkpoints import NAMES, Names, Source
from jitfp4.integrations.fp8 import least_tokens
from jitfp4.integrations.partitioned_experts import MULTIPLE, PartitionedFp4Experts
from jitfp4.integrations.vllm.options import activations_of

_ACTIVATIONS = {  # by vLLM's name: jitfp4's, and the order of w13's rows
    MoEActivation.SILU: ("swiglu", "concatenated gate,up"),
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: ("swigluoai", "concatenated gate,up"),
    MoEActivation.SWIGLUOAI: ("swigluoai", "interleaved"),
    MoEActivation.RELU2_NO_MUL: ("relu2", None),
}


class Fp4ExpertsMethod(PartitionedFp4Experts, FusedMoEMethodBase):
    """Experts of vLLM; see PartitionedFp4Experts.

    With ``--additional-config '{"jitfp4_activations": "fp8"}'`` activations of many tokens are quantized to E4M3.
    vLLM's loader asks for the name of this class: hence one for each kind of checkpoint.

    Args:
        moe: vLLM's description of the layer.
        block_format: the weights'.
    """

    biased = False

    def __init__(self, moe: Any, block_format: BlockFormat) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.activation, order = _ACTIVATIONS[moe.activation]
        config, slots = get_current_vllm_config(), moe.experts_per_token
        max_tokens = int(config.scheduler_config.max_num_batched_tokens)
        fp8_from = least_tokens(moe.num_experts, slots) if activations_of(config) == "fp8" else None
        PartitionedFp4Experts.__init__(self, block_format, order, slots, max_tokens, moe.has_bias, fp8_from)

    @classmethod
    def serves(cls, moe: Any) -> bool:
        """Whether jitfp4 runs such a layer: by its activation and sizes, and whether there are biases."""
        sizes, known = (moe.hidden_dim, moe.intermediate_size_per_partition), moe.activation in _ACTIVATIONS
        return known and (cls.biased or not moe.has_bias) and not any(size % MULTIPLE for size in sizes)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum of the experts of each token of ``x [tokens, hidden]``; vLLM adds shared experts itself."""
        del shared_experts, shared_experts_input
        return fp4_experts(
            x,
            layer.fp4_experts,
            topk_ids,
            topk_weights,
            activation=self.activation,
            swiglu_limit=layer.swiglu_limit,
            swiglu_alpha=layer.swiglu_alpha,
            swiglu_beta=layer.swiglu_beta,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            activations=self.activations_of(x),
        )

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: there is nothing that vLLM's own kernels would need to know."""
        del layer

    def uses_weight_scale_2_pattern(self) -> bool:
        """Whether the checkpoint's scale of a whole matrix is called ``weight_scale_2``."""
        return self.names.global_scale == "weight_scale_2"


class CompressedTensorsFp4ExpertsMethod(Fp4ExpertsMethod):
    """Of a checkpoint of compressed-tensors."""

    names = NAMES[Source.COMPRESSED_TENSORS]


class ModelOptFp4ExpertsMethod(Fp4ExpertsMethod):
    """Of a checkpoint of ModelOpt."""

    names = NAMES[Source.MODELOPT]


class GptOssFp4ExpertsMethod(Fp4ExpertsMethod):
    """Of gpt-oss: MXFP4 with biases. vLLM's loader gives the tensors of all experts at once."""

    names = Names("weight", "weight_scale", "", "", False)
    biased = True
    weight_dtype = "gpt_oss_mxfp4"  # vLLM's loader of the model asks
