"""The plugin for vLLM: FP4 linear layers and experts, attention over an NVFP4 KV cache, and norms.

vLLM calls register() in each of its processes, through the entry point ``jitfp4`` of the group
``vllm.general_plugins``. Nothing of vLLM is patched: all that is used are its registries, and a hook of torch's.

- NVFP4 and MXFP4 checkpoints of compressed-tensors and ModelOpt are claimed where the GPU has no FP4 tensor cores, and
  weights without quantized activations everywhere; gpt-oss likewise. ``--quantization compressed-tensors`` (or
  ``modelopt_fp4``, ``gpt_oss_mxfp4``) keeps vLLM's own kernels.
- The product of an MLP's gates and ups applies SiluAndMul itself, where no LoRA adapters are enabled.
- ``--attention-backend CUSTOM`` is jitfp4's, with ``--kv-cache-dtype nvfp4`` or ``auto``.
- RMSNorm of models whose FP4 layers it runs is jitfp4's, where it is not compiled with the rest by torch.compile; so
  are their layers of gated delta rules, and the gated norms behind these.
- ``--additional-config '{"jitfp4_activations": "fp4"}'`` lets norms and SwiGLU give NVFP4 to vLLM's own products of FP4
  by FP4, where these take it.
"""

from __future__ import annotations

import logging

try:
    import vllm  # noqa: F401 - only to say what is missing
except ImportError as error:
    raise ImportError("jitfp4.integrations.vllm needs vLLM, 0.26.0 or newer: pip install vllm") from error

__all__ = ["register"]

BACKEND = "jitfp4.integrations.vllm.attention.Jitfp4AttentionBackend"

_log = logging.getLogger("jitfp4.integrations.vllm")


def register() -> None:
    """Register quantization configs, the attention backend and norms with vLLM; a second call changes nothing.

    Another plugin's backend for CUSTOM and its layers are left in place, with a warning.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from jitfp4.integrations.vllm.activations import register_activations
    from jitfp4.integrations.vllm.hybrids import register_hybrids
    from jitfp4.integrations.vllm.norms import register_norms
    from jitfp4.integrations.vllm.quantization import CONFIGS
    from jitfp4.integrations.vllm.swiglu import register_swiglu

    register_norms()
    register_hybrids()
    register_swiglu()
    register_activations()
    for name, config in CONFIGS.items():
        register_quantization_config(name)(config)
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        _log.warning("the attention backend CUSTOM is %s already; jitfp4's is not registered", custom.get_path())
    else:
        register_backend(custom, BACKEND)
