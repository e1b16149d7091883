"""The plugin for SGLang: FP4 linear layers.

SGLang calls register() in each of its processes, through the entry point ``jitfp4`` of the group
``sglang.srt.plugins``. It hooks two methods with SGLang's own registry of hooks. Linear layers of NVFP4 and MXFP4
checkpoints of compressed-tensors and ModelOpt are claimed where the GPU has no FP4 tensor cores, and weights without
quantized activations everywhere. The rest stays SGLang's: heads, experts, attention and its cache. ``SGLANG_PLUGINS``
names the plugins that are loaded, where not all should be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import sglang  # noqa: F401 - only to say what is missing
except ImportError as error:
    raise ImportError("jitfp4.integrations.sglang needs SGLang: pip install sglang") from error

from sglang.srt.layers import linear
from sglang.srt.layers.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_schedule
from sglang.srt.utils import get_device_capability

from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.integrations.checkpoints import Source
from jitfp4.integrations.partitions import Parameters, PartitionedFp4Linear, fp4_format

__all__ = ["register"]

_QUANTIZATION = "sglang.srt.layers.quantization"
_FP4_MAJOR = 10  # from sm_100 on, tensor cores multiply FP4 by FP4
_registered: set[str] = set()


class Jitfp4LinearMethod(PartitionedFp4Linear, LinearMethodBase):
    """A linear layer of SGLang; see PartitionedFp4Linear.

    Args:
        source, block_format, prefix: as there.
    """

    parameters = Parameters(ModelWeightParameter, GroupQuantScaleParameter, PerTensorScaleParameter)

    def __init__(self, source: Source, block_format: BlockFormat, prefix: str) -> None:
        schedule = get_schedule()
        max_tokens = max(schedule.chunked_prefill_size or 0, schedule.max_prefill_tokens or 0)
        super().__init__(source, block_format, prefix, int(max_tokens))


def register() -> None:
    """Register the hooks and the name of the method; a second call changes nothing. SGLang then applies the hooks."""
    supported = linear.WEIGHT_LOADER_V2_SUPPORTED
    if Jitfp4LinearMethod.__name__ not in supported:
        supported.append(Jitfp4LinearMethod.__name__)
    for config, hook in (
        ("compressed_tensors.compressed_tensors.CompressedTensorsConfig", method_of_compressed_tensors),
        ("modelopt_quant.ModelOptFp4Config", method_of_modelopt),
    ):
        target = f"{_QUANTIZATION}.{config}.get_quant_method"
        if target not in _registered:
            _registered.add(target)
            HookRegistry.register(target, hook, HookType.AROUND)


def method_of_compressed_tensors(own: Callable[..., Any], config: Any, layer: Any, prefix: str) -> Any:
    """jitfp4's method for an FP4 linear layer, else what ``own`` says."""
    if isinstance(layer, linear.LinearBase) and config.linear_fp8_config is None:
        scheme = config.get_scheme_dict(layer, prefix)
        weights = scheme["weights"] if scheme else None
        block_format = fp4_format(None if weights is None else weights.model_dump())
        if block_format is not None and _claims(not scheme["input_activations"]):
            return Jitfp4LinearMethod(Source.COMPRESSED_TENSORS, block_format, prefix)
    return own(config, layer, prefix)


def method_of_modelopt(own: Callable[..., Any], config: Any, layer: Any, prefix: str) -> Any:
    """jitfp4's method for a linear layer in NVFP4 whose inputs are not scaled (AWQ), else what ``own`` says."""
    method = own(config, layer, prefix)
    kinds = (modelopt_quant.ModelOptFp4LinearMethod, modelopt_quant.ModelOptNvFp4A16LinearMethod)
    is_fp4 = isinstance(layer, linear.LinearBase) and type(method) in kinds
    if is_fp4 and not config.is_awq and _claims(config.is_w4a16):
        return Jitfp4LinearMethod(Source.MODELOPT, NVFP4, prefix)
    return method


def _claims(by_16_bits: bool) -> bool:
    """Whether jitfp4 runs a layer: its activations are in 16 bits, or the GPU has no products of FP4 by FP4."""
    major, _ = get_device_capability()
    return by_16_bits or major is None or major < _FP4_MAJOR
