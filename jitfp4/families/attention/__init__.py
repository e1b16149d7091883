"""Attention over a paged cache: of a few query tokens, and of many."""

from jitfp4.families.attention.api import single_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache
from jitfp4.families.attention.context import trtllm_batch_context_with_kv_cache
from jitfp4.families.attention.wrapper import BatchDecodeWithPagedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
]
