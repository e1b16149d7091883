"""Quantization configs that give FP4 linear layers and experts to jitfp4, and leave the rest to vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm import platforms
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from jitfp4.formats import MXFP4, NVFP4
from jitfp4.integrations.checkpoints import Source
from jitfp4.integrations.partitions import fp4_format
from jitfp4.integrations.vllm.experts import (
    CompressedTensorsFp4ExpertsMethod,
    Fp4ExpertsMethod,
    GptOssFp4ExpertsMethod,
    ModelOptFp4ExpertsMethod,
)
from jitfp4.integrations.vllm.linear import Fp4LinearMethod

_FP4_CAPABILITY = 100  # from sm_100 on, tensor cores multiply FP4 by FP4


class Jitfp4CompressedTensorsConfig(CompressedTensorsConfig):
    """compressed-tensors, with its NVFP4 and MXFP4 linear layers on jitfp4."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name of this config for checkpoints that it serves, else None; see register()."""
        del hf_config
        if hf_quant_cfg is None or hf_quant_cfg.get("quant_method") != "compressed-tensors":
            return None
        groups = hf_quant_cfg.get("config_groups") or {}
        served = [group for group in groups.values() if fp4_format(group.get("weights")) is not None]
        by_16_bits = all(not group.get("input_activations") for group in served)
        return "jitfp4-compressed-tensors" if served and _claims(cls, user_quant, by_16_bits) else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """A method of jitfp4 for FP4 linear layers, else vLLM's own."""
        if isinstance(layer, (LinearBase, ParallelLMHead)) and not self.transform_config:
            scheme = self.get_scheme_dict(layer, layer_name=prefix)
            weights = scheme["weights"] if scheme else None
            block_format = fp4_format(None if weights is None else weights.model_dump())
            if block_format is not None:
                return Fp4LinearMethod(Source.COMPRESSED_TENSORS, block_format, prefix)
        if isinstance(layer, RoutedExperts) and Fp4ExpertsMethod.serves(layer.moe_config):
            self._add_fused_moe_to_target_scheme_map()  # as vLLM does first: "Linear" means experts, too
            names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            schemes = [self.get_scheme_dict(layer, layer_name=f"{prefix}.0.{name}") for name in names]
            formats = {fp4_format(scheme["weights"].model_dump() if scheme else None) for scheme in schemes}
            if len(formats) == 1 and (block_format := formats.pop()) is not None:
                return CompressedTensorsFp4ExpertsMethod(layer.moe_config, block_format)
        return super().get_quant_method(layer, prefix)


class Jitfp4ModelOptConfig(ModelOptNvFp4Config):
    """ModelOpt NVFP4, with its linear layers on jitfp4."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name of this config for checkpoints that it serves, else None; see register()."""
        del hf_config
        algorithm = cls._extract_modelopt_quant_algo(hf_quant_cfg)
        served = algorithm in ("NVFP4", "W4A16_NVFP4")
        return "jitfp4-modelopt" if served and _claims(cls, user_quant, algorithm == "W4A16_NVFP4") else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """A method of jitfp4 for linear layers that are not excluded, else vLLM's own."""
        is_linear = isinstance(layer, (LinearBase, ParallelLMHead))
        if is_linear and not self.is_layer_excluded(prefix) and not _is_vision(prefix):
            return Fp4LinearMethod(Source.MODELOPT, NVFP4, prefix)
        if (
            isinstance(layer, RoutedExperts)
            and not self.is_layer_excluded(prefix)
            and Fp4ExpertsMethod.serves(layer.moe_config)
        ):
            return ModelOptFp4ExpertsMethod(layer.moe_config, NVFP4)
        return super().get_quant_method(layer, prefix)


class Jitfp4GptOssConfig(GptOssMxfp4Config):
    """gpt-oss, with its MXFP4 experts on jitfp4. Its name stays vLLM's: the loader of experts asks for it."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name of this config for checkpoints that it serves, else None; see register()."""
        served = super().override_quantization_method(hf_quant_cfg, None, hf_config) is not None
        return "jitfp4-gpt-oss" if served and _claims(cls, user_quant, False) else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """A method of jitfp4 for experts, else vLLM's own."""
        if isinstance(layer, RoutedExperts) and GptOssFp4ExpertsMethod.serves(layer.moe_config):
            return GptOssFp4ExpertsMethod(layer.moe_config, MXFP4)
        return super().get_quant_method(layer, prefix)


CONFIGS = {
    "jitfp4-compressed-tensors": Jitfp4CompressedTensorsConfig,
    "jitfp4-modelopt": Jitfp4ModelOptConfig,
    "jitfp4-gpt-oss": Jitfp4GptOssConfig,
}


def has_fp4_layers() -> bool:
    """Whether jitfp4 runs the FP4 layers of the model that is made now."""
    return isinstance(get_current_vllm_config().quant_config, tuple(CONFIGS.values()))


def _claims(cls: type, user_quant: str | None, by_16_bits: bool) -> bool:
    """Whether jitfp4 runs a checkpoint: the user asked for no other config, and the GPU has no faster way."""
    names = [name for name, config in CONFIGS.items() if config is cls]
    if user_quant is not None:
        return user_quant in names
    capability = platforms.current_platform.get_device_capability()
    return by_16_bits or capability is None or capability.to_int() < _FP4_CAPABILITY


def _is_vision(prefix: str) -> bool:
    """Layers that ModelOpt before 0.39 did not quantize and did not list."""
    return any(part in prefix for part in ("vision_tower", "vision_model", "vit_large_projector"))
