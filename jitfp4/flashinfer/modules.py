"""FlashInfer's modules, and in each of them what jitfp4 has of it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jitfp4

HERE = {
    "ActivationType": "expert_layers",
    "cutlass_fused_moe": "moe",
    "interleave_moe_scales_for_sm90_mixed_gemm": "mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm": "mixed_gemm",
    "trtllm_fp4_block_scale_routed_moe": "trtllm_moe",
}
"""Names that jitfp4 has for FlashInfer's callers alone, and their modules in this package."""

LEFT = (
    *("ActivationType", "FP4Tensor", "NVFP44Over6Config", "NVFP44Over6ErrMode", "SfLayout"),
    *("interleave_moe_scales_for_sm90_mixed_gemm", "interleave_moe_weights_for_sm90_mixed_gemm"),
)
"""FlashInfer's own are left to it by overlay(): jitfp4's functions take them, and what they return."""

_FP4 = (
    "SfLayout",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_dequantize",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize",
    "nvfp4_quantize_paged_kv_cache",
    "scaled_fp4_grouped_quantize",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul_nvfp4_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
)
_MOE = tuple(HERE)
_NORM = ("add_rmsnorm_fp4quant", "rmsnorm_fp4quant")
_SCALES = ("NVFP44Over6Config", "NVFP44Over6ErrMode", "make_nvfp4_global_scale")

MODULES: dict[str, tuple[str, ...]] = {
    "activation": ("silu_and_mul", "silu_and_mul_scaled_nvfp4_experts_quantize"),
    "cute_dsl": (*_NORM, "grouped_gemm_nt_masked"),
    "cute_dsl.add_rmsnorm_fp4quant": ("add_rmsnorm_fp4quant",),
    "cute_dsl.blockscaled_gemm": ("grouped_gemm_nt_masked",),
    "cute_dsl.rmsnorm_fp4quant": ("rmsnorm_fp4quant",),
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "single_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache",
    ),
    "fp4_quantization": _FP4,
    "fused_moe": (*_MOE, "fused_topk_deepseek"),
    "fused_moe.core": _MOE,
    "fused_moe.fused_routing_dsv3": ("fused_topk_deepseek",),
    "gdn_decode": (
        "gated_delta_rule_decode",
        "gated_delta_rule_decode_pretranspose",
        "gated_delta_rule_mtp",
    ),
    "gemm": ("grouped_gemm_nt_masked", "mm_fp4"),  # FlashInfer's mm_bf16_fp4 takes other arguments
    "gemm.gemm_base": ("mm_fp4",),
    "norm": _NORM,
    "page": (
        "nvfp4_kv_dequantize_paged",
        "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
    ),
    "quantization": (*_FP4, *_SCALES),
    "quantization.fp4_quantization": _FP4,
    "quantization.nvfp4_quantization_utils": _SCALES,
    "utils": ("FP4Tensor",),
}
"""FlashInfer's modules, and of their functions those that jitfp4 has under these names."""

KERNELS: dict[str, tuple[str, ...]] = {
    "gdn_kernels": ("gated_delta_rule_mtp",),
    "gdn_kernels.gdn_decode_bf16_state": ("gated_delta_rule_mtp",),
}
"""Modules below FlashInfer's functions, from which engines import, too: names of ``jitfp4.flashinfer.states``."""

ALL = tuple(dict.fromkeys(name for names in MODULES.values() for name in names))
FUNCTIONS = tuple(name for name in ALL if name not in LEFT)


class Module(ModuleType):
    """A module of names that are looked up in jitfp4 when they are used."""

    def __init__(self, name: str, names: tuple[str, ...], modules: tuple[str, ...] = ()) -> None:
        super().__init__(name, f"FlashInfer's {name.partition('.')[2] or 'package'}, as far as jitfp4 has it.")
        self.__spec__ = ModuleSpec(name, None, is_package=bool(modules))
        self.__path__: list[str] = []
        self.__all__ = [public for public in names if public in HERE or public in jitfp4.__all__]

    def __getattr__(self, name: str) -> Any:
        return look_up(self.__name__, self.__all__, name)

    def __dir__(self) -> list[str]:
        return sorted(self.__all__)


def look_up(module: str, names: list[str], name: str) -> Any:
    """The function ``name`` of jitfp4, if it is one of ``names``."""
    if name in names:
        return of_jitfp4("", name)
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    has = ", ".join(names) or "nothing yet"
    raise AttributeError(f"{module}.{name} is not in jitfp4, which stands in for this module; it has {has}")


def of_jitfp4(module: str, name: str) -> Any:
    """What stands in for ``name`` of FlashInfer's ``module``, named without the package."""
    home = "states" if name in KERNELS.get(module, ()) else HERE.get(name)
    return getattr(jitfp4 if home is None else importlib.import_module(f"jitfp4.flashinfer.{home}"), name)


def modules(root: str) -> dict[str, ModuleType]:
    """FlashInfer's modules below ``root``, by their full names; each is an attribute of the module above it."""
    found: dict[str, ModuleType] = {f"{root}.{name}": Module(f"{root}.{name}", MODULES[name]) for name in MODULES}
    for name, names in KERNELS.items():
        kernels = found[f"{root}.{name}"] = Module(f"{root}.{name}", ())
        vars(kernels).update({public: of_jitfp4(name, public) for public in names}, __all__=list(names))
    for name, module in found.items():
        above, _, last = name.rpartition(".")
        if above in found and last not in found[above].__all__:  # cute_dsl.rmsnorm_fp4quant is the function, as there
            setattr(found[above], last, module)
    return found


def register(package: ModuleType) -> None:
    """Make the modules submodules of ``package``."""
    for name, module in modules(package.__name__).items():
        sys.modules[name] = module
        if name.count(".") == package.__name__.count(".") + 1:
            setattr(package, name.rpartition(".")[2], module)
