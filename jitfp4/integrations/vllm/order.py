"""Linear layers whose outputs get another order when their weights are loaded: what was interleaved is side by side."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod

from jitfp4.integrations.vllm.linear import Fp4LinearMethod


class OrderedLinearMethod(LinearMethodBase):
    """The method of a layer, whose weight is loaded as before and put in order before it is prepared.

    Args:
        method: the layer's, one that ``can_be_ordered`` accepts.
        order: of which output before each is, int64 [n].
    """

    def __init__(self, method: LinearMethodBase, order: torch.Tensor) -> None:
        super().__init__()
        self.method, self.order = method, order

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """As the layer's own method."""
        self.method.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Put the rows of the weight and of its block scales in order; then as the layer's own method."""
        for parameter in layer.parameters(recurse=False):
            if parameter.shape[:1] == self.order.shape:
                parameter.data = parameter.data[self.order.to(parameter.device)]
        self.method.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As the layer's own method."""
        return self.method.apply(layer, x, bias)  # type: ignore[no-any-return]


def can_be_ordered(layer: LinearBase) -> bool:
    """Whether a rank's weight, all of one matrix, has a row for each output, and so have its scales."""
    kinds = (Fp4LinearMethod, UnquantizedLinearMethod)
    return isinstance(layer.quant_method, kinds) and len(layer.output_partition_sizes) == 1
