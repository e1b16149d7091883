"""FP4 linear layers: vLLM loads a checkpoint's tensors, jitfp4 prepares the weight and multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from jitfp4.errors import ArgumentError
from jitfp4.families.gemm import Fp4Weight, mm_bf16_fp4, prepare_fp4_weight
from jitfp4.formats import BlockFormat
from jitfp4.integrations.kernels import load_products
from jitfp4.layouts import SfLayout, round_up
from jitfp4.weight import COLS, ROWS

_NAME = "weight_scale"  # of the block scales, in every format
_SCALE_DTYPES = {16: torch.float8_e4m3fn, 32: torch.uint8}


@dataclass(frozen=True)
class Parameters:
    """The parameters of an FP4 linear layer in a checkpoint.

    ``codes`` names the packed codes; block scales are always ``weight_scale``. ``global_scale`` names the scale of each
    partition, the one by which the weight was multiplied (``is_encode``) or is multiplied; MXFP4 has none. ``unused``
    is a scale of activations: loaded, and dropped, because activations stay in 16 bits.
    """

    codes: str
    format: BlockFormat
    global_scale: str | None = None
    is_encode: bool = False
    unused: str | None = None


class Product(NamedTuple):
    """Rows ``first`` to ``last`` of a layer's output: a prepared weight, whose own n and k may be padded."""

    weight: Fp4Weight
    alpha: torch.Tensor | None
    first: int
    last: int


@register_weight_loader_v2_supported_method
class Fp4LinearMethod(LinearMethodBase):
    """A linear layer whose weight is NVFP4 or MXFP4, and whose activations are bf16 or fp16.

    Partitions that vLLM fuses (q, k, v; gate, up) are one product where they share a global scale, else one each, into
    the parts of one output: no scale is rounded.

    Args:
        parameters: the checkpoint's.
        prefix: the layer's name, for errors.
    """

    def __init__(self, parameters: Parameters, prefix: str) -> None:
        self.parameters, self.prefix = parameters, prefix
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
        """Register the checkpoint's parameters; vLLM's loader fills them."""
        del input_size, output_size
        block, k = self.parameters.format.block, input_size_per_partition
        if k % block:
            raise ArgumentError(self.prefix, f"{k} input features of a rank", f"a multiple of {block}")
        if params_dtype not in (torch.bfloat16, torch.float16):
            raise ArgumentError(self.prefix, f"activations of {params_dtype}", "bfloat16 or float16")
        layer.logical_widths, layer.params_dtype = list(output_partition_sizes), params_dtype
        n, loader = sum(output_partition_sizes), extra_weight_attrs.get("weight_loader")
        places = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        codes = ModelWeightParameter(data=torch.empty(n, k // 2, dtype=torch.uint8), **places)
        layer.register_parameter(self.parameters.codes, codes)
        scales = torch.empty(n, k // block, dtype=_SCALE_DTYPES[block])
        layer.register_parameter(_NAME, GroupQuantScaleParameter(data=scales, **places))
        for name in (self.parameters.global_scale, self.parameters.unused):
            if name is not None:
                data = torch.ones(len(output_partition_sizes), dtype=torch.float32)
                layer.register_parameter(name, PerTensorScaleParameter(data=data, weight_loader=loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weight, free the checkpoint's tensors, and load the kernels that the layer can need."""
        codes, scales = getattr(layer, self.parameters.codes).data, layer.weight_scale.data
        alphas = self._decode_scales(layer)
        ends = list(accumulate(layer.logical_widths, initial=0))
        if alphas is None or all(alpha == alphas[0] for alpha in alphas):
            ends, alphas = [0, ends[-1]], alphas and alphas[:1]
        layer.jitfp4_products = tuple(
            Product(self._prepare(codes[first:last], scales[first:last]), _scalar(alphas, i, codes.device), first, last)
            for i, (first, last) in enumerate(pairwise(ends))
        )
        for name in (self.parameters.codes, _NAME, self.parameters.global_scale, self.parameters.unused):
            if name is not None:
                delattr(layer, name)
        # vLLM asks a layer's weight for its device, as LoRA does
        layer.weight = torch.nn.Parameter(layer.jitfp4_products[0].weight.data, requires_grad=False)
        for product in layer.jitfp4_products:
            load_products(product.weight, layer.params_dtype, self.max_tokens)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., k]`` times the transpose of the layer's weight, plus ``bias``; [..., n] in x's dtype."""
        products: tuple[Product, ...] = layer.jitfp4_products
        if x.shape[-1] != products[0].weight.k:
            x = pad(x, (0, products[0].weight.k - x.shape[-1]))
        if len(products) == 1:
            return _multiply(products[0], x, bias)
        if any(product.weight.n != product.last - product.first for product in products):
            parts = [_multiply(p, x, None if bias is None else bias[p.first : p.last]) for p in products]
            return torch.cat(parts, -1)
        out = torch.empty((*x.shape[:-1], products[-1].last), dtype=x.dtype, device=x.device)
        for p in products:
            part = None if bias is None else bias[p.first : p.last]
            mm_bf16_fp4(x, p.weight, p.alpha, part, out=out[..., p.first : p.last])
        return out

    def _decode_scales(self, layer: Any) -> list[float] | None:
        """The global decode scale of each partition; None without global scales. One copy to the host."""
        if self.parameters.global_scale is None:
            return None
        scales = getattr(layer, self.parameters.global_scale).data.float()
        return (scales.reciprocal() if self.parameters.is_encode else scales).tolist()  # type: ignore[no-any-return]

    def _prepare(self, codes: torch.Tensor, scales: torch.Tensor) -> Fp4Weight:
        """The prepared weight, with zeros where a rank's part is not a multiple of 8 rows and 32 columns."""
        block = self.parameters.format.block
        n, k = codes.shape[0], codes.shape[1] * 2
        more_n, more_k = round_up(n, ROWS) - n, round_up(k, COLS) - k
        scales = scales.view(torch.uint8)
        if more_n or more_k:
            codes = pad(codes, (0, more_k // 2, 0, more_n))
            scales = pad(scales, (0, more_k // block, 0, more_n))
        return prepare_fp4_weight(codes.contiguous(), scales.contiguous(), block, SfLayout.layout_linear)


def _scalar(alphas: list[float] | None, number: int, device: torch.device) -> torch.Tensor | None:
    return None if alphas is None else torch.tensor([alphas[number]], dtype=torch.float32, device=device)


def _multiply(product: Product, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    n, padded = product.last - product.first, product.weight.n
    if padded == n:
        return mm_bf16_fp4(x, product.weight, product.alpha, bias)
    bias = None if bias is None else pad(bias, (0, padded - n))
    return mm_bf16_fp4(x, product.weight, product.alpha, bias)[..., :n].contiguous()
