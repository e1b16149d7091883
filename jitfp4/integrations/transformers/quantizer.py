"""The quantizer: linear layers are replaced on the meta device, filled while files are read, and prepared after it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from jitfp4.errors import ArgumentError
from jitfp4.formats import BlockFormat
from jitfp4.integrations.checkpoints import Source, fp4_experts_of, fp4_layers
from jitfp4.integrations.experts import ExpertsModule, Shape, stacked
from jitfp4.integrations.layers import Expected, Fp4Linear, fuse, prepared, quantized
from jitfp4.integrations.swiglu import SwiGlu, swiglu_of
from jitfp4.integrations.transformers.config import METHOD, Jitfp4Config
from jitfp4.integrations.transformers.delta_rule import fuse_delta_nets
from jitfp4.integrations.transformers.experts import shape_of
from jitfp4.integrations.transformers.glue import fuse_glue

# Layers that are too small, or whose outputs decide too much: they choose experts, or are exponents of decays.
KEPT = ("gate", "router", "shared_expert_gate", "in_proj_ba", "in_proj_b", "in_proj_a")
_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
_ONE_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)_proj")
_FP4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


class Jitfp4Quantizer(HfQuantizer):  # type: ignore[misc]
    """Loads FP4 layers of every kind that jitfp4.integrations.checkpoints knows, and quantizes those in floats."""

    requires_calibration = False
    quantization_config: Jitfp4Config

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raises ArgumentError for layers that would be on the disk when they are called."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ArgumentError("device_map", "a layer on disk", "the CPU and GPUs")

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a tensor is one of an FP4 layer."""
        layer, kind = param_name.rpartition(".")[::2]
        return not kind.endswith("bias") and isinstance(model.get_submodule(layer), (Expected, ExpertsModule))

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element on the device: what is quantized while it is loaded needs few."""
        if not self.pre_quantized and param.dim() > 1 and self.param_needs_quantization(model, param_name):
            return 0.5 + 1 / self.quantization_config.format.block
        return float(param.element_size())

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """Experts that are loaded one by one are not joined by transformers."""
        if self._by_expert:
            weight_conversions = [
                conversion
                for conversion in weight_conversions
                if not (isinstance(conversion, WeightConverter) and ".experts." in str(conversion.target_patterns))
            ]
        return list(super().update_weight_conversions(weight_conversions, *args))

    def get_quantize_ops(self) -> ConversionOps:
        """What makes an FP4 layer of a float weight."""
        return _Quantize(self.quantization_config.format)

    _by_expert = False

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, dtype: torch.dtype | None = None, **_: Any
    ) -> None:
        names = list(_names(checkpoint_files or ()))
        layers, experts = fp4_layers(names), fp4_experts_of(names)
        self.pre_quantized = bool(layers or experts)
        floats = dtype or torch.bfloat16
        if self.pre_quantized:
            self._expect(model, names, layers, experts, floats)
        else:
            self._expect_floats(model, floats)

    def _expect_floats(self, model: Any, floats: torch.dtype) -> None:
        """Replace all layers that are to be quantized while they are loaded."""
        kept = self._kept(model)

        def is_kept(name: str) -> bool:
            return name.rpartition(".")[2] in KEPT or any(f".{part}." in f".{name}." for part in kept)

        for name, linear in _linears(model):
            if not is_kept(name):
                block_format = self.quantization_config.format
                layer = Fp4Linear(*_sizes(linear), linear.bias is not None, floats, block_format)
                layer.expect_floats(floats)
                _replace(model, name, layer)
        for name, shape in _experts(model).items():
            if not is_kept(name):
                module = ExpertsModule(shape)
                module.expect_floats(floats)
                _replace(model, name, module)

    def _expect(
        self,
        model: Any,
        names: list[str],
        layers: Mapping[str, Source],
        experts: Mapping[str, Source],
        floats: torch.dtype,
    ) -> None:
        """Replace the layers that a checkpoint has in FP4."""
        kinds: dict[str, set[str]] = {}
        for full in names:
            layer_name, kind = full.rpartition(".")[::2]
            kinds.setdefault(layer_name, set()).add(kind)
        linears, shapes = dict(_linears(model)), _experts(model)
        owners: dict[str, Source] = dict(experts)
        for layer_name, source in layers.items():
            if one := _ONE_EXPERT.fullmatch(layer_name):
                owners[one[1]] = source
                self._by_expert = True
                continue
            name = _own_name(model, layer_name, linears)
            layer = Fp4Linear(*_sizes(linears[name]), linears[name].bias is not None, floats, _saved(kinds[layer_name]))
            layer.expect(source, kinds[layer_name])
            _replace(model, name, layer)
        for layer_name, source in owners.items():
            name = _own_name(model, layer_name, shapes)
            inner = {
                full.removeprefix(layer_name).removeprefix("."): found
                for full, found in kinds.items()
                if f"{full}.".startswith(f"{layer_name}.")
            }
            module = ExpertsModule(shapes[name])
            module.expect(source, inner, floats)
            _replace(model, name, module)

    def _kept(self, model: Any) -> list[str]:
        """Modules, or adjacent parts of their names, whose linear layers keep their floats."""
        head = model.get_output_embeddings()
        heads = [name for name, module in model.named_modules() if module is head is not None]
        tied = any(name in key for name in heads for key in getattr(model, "all_tied_weights_keys", ()))
        kept = [*self.quantization_config.modules_to_not_convert, *(model._keep_in_fp32_modules or ())]
        return kept if self.quantization_config.lm_head and not tied else kept + heads

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if (ranks := getattr(model, "_tp_size", None) or 1) > 1:
            raise ArgumentError("tp_plan", f"{ranks} ranks", "none: FP4 layers are not divided over ranks")
        for name, module in list(model.named_modules()):
            if isinstance(module, (Fp4Linear, ExpertsModule)):
                module.finish(name)
        config = self.quantization_config
        if config.lm_head and isinstance(head := model.get_output_embeddings(), nn.Linear):
            _untie(model, head, config.format)
        config.modules_to_not_convert = [name for name, _ in _linears(model)]
        if config.fuse:
            fuse_siblings(model)
            fuse_glue(model)
            fuse_delta_nets(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The state of a model as it is saved: parts of what is fused are tensors of their own."""
        state = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, SwiGlu):
                state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.gate_up.")}
                state |= {f"{name}.{key}": tensor for key, tensor in module.separate().items()}
            elif isinstance(module, Fp4Linear) and module.fused:
                for kind in ("weight", "alpha"):
                    if f"{name}.{kind}" in state:
                        state[f"{name}.{kind}"] = state[f"{name}.{kind}"].clone()
        return state, {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Yes: what is saved is loaded as it is."""
        return True

    @property
    def is_trainable(self) -> bool:
        """No."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Yes: every call is traced."""
        return True


class _Quantize(ConversionOps):  # type: ignore[misc]
    """A float weight becomes the tensors of an FP4 layer, where it is."""

    def __init__(self, block_format: BlockFormat) -> None:
        self.format = block_format

    def convert(self, input_dict: Mapping[str, Any], *, model: Any, **_: Any) -> dict[str, torch.Tensor]:
        """One layer's weight by name to its tensors by name: prepared ones, or codes and scales of experts."""
        out: dict[str, torch.Tensor] = {}
        for name, given in input_dict.items():
            floats = given[0] if isinstance(given, list) else given
            owner = model.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, ExpertsModule):
                out |= stacked(name, floats, owner.shape.transposed, self.format)
                continue
            layer = quantized(floats, self.format)
            named = prepared(layer).tensors()
            stem = name.removesuffix("weight")
            out |= {name: named["data"], f"{stem}weight_size": named["size"]}
            if layer.decode_scale is not None:
                out[f"{stem}alpha"] = layer.decode_scale
            if "row_scale" in named:
                out[f"{stem}weight_row_scale"] = named["row_scale"]
        return out


