"""Mixtures of FP4 experts in engines, which route and load a checkpoint's tensors; jitfp4 prepares and multiplies.

vLLM's and SGLang's layers are alike: a method of a layer registers the checkpoint's tensors, and prepares what the
engine's loader put there. Here is all of it but what differs.
"""

from __future__ import annotations

from typing import Any

import torch

from jitfp4.families.experts import prepare_fp4_experts
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.integrations.checkpoints import STORED_SCALES, Names
from jitfp4.integrations.fp8 import check_gpu
from jitfp4.integrations.kernels import load_experts, load_fp8_experts
from jitfp4.layouts import SfLayout

MULTIPLE = 32  # of hidden and intermediate sizes
_GROUP, _TENSOR = "group", "tensor"  # what engines call scales of blocks and of matrices


class PartitionedFp4Experts:
    """Experts whose weights are NVFP4 or MXFP4, and whose activations are bf16 or fp16.

    Args:
        block_format: the weights'.
        order: of the rows of gates and ups, as prepare_fp4_experts() names it; None: there are no gates.
        slots: experts of a token.
        max_tokens: the most rows of activations.
        biased: whether there are biases.
        fp8_from: tokens from which activations are quantized to E4M3; None: they never are.
    """

    names: Names

    def __init__(
        self,
        block_format: BlockFormat,
        order: str | None,
        slots: int,
        max_tokens: int,
        biased: bool = False,
        fp8_from: int | None = None,
    ) -> None:
        self.format, self.order, self.slots, self.max_tokens = block_format, order, slots, max_tokens
        self.has_biases, self.fp8_from = biased, fp8_from

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the checkpoint's tensors as parameters; the engine's loader fills them."""
        inter, block = intermediate_size_per_partition, self.format.block
        layer.params_dtype, sides = params_dtype, 1 if self.order is None else 2

        def register(name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str | None) -> None:
            parameter = torch.nn.Parameter(torch.ones(num_experts, *shape).to(dtype), requires_grad=False)
            layer.register_parameter(name, parameter)
            for key, value in (extra_weight_attrs | ({} if kind is None else {"quant_method": kind})).items():
                setattr(parameter, key, value)

        scalars: dict[str, tuple[int, ...]] = {"w13": (sides,), "w2": ()}
        for matrix, rows, columns in (("w13", sides * inter, hidden_size), ("w2", hidden_size, inter)):
            register(f"{matrix}_{self.names.codes}", (rows, columns // 2), torch.uint8, None)
            register(f"{matrix}_{self.names.scales}", (rows, columns // block), STORED_SCALES[block], _GROUP)
            for name in self._scalars():
                register(f"{matrix}_{name}", scalars[matrix], torch.float32, _TENSOR)
            if self.has_biases:
                register(f"{matrix}_bias", (rows,), params_dtype, None)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights, free the checkpoint's tensors, and load the kernels that the layer can need.

        Raises ArgumentError where activations are to be in E4M3, on a GPU without such products.
        """
        given: dict[str, torch.Tensor] = {}
        biases = ("bias",) if self.has_biases else ()
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
        if self.fp8_from is not None:
            check_gpu(layer.fp4_experts.w13)
            load_fp8_experts(layer.fp4_experts, layer.params_dtype, self.slots, self.fp8_from, self.max_tokens)
        load_experts(layer.fp4_experts, layer.params_dtype, self.slots, self.max_tokens)

    def activations_of(self, x: torch.Tensor) -> str | None:
        """What fp4_experts() is to make of ``x [tokens, hidden]`` and of what is between its products."""
        return "fp8" if self.fp8_from is not None and x.shape[0] >= self.fp8_from else None

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
