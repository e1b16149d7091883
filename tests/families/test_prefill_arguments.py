"""What the prefill functions refuse, and ways to say the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import sim
from jitfp4.dtypes import CODE_DTYPES
from tests.support.attention import Case

SMALL: dict[str, Any] = {"lengths": (40, 20), "q_lens": (12, 20), "kv_heads": 1, "group": 2}


def test_what_is_tied_to_closed_kernels_is_an_error() -> None:
    case = Case(**SMALL)
    for name, value in {
        "skip_softmax_threshold_scale_factor": 1.0,
        "use_fp16_softmax": True,
        "uses_spcompress": True,
    }.items():
        with pytest.raises(jitfp4.ArgumentError, match=f"(?s){name}.*binaries"):
            case.run_context(**{name: value})


def _wrong(case: Case) -> dict[str, tuple[str, dict[str, Any]]]:
    (k, v), scales = case.kv_cache, case.kv_cache_sf
    ends = torch.tensor(case.ends, dtype=torch.int32)
    return {
        "no scales": ("kv_cache_sf", {"kv_cache_sf": None}),
        "both names of the scales": ("kv_block_scales", {"kv_block_scales": scales}),
        "an fp16 cache for bf16": ("kv_cache", {"kv_cache": (k.half(), v.half())}),
        "three tensors": ("kv_cache", {"kv_cache": (k, v, v)}),
        "a layout": ("kv_layout", {"kv_layout": "DHN"}),
        "a scale layout": ("v_scale_layout", {"v_scale_layout": "swizzled"}),
        "no queries at all": ("max_q_len", {"max_q_len": 0}),
        "another batch": ("batch_size|cum_seq_lens_kv", {"batch_size": 3}),
        "lengths of another batch": ("batch_size", {"seq_lens": case.seq_lens[:1]}),
        "ends of fewer queries": ("cum_seq_lens_q", {"cum_seq_lens_q": ends[:-1]}),
        "long ends": ("cum_seq_lens_q", {"cum_seq_lens_q": ends.long()}),
        "ends of no tokens": ("cum_seq_lens_kv", {"cum_seq_lens_kv": ends[:1]}),
        "a flag that is a number": ("causal", {"causal": 1}),
        "a window": ("window_left", {"window_left": -2}),
        "a bound beyond positions": ("max_kv_len", {"max_kv_len": -1}),
        "sinks of some heads": ("sinks", {"sinks": torch.zeros(3)}),
        "an output of another shape": ("out", {"out": torch.empty(1, 2, 3, dtype=torch.bfloat16)}),
        "an output type": ("out_dtype", {"out_dtype": torch.float32}),
    }


@pytest.mark.parametrize("what", _wrong(Case(**SMALL)))
def test_errors_name_the_argument(what: str) -> None:
    case = Case(**SMALL)
    name, changes = _wrong(case)[what]
    with pytest.raises((jitfp4.ArgumentError, jitfp4.ArgumentTypeError), match=name):
        case.run_context(**changes)


def _lists(case: Case) -> tuple[torch.Tensor, ...]:
    """A case's qo_indptr, paged_kv_indptr, paged_kv_indices and paged_kv_last_page_len."""
    columns = [-(-length // case.page) for length in case.lengths]
    pages = [table[:n] for table, n in zip(case.block_tables, columns, strict=True)]
    last = [(length - 1) % case.page + 1 for length in case.lengths]
    ends = torch.tensor([0, *columns]).cumsum(0)
    return tuple(torch.as_tensor(t).to(torch.int32) for t in (case.ends, ends, torch.cat(pages), last))


@pytest.mark.parametrize(("causal", "backend"), [(False, "fa2"), (True, "trtllm-gen")])
def test_the_wrapper_gives_the_same_bits(causal: bool, backend: str) -> None:
    order = "linear" if backend == "fa2" else "interleaved4"
    case = Case(**SMALL, kv_layout="NHD", causal=causal, v_scale_layout=order)
    workspace = torch.full((1 << 20,), 0x7F, dtype=torch.uint8)
    wrapper = jitfp4.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    with sim.device("sm_90a"):
        wrapper.plan(
            *_lists(case),
            2,
            1,
            128,
            16,
            causal=causal,
            q_data_type="bfloat16",
            kv_data_type=torch.uint8,
            sm_scale=case.bmm1 / 2,
            max_token_per_sequence=20,
        )
        got = wrapper.run(
            case.query, case.kv_cache, k_scale=2.0, v_scale=case.bmm2, kv_cache_sf=case.kv_cache_sf, return_lse=True
        )
        expected = case.run_context()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("layout", ["NH", "HN"])
@pytest.mark.parametrize("base", ["log2", "ln"])
def test_the_wrapper_gives_logarithms_of_either_base_and_order(base: str, layout: str) -> None:
    case = Case(**SMALL)
    wrapper = jitfp4.BatchPrefillWithPagedKVCacheWrapper(case.workspace, "HND")
    wrapper.plan(*_lists(case), 2, 1, 128, 16, causal=True, q_data_type="bfloat16", kv_data_type="nvfp4")
    options = {"v_scale": case.bmm2, "kv_cache_sf": case.kv_cache_sf}
    out, plain = wrapper.run(case.query, case.kv_cache, return_lse=True, **options)
    wanted = plain * (1.0 if base == "log2" else math.log(2))
    wanted = wanted.T.contiguous() if layout == "HN" else wanted
    given = torch.full_like(wanted, torch.nan)
    options |= {"lse_base": base, "lse_layout": layout}
    for lse in (None, given):
        got = wrapper.run(case.query, case.kv_cache, lse=lse, return_lse=True, **options)
        assert torch.equal(got[0], out) and torch.allclose(got[1], wanted) and got[1].is_contiguous()
        assert lse is None or got[1] is lse
    given.fill_(torch.nan)
    assert torch.equal(wrapper.run(case.query, case.kv_cache, lse=given, **options), out)
    assert torch.allclose(given, wanted)
    for name, value in (("lse_base", "e"), ("lse_layout", "hn"), ("lse", given[:1])):
        with pytest.raises(jitfp4.ArgumentError, match=name):
            wrapper.run(case.query, case.kv_cache, return_lse=True, **options | {name: value})


def test_a_uniform_number_of_queries_is_a_bound() -> None:
    case = Case(lengths=(40, 20), q_lens=6, kv_heads=1, group=2)
    wrapper = jitfp4.BatchPrefillWithPagedKVCacheWrapper(case.workspace, "HND")
    kinds = {"causal": True, "q_data_type": "bfloat16", "kv_data_type": torch.uint8, "sm_scale": case.bmm1}
    wrapper.plan(*_lists(case), 2, 1, 128, 16, uniform_q_len=6, **kinds)
    out = wrapper.run(case.query, case.kv_cache, v_scale=case.bmm2, kv_cache_sf=case.kv_cache_sf)
    assert torch.equal(out, case.run_context()[0])
    with pytest.raises(jitfp4.ArgumentError, match="uniform_q_len"):
        wrapper.plan(*_lists(case), 2, 1, 128, 16, uniform_q_len=0, **kinds)


def test_a_captured_wrapper_keeps_its_buffers() -> None:
    case = Case(lengths=(40, 20), q_lens=(12, 20), kv_heads=1, group=2, cache=torch.float16, q_dtype=torch.float16)
    q_ends, page_ends, pages, last = _lists(case)
    buffers = (torch.zeros_like(q_ends), torch.zeros_like(page_ends), torch.zeros(9).int(), torch.zeros_like(last))
    wrapper = jitfp4.BatchPrefillWithPagedKVCacheWrapper(case.workspace, "HND", True, *buffers)
    wrapper.plan(q_ends, page_ends, pages, last, 2, 1, 128, 16, causal=True, sm_scale=case.bmm1)
    out = wrapper.run(case.query, case.kv_cache, v_scale=case.bmm2)
    assert torch.equal(out, case.run_context()[0])
    for buffer, given in zip(buffers[:3], (q_ends, page_ends, pages), strict=True):
        assert torch.equal(buffer[: len(given)], given)
    with pytest.raises(jitfp4.ArgumentError, match="paged_kv_indptr"):
        wrapper.plan(q_ends[:2], page_ends[:2], pages, last[:1], 2, 1, 128, 16)
    with pytest.raises(jitfp4.ArgumentError, match="qo_indptr_buf"):
        jitfp4.BatchPrefillWithPagedKVCacheWrapper(case.workspace, "HND", True, None, *buffers[1:])


def test_the_wrapper_refuses() -> None:
    case = Case(**SMALL, kv_layout="NHD")
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    wrapper = jitfp4.BatchPrefillWithPagedKVCacheWrapper(workspace)
    with pytest.raises(jitfp4.ArgumentError, match="plan"):
        wrapper.run(case.query, case.kv_cache, kv_cache_sf=case.kv_cache_sf)
    sizes, kinds = (2, 1, 128, 16), {"q_data_type": "bfloat16", "kv_data_type": torch.uint8}
    for name, value in {
        "head_dim_vo": 64,
        "custom_mask": torch.ones(3, 3, dtype=torch.bool),
        "packed_custom_mask": torch.ones(3, dtype=torch.bool),
        "pos_encoding_mode": "ROPE_LLAMA",
        "logits_soft_cap": -30.0,
        "rope_theta": 1e4,
        "prefix_len_ptr": torch.ones(1),
        "token_pos_in_items_len": 3,
        "fixed_split_size": 64,
        "kv_data_type": torch.int8,
        "max_token_per_sequence": 0,
    }.items():
        with pytest.raises(jitfp4.ArgumentError, match=name):
            wrapper.plan(*_lists(case), *sizes, **(kinds | {name: value}))
    for name, value in {"custom_mask_buf": torch.ones(3), "backend": "cudnn", "jit_kwargs": {}}.items():
        with pytest.raises(jitfp4.ArgumentError, match=name):
            jitfp4.BatchPrefillWithPagedKVCacheWrapper(workspace, **{name: value})
    wrapper.plan(*_lists(case), *sizes, **kinds)
    for name in ("use_fp16_softmax", "uses_spcompress"):
        with pytest.raises(jitfp4.ArgumentError, match=name):
            wrapper.run(case.query, case.kv_cache, kv_cache_sf=case.kv_cache_sf, **{name: True})
    with pytest.raises(jitfp4.ArgumentError, match="q"):
        wrapper.run(case.query[..., :64], case.kv_cache, kv_cache_sf=case.kv_cache_sf)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_single_request_without_pages(kv_layout: str) -> None:
    case = Case(lengths=(48,), q_lens=(20,), kv_heads=2, group=2, page=1, kv_layout="NHD")
    order = case.block_tables[0, :48].long()
    lay = (lambda t: t[order, 0].transpose(0, 1).contiguous()) if kv_layout == "HND" else (lambda t: t[order, 0])
    (k, v), (ks, vs) = case.kv_cache, case.kv_cache_sf
    call: dict[str, Any] = {
        "q": case.query,
        "k": lay(k),
        "v": lay(v),
        "causal": True,
        "kv_layout": kv_layout,
        "kv_cache_sf": (lay(ks), lay(vs)),
        "sm_scale": case.bmm1,
        "v_scale": case.bmm2,
        "return_lse": True,
    }
    out, lse = jitfp4.single_prefill_with_kv_cache(**call)
    native = {name: call[name].view(CODE_DTYPES[-1]) for name in "kv"}
    assert torch.equal(jitfp4.single_prefill_with_kv_cache(**(call | native), backend="fa2")[0], out)
    expected = case.run_context()
    assert torch.equal(out, expected[0])
    assert (lse - expected[1]).abs().max() < 1e-5
    for name, value in {
        "scale_q": torch.ones(4),
        "custom_mask": torch.ones(48, 20, dtype=torch.bool),
        "pos_encoding_mode": "ALIBI",
        "backend": "trtllm-gen",
    }.items():
        with pytest.raises(jitfp4.ArgumentError, match=name):
            jitfp4.single_prefill_with_kv_cache(**(call | {name: value}))
