"""What users ask the plugin for, by vLLM's ``--additional-config``."""

from __future__ import annotations

from vllm.config import VllmConfig

from jitfp4.errors import ArgumentError


def asks_for_fp8(config: VllmConfig) -> bool:
    """Whether activations of many tokens are to be in E4M3: ``{"jitfp4_activations": "fp8"}``. Raises ArgumentError."""
    activations: str | None = config.additional_config.get("jitfp4_activations")
    if activations not in (None, "fp8"):
        raise ArgumentError("additional_config, jitfp4_activations", repr(activations), "'fp8' or None")
    return activations == "fp8"
