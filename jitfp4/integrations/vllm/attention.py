"""An attention backend over an NVFP4 or 16-bit KV cache, for head dimensions up to 256, sinks and windows.

A page holds ``[K codes | K scales | V codes | V scales]``, each part [kv_heads, page, ...]: for vLLM it is one tensor
[pages, 2 * kv_heads, page, head_dim / 2 + head_dim / 16] of bytes, heads of K first. A 16-bit page is
[2 * kv_heads, page, head_dim]. Requests of few query tokens come first in a batch and are decoded; the others are
prefilled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from jitfp4.families.attention import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from jitfp4.families.attention.api import new_workspace
from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.problem import HEAD_DIMS, MAX_GROUP, MAX_Q_LEN
from jitfp4.families.kv import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
from jitfp4.formats import NVFP4
from jitfp4.integrations.kernels import Traffic, load_appends, load_attention

Pair = tuple[torch.Tensor, torch.Tensor]

_PAGE = 64  # tokens; measured fastest for decode
_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "nvfp4": torch.uint8}
_NEWEST_CAPABILITY, _OLDEST_CAPABILITY = 121, 80


def row_elements(head_dim: int, cache_dtype: str) -> int:
    """Elements of one token of one head of K, or of V, in the cache: floats, or bytes of NVFP4 with its scales."""
    return head_dim // 2 + head_dim // NVFP4.block if cache_dtype == "nvfp4" else head_dim


class Jitfp4AttentionBackend(AttentionBackend):
    """What vLLM asks before it chooses the backend and allocates the cache."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(_DTYPES)
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The name that vLLM finds its backend by."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Jitfp4AttentionImpl]:
        """The layers' class."""
        return Jitfp4AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Jitfp4MetadataBuilder]:
        """The class that prepares a step."""
        return Jitfp4MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a page."""
        del kv_cache_spec
        return [16, 32, 64, 128]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Tokens of a page where the user names none."""
        return max(default_block_size, _PAGE) if default_block_size <= 128 else _PAGE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head dimensions."""
        return list(HEAD_DIMS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """From sm_80 on."""
        return _OLDEST_CAPABILITY <= int(capability.to_int()) <= _NEWEST_CAPABILITY

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks, as gpt-oss has them."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows."""
        return True

    # ---- the cache, as vLLM 0.26 asks for it ---------------------------------------------------------------------

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The shape of a layer's cache."""
        return num_blocks, 2 * num_kv_heads, block_size, row_elements(head_size, cache_dtype_str)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Heads before tokens in a page; with layers, a page of every layer side by side."""
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Heads before tokens."""
        return "HND"

    # ---- and as vLLM 0.33 does ---------------------------------------------------------------------------------

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Heads of K, then heads of V, each with its own rows."""
        if spec.state_content_bytes is not None:
            return spec
        elements = row_elements(spec.head_size, "nvfp4" if spec.kv_quant_mode.is_nvfp4 else "auto")
        content = elements * spec.dtype.itemsize
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Heads before tokens; layers outside or inside of pages."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC


class Prefill(NamedTuple):
    """The requests of a step from number ``decodes`` on: their pages, lengths, and where their queries begin."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor


@dataclass
class Jitfp4Metadata:
    """A step: the first ``decodes`` requests, which have ``decode_tokens`` query tokens, then those to prefill.

    ``is_one``: each of the first has one query token.
    """

    num_actual_tokens: int
    decodes: int
    decode_tokens: int
    is_one: bool
    max_query_len: int
    max_seq_len: int
    starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    workspace: torch.Tensor
    prefill: Prefill | None


