"""What the launches of the kernels have in common: the parameters of a cache, its strides, the cut of the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from jitfp4.dispatch import known
from jitfp4.families.kv.arguments import Dequantize, Quantize
from jitfp4.layouts import ceil_div
from jitfp4.spec import I64, KernelSpec

MAX_THREADS = 256
PLACE_BYTES = 8

CACHE = (
    I64("num_pages"),
    I64("page_size"),
    I64("heads"),
    I64("cols", "block scales of a head"),
    I64("codes_page", "bytes from one to the next, in both sides"),
    I64("codes_token"),
    I64("codes_head"),
    I64("sf_page"),
    I64("sf_token"),
    I64("sf_head"),
    I64("interleaved_side", "0 for K, 1 for V, else neither"),
    I64("wide_lists", "bit i: list i has entries of 8 bytes, not 4"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec(KernelSpec):
    """What the specs of all kernels have in common."""

    @property
    def max_threads(self) -> int:
        """The most threads of a CTA."""
        return MAX_THREADS

    @property
    def place_bytes(self) -> int:
        """Bytes of shared memory for the place of one token."""
        return PLACE_BYTES


def steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of all dimensions but the last; 0 for a dimension of size 1, whose stride means nothing."""
    return tuple(
        0 if known(size == 1) else stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )


def bind_cache(a: Quantize | Dequantize, lists: tuple[torch.Tensor | None, ...]) -> Mapping[str, int]:
    """The values of CACHE; ``lists`` in the order of their numbers."""
    pages, page_size, heads, cols = a.k_sf.shape
    codes, sf = steps(a.k_codes), steps(a.k_sf)
    return {
        "num_pages": pages,
        "page_size": page_size,
        "heads": heads,
        "cols": cols,
        **dict(zip(("codes_page", "codes_token", "codes_head"), codes, strict=True)),
        **dict(zip(("sf_page", "sf_token", "sf_head"), sf, strict=True)),
        "interleaved_side": a.interleaved,
        "wide_lists": sum(1 << i for i, x in enumerate(lists) if x is not None and x.dtype == torch.int64),
    }


def cut(tokens: int, items: int, tokens_per_thread: int, threads: int) -> tuple[int, int, tuple[int, int, int]]:
    """CTAs over tokens, CTAs over the items of a token, and the shape of a CTA: x over items, y over tokens."""
    strips = ceil_div(items, threads)
    wide = ceil_div(items, strips)
    high = max(1, threads // wide)
    return ceil_div(tokens, high * tokens_per_thread), strips, (wide, high, 1)
