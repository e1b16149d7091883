"""The plugin for SGLang: FP4 linear layers and experts.

SGLang calls register() in each of its processes, through the entry point ``jitfp4`` of the group
``sglang.srt.plugins``. It hooks two methods with SGLang's own registry of hooks. Linear layers and experts of NVFP4 and
MXFP4 checkpoints of compressed-tensors and ModelOpt are claimed where the GPU has no FP4 tensor cores, and weights
without quantized activations everywhere. The rest stays SGLang's: heads, experts that another option asks for, and
attention and its cache. ``SGLANG_PLUGINS`` names the plugins that are loaded, where not all should be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import sglang  # noqa: F401 - only to say what is missing
except ImportError as error:
    raise ImportError("jitfp4.integrations.sglang needs SGLang: pip install sglang") from error

from sglang.srt.layers import linear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_schedule
from sglang.srt.utils import get_device_capability

from jitfp4.families.experts import fp4_experts
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.integrations.checkpoints import NAMES, Source
from jitfp4.integrations.partitioned_experts import MULTIPLE, PartitionedFp4Experts
from jitfp4.integrations.partitions import Parameters, PartitionedFp4Linear, fp4_format

__all__ = ["register"]

_QUANTIZATION = "sglang.srt.layers.quantization"
_GATE_UP = "concatenated gate,up"
_FP4_MAJOR = 10  # from sm_100 on, tensor cores multiply FP4 by FP4
_registered: set[str] = set()


class Jitfp4LinearMethod(PartitionedFp4Linear, LinearMethodBase):
    """A linear layer of SGLang; see PartitionedFp4Linear.

    Args:
        source, block_format, prefix: as there.
    """

    parameters = Parameters(ModelWeightParameter, GroupQuantScaleParameter, PerTensorScaleParameter)

    def __init__(self, source: Source, block_format: BlockFormat, prefix: str) -> None:
        super().__init__(source, block_format, prefix, _max_tokens())


class Jitfp4ExpertsMethod(PartitionedFp4Experts, FusedMoEMethodBase):
    """Experts of SGLang; see PartitionedFp4Experts. SGLang gives them ids of this rank's experts, -1 for others.

    Args:
        source, block_format: as for linear layers.
        layer: whose experts they are.
    """

    fuse_routed_scaling_factor_in_topk = True  # the weights of the chosen experts come with it

    def __init__(self, source: Source, block_format: BlockFormat, layer: Any) -> None:
        self.names = NAMES[source]
        super().__init__(block_format, _GATE_UP, layer.top_k, _max_tokens())

    @staticmethod
    def serves(layer: Any) -> bool:
        """Whether jitfp4 runs such a layer: plain SwiGLU, no biases or shared experts among them, sizes that fit.

        And whether no other backend is asked for.
        """
        config = layer.moe_runner_config
        others = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
        limited = any(getattr(config, name, None) is not None for name in others)  # 0.5.17 has no beta
        plain = config.activation == "silu" and config.is_gated and not config.no_combine and not limited
        alone = not layer.with_bias and not layer.num_fused_shared_experts
        by_choice = get_moe_runner_backend().is_auto() and get_moe_a2a_backend().is_none()
        sizes = layer.hidden_size, layer.intermediate_size_per_partition
        return plain and alone and by_choice and not any(size % MULTIPLE for size in sizes)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Nothing: apply() calls the kernels."""

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        """The sum of the chosen experts of each token [tokens, hidden]."""
        chosen = dispatch_output.topk_output
        out = fp4_experts(
            dispatch_output.hidden_states,
            layer.fp4_experts,
            chosen.topk_ids,
            chosen.topk_weights,
            activation="swiglu",
            apply_router_weight_on_input=layer.moe_runner_config.apply_router_weight_on_input,
        )
        return StandardCombineInput(hidden_states=out)


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
    """jitfp4's method for an FP4 linear layer or FP4 experts, else what ``own`` says."""
    if isinstance(layer, linear.LinearBase) and config.linear_fp8_config is None:
        block_format = _format_of(config, layer, prefix)
        if block_format is not None:
            return Jitfp4LinearMethod(Source.COMPRESSED_TENSORS, block_format, prefix)
    if isinstance(layer, FusedMoE) and Jitfp4ExpertsMethod.serves(layer):
        config._add_fused_moe_to_target_scheme_map()  # as SGLang does first: "Linear" means experts, too
        formats = {_format_of(config, layer, f"{prefix}.0.{name}_proj") for name in ("gate", "up", "down")}
        if len(formats) == 1 and (block_format := formats.pop()) is not None:
            return Jitfp4ExpertsMethod(Source.COMPRESSED_TENSORS, block_format, layer)
    return own(config, layer, prefix)


def _format_of(config: Any, layer: Any, name: str) -> BlockFormat | None:
    """The format of weights that jitfp4 claims; None of others."""
    scheme = config.get_scheme_dict(layer, name)
    weights = scheme["weights"] if scheme else None
    block_format = fp4_format(None if weights is None else weights.model_dump())
    return block_format if block_format is not None and _claims(not scheme["input_activations"]) else None


def method_of_modelopt(own: Callable[..., Any], config: Any, layer: Any, prefix: str) -> Any:
    """jitfp4's method for NVFP4 linear layers and experts whose inputs are not scaled (AWQ), else what ``own`` says."""
    stored = config.is_checkpoint_nvfp4_serialized and not config.is_awq and not config.is_layer_excluded(prefix)
    claimed = _claims(getattr(config, "is_w4a16", False))  # SGLang 0.5.17 has no such checkpoints here
    if isinstance(layer, FusedMoE) and stored and claimed and Jitfp4ExpertsMethod.serves(layer):
        return Jitfp4ExpertsMethod(Source.MODELOPT, NVFP4, layer)
    method = own(config, layer, prefix)
    kinds = (modelopt_quant.ModelOptFp4LinearMethod, modelopt_quant.ModelOptNvFp4A16LinearMethod)
    is_fp4 = isinstance(layer, linear.LinearBase) and type(method) in kinds
    if is_fp4 and not config.is_awq and claimed:
        return Jitfp4LinearMethod(Source.MODELOPT, NVFP4, prefix)
    return method


def _max_tokens() -> int:
    """The most tokens of a step."""
    schedule = get_schedule()
    return int(max(schedule.chunked_prefill_size or 0, schedule.max_prefill_tokens or 0))


def _claims(by_16_bits: bool) -> bool:
    """Whether jitfp4 runs a layer: its activations are in 16 bits, or the GPU has no products of FP4 by FP4."""
    major, _ = get_device_capability()
    return by_16_bits or major is None or major < _FP4_MAJOR
