"""What engines do with a wrapper beside plan() and run(): their own planners, and names that they read."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import jitfp4
from tests.support.attention import Case

_BOUND = {torch.bfloat16: 4e-3}
_KIND: dict[str, Any] = {"cache": torch.bfloat16, "kv_heads": 1, "group": 2, "page": 1, "kv_layout": "NHD"}
_FIRST, _LATER = (40, 20), (33, 25)  # tokens of requests when a graph is captured, and when it is replayed


def _lists(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where pages end, pages, and tokens of last pages, for pages of one token."""
    pages = [table[:length] for table, length in zip(case.block_tables, case.lengths, strict=True)]
    ends = torch.tensor([0, *case.lengths]).cumsum(0).int()
    return ends, torch.cat(pages), torch.ones(len(case.lengths), dtype=torch.int32)


def _ints(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.int32) for size in sizes]


def _space() -> torch.Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8)


def _decode(case: Case) -> jitfp4.BatchDecodeWithPagedKVCacheWrapper:
    """A planned wrapper of a CUDA graph."""
    wrapper = jitfp4.BatchDecodeWithPagedKVCacheWrapper(_space(), "NHD", True, True, *_ints(3, 100, 2), backend="fa2")
    wrapper.begin_forward(*_lists(case), 2, 1, 128, 1, data_type=torch.bfloat16, q_data_type=torch.bfloat16)
    return wrapper


def test_a_planner_that_leaves_the_plan_to_the_wrapper() -> None:
    wrapper, later = _decode(Case(lengths=_FIRST, **_KIND)), Case(lengths=_LATER, **_KIND)
    assert wrapper._cudnn_auto and wrapper._backend != "cudnn" and wrapper._requested_backend != "auto"
    assert wrapper.use_tensor_cores and wrapper.device == torch.device("cpu")
    wrapper._plan_impl(
        *_lists(later),
        *(2, 1, 128, 1),
        q_data_type=torch.bfloat16,
        kv_data_type=None,
        data_type=torch.bfloat16,
        o_data_type=wrapper._cached_o_data_type,
        block_tables=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
    )
    later.check(wrapper.forward_return_lse(later.query, later.kv_cache, sm_scale=later.bmm1, v_scale=0.6), _BOUND)


def test_the_planner_of_flashinfer() -> None:
    decode = pytest.importorskip("flashinfer.decode")
    wrapper, later = _decode(Case(lengths=_FIRST, **_KIND)), Case(lengths=_LATER, **_KIND)
    wrapper.begin_forward = functools.partial(decode.fast_decode_plan, wrapper)
    lists, kinds = _lists(later), {"data_type": torch.bfloat16, "q_data_type": torch.bfloat16}
    wrapper.begin_forward(*lists, 2, 1, 128, 1, **kinds, global_override_indptr_cpu=lists[0])
    later.check(wrapper.forward_return_lse(later.query, later.kv_cache, sm_scale=later.bmm1, v_scale=0.6), _BOUND)


def test_a_planner_that_fills_the_buffers() -> None:
    first, later = (Case(lengths=lengths, q_lens=3, **_KIND) for lengths in (_FIRST, _LATER))
    wrapper = jitfp4.BatchPrefillWithPagedKVCacheWrapper(_space(), "NHD", True, *_ints(3, 3, 100, 2), backend="fa2")
    assert wrapper._cached_module is None, "not before a plan"
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.begin_forward(first.cum_seq_lens_q, *_lists(first), 2, 1, 128, 1, **kinds)
    assert wrapper.is_cuda_graph_enabled and wrapper._backend == "fa2" and wrapper._custom_mask_buf is None
    ends, pages, last = _lists(later)
    wrapper._qo_indptr_buf.copy_(later.cum_seq_lens_q)
    wrapper._paged_kv_indptr_buf.copy_(ends)
    wrapper._paged_kv_last_page_len_buf.copy_(last)
    wrapper._paged_kv_indices_buf[: len(pages)].copy_(pages)
    buffers = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer
    lists = later.cum_seq_lens_q, ends, torch.tensor(later.lengths)
    rows = wrapper._max_total_num_rows or 6
    wrapper._cached_module.plan(*buffers, *lists, rows, 2, 2, 1, 1, True, 128, 128, True, -1, -1, False, 0, 0)
    got = wrapper.forward_return_lse(later.query, later.kv_cache, causal=True, sm_scale=later.bmm1, v_scale=0.6)
    later.check(got, _BOUND)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8])
def test_pages_of_one_token_need_no_dimension(cache: torch.dtype, layout: str) -> None:
    case = Case(lengths=_FIRST, **_KIND | {"kv_layout": layout, "cache": cache, "kv_heads": 2})
    wrapper = jitfp4.BatchDecodeWithPagedKVCacheWrapper(case.workspace, layout)
    wrapper.plan(*_lists(case), 4, 2, 128, 1, q_data_type=torch.bfloat16, kv_data_type=cache, sm_scale=case.bmm1)
    at = 1 if layout == "NHD" else 2
    flat = [side.squeeze(at) for side in case.kv_cache]
    scales = None if case.kv_cache_sf is None else [side.squeeze(at) for side in case.kv_cache_sf]
    for sides, factors in (
        (tuple(flat), None if scales is None else tuple(scales)),
        (torch.stack(flat, 1), None if scales is None else torch.stack(scales, 1)),
    ):
        case.check(wrapper.run_return_lse(case.query, sides, v_scale=case.bmm2, kv_cache_sf=factors), _BOUND)
    with pytest.raises(jitfp4.ArgumentError, match="paged_kv_cache"):
        wrapper.run(case.query, flat[0])


@pytest.mark.parametrize("scale", [torch.tensor(0.6), torch.tensor([0.6]), torch.tensor(0.6, dtype=torch.float64)])
def test_factors_may_be_tensors(scale: torch.Tensor) -> None:
    case = Case(lengths=_FIRST, **_KIND)
    wrapper = _decode(case)
    run = functools.partial(wrapper.run_return_lse, case.query, case.kv_cache)
    case.check(run(v_scale=scale), _BOUND)
    halves = run(q_scale=torch.tensor(0.5), k_scale=torch.tensor(2.0), v_scale=0.6)
    assert all(torch.equal(a, b) for a, b in zip(halves, run(v_scale=0.6), strict=True))
    for name, wrong in (("k_scale", torch.ones(2)), ("v_scale", torch.tensor(1)), ("q_scale", "1")):
        with pytest.raises((jitfp4.ArgumentError, jitfp4.ArgumentTypeError), match=name):
            run(**{name: wrong})


@pytest.mark.gpu
def test_factors_on_the_device_wait_for_nothing() -> None:
    case = Case(lengths=_FIRST, **_KIND, device="cuda")
    scale = torch.tensor(0.6, device="cuda")
    wrapper = jitfp4.BatchDecodeWithPagedKVCacheWrapper(case.workspace, "NHD")
    lists = [tensor.cuda() for tensor in _lists(case)]
    wrapper.plan(*lists, 2, 1, 128, 1, q_data_type=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = wrapper.run_return_lse(case.query, case.kv_cache, k_scale=scale, v_scale=scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    number = wrapper.run_return_lse(case.query, case.kv_cache, k_scale=0.6, v_scale=0.6)
    assert all(torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-4) for a, b in zip(got, number, strict=True))
