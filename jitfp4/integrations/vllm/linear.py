"""FP4 linear layers: vLLM loads a checkpoint's tensors, jitfp4 prepares the weight and multiplies."""

from __future__ import annotations

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from jitfp4.formats import BlockFormat
from jitfp4.integrations.checkpoints import Source
from jitfp4.integrations.partitions import Parameters, PartitionedFp4Linear
from jitfp4.integrations.vllm.options import activations_of


@register_weight_loader_v2_supported_method
class Fp4LinearMethod(PartitionedFp4Linear, LinearMethodBase):
    """A linear layer of vLLM; see PartitionedFp4Linear.

    With ``--additional-config '{"jitfp4_activations": "fp8"}'`` activations of many tokens are quantized to E4M3.

    Args:
        source, block_format, prefix: as there.
    """

    parameters = Parameters(ModelWeightParameter, GroupQuantScaleParameter, PerTensorScaleParameter)

    def __init__(self, source: Source, block_format: BlockFormat, prefix: str) -> None:
        config = get_current_vllm_config()
        max_tokens = int(config.scheduler_config.max_num_batched_tokens)
        super().__init__(source, block_format, prefix, max_tokens, activations_of(config) == "fp8")
