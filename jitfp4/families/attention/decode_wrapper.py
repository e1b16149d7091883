"""The decode wrapper, with FlashInfer's interface."""

from __future__ import annotations

import functools

import torch

from jitfp4.families.attention import checks
from jitfp4.families.attention.api import check_plain
from jitfp4.families.attention.problem import CACHES
from jitfp4.families.attention.wrapper import PagedWrapper, Plan, check_sizes, dtype, dtypes
from jitfp4.public import checked


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of a few query tokens over a paged cache, whose page numbers are one list for all requests.

    Args:
        float_workspace_buffer: as workspace_buffer of trtllm_batch_decode_with_kv_cache().
        kv_layout: "NHD" or "HND".
        use_cuda_graph: if True, plan() copies its tensors into the three buffers, whose addresses a captured run()
            reads; the batch is the length of paged_kv_last_page_len_buffer.
        use_tensor_cores: accepted; every kernel uses them.
        backend: with "auto", "fa2" or "fa3" V's block scales are linear; with "trtllm-gen" they are interleaved, as
            nvfp4_quantize_paged_kv_cache() returns them. The kernels are the same.
        jit_args: None.
    """

    @checked
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[object] | None = None,
    ) -> None:
        del use_tensor_cores
        checks.unused("jit_args", jit_args, None)
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, backend, buffers if use_cuda_graph else None)

    @checked
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        """Store the page lists of a batch for run(). The host reads none of them and does not wait for the device.

        Args:
            indptr: int32 [batch + 1]; the pages of request b are ``indices[indptr[b] : indptr[b + 1]]``.
            indices: int32, page numbers.
            last_page_len: int32 [batch], tokens in the last page of each request, 1 to page_size.
            kv_data_type: torch.uint8, float4_e2m1fn_x2 or "nvfp4" for packed E2M1, float8_e4m3fn, or 16-bit floats;
                None means q_data_type. data_type is an older name.
            q_data_type, o_data_type: dtypes of queries and outputs; o_data_type None means q_data_type.
            sm_scale: None means ``head_dim ** -0.5``.
            seq_lens: int32 [batch], the tokens of each request; None computes them from indptr and last_page_len.
            block_tables: not read, because indices has the same pages.
            q_len_per_req: query tokens of a request, 1 or more.
            is_causal: whether the queries of a request see only tokens up to their own; None is True.
            logits_soft_cap: if positive, a logit x becomes ``logits_soft_cap * tanh(x / logits_soft_cap)``.
            disable_split_kv: if True, no request's tokens are divided among CTAs, so that its results depend on no
                other request; slower where few requests are long.
            pos_encoding_mode, rope_scale, rope_theta, fixed_split_size, window_right: any value but the default is an
                error, except -1 for fixed_split_size.
        Raises:
            ArgumentError, ArgumentTypeError.
        """
        del block_tables  # indices has the same pages
        check_plain(pos_encoding_mode, rope_scale, rope_theta)
        for name, value, default in (
            ("fixed_split_size", None if fixed_split_size == -1 else fixed_split_size, None),  # engines pass either
            ("window_right", window_right, 0),
        ):
            checks.unused(name, value, default)
        older = None if data_type is None else dtype("data_type", data_type, CACHES)
        given = older if kv_data_type is None else kv_data_type
        q_dtype, cache_dtype, out_dtype = dtypes(q_data_type, given, o_data_type)
        check_sizes((num_qo_heads, num_kv_heads), ("head_dim", head_dim), page_size, window_left)
        checks.check_q_len("q_len_per_req", q_len_per_req)
        lists = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        self._cached_o_data_type = out_dtype
        plan = Plan(
            kv_layout=self._kv_layout,
            v_scale_layout=self._v_scale_layout,
            heads=(num_qo_heads, num_kv_heads),
            head_dim=head_dim,
            page_size=page_size,
            window_left=window_left,
            q_dtype=q_dtype,
            cache_dtype=cache_dtype,
            out_dtype=out_dtype,
            sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
            soft_cap=checks.soft_cap(logits_soft_cap),
            q_len=q_len_per_req,
            causal=is_causal is not False,
            whole=disable_split_kv,
        )
        self._store(plan, self._take(lists, page_size, seq_lens, non_blocking))

    begin_forward = _plan_impl = plan

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False, so that engines call plan() for CUDA graphs too, and do not write into FlashInfer's own buffers."""
        return False

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: checks.Pair | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend with the queries of a planned batch.

        Args:
            q: [batch * q_len_per_req, heads, d].
            paged_kv_cache: as kv_cache of trtllm_batch_decode_with_kv_cache(). Where pages have one token, their
                dimension may be left out, here and in kv_cache_sf.
            kv_cache_sf: the block scales of an NVFP4 cache; two tensors, or one with both along dimension 1.
            q_scale, k_scale, v_scale: factors of queries, keys and values: numbers, or tensors of one float; None: 1.
            out, lse, return_lse, enable_pdl, sinks: as for trtllm_batch_decode_with_kv_cache().
            window_left, q_len_per_req: None means the values of plan().
        Returns:
            out, or ``(out, lse)`` with return_lse: what trtllm_batch_decode_with_kv_cache() returns, but for the order
            of the sums: that function chooses a kernel by its max_seq_len, this one by the length of its list of pages.
        Raises:
            ArgumentError, ArgumentTypeError: before anything is written.
        """
        return self._attention()(
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
            q_len_per_req,
            skip_softmax_threshold_scale_factor,
            *(None, None),  # of prefill
            self._workspace,
            *self._listed(),
        )

    @checked
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: checks.Pair,
        pos_encoding_mode: str = "NONE",
        q_scale: float | torch.Tensor | None = None,
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
        """run() with the window and the softmax scale given here, which replace those of plan().

        Args:
            q, paged_kv_cache, q_scale, k_scale, v_scale, kv_cache_sf: as for run().
            window_left, sm_scale, pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta: as for plan().
        Returns:
            [batch * q_len_per_req, heads, d].
        Raises:
            ArgumentError, ArgumentTypeError: before anything is written.
        """
        check_plain(pos_encoding_mode, rope_scale, rope_theta)
        self._replan(window_left, sm_scale, logits_soft_cap, self._planned().causal)
        return self.run(q, paged_kv_cache, q_scale, k_scale, v_scale, kv_cache_sf=kv_cache_sf)

    @checked
    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: checks.Pair,
        pos_encoding_mode: str = "NONE",
        q_scale: float | torch.Tensor | None = None,
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
            q, paged_kv_cache, q_scale, k_scale, v_scale, kv_cache_sf: as for run().
            window_left, sm_scale, pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta: as for plan().
        Returns:
            ``(out, lse)``, as of run().
        Raises:
            ArgumentError, ArgumentTypeError: before anything is written.
        """
        check_plain(pos_encoding_mode, rope_scale, rope_theta)
        self._replan(window_left, sm_scale, logits_soft_cap, self._planned().causal)
        return self.run(q, paged_kv_cache, q_scale, k_scale, v_scale, return_lse=True, kv_cache_sf=kv_cache_sf)

    run_return_lse = functools.partialmethod(run, return_lse=True)
