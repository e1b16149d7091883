"""Names of FlashInfer's paged wrappers that engines use beside its documented ones, as in its version 0.7.2.

vLLM asserts that run() uses what was planned. FlashInfer's fast_decode_plan(), which SGLang calls for CUDA graphs,
leaves a wrapper that says ``_cudnn_auto`` to ``_plan_impl()``. SGLang's fast_prefill_plan() copies its lists into the
buffers of a wrapper by itself, and has ``_cached_module`` plan from them.
"""

from __future__ import annotations

from typing import Any

import torch


class EngineNames:
    """What a wrapper has under these names. None of them does anything that plan() and run() do not."""

    use_tensor_cores = True
    _backend = _requested_backend = "fa2"
    _cudnn_auto = True  # plans are made by _plan_impl()
    _max_total_num_rows: int | None = None
    _cached_o_data_type: torch.dtype | None = None
    _custom_mask_buf: torch.Tensor | None = None
    _int_workspace_buffer: torch.Tensor | None = None
    _pin_memory_int_workspace_buffer: torch.Tensor | None = None
    _paged_kv_indptr_buf: torch.Tensor | None = None
    _paged_kv_indices_buf: torch.Tensor | None = None
    _paged_kv_last_page_len_buf: torch.Tensor | None = None
    _qo_indptr_buf: torch.Tensor | None = None

    def _keep(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *qo_indptr: torch.Tensor) -> None:
        """Name the buffers of CUDA graphs."""
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
        self._paged_kv_last_page_len_buf = last
        if qo_indptr:
            (self._qo_indptr_buf,) = qo_indptr


def tokens(page_ends: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """The tokens of each request, int32: of whole pages and of the last one; none without pages."""
    pages = page_ends[1:] - page_ends[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).to(torch.int32)


class BufferPlanner:
    """Plans of a wrapper whose lists somebody else has copied into its buffers; its ``_cached_module``."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def plan(self, *values: Any) -> list[int]:
        """Find the tokens of each request from the buffers, on the device.

        Args:
            values: as FlashInfer's planner of many query tokens takes them; the eleventh is the page size.
        Returns:
            Nothing that a run() needs.
        """
        wrapper = self._wrapper
        last = wrapper._paged_kv_last_page_len_buf
        ends = wrapper._paged_kv_indptr_buf[: len(last) + 1]
        wrapper._listed().seq_lens.copy_(tokens(ends, last, values[10]))
        return []
