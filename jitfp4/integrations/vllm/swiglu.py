"""SwiGLU in the epilogue of the product of gates and ups, in vLLM's own models.

A method of a linear layer does not see what becomes of its outputs. So modules are watched as models register them, by
torch's hook for this: where an MLP with FP4 gates and ups registers vLLM's SiluAndMul, the layer takes the activation,
and the MLP gets an identity in its place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul

from jitfp4.integrations.vllm.linear import Fp4LinearMethod

_registered: list[object] = []


def register_swiglu() -> None:
    """Watch modules from now on; a second call changes nothing."""
    if not _registered:
        _registered.append(register_module_module_registration_hook(_moved))


def _moved(owner: torch.nn.Module, name: str, module: torch.nn.Module | None) -> Any:
    """Give ``module``, an activation that ``owner`` registers as ``name``, to its gates and ups.

    Returns what is registered instead; None: nothing is.
    """
    if type(module) is not SiluAndMul:
        return None
    layer: Any = getattr(owner, "gate_up_proj", None)
    if not isinstance(getattr(layer, "quant_method", None), Fp4LinearMethod) or not is_swiglu(type(owner), name):
        return None
    if get_current_vllm_config().lora_config is not None:  # adapters add to gates and ups
        return None
    layer.activation = module
    return torch.nn.Identity()


def is_swiglu(mlp: Any, name: str) -> bool:
    """Whether an MLP's forward passes gates and ups to the activation, and nothing but its result on.

    The MLP's result may be multiplied by a gate of its input, as that of Qwen's shared expert is.
    """
    x, products, activated, gate = object(), object(), *torch.tensor([[1.0], [0.0]], device="cpu")
    stand_in = SimpleNamespace(
        gate_up_proj=lambda _: (products, None),
        down_proj=lambda rows: (rows, None),
        expert_gate=lambda rows: (gate if rows is x else None, None),
        **{name: lambda rows: activated if rows is products else None},
    )
    try:
        out = mlp.forward(stand_in, x)
    except Exception:  # it asks for what an MLP of these attributes has not
        return False
    return out is activated or torch.equal(out, gate.sigmoid() * activated)
