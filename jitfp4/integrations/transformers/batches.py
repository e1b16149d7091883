"""generate_batch(), transformers' continuous batching, over pages in NVFP4.

transformers has a table of allocators of pages, one for each kind of attention, and takes a name with "flash" in it for
an attention of packed requests that needs no masks. A page of the cache is that of one layer, and holds ``[K codes | K
scales | V codes | V scales]``, each part [kv_heads, tokens, ...]; what transformers calls a page may be several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import AttentionInterface, __version__

try:
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
except ImportError as error:
    raise ImportError(f"nvfp4_batches() needs transformers 5.23 or newer, and this is {__version__}") from error

from jitfp4.errors import ArgumentError
from jitfp4.families.attention import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from jitfp4.families.attention.api import new_workspace
from jitfp4.families.attention.problem import MAX_PAGE
from jitfp4.families.kv import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
from jitfp4.formats import NVFP4
from jitfp4.integrations.transformers.attention import by_token
from jitfp4.layouts import ceil_div

NAME = "flash_jitfp4"

_GROUP = 4  # tokens whose scales are interleaved


@contextmanager
def nvfp4_batches(model: Any, scales: Sequence[tuple[float, float]]) -> Iterator[None]:
    """Let ``model.generate_batch()`` keep keys and values in NVFP4, in 9/32 of bf16's memory, inside of a ``with``.

    Attention is jitfp4's then, with sinks and sliding windows; layers with a window keep all tokens. transformers'
    ``num_blocks`` still counts in blocks of the model's dtype, so more tokens than it says find room.

    Args:
        model: whose layers all have attention, with a head dimension of 64, 80, 96, 112, 128, 192 or 256.
        scales: for each layer the decode scales of keys and of values, as calibrate() gives them.
    Raises:
        ArgumentError: if there are not as many scales as layers. generate_batch() raises one for a ``page_size`` that
            is neither a multiple of 4 up to 128 nor one of 128, and when a manager is used after the ``with``.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(scales) != layers:
        raise ArgumentError("scales", f"{len(scales)} pairs", f"{layers}, one for each layer")
    table, attention = dict(ATTN_TYPE_TO_ALLOCATOR), model.config._attn_implementation
    for kind in table:
        given = {"layer_type": kind, "scales": tuple(scales)}
        ATTN_TYPE_TO_ALLOCATOR[kind] = type(Nvfp4Allocator.__name__, (Nvfp4Allocator,), given)
    AttentionInterface.register(NAME, attend)
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        ATTN_TYPE_TO_ALLOCATOR.update(table)
        model.config._attn_implementation = attention


class Pages(NamedTuple):
    """Codes and scales of keys and values [pages, kv_heads, tokens, ...], and their decode scales float32 [1]."""

    codes: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]
    factors: tuple[torch.Tensor, torch.Tensor]


