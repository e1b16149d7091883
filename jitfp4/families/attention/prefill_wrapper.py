"""FlashInfer's prefill wrapper."""

from __future__ import annotations

import torch

from jitfp4.errors import ArgumentError
from jitfp4.families.attention import checks
from jitfp4.families.attention.api import check_plain
from jitfp4.families.attention.context import check_masks
from jitfp4.families.attention.wrapper import PagedWrapper, Plan, Run, check_sizes, dtypes
from jitfp4.public import checked


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of many query tokens a request over a paged cache whose page numbers come as one list.

    Args:
        float_workspace_buffer: as workspace_buffer of trtllm_batch_context_with_kv_cache(), of any content; its first
            64 KiB are set to zero here, and nobody else may write them while the wrapper is in use.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: plan() then copies its tensors into the four buffers, whose addresses a captured run() keeps;
            the batch is the length of paged_kv_last_page_len_buf.
        custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs: None.
        backend: "auto", "fa2" or "fa3", where V's block scales are linear, or "trtllm-gen", where they are interleaved
            as nvfp4_quantize_paged_kv_cache() gives them. The kernels are the same.
    """

    @checked
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[object] | None = None,
        jit_kwargs: dict[str, object] | None = None,
    ) -> None:
        check_masks(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        checks.unused("jit_args", jit_args, None)
        checks.unused("jit_kwargs", jit_kwargs, None)
        buffers = {
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
            "qo_indptr_buf": qo_indptr_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, backend, buffers if use_cuda_graph else None)

    @checked
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Take the lists of a batch. Nothing is read on the host, and nothing waits for the device.

        Args:
            qo_indptr: int32 [batch + 1]; the queries of request b are rows qo_indptr[b] to qo_indptr[b + 1].
            paged_kv_indptr: int32 [batch + 1]; its pages are those of paged_kv_indices from paged_kv_indptr[b] to
                paged_kv_indptr[b + 1].
            paged_kv_indices: int32, page numbers.
            paged_kv_last_page_len: int32 [batch], tokens in each last page, 1 to page_size.
            head_dim_vo: None or head_dim_qk.
            causal: whether query i of n in a request of s tokens sees those up to s - n + i only.
            use_fp16_qk_reduction: accepted; sums are float32.
            sm_scale: None means ``head_dim_qk ** -0.5``.
            window_left: as in trtllm_batch_context_with_kv_cache().
            q_data_type, o_data_type: of queries and outputs; o_data_type None means q_data_type.
            kv_data_type: torch.uint8 or float4_e2m1fn_x2 for packed E2M1, float8_e4m3fn, or 16-bit floats; None means
                q_data_type.
            seq_lens: int32 [batch], in place of what paged_kv_indptr and paged_kv_last_page_len give; seq_lens_q,
                block_tables and max_sequence_kv are not needed.
            max_token_per_sequence: no less than the queries of any request; it only helps to choose a kernel.
            custom_mask, packed_custom_mask, pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta, prefix_len_ptr,
                token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, fixed_split_size, disable_split_kv:
                anything but the default is an error, -1 for fixed_split_size aside.
        Raises:
            ArgumentError, ArgumentTypeError.
        """
        del use_fp16_qk_reduction, seq_lens_q, block_tables  # the same again
        if max_sequence_kv is not None and max_sequence_kv < 0:
            raise ArgumentError("max_sequence_kv", max_sequence_kv, "0 or more")
        check_plain(pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta)
        check_masks(
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        for name, value, default in (
            ("token_pos_in_items_len", token_pos_in_items_len, 0),
            ("fixed_split_size", None if fixed_split_size == -1 else fixed_split_size, None),  # engines say either
            ("disable_split_kv", disable_split_kv, False),
        ):
            checks.unused(name, value, default)
        if head_dim_vo not in (None, head_dim_qk):
            raise ArgumentError("head_dim_vo", head_dim_vo, f"None or head_dim_qk, {head_dim_qk}")
        if max_token_per_sequence is not None:
            checks.check_q_len("max_token_per_sequence", max_token_per_sequence)
        q_dtype, cache_dtype, out_dtype = dtypes(q_data_type, kv_data_type, o_data_type)
        check_sizes((num_qo_heads, num_kv_heads), ("head_dim_qk", head_dim_qk), page_size, window_left)
        lists = {
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices,
            "paged_kv_last_page_len": paged_kv_last_page_len,
            "qo_indptr": qo_indptr,
        }
        self._plan = Plan(
            lists=self._take(lists, page_size, seq_lens, non_blocking),
            heads=(num_qo_heads, num_kv_heads),
            head_dim=head_dim_qk,
            page_size=page_size,
            window_left=window_left,
            q_dtype=q_dtype,
            cache_dtype=cache_dtype,
            out_dtype=out_dtype,
            sm_scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            q_len=max_token_per_sequence,
            causal=causal,
        )

    begin_forward = plan

    @checked
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: checks.Pair,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: checks.Pair | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend with the queries of a planned batch.

        Args:
            q: [tokens, heads, d], where qo_indptr says whose they are.
            paged_kv_cache: as kv_cache of trtllm_batch_context_with_kv_cache().
            kv_cache_sf: the block scales of an NVFP4 cache; two tensors, or one with both along dimension 1.
            q_scale, k_scale, v_scale: factors of queries, keys and values; None means 1.
            out, lse, return_lse, enable_pdl, sinks: as there.
            window_left: None means what plan() got.
            skip_softmax_threshold_scale_factor: None.
        Returns:
            out, or ``(out, lse)`` with return_lse: the bits that trtllm_batch_context_with_kv_cache() gives for a
            max_q_len of max_token_per_sequence, or of all tokens.
        Raises:
            ArgumentError, ArgumentTypeError: before anything is written.
        """
        checks.unused("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor, None)
        q_len = self._planned().q_len
        return self._attend(
            Run(
                q=q,
                paged_kv_cache=paged_kv_cache,
                kv_cache_sf=kv_cache_sf,
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
                sinks=sinks,
                out=out,
                lse=lse,
                return_lse=return_lse,
                window_left=window_left,
                q_len=max(1, q.shape[0]) if q_len is None else q_len,
                enable_pdl=enable_pdl,
            )
        )

    @checked
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: checks.Pair,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        kv_cache_sf: checks.Pair | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """run() with the mask, the window and the softmax scale given here, which replace those of plan().

        Args:
            q, paged_kv_cache, k_scale, v_scale, kv_cache_sf: as for run().
            causal, window_left, sm_scale, use_fp16_qk_reduction: as for plan().
            pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta: as for plan().
        Returns:
            [tokens, heads, d].
        Raises:
            ArgumentError, ArgumentTypeError: before anything is written.
        """
        del use_fp16_qk_reduction
        check_plain(pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta)
        self._replan(window_left, sm_scale, causal)
        return self.run(q, paged_kv_cache, None, k_scale, v_scale, kv_cache_sf=kv_cache_sf)