def fuse_siblings(model: Any) -> int:
    """Fuse layers of one input, by their usual names, where scales allow it. Returns how many groups were.

    MLPs of gates and ups become SwiGlu.
    """
    count = 0
    for name, module in list(model.named_modules()):
        if (mlp := swiglu_of(module)) is not None:
            _replace(model, name, mlp)
            count += 1
            continue
        for names in _GROUPS:
            layers = [layer for name in names if isinstance(layer := getattr(module, name, None), Fp4Linear)]
            if len(layers) == len(names):
                count += fuse(layers)
    return count


def _untie(model: Any, head: nn.Linear, block_format: BlockFormat) -> None:
    """Replace the head, which has the embedding's weight, by one of its own in FP4."""
    layer = Fp4Linear(*_sizes(head), head.bias is not None, head.weight.dtype, block_format)
    layer.load(quantized(head.weight.data, block_format))
    layer.bias = head.bias
    model.set_output_embeddings(layer)
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def _names(files: Iterable[str]) -> Iterator[str]:
    """All tensors of safetensors files. Raises ArgumentError for another file."""
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ArgumentError("checkpoint", str(file), "safetensors files")
        with safe_open(file, framework="pt") as opened:
            yield from opened.keys()


def _linears(model: Any) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]


def _experts(model: Any) -> dict[str, Shape]:
    found = {name: shape_of(module) for name, module in model.named_modules()}
    return {name: shape for name, shape in found.items() if shape is not None}


