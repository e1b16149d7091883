"""Attention over a paged KV cache: for a few query tokens (decode) and for many (prefill)."""

from jitfp4.families.attention.api import trtllm_batch_decode_with_kv_cache
from jitfp4.families.attention.context import single_prefill_with_kv_cache, trtllm_batch_context_with_kv_cache
from jitfp4.families.attention.decode_wrapper import BatchDecodeWithPagedKVCacheWrapper
from jitfp4.families.attention.fp4_tensor import FP4Tensor
from jitfp4.families.attention.prefill_wrapper import BatchPrefillWithPagedKVCacheWrapper
from jitfp4.families.attention.single import single_decode_with_kv_cache
from jitfp4.families.attention.xqa import xqa_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "FP4Tensor",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]
