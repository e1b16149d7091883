"""The KV cache: quantize, append to pages, also behind a rotation, dequantize."""

from jitfp4.families.kv.api import (
    nvfp4_kv_dequantize,
    nvfp4_kv_dequantize_paged,
    nvfp4_kv_quantize,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    nvfp4_quantize_paged_kv_cache,
)
from jitfp4.families.kv.rope import rope_append_paged_kv_cache

__all__ = [
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_paged_kv_cache",
    "rope_append_paged_kv_cache",
]
