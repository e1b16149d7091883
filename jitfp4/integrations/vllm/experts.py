"""Mixtures of FP4 experts: vLLM routes and loads a checkpoint's tensors, jitfp4 prepares the weights and multiplies.

Experts may be divided over ranks by columns (tensor parallelism) or by number (expert parallelism); a rank then gets
the tokens of all. Kernels that exchange tokens between ranks are not used.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from jitfp4.families.experts import fp4_experts, prepare_fp4_experts
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.integrations.checkpoints import NAMES, Names, Source
from jitfp4.integrations.kernels import load_experts
from jitfp4.layouts import SfLayout

_MULTIPLE = 32  # of hidden and intermediate sizes
_SCALE_DTYPES = {16: torch.float8_e4m3fn, 32: torch.uint8}
_GROUP, _TENSOR = FusedMoeWeightScaleSupported.GROUP.value, FusedMoeWeightScaleSupported.TENSOR.value
_ACTIVATIONS = {  # by vLLM's name: jitfp4's, and the order of w13's rows
    MoEActivation.SILU: ("swiglu", "concatenated gate,up"),
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: ("swigluoai", "concatenated gate,up"),
    MoEActivation.SWIGLUOAI: ("swigluoai", "interleaved"),
    MoEActivation.RELU2_NO_MUL: ("relu2", None),
}


class Fp4ExpertsMethod(FusedMoEMethodBase):
    """Experts whose weights are NVFP4 or MXFP4, and whose activations are bf16 or fp16.

    vLLM's loader asks for the name of this class: hence one for each kind of checkpoint.

    Args:
        moe: vLLM's description of the layer.
        block_format: the weights'.
    """

    names: Names
    biased = False

    def __init__(self, moe: Any, block_format: BlockFormat) -> None:
        super().__init__(moe)
        self.format = block_format
        self.max_tokens = int(get_current_vllm_config().scheduler_config.max_num_batched_tokens)
        self.activation, self.order = _ACTIVATIONS[moe.activation]

    @classmethod
    def serves(cls, moe: Any) -> bool:
        """Whether jitfp4 runs such a layer: by its activation and sizes, and whether there are biases."""
        sizes, known = (moe.hidden_dim, moe.intermediate_size_per_partition), moe.activation in _ACTIVATIONS
        return known and (cls.biased or not moe.has_bias) and not any(size % _MULTIPLE for size in sizes)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the checkpoint's tensors as parameters; vLLM's loader fills them."""
        inter, block = intermediate_size_per_partition, self.format.block
        layer.params_dtype, sides = params_dtype, 1 if self.order is None else 2

        def register(name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str | None) -> None:
            parameter = torch.nn.Parameter(torch.ones(num_experts, *shape).to(dtype), requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra_weight_attrs | ({} if kind is None else {"quant_method": kind}))

        scalars: dict[str, tuple[int, ...]] = {"w13": (sides,), "w2": ()}
        for matrix, rows, columns in (("w13", sides * inter, hidden_size), ("w2", hidden_size, inter)):
            register(f"{matrix}_{self.names.codes}", (rows, columns // 2), torch.uint8, None)
            register(f"{matrix}_{self.names.scales}", (rows, columns // block), _SCALE_DTYPES[block], _GROUP)
            for name in self._scalars():
                register(f"{matrix}_{name}", scalars[matrix], torch.float32, _TENSOR)
            if self.moe.has_bias:
                register(f"{matrix}_bias", (rows,), params_dtype, None)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights, free the checkpoint's tensors, and load the kernels that the layer can need."""
        given: dict[str, torch.Tensor] = {}
        biases = ("bias",) if self.moe.has_bias else ()
        for matrix in ("w13", "w2"):
            for name in (self.names.codes, self.names.scales, *self._scalars(), *biases):
                given[f"{matrix}_{name}"] = getattr(layer, f"{matrix}_{name}").data
                delattr(layer, f"{matrix}_{name}")
        layer.fp4_experts = prepare_fp4_experts(
            given[f"w13_{self.names.codes}"],
            given[f"w13_{self.names.scales}"].view(torch.uint8),
            given[f"w2_{self.names.codes}"],
            given[f"w2_{self.names.scales}"].view(torch.uint8),
            order=self.order,
            sf_layout=SfLayout.layout_linear,
            block_size=self.format.block,
            w13_alpha=self._decode_scales(given, "w13"),
            w2_alpha=self._decode_scales(given, "w2"),
            w13_bias=given.get("w13_bias"),
            w2_bias=given.get("w2_bias"),
        )
        load_experts(layer.fp4_experts, layer.params_dtype, self.moe.experts_per_token, self.max_tokens)

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
        )

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: there is nothing that vLLM's own kernels would need to know."""
        del layer

    def uses_weight_scale_2_pattern(self) -> bool:
        """Whether the checkpoint's scale of a whole matrix is called ``weight_scale_2``."""
        return self.names.global_scale == "weight_scale_2"

    def _scalars(self) -> tuple[str, ...]:
        """The names of the scales of whole matrices."""
        return (self.names.global_scale, self.names.input_scale) if self.format is NVFP4 else ()

    def _decode_scales(self, given: dict[str, torch.Tensor], matrix: str) -> torch.Tensor | None:
        """The decode scale of each expert, and for w13 of its gate and of its up part; None for MXFP4."""
        if self.format is not NVFP4:
            return None
        scales = given[f"{matrix}_{self.names.global_scale}"].float()
        scales = scales.reciprocal() if self.names.encode else scales
        return (scales[:, 0] if matrix == "w13" and self.order is None else scales).contiguous()


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
