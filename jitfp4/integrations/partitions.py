"""Linear layers of engines: a rank's part of one or several projections, loaded by the engine, multiplied by jitfp4.

vLLM's and SGLang's layers are alike: a method of a layer registers the checkpoint's tensors as parameters of the
engine's classes, prepares what its loader put there, and multiplies. Here is all of it but those classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from jitfp4.errors import ArgumentError
from jitfp4.families.gemm import Fp4Weight
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.integrations.checkpoints import NAMES, STORED_SCALES, Layer, Source
from jitfp4.integrations.fp8 import row_scale_of
from jitfp4.integrations.kernels import load_fp8_products, load_products
from jitfp4.integrations.layers import prepared, product
from jitfp4.weight import ROWS

_GATE_UP = "concatenated gate,up"
_STRATEGIES = {16: ("tensor_group", NVFP4), 32: ("group", MXFP4)}


def fp4_format(weights: Mapping[str, Any] | None) -> BlockFormat | None:
    """The format of weights that compressed-tensors' arguments describe; None where it is not NVFP4 or MXFP4."""
    if weights is None or weights.get("num_bits") != 4 or weights.get("type") != "float":
        return None
    strategy, block_format = _STRATEGIES.get(weights.get("group_size") or 0, (None, None))
    if weights.get("strategy") != strategy or not weights.get("symmetric", True) or weights.get("dynamic"):
        return None
    return block_format


class Part(NamedTuple):
    """Some rows of a layer: a prepared weight, whose own n and k may be padded, its decode scale, its outputs.

    ``fp8_scale`` is what products in FP8 need; None where there are none.
    """

    weight: Fp4Weight
    alpha: torch.Tensor | None
    rows: slice
    fp8_scale: torch.Tensor | None


class Parameters(NamedTuple):
    """An engine's classes of parameters: for codes, for block scales, and for scales of whole matrices."""

    codes: Callable[..., Any]
    scales: Callable[..., Any]
    scalars: Callable[..., Any]


class PartitionedFp4Linear:
    """A linear layer whose weight is NVFP4 or MXFP4, and whose activations are bf16 or fp16.

    Partitions that engines fuse (q, k, v; gate, up) are one product where they share a global scale, else one each: no
    scale is rounded. Scales of activations are loaded and dropped. Where a layer has an ``activation``, the engine's
    module for SwiGLU, its outputs are those of the activation, which one product of gates and ups applies itself.

    Args:
        source: who wrote the checkpoint.
        block_format: the weight's.
        prefix: the layer's name, for errors.
        max_tokens: the most rows of activations.
        fp8: whether activations of many rows are quantized to E4M3; see jitfp4.integrations.fp8.
    """

    parameters: Parameters

    def __init__(
        self, source: Source, block_format: BlockFormat, prefix: str, max_tokens: int, fp8: bool = False
    ) -> None:
        self.names, self.format, self.prefix, self.max_tokens = NAMES[source], block_format, prefix, max_tokens
        self.fp8 = fp8

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
        """Register the checkpoint's tensors as parameters; the engine's loader fills them."""
        del input_size, output_size
        block, k = self.format.block, input_size_per_partition
        if k % block:
            raise ArgumentError(self.prefix, f"{k} input features of a rank", f"a multiple of {block}")
        if params_dtype not in (torch.bfloat16, torch.float16):
            raise ArgumentError(self.prefix, f"activations of {params_dtype}", "bfloat16 or float16")
        layer.logical_widths, layer.params_dtype, layer.fp4_columns = list(output_partition_sizes), params_dtype, k
        n, loader = sum(output_partition_sizes), extra_weight_attrs.get("weight_loader")
        places = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        codes = self.parameters.codes(data=torch.empty(n, k // 2, dtype=torch.uint8), **places)
        layer.register_parameter(self.names.codes, codes)
        scales = torch.empty(n, k // block, dtype=STORED_SCALES[block])
        layer.register_parameter(self.names.scales, self.parameters.scales(data=scales, **places))
        for name in self._scalars():
            ones = torch.ones(len(output_partition_sizes), dtype=torch.float32)
            layer.register_parameter(name, self.parameters.scalars(data=ones, weight_loader=loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weight, free the checkpoint's tensors, and load the kernels that the layer can need."""
        codes, scales = getattr(layer, self.names.codes).data, getattr(layer, self.names.scales).data
        alphas, ends = self._decode_scales(layer), list(accumulate(layer.logical_widths, initial=0))
        if alphas is None or len(set(alphas.tolist())) == 1:
            ends = [0, ends[-1]]
        order = _GATE_UP if len(ends) == 2 and _is_gated(layer) else None
        layer.fp4_parts = tuple(
            self._part(codes, scales, None if alphas is None else alphas[i : i + 1].contiguous(), slice(*pair), order)
            for i, pair in enumerate(pairwise(ends))
        )
        for name in (self.names.codes, self.names.scales, *self._scalars()):
            delattr(layer, name)
        # engines ask a layer's weight for its device, as LoRA does
        layer.weight = torch.nn.Parameter(layer.fp4_parts[0].weight.data, requires_grad=False)
        for part in layer.fp4_parts:
            load_products(part.weight, layer.params_dtype, self.max_tokens)
            if part.fp8_scale is not None:
                load_fp8_products(part.weight, layer.params_dtype, self.max_tokens)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., k]`` times the transpose of the layer's weight, plus ``bias``; [..., n] in x's dtype.

        [..., n / 2] where the layer has an activation.
        """
        outputs = []
        for part in layer.fp4_parts:
            own = None if bias is None else bias[part.rows]
            out = product(x, part.weight, part.alpha, own, layer.fp4_columns, None, part.fp8_scale)
            n = part.rows.stop - part.rows.start
            outputs.append(out if part.weight.n == n else out[..., :n].contiguous())
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        activation = None if layer.fp4_parts[0].weight.gated else getattr(layer, "activation", None)
        return out if activation is None else activation(out)

    def _part(
        self, codes: torch.Tensor, scales: torch.Tensor, alpha: torch.Tensor | None, rows: slice, order: str | None
    ) -> Part:
        weight = prepared(Layer(codes=codes[rows], scales=scales[rows], decode_scale=alpha), order)
        return Part(weight, alpha, rows, row_scale_of(weight) if self.fp8 else None)

    def _scalars(self) -> tuple[str, ...]:
        """The names of the scales of whole matrices."""
        return (self.names.global_scale, self.names.input_scale) if self.format is NVFP4 else ()

    def _decode_scales(self, layer: Any) -> torch.Tensor | None:
        """The decode scale of each partition, float32; None for MXFP4."""
        if self.format is not NVFP4:
            return None
        scales: torch.Tensor = getattr(layer, self.names.global_scale).data.float()
        return scales.reciprocal() if self.names.encode else scales


def _is_gated(layer: Any) -> bool:
    """Whether one product can apply the layer's activation."""
    widths = layer.logical_widths
    has_halves = len(widths) == 2 and widths[0] == widths[1] and widths[0] % ROWS == 0
    return has_halves and getattr(layer, "activation", None) is not None and layer.bias is None
