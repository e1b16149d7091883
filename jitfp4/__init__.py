# ruff: noqa: F403 - type checkers read the star imports, and __getattr__ finds the same names
"""FP4 kernels for LLM inference, generated and compiled at first use, kept in a verified cache.

Importing this package touches no GPU, no file and no environment variable, and imports no torch. The kernel families
are imported with torch, before or after which this package may be imported, or when the first public name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jitfp4.registration import register_with_torch

if TYPE_CHECKING:  # what each module lists in its own __all__
    from jitfp4 import sim as sim
    from jitfp4.engine import *
    from jitfp4.errors import *
    from jitfp4.families.attention import *
    from jitfp4.families.conv import *
    from jitfp4.families.experts import *
    from jitfp4.families.gdn import *
    from jitfp4.families.gemm import *
    from jitfp4.families.kv import *
    from jitfp4.families.norm import *
    from jitfp4.families.quantize import *
    from jitfp4.families.step import *
    from jitfp4.formats import *
    from jitfp4.layouts import *
    from jitfp4.tuning import *

_HOMES = {
    "jitfp4.engine": ("CacheInfo", "cache_info"),
    "jitfp4.errors": (
        "ArgumentError",
        "ArgumentTypeError",
        "BundleError",
        "CacheCorruptError",
        "CacheError",
        "CacheUntrustedError",
        "CompileError",
        "Jitfp4Error",
        "LaunchError",
        "OfflineError",
        "RenderError",
        "SimError",
        "TacticsError",
        "ToolchainError",
        "UnsupportedArchError",
    ),
    "jitfp4.families.attention": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "FP4Tensor",
        "single_decode_with_kv_cache",
        "single_prefill_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache",
    ),
    "jitfp4.families.conv": ("causal_conv1d_fn", "causal_conv1d_update"),
    "jitfp4.families.experts": (
        "Fp4Experts",
        "fp4_experts",
        "fused_topk_deepseek",
        "prepare_fp4_experts",
        "route_experts",
        "route_tokens",
    ),
    "jitfp4.families.gdn": (
        "chunk_gated_delta_rule",
        "gated_delta_rule_decode",
        "gated_delta_rule_decode_pretranspose",
        "gated_delta_rule_mtp",
    ),
    "jitfp4.families.gemm": (
        "Fp4Weight",
        "fp8_row_scale",
        "grouped_gemm_nt_masked",
        "mm_bf16_fp4",
        "mm_fp4",
        "mm_fp8_fp4",
        "prepare_fp4_weight",
    ),
    "jitfp4.families.kv": (
        "nvfp4_kv_dequantize",
        "nvfp4_kv_dequantize_paged",
        "nvfp4_kv_quantize",
        "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
        "nvfp4_quantize_paged_kv_cache",
        "rope_append_paged_kv_cache",
    ),
    "jitfp4.families.norm": (
        "add_rmsnorm_fp4quant",
        "add_rmsnorm_fp8quant",
        "fused_add_rmsnorm",
        "gemma_fused_add_rmsnorm",
        "gemma_rmsnorm",
        "rmsnorm",
        "rmsnorm_fp4quant",
        "rmsnorm_fp8quant",
        "rmsnorm_gated",
        "rmsnorm_gated_fp4quant",
        "rmsnorm_linear",
        "rows_fp8quant",
    ),
    "jitfp4.families.quantize": (
        "block_scale_interleave",
        "e2m1_and_ufp8sf_scale_to_float",
        "fp4_quantize",
        "make_nvfp4_global_scale",
        "mxfp4_dequantize",
        "mxfp4_dequantize_host",
        "mxfp4_quantize",
        "nvfp4_batched_quantize",
        "nvfp4_block_scale_interleave",
        "nvfp4_dequantize",
        "nvfp4_quantize",
        "scaled_fp4_grouped_quantize",
        "shuffle_matrix_a",
        "shuffle_matrix_sf_a",
        "silu_and_mul",
        "silu_and_mul_nvfp4_quantize",
        "silu_and_mul_scaled_nvfp4_experts_quantize",
    ),
    "jitfp4.families.step": ("DecodeStep",),
    "jitfp4.formats": ("NVFP44Over6Config", "NVFP44Over6ErrMode"),
    "jitfp4.layouts": ("SfLayout",),
    "jitfp4.tuning": ("load_tactics", "tune"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["sim", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("jitfp4.version").version()
    if name not in __all__:
        raise AttributeError(f"module 'jitfp4' has no attribute {name!r}")
    if name == "sim":
        value: Any = importlib.import_module("jitfp4.sim")
    else:
        value = getattr(importlib.import_module(_HOME[name]), name)
    register_with_torch()  # a module that itself imported torch kept the families from being imported with it
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_torch()
