"""Prompts in FP8: products of many tokens with activations in E4M3."""

from __future__ import annotations

from torch import nn

from jitfp4.integrations.experts import ExpertsModule
from jitfp4.integrations.layers import Fp4Linear


def use_fp8_activations(model: nn.Module) -> int:
    """Let the linear layers in FP4 of a model quantize their activations to E4M3 in steps of 512 tokens and more.

    So do experts in FP4, in steps with 128 rows and more for each expert in the mean. Steps of fewer tokens are not
    changed. Numbers of the others are: docs/numerics.md says by how much. Weights keep their memory; a linear layer
    gets a float32 for each row of its weight. Layers in floats stay as they are.
    Call it when the model is on its device, and after anything that fuses layers; moving the model undoes it.

    Returns:
        How many layers there are.
    Raises:
        ArgumentError: on a GPU other than sm_90a.
    """
    layers = [module for module in model.modules() if isinstance(module, (Fp4Linear, ExpertsModule))]
    for layer in layers:
        layer.multiply_in_fp8()
    return len(layers)
