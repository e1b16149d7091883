"""FP4 linear layers: vLLM loads a checkpoint's tensors, jitfp4 prepares the weight and multiplies."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from jitfp4.errors import ArgumentError
from jitfp4.families.gemm import Fp4Weight
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.integrations.checkpoints import NAMES, Layer, Source
from jitfp4.integrations.kernels import load_products
from jitfp4.integrations.layers import prepared, product

_SCALE_DTYPES = {16: torch.float8_e4m3fn, 32: torch.uint8}


class Part(NamedTuple):
    """Some rows of a layer: a prepared weight, whose own n and k may be padded, its decode scale, its outputs."""

    weight: Fp4Weight
    alpha: torch.Tensor | None
    rows: slice


@register_weight_loader_v2_supported_method
class Fp4LinearMethod(LinearMethodBase):
    """A linear layer whose weight is NVFP4 or MXFP4, and whose activations are bf16 or fp16.

    Partitions that vLLM fuses (q, k, v; gate, up) are one product where they share a global scale, else one each: no
    scale is rounded. Scales of activations are loaded and dropped.

    Args:
        source: who wrote the checkpoint.
        block_format: the weight's.
        prefix: the layer's name, for errors.
    """

    def __init__(self, source: Source, block_format: BlockFormat, prefix: str) -> None:
        self.names, self.format, self.prefix = NAMES[source], block_format, prefix
        self.max_tokens = int(get_current_vllm_config().scheduler_config.max_num_batched_tokens)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the checkpoint's tensors as parameters; vLLM's loader fills them."""
        del input_size, output_size
        block, k = self.format.block, input_size_per_partition
        if k % block:
            raise ArgumentError(self.prefix, f"{k} input features of a rank", f"a multiple of {block}")
        if params_dtype not in (torch.bfloat16, torch.float16):
            raise ArgumentError(self.prefix, f"activations of {params_dtype}", "bfloat16 or float16")
        layer.logical_widths, layer.params_dtype, layer.fp4_columns = list(output_partition_sizes), params_dtype, k
        n, loader = sum(output_partition_sizes), extra_weight_attrs.get("weight_loader")
        places = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        codes = ModelWeightParameter(data=torch.empty(n, k // 2, dtype=torch.uint8), **places)
        layer.register_parameter(self.names.codes, codes)
        scales = torch.empty(n, k // block, dtype=_SCALE_DTYPES[block])
        layer.register_parameter(self.names.scales, GroupQuantScaleParameter(data=scales, **places))
        for name in self._scalars():
            ones = torch.ones(len(output_partition_sizes), dtype=torch.float32)
            layer.register_parameter(name, PerTensorScaleParameter(data=ones, weight_loader=loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weight, free the checkpoint's tensors, and load the kernels that the layer can need."""
        codes, scales = getattr(layer, self.names.codes).data, getattr(layer, self.names.scales).data
        alphas, ends = self._decode_scales(layer), list(accumulate(layer.logical_widths, initial=0))
        if alphas is None or len(set(alphas.tolist())) == 1:
            ends = [0, ends[-1]]
        layer.fp4_parts = tuple(
            _part(codes, scales, None if alphas is None else alphas[i : i + 1].contiguous(), slice(first, last))
            for i, (first, last) in enumerate(pairwise(ends))
        )
        for name in (self.names.codes, self.names.scales, *self._scalars()):
            delattr(layer, name)
        # vLLM asks a layer's weight for its device, as LoRA does
        layer.weight = torch.nn.Parameter(layer.fp4_parts[0].weight.data, requires_grad=False)
        for part in layer.fp4_parts:
            load_products(part.weight, layer.params_dtype, self.max_tokens)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., k]`` times the transpose of the layer's weight, plus ``bias``; [..., n] in x's dtype."""
        outputs = []
        for part in layer.fp4_parts:
            own = None if bias is None else bias[part.rows]
            out = product(x, part.weight, part.alpha, own, layer.fp4_columns)
            n = part.rows.stop - part.rows.start
            outputs.append(out if part.weight.n == n else out[..., :n].contiguous())
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _scalars(self) -> tuple[str, ...]:
        """The names of the scales of whole matrices."""
        return (self.names.global_scale, self.names.input_scale) if self.format is NVFP4 else ()

    def _decode_scales(self, layer: Any) -> torch.Tensor | None:
        """The decode scale of each partition, float32; None for MXFP4."""
        if self.format is not NVFP4:
            return None
        scales: torch.Tensor = getattr(layer, self.names.global_scale).data.float()
        return scales.reciprocal() if self.names.encode else scales


def _part(codes: torch.Tensor, scales: torch.Tensor, alpha: torch.Tensor | None, rows: slice) -> Part:
    return Part(prepared(Layer(codes=codes[rows], scales=scales[rows], decode_scale=alpha)), alpha, rows)
