"""What users ask the plugin for, by vLLM's ``--additional-config``."""

from __future__ import annotations

from vllm.config import VllmConfig

from jitfp4.errors import ArgumentError


def activations_of(config: VllmConfig) -> str | None:
    """The format of activations that is asked for: ``{"jitfp4_activations": "fp8"}`` or "fp4". Raises ArgumentError.

    "fp8": of many tokens, in products of jitfp4's. "fp4": as norms and SwiGLU make them for products of vLLM's own.
    """
    activations: str | None = config.additional_config.get("jitfp4_activations")
    if activations not in (None, "fp8", "fp4"):
        raise ArgumentError("additional_config, jitfp4_activations", repr(activations), "'fp8', 'fp4' or None")
    return activations