def _sizes(linear: nn.Linear) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _saved(kinds: set[str]) -> BlockFormat:
    """The format of a layer that jitfp4 saved; for others it does not matter yet."""
    return Jitfp4Config("mxfp4" if "weight_row_scale" in kinds else "nvfp4").format


def _own_name(model: Any, name: str, modules: Mapping[str, object]) -> str:
    """The name in the model of a checkpoint's layer: one may have a prefix that the other lacks."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for own in (name, f"{prefix}{name}", name.removeprefix(prefix)):
        if own in modules:
            return own
    raise ArgumentError("checkpoint", f"an FP4 weight of {name}", "weights of the model's linear layers and experts")


def _replace(model: Any, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


# ---- methods of others -----------------------------------------------------------------------------------------------


def claim() -> None:
    """Register the method, and take over the FP4 formats of methods that transformers may know already."""
    AUTO_QUANTIZER_MAPPING[METHOD] = Jitfp4Quantizer
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Jitfp4Config
    ours = {"compressed-tensors": _is_compressed_fp4, "modelopt": _is_modelopt_fp4, "mxfp4": _is_gpt_oss}
    for method, is_fp4 in ours.items():
        known = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
        if not getattr(known, "of_jitfp4", False):
            AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _claimed(method, known, is_fp4)


def _claimed(
    method: str, known: type[QuantizationConfigMixin] | None, is_fp4: Callable[[Mapping[str, Any]], bool]
) -> type[QuantizationConfigMixin]:
    """The config of a method: Jitfp4Config for an FP4 checkpoint, else what it was."""

    class Claimed(known or QuantizationConfigMixin):  # type: ignore[misc]
        """Chooses by what config.json says."""

        of_jitfp4 = True

        @classmethod
        def from_dict(cls, config_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            if is_fp4(config_dict):
                return Jitfp4Config.from_dict({}, *args, **kwargs)
            if known is None:
                raise ArgumentError(f"quantization_config, {method}", dict(config_dict), "NVFP4")
            return known.from_dict(config_dict, *args, **kwargs)

    return Claimed


def _is_compressed_fp4(config: Mapping[str, Any]) -> bool:
    groups = (config.get("config_groups") or {}).values()
    formats = {group.get("format") or config.get("format") for group in groups if isinstance(group, Mapping)}
    return bool(formats) and formats <= set(_FP4_FORMATS)


def _is_modelopt_fp4(config: Mapping[str, Any]) -> bool:
    return "FP4" in str(config.get("quant_algo") or config.get("quantization", {}).get("quant_algo"))


def _is_gpt_oss(config: Mapping[str, Any]) -> bool:
    return not config.get("dequantize", False)
