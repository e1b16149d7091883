"""Attention over a paged KV cache: for a few query tokens (decode) and for many (prefill)."""

from jitfp4.families.attention.api import single_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache
from jitfp4.families.attention.context import single_prefill_with_kv_cache, trtllm_batch_context_with_kv_cache
from jitfp4.families.attention.decode_wrapper import BatchDecodeWithPagedKVCacheWrapper
from jitfp4.families.attention.prefill_wrapper import BatchPrefillWithPagedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
]
