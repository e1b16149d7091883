"""The prefill wrapper, with FlashInfer's interface."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import cast

import torch

from jitfp4.errors import ArgumentError
from jitfp4.families.attention import checks
from jitfp4.families.attention.api import check_plain
from jitfp4.families.attention.engine_names import BufferPlanner
from jitfp4.families.attention.masks import check_buffers, check_room, check_whole_mask, fill, whole_mask
from jitfp4.families.attention.wrapper import Lists, PagedWrapper, Plan, check_sizes, dtypes
from jitfp4.public import checked
from jitfp4.tensors import output


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of many query tokens over a paged cache, whose page numbers are one list for all requests.

    Args:
        float_workspace_buffer: as workspace_buffer of trtllm_batch_context_with_kv_cache().
        kv_layout: "NHD" or "HND".
        use_cuda_graph: if True, plan() copies its tensors into the four buffers, whose addresses a captured run()
            reads; the batch is the length of paged_kv_last_page_len_buf.
        custom_mask_buf, mask_indptr_buf: None, or with use_cuda_graph two more buffers, uint8 and int32 [batch + 1],
            into which plan() copies a mask and where the bytes of each request begin. Every run() then has a mask.
        jit_args, jit_kwargs: None.
        variant_owns_mask: False.
        backend: with "auto", "fa2" or "fa3" V's block scales are linear; with "trtllm-gen" they are interleaved, as
            nvfp4_quantize_paged_kv_cache() returns them. The kernels are the same.
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
        variant_owns_mask: bool = False,
    ) -> None:
        checks.unused("jit_args", jit_args, None)
        checks.unused("jit_kwargs", jit_kwargs, None)
        checks.unused("variant_owns_mask", variant_owns_mask, False, "there are no kernels of the caller's own")
        buffers = {
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
            "qo_indptr_buf": qo_indptr_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, backend, buffers if use_cuda_graph else None)
        check_buffers(custom_mask_buf, mask_indptr_buf, self._qo_indptr_buf)
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf

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
        uniform_q_len: int | None = None,
    ) -> None:
        """Store the lists of a batch for run(). The host reads none of them and does not wait for the device.

        Args:
            qo_indptr: int32 [batch + 1]; the queries of request b are ``q[qo_indptr[b] : qo_indptr[b + 1]]``.
            paged_kv_indptr: int32 [batch + 1]; the pages of request b are
                ``paged_kv_indices[paged_kv_indptr[b] : paged_kv_indptr[b + 1]]``.
            paged_kv_indices: int32, page numbers.
            paged_kv_last_page_len: int32 [batch], tokens in the last page of each request, 1 to page_size.
            head_dim_vo: None or head_dim_qk.
            causal: whether query i of n in a request of s tokens sees only tokens up to s - n + i. With a mask it says
                nothing.
            custom_mask: bool, one dimension: for each request in order and each of its queries, which of the request's
                tokens it sees, within its window. On any device. Tokens behind its end are not seen.
            packed_custom_mask: the same as bits, uint8, the lowest of a byte first, where each request begins with a
                byte; custom_mask is then not read. Without either, a wrapper with buffers for masks keeps what is in
                them.
            use_fp16_qk_reduction: accepted; sums are float32.
            sm_scale: None means ``head_dim_qk ** -0.5``.
            window_left: as in trtllm_batch_context_with_kv_cache().
            q_data_type, o_data_type: dtypes of queries and outputs; o_data_type None means q_data_type.
            kv_data_type: torch.uint8, float4_e2m1fn_x2 or "nvfp4" for packed E2M1, float8_e4m3fn, or 16-bit floats;
                None means q_data_type.
            seq_lens: int32 [batch], the tokens of each request; None computes them from paged_kv_indptr and
                paged_kv_last_page_len.
            seq_lens_q, block_tables, max_sequence_kv: not read, because other arguments say the same.
            max_token_per_sequence: at least the queries of every request; only the choice of a kernel depends on it.
            uniform_q_len: the queries of every request, if all have as many; it says the same.
            logits_soft_cap: if positive, a logit x becomes ``logits_soft_cap * tanh(x / logits_soft_cap)``.
            pos_encoding_mode, rope_scale, rope_theta, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len,
                max_item_len_ptr, fixed_split_size: any value but the default is an error, except -1 for
                fixed_split_size.
            disable_split_kv: if True, no request's tokens are divided among CTAs, so that its results depend on no
                other request; on sm_90a slower by a kernel without wgmma.
        Raises:
            ArgumentError, ArgumentTypeError.
        """
        del use_fp16_qk_reduction, seq_lens_q, block_tables  # not needed
        if max_sequence_kv is not None and max_sequence_kv < 0:
            raise ArgumentError("max_sequence_kv", max_sequence_kv, "0 or more")
        check_plain(pos_encoding_mode, rope_scale, rope_theta)
        for name, value, default in (
            ("prefix_len_ptr", prefix_len_ptr, None),
            ("token_pos_in_items_ptr", token_pos_in_items_ptr, None),
            ("max_item_len_ptr", max_item_len_ptr, None),
            ("token_pos_in_items_len", token_pos_in_items_len, 0),
            ("fixed_split_size", None if fixed_split_size == -1 else fixed_split_size, None),  # engines pass either
        ):
            checks.unused(name, value, default)
        if head_dim_vo not in (None, head_dim_qk):
            raise ArgumentError("head_dim_vo", head_dim_vo, f"None or head_dim_qk, {head_dim_qk}")
        for name, count in (("max_token_per_sequence", max_token_per_sequence), ("uniform_q_len", uniform_q_len)):
            if count is not None:
                checks.check_q_len(name, count)
        q_dtype, cache_dtype, out_dtype = dtypes(q_data_type, kv_data_type, o_data_type)
        check_sizes((num_qo_heads, num_kv_heads), ("head_dim_qk", head_dim_qk), page_size, window_left)
        lists = {
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices,
            "paged_kv_last_page_len": paged_kv_last_page_len,
            "qo_indptr": qo_indptr,
        }
        plan = Plan(
            kv_layout=self._kv_layout,
            v_scale_layout=self._v_scale_layout,
            heads=(num_qo_heads, num_kv_heads),
            head_dim=head_dim_qk,
            page_size=page_size,
            window_left=window_left,
            q_dtype=q_dtype,
            cache_dtype=cache_dtype,
            out_dtype=out_dtype,
            sm_scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            soft_cap=checks.soft_cap(logits_soft_cap),
            q_len=uniform_q_len if max_token_per_sequence is None else max_token_per_sequence,
            causal=causal,
            whole=disable_split_kv,
        )
        check_whole_mask(custom_mask, packed_custom_mask)
        if self._buffers is not None:
            check_room(self._custom_mask_buf, custom_mask, packed_custom_mask, len(self._buffers[2]))
        taken = self._take(lists, page_size, seq_lens, non_blocking)
        self._store(plan, self._with_mask(taken, custom_mask, packed_custom_mask))

    def _with_mask(self, lists: Lists, custom: torch.Tensor | None, packed: torch.Tensor | None) -> Lists:
        """The lists of a plan with its mask, which is in the wrapper's buffers if it has such."""
        mask = whole_mask(custom, packed, cast("torch.Tensor", lists.q_ends).diff(), lists.seq_lens)
        if self._custom_mask_buf is None or self._mask_indptr_buf is None:
            return lists._replace(mask=mask.data, mask_ends=mask.ends)
        fill(self._custom_mask_buf, self._mask_indptr_buf, mask)
        return lists._replace(mask=self._custom_mask_buf, mask_ends=self._mask_indptr_buf)

    begin_forward = plan

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the constructor was given buffers for CUDA graphs."""
        return self._buffers is not None

    @property
    def _cached_module(self) -> BufferPlanner | None:
        return None if self._buffers is None or self._plan is None else BufferPlanner(self)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: checks.Pair,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: checks.Pair | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend with the queries of a planned batch.

        Args:
            q: [tokens, heads, d]; qo_indptr of plan() says which tokens each request has.
            paged_kv_cache: as kv_cache of trtllm_batch_context_with_kv_cache(). Where pages have one token, their
                dimension may be left out, here and in kv_cache_sf.
            kv_cache_sf: the block scales of an NVFP4 cache; two tensors, or one with both along dimension 1.
            q_scale, k_scale, v_scale: factors of queries, keys and values: numbers, or tensors of one float; None: 1.
            out, return_lse, enable_pdl, sinks: as for trtllm_batch_context_with_kv_cache().
            lse: likewise, in the order of lse_layout.
            lse_base: "log2", or "ln" for natural logarithms.
            lse_layout: "NH" for [tokens, heads], "HN" for [heads, tokens]; both contiguous.
            window_left: None means the value of plan().
            skip_softmax_threshold_scale_factor: None.
            use_fp16_softmax, uses_spcompress: None or False.
        Returns:
            out, or ``(out, lse)`` with return_lse; the same bits as trtllm_batch_context_with_kv_cache() returns if
            max_q_len is max_token_per_sequence, or the number of all tokens where that is None.
        Raises:
            ArgumentError, ArgumentTypeError: before anything is written.
        """
        run = self._attention()
        if lse_base != "log2" or lse_layout != "NH":
            run = functools.partial(_with_logarithms, run, lse_base, lse_layout)
        return run(
            q,
            paged_kv_cache,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
            return_lse,
            enable_pdl,
            window_left,
            sinks,
            kv_cache_sf,
            None,
            skip_softmax_threshold_scale_factor,
            use_fp16_softmax,
            uses_spcompress,
            self._workspace,
            *self._listed(),
        )

    @checked
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: checks.Pair,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
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
        check_plain(pos_encoding_mode, rope_scale, rope_theta)
        self._replan(window_left, sm_scale, logits_soft_cap, causal)
        return self.run(q, paged_kv_cache, None, k_scale, v_scale, kv_cache_sf=kv_cache_sf)

    @checked
    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: checks.Pair,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        kv_cache_sf: checks.Pair | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """forward() that returns the logarithms too.

        Args:
            q, paged_kv_cache, k_scale, v_scale, kv_cache_sf: as for run().
            causal, window_left, sm_scale, use_fp16_qk_reduction: as for plan().
            pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta: as for plan().
        Returns:
            ``(out, lse)``, as of run().
        Raises:
            ArgumentError, ArgumentTypeError: before anything is written.
        """
        del use_fp16_qk_reduction
        check_plain(pos_encoding_mode, rope_scale, rope_theta)
        self._replan(window_left, sm_scale, logits_soft_cap, causal)
        return self.run(q, paged_kv_cache, None, k_scale, v_scale, return_lse=True, kv_cache_sf=kv_cache_sf)

    run_return_lse = functools.partialmethod(run, return_lse=True)


@checked
def _with_logarithms(
    run: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    lse_base: str,
    lse_layout: str,
    q: torch.Tensor,
    paged_kv_cache: checks.Pair,
    q_scale: checks.Factor,
    k_scale: checks.Factor,
    v_scale: checks.Factor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    *others: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What ``run`` gives, with logarithms of another base or in another order."""
    for name, value, allowed in (("lse_base", lse_base, ("log2", "ln")), ("lse_layout", lse_layout, ("NH", "HN"))):
        if value not in allowed:
            raise ArgumentError(name, repr(value), " or ".join(map(repr, allowed)))
    wanted, transposed = return_lse or lse is not None, lse_layout == "HN"
    given = output("lse", lse, (q.shape[1], q.shape[0]), (torch.float32,), like=q) if wanted and transposed else lse
    own = None if transposed else lse
    result = run(q, paged_kv_cache, q_scale, k_scale, v_scale, out, own, wanted, *others)
    if not isinstance(result, tuple):
        return result
    logarithms = given.copy_(result[1].T) if transposed and given is not None else result[1]
    if lse_base == "ln":
        logarithms.mul_(math.log(2))
    return (result[0], logarithms) if return_lse else result[0]
