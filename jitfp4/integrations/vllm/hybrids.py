"""When the plugin's layers of gated delta rules are registered.

vLLM's module of these layers asks for the GPU's name when it is imported. Plugins are loaded before a process has its
GPU, and in processes that have none; so the layers are registered once the code of a model has imported that module.
"""

from __future__ import annotations

import logging
import sys

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.model_executor.custom_op import op_registry_oot

_MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

_log = logging.getLogger("jitfp4.integrations.vllm")
_registered: list[object] = []


def register_hybrids() -> None:
    """Give models that have such layers jitfp4's; a second call changes nothing. Others' stay, with a warning."""
    if not _registered:
        _registered.append(register_module_module_registration_hook(_seen))
    _register()


def _seen(_owner: torch.nn.Module, _name: str, _module: torch.nn.Module | None) -> None:
    """A model registers a module: its first one comes before its layers are made."""
    _register()


def _register() -> None:
    if len(_registered) > 1 or _MODULE not in sys.modules:
        return
    _registered.append(_MODULE)
    from jitfp4.integrations.vllm.delta_rule import LAYERS

    for name, ours in LAYERS.items():
        registered = op_registry_oot.setdefault(name, ours)
        if registered is not ours:
            _log.warning("%s is %s already; jitfp4's is not registered", name, registered.__qualname__)
