"""FlashInfer's decode wrapper: page lists and scalars once in plan(), tensors in run()."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from jitfp4.errors import ArgumentError
from jitfp4.families.attention import checks
from jitfp4.families.attention.api import attend, check_plain
from jitfp4.families.attention.problem import CACHES, MAX_Q_LEN
from jitfp4.tensors import check_dtype

_COUNTER_BYTES = 1 << 16  # at the start of the workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    indptr: torch.Tensor
    indices: torch.Tensor
    seq_lens: torch.Tensor
    heads: tuple[int, int]
    head_dim: int
    page_size: int
    window_left: int
    q_dtype: torch.dtype
    cache_dtype: torch.dtype
    out_dtype: torch.dtype
    sm_scale: float
    q_len: int


class BatchDecodeWithPagedKVCacheWrapper:
    """Attention over a paged cache whose page numbers come as one list.

    Args:
        float_workspace_buffer: as workspace_buffer of trtllm_batch_decode_with_kv_cache(), of any content; its first
            64 KiB are set to zero here, and nobody else may write them while the wrapper is in use.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: plan() then copies its tensors into the three buffers, whose addresses a captured run() keeps;
            the batch is the length of paged_kv_last_page_len_buffer.
        use_tensor_cores, backend: "auto" only; every kernel uses tensor cores. jit_args: None only.
    """

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
        checks.check_layout(kv_layout)
        checks.unused("backend", backend, "auto")
        checks.unused("jit_args", jit_args, None)
        self._workspace = checks.check_workspace(float_workspace_buffer, float_workspace_buffer)
        self._workspace[:_COUNTER_BYTES].zero_()
        self._kv_layout = kv_layout
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            for name, buffer in zip(("indptr", "indices", "last_page_len"), buffers, strict=True):
                if buffer is None:
                    raise ArgumentError(f"paged_kv_{name}_buffer", "None", "a tensor with use_cuda_graph")
                checks.check_ints(f"paged_kv_{name}_buffer", buffer, (None,), self._workspace)
            self._buffers = (buffers[0], buffers[1], torch.zeros_like(buffers[2]))  # type: ignore[assignment, arg-type]
        self._plan: _Plan | None = None

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
    ) -> None:
        """Take the page lists of a batch. Nothing is read on the host, and nothing waits for the device.

        Args:
            indptr: int32 [batch + 1]; the pages of request b are ``indices[indptr[b] : indptr[b + 1]]``.
            indices: int32, page numbers.
            last_page_len: int32 [batch], tokens in each last page, 1 to page_size.
            kv_data_type: torch.uint8 for packed E2M1, float8_e4m3fn, or 16-bit floats; data_type is its older name,
                and None means q_data_type.
            q_data_type, o_data_type: of queries and outputs; o_data_type None means q_data_type.
            sm_scale: None means ``head_dim ** -0.5``.
            seq_lens: int32 [batch], in place of what indptr and last_page_len give; block_tables is not needed.
            q_len_per_req: query tokens of a request, 1 to 8.
            pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta, fixed_split_size, disable_split_kv,
                window_right: anything but the default is an error.
        Raises:
            ArgumentError, ArgumentTypeError.
        """
        del block_tables  # the same pages again
        check_plain(pos_encoding_mode, logits_soft_cap, rope_scale, rope_theta)
        for name, value, default in (
            ("fixed_split_size", fixed_split_size, None),
            ("disable_split_kv", disable_split_kv, False),
            ("window_right", window_right, 0),
        ):
            checks.unused(name, value, default)
        q_dtype = _dtype("q_data_type", q_data_type)
        cache_dtype = q_dtype
        if (given := kv_data_type if kv_data_type is not None else data_type) is not None:
            cache_dtype = _dtype("kv_data_type", given)
        if cache_dtype not in CACHES:
            raise ArgumentError("kv_data_type", cache_dtype, " or ".join(map(str, CACHES)))
        batch = last_page_len.shape[0]
        move = functools.partial(torch.Tensor.to, device=self._workspace.device, non_blocking=non_blocking)
        moved = [move(tensor) for tensor in (indptr, indices, last_page_len)]
        names = ("indptr", "indices", "last_page_len")
        for name, tensor, size in zip(names, moved, (batch + 1, None, batch), strict=True):
            checks.check_ints(name, tensor, (size,), self._workspace)
        if seq_lens is not None:
            lengths = move(seq_lens)
            checks.check_ints("seq_lens", lengths, (batch,), self._workspace)
        else:
            pages = moved[0][1:] - moved[0][:-1]
            lengths = torch.where(pages > 0, (pages - 1) * page_size + moved[2], 0).to(torch.int32)
        if self._buffers is not None:
            lists = self._buffers[1]
            if batch != len(self._buffers[2]) or batch + 1 > len(self._buffers[0]) or len(moved[1]) > len(lists):
                raise ArgumentError("indptr", f"a batch of {batch}", f"{len(self._buffers[2])}, as the buffers hold")
            self._buffers[0][: batch + 1].copy_(moved[0])
            lists[: len(moved[1])].copy_(moved[1])
            self._buffers[2].copy_(lengths)
            moved[:2], lengths = [self._buffers[0][: batch + 1], lists], self._buffers[2]
        self._plan = _Plan(
            indptr=moved[0],
            indices=moved[1],
            seq_lens=lengths,
            heads=(num_qo_heads, num_kv_heads),
            head_dim=head_dim,
            page_size=page_size,
            window_left=window_left,
            q_dtype=q_dtype,
            cache_dtype=cache_dtype,
            out_dtype=q_dtype if o_data_type is None else _dtype("o_data_type", o_data_type),
            sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
            q_len=q_len_per_req,
        )

    begin_forward = plan

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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: checks.Pair | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend with the queries of a planned batch.

        Args:
            q: [batch * q_len_per_req, heads, d].
            paged_kv_cache: as kv_cache of trtllm_batch_decode_with_kv_cache().
            kv_cache_sf: the block scales of a uint8 cache, V's linear; two tensors, or one with both along dimension 1.
            q_scale, k_scale, v_scale: factors of queries, keys and values; None means 1.
            out, lse, return_lse, enable_pdl, sinks: as there.
            window_left, q_len_per_req: None means what plan() got.
        Returns:
            out, or ``(out, lse)`` with return_lse: the bits that trtllm_batch_decode_with_kv_cache() gives.
        Raises:
            ArgumentError, ArgumentTypeError: before anything is written.
        """
        plan = self._plan
        if plan is None:
            raise ArgumentError("run", "a call before plan()", "plan() first")
        checks.unused("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor, None)
        check_dtype("q", q, (plan.q_dtype,))
        key, value = checks.pair("paged_kv_cache", paged_kv_cache)
        check_dtype("paged_kv_cache", key, (plan.cache_dtype,))
        page_at, heads_at = (2, 1) if self._kv_layout == "HND" else (1, 2)
        if key.dim() != 4 or (key.shape[page_at], key.shape[heads_at]) != (plan.page_size, plan.heads[1]):
            wanted = f"pages of {plan.page_size} tokens and {plan.heads[1]} heads, as planned"
            raise ArgumentError("paged_kv_cache", f"shape {tuple(key.shape)}", wanted)
        if q.dim() != 3 or tuple(q.shape[1:]) != (plan.heads[0], plan.head_dim):
            wanted = f"[tokens, {plan.heads[0]}, {plan.head_dim}], as planned"
            raise ArgumentError("q", f"shape {tuple(q.shape)}", wanted)
        scales = (None, None) if kv_cache_sf is None else checks.pair("kv_cache_sf", kv_cache_sf)
        q_len = plan.q_len if q_len_per_req is None else q_len_per_req
        checks.check_q_len("q_len_per_req", q_len, MAX_Q_LEN)
        result = attend(
            q,
            key,
            value,
            scales[0],
            scales[1],
            self._workspace,
            plan.indices,
            plan.seq_lens,
            plan.indptr,
            None,
            plan.sm_scale * _factor(q_scale) * _factor(k_scale),
            _factor(v_scale),
            sinks,
            out,
            lse,
            0,
            plan.window_left if window_left is None else window_left,
            plan.out_dtype,
            self._kv_layout,
            "linear",
            q_len,
            True,
            True,
            return_lse or lse is not None,
            enable_pdl,
        )
        return (result[0], result[1]) if return_lse else result[0]

    forward = run


def _factor(scale: float | None) -> float:
    return 1.0 if scale is None else float(scale)


def _dtype(name: str, dtype: torch.dtype | str | None) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ArgumentError(name, repr(dtype), "a torch dtype")
    return found