class Jitfp4MetadataBuilder(AttentionMetadataBuilder[Jitfp4Metadata]):
    """Prepares the steps of layers with one kind of cache, after it has loaded every kernel that they can need."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.reorder_batch_threshold: int = min(self.reorder_batch_threshold, MAX_Q_LEN)
        self.workspace = new_workspace(device)
        self._load_kernels()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Jitfp4Metadata:
        """The metadata of a step."""
        del common_prefix_len, fast_build
        common, threshold = common_attn_metadata, self.reorder_batch_threshold
        if common.causal is not True:
            raise NotImplementedError("attention over a KV cache that is not causal")
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=threshold)
        starts, prefill = common.query_start_loc, None
        if prefills:
            own = starts[decodes:] - starts[decodes] if decodes else starts
            prefill = Prefill(common.block_table_tensor[decodes:], common.seq_lens[decodes:], own)
        return Jitfp4Metadata(
            num_actual_tokens=common.num_actual_tokens,
            decodes=decodes,
            decode_tokens=decode_tokens,
            is_one=decode_tokens == decodes and (threshold == 1 or common.max_query_len == 1),
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            starts=starts[: decodes + 1],
            seq_lens=common.seq_lens[:decodes],
            block_table=common.block_table_tensor[:decodes],
            slot_mapping=common.slot_mapping,
            workspace=self.workspace,
            prefill=prefill,
        )

    def _load_kernels(self) -> None:
        """Load what decode, prefill and append launch for these layers."""
        spec, config = self.kv_cache_spec, self.vllm_config
        dtype, scheduler = config.model_config.dtype, config.scheduler_config
        is_nvfp4 = spec.kv_quant_mode.is_nvfp4
        group = config.model_config.get_num_attention_heads(config.parallel_config) // spec.num_kv_heads
        traffic = Traffic(
            tokens=scheduler.max_num_batched_tokens,
            requests=scheduler.max_num_seqs,
            context=config.model_config.max_model_len,
        )
        row = row_elements(spec.head_size, "nvfp4" if is_nvfp4 else "auto")
        page = torch.empty(1, 2 * spec.num_kv_heads, spec.block_size, row, dtype=spec.dtype, device=self.device)
        query = torch.empty(1, max(1, group) * spec.num_kv_heads, spec.head_size, dtype=dtype, device=self.device)
        keys, scales = views_of(page, spec.num_kv_heads, spec.head_size)
        one = torch.ones(1, 1, dtype=torch.int32, device=self.device)
        call = Arguments(
            query=query, key_cache=keys[0], value_cache=keys[1], key_scales=scales[0] if scales else None,
            value_scales=scales[1] if scales else None, block_tables=one, seq_lens=one[0], page_ends=None,
            cum_seq_lens_q=None, sinks=None, bmm1_scale=None, bmm2_scale=None, workspace_buffer=self.workspace,
            out=query, lse=None, bmm1=1.0, bmm2=1.0, q_len_per_req=1, window_left=-1, causal=True,
            max_tokens=spec.block_size, hnd=True, interleaved=False, enable_pdl=None,
        )  # fmt: skip
        load_attention(call, traffic)
        if is_nvfp4:
            load_appends(dtype, spec.num_kv_heads, spec.head_size, traffic.tokens, query)


class Jitfp4AttentionImpl(AttentionImpl[Jitfp4Metadata]):
    """One attention layer.

    Raises NotImplementedError for ALiBi, a cap of logits, encoders, and more than 128 query heads for a KV head.
    """

    supports_quant_query_input: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, refused in (
            ("ALiBi", alibi_slopes is not None),
            ("a cap of logits", bool(logits_soft_cap)),
            (f"attention of type {attn_type}", attn_type != AttentionType.DECODER),
            (f"more than {MAX_GROUP} query heads for a KV head", num_heads > MAX_GROUP * kv_heads),
        ):
            if refused:
                raise NotImplementedError(f"jitfp4's attention backend has no {name}")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, kv_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._seen: torch.Tensor | None = None
        self._views: tuple[Pair, Pair | None] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks in float32, as the kernels take them."""
        del act_dtype
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float().contiguous()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Jitfp4Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query [tokens, heads, d]`` into ``output``; without metadata, zeros: vLLM measures memory."""
        del key, value
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantized outputs of attention")
        if attn_metadata is None:
            return output.fill_(0)
        step, tokens = attn_metadata, attn_metadata.decode_tokens
        keys, scales = self._views_of(kv_cache)
        bmm1, bmm2 = self.scale, 1.0
        if scales is not None:
            bmm1, bmm2 = bmm1 * float(layer._k_scale_float), float(layer._v_scale_float)
        if tokens:
            trtllm_batch_decode_with_kv_cache(
                query[:tokens],
                keys,
                step.workspace,
                step.block_table,
                step.seq_lens,
                step.max_seq_len,
                bmm1,
                bmm2,
                self.window_left,
                out=output[:tokens],
                sinks=self.sinks,
                max_q_len=None if step.is_one else min(step.max_query_len, MAX_Q_LEN),
                cum_seq_lens_q=None if step.is_one else step.starts,
                kv_cache_sf=scales,
                v_scale_layout="linear",
            )
        if step.prefill is not None:
            trtllm_batch_context_with_kv_cache(
                query[tokens : step.num_actual_tokens],
                keys,
                step.workspace,
                step.prefill.block_table,
                step.prefill.seq_lens,
                step.max_query_len,
                step.max_seq_len,
                bmm1,
                bmm2,
                len(step.prefill.seq_lens),
                step.prefill.starts,
                step.prefill.starts,
                self.window_left,
                out=output[tokens : step.num_actual_tokens],
                sinks=self.sinks,
                kv_cache_sf=scales,
                v_scale_layout="linear",
            )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new tokens [tokens, kv_heads, d] into their slots; negative slots are skipped."""
        keys, scales = self._views_of(kv_cache)
        if scales is not None:
            nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
                key, value, slot_mapping, keys, scales, layer._k_scale, layer._v_scale, "HND"
            )
        else:
            sides = (side.transpose(1, 2) for side in keys)
            torch.ops._C_cache_ops.reshape_and_cache_flash(
                key, value, *sides, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )

    def _views_of(self, kv_cache: torch.Tensor) -> tuple[Pair, Pair | None]:
        """views_of() the layer's cache, made once."""
        if self._views is None or self._seen is not kv_cache:
            self._seen, self._views = kv_cache, views_of(kv_cache, self.num_kv_heads, self.head_size)
        return self._views


def views_of(kv_cache: torch.Tensor, kv_heads: int, head_dim: int) -> tuple[Pair, Pair | None]:
    """K and V of a cache, [pages, kv_heads, page, ...] each, and their block scales; None for 16-bit caches.

    Args:
        kv_cache: [pages, 2 * kv_heads, page, row_elements()], contiguous within a page.
    """
    if kv_cache.dtype != torch.uint8:
        return (kv_cache[:, :kv_heads], kv_cache[:, kv_heads:]), None
    pages, _, page, row = kv_cache.shape
    side, rows = kv_heads * page * row, kv_heads * page

    def part(first: int, width: int) -> torch.Tensor:
        strides = (kv_cache.stride(0), page * width, width, 1)
        return kv_cache.as_strided((pages, kv_heads, page, width), strides, kv_cache.storage_offset() + first)

    codes, scales = head_dim // 2, head_dim // NVFP4.block
    keys, values = part(0, codes), part(side, codes)
    key_scales, value_scales = (part(first + rows * codes, scales) for first in (0, side))
    return (keys, values), (key_scales.view(torch.float8_e4m3fn), value_scales.view(torch.float8_e4m3fn))