class Nvfp4Allocator(FullAttentionCacheAllocator):  # type: ignore[misc]
    """Pages of the layers of one kind: page ``p`` of the first is page ``p`` of the second, counted from its first."""

    supports_block_table = False
    rows_per_token = 1
    sliding_window = None  # all tokens are kept
    scales: ClassVar[tuple[tuple[float, float], ...]]

    @classmethod
    def get_bytes_per_page(
        cls, num_key_value_heads: int, head_dim: int, cache_dtype: torch.dtype, page_size: int
    ) -> int:
        """Of keys and values of a layer."""
        del cache_dtype
        return 2 * num_key_value_heads * page_size * (head_dim // 2 + head_dim // NVFP4.block)

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        """Divide the memory, bytes, into pages."""
        size = self.tokens_per_page
        self.tokens = min(size, MAX_PAGE)
        if size % self.tokens or self.tokens % _GROUP:
            raise ArgumentError("page_size", size, f"a multiple of {_GROUP} to {MAX_PAGE}, or of {MAX_PAGE}")
        self.bytes_per_sector, self._copy_view = bytes_per_sector, cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        rows, d = self.num_key_value_heads * self.tokens, self.head_dim
        widths = (d // 2, d // NVFP4.block) * 2
        parts = cache_tensor.view(-1, rows * sum(widths)).split([rows * width for width in widths], 1)
        k, k_sf, v, v_sf = (
            part.unflatten(1, (self.num_key_value_heads, self.tokens, width))
            for part, width in zip(parts, widths, strict=True)
        )
        sf = k_sf.view(torch.float8_e4m3fn), v_sf.view(torch.float8_e4m3fn)
        self.pages: dict[int, Pages] = {}
        for number, layer in enumerate(self.layer_indices):
            first = number * (size // self.tokens)
            factors = [torch.tensor([scale], dtype=torch.float32, device=k.device) for scale in self.scales[layer]]
            own = (k[first:], v[first:]), (sf[0][first:], sf[1][first:])
            self.pages[layer] = Pages(*own, (factors[0], factors[1]))
        self.order = "interleaved4" if d % 64 == 0 else "linear"
        self.workspace = new_workspace(k.device)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The first places of a request's pages, where others want that of each token."""
        firsts = range(0, self.tokens_per_page, self.tokens)
        places = [page * self.block_physical_stride + at for page in self.block_table[request_id] for at in firsts]
        return places[: ceil_div(past_length + query_length, self.tokens)]

    def begin(
        self, q_ends: torch.Tensor, ends: torch.Tensor, longest: int, read: torch.Tensor, written: torch.Tensor
    ) -> None:
        """Find lengths and pages of a step's requests: the pages that are read, or where nothing is, places written.

        Where there are as many requests as tokens, each token becomes a request that ends with it. Most have one token
        then; in a captured step, requests without tokens fill up, and others may have several.
        """
        self.slots, self.ends = written, ends.to(torch.int32)
        self.lengths = self.ends.diff()
        columns = torch.arange(ceil_div(longest, self.tokens), device=ends.device)
        if read.numel():
            counts = (self.lengths + self.tokens - 1) // self.tokens
            places, starts = read, counts.cumsum(0) - counts
        else:
            places, starts, columns = written, ends[:-1], columns * self.tokens
        firsts = (starts.unsqueeze(1) + columns).clamp(max=places.numel() - 1)
        self.tables = (places[firsts] // self.tokens).to(torch.int32)
        self.one_each = written.numel() == self.lengths.numel()
        if self.one_each:
            tokens = torch.arange(written.numel(), dtype=q_ends.dtype, device=ends.device)
            owners = torch.searchsorted(q_ends[1:], tokens, right=True).clamp(max=tokens.numel() - 1)
            self.lengths = self.lengths[owners] - (q_ends[1:][owners] - 1 - tokens).clamp(min=0).to(torch.int32)
            self.tables = self.tables[owners]

    def update(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What another attention would call. Raises ArgumentError."""
        raise ArgumentError("attn_implementation", "another one", "that of nvfp4_batches(), for its cache")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[1, tokens, heads, d] of packed requests; queries, keys and values [1, heads, tokens, d]. ``s_aux`` are sinks.

    Raises ArgumentError outside of generate_batch().
    """
    del attention_mask
    allocator = None if cache is None else cache.layer_to_allocator[module.layer_idx]
    if not isinstance(allocator, Nvfp4Allocator):
        raise ArgumentError("cache", "another one, or none", "that of generate_batch() within nvfp4_batches()")
    if module.layer_idx == allocator.layer_indices[0]:
        kind, index = allocator.layer_type, allocator.index
        found = kwargs["cu_seq_lens_k"][kind], kwargs["max_length_k"][kind]
        places = kwargs["read_index"][index], kwargs["write_index"][index]
        allocator.begin(kwargs["cu_seq_lens_q"], *found, *places)
    pages, rows = allocator.pages[module.layer_idx], by_token(query)
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        by_token(key),
        by_token(value),
        allocator.slots,
        pages.codes,
        pages.scales,
        *pages.factors,
        kv_layout="HND",
        v_sf_layout=allocator.order,
    )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    first = (rows, pages.codes, allocator.workspace, allocator.tables, allocator.lengths)
    products = pages.factors[0] * scaling, pages.factors[1]
    requests, longest = allocator.tables.shape[0], allocator.tables.shape[1] * allocator.tokens
    options: dict[str, Any] = {
        "window_left": -1 if sliding_window is None else sliding_window - 1,
        "sinks": None if s_aux is None else s_aux.detach().float(),
        "kv_cache_sf": pages.scales,
        "v_scale_layout": allocator.order,
    }
    out: Any
    if allocator.one_each:
        out = trtllm_batch_decode_with_kv_cache(*first, longest, *products, **options)
    else:
        ends = kwargs["cu_seq_lens_q"].to(torch.int32), allocator.ends
        out = trtllm_batch_context_with_kv_cache(
            *first, kwargs["max_length_q"], longest, *products, requests, *ends, **options
        )
    return (out if isinstance(out, torch.Tensor) else out[0]).unsqueeze(0), None
