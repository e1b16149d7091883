"""What the decode functions refuse, and ways to say the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import sim
from jitfp4.arch import Arch
from jitfp4.dtypes import CODE_DTYPES
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.operation import ATTENTION
from tests.support.attention import Case, relative_error


def test_what_is_tied_to_closed_kernels_is_an_error() -> None:
    case = Case()
    for name, value in {
        "o_scale": 2.0,
        "backend": "cudnn",
        "mask": torch.ones(1),
        "skip_softmax_threshold_scale_factor": 1.0,
        "bmm1_scale_log2": torch.ones(1),
        "enable_block_sparse_attention": True,
        "bf16q_fp8kv_transform_mode": "x",
        "cp_world": 2,
        "cp_rank": 1,
        "causal_seqlens_kv_global": torch.ones(2, dtype=torch.int32),
    }.items():
        with pytest.raises(jitfp4.ArgumentError, match=name):
            case.run(**{name: value})


def test_counters_of_flashinfer_are_taken_and_not_touched() -> None:
    case = Case(lengths=(40,), kv_heads=1, q_lens=2)
    buffer = torch.full((1024,), 0xFF, dtype=torch.uint8)
    flags = {"use_fp16_softmax": False, "uses_spcompress": False}
    for run, others in ((case.run, {}), (case.run_context, flags)):
        got = run(multi_ctas_kv_counter_buffer=buffer, **others)
        assert torch.equal(got[0], run()[0])
        assert (buffer == 0xFF).all()
        with pytest.raises(jitfp4.ArgumentTypeError, match="multi_ctas_kv_counter_buffer"):
            run(multi_ctas_kv_counter_buffer=1024)
        with pytest.raises(jitfp4.ArgumentTypeError, match="multi_ctas_kv_counter_buffer"):
            run(multi_ctas_kv_counter_buffer=torch.empty(1024, device="meta"))


def test_the_order_of_requests_changes_nothing() -> None:
    case = Case()
    order = torch.tensor([1, 0], dtype=torch.int32)
    got = case.run(request_order=order, request_order_plan=object(), backend="cake")
    assert all(torch.equal(a, b) for a, b in zip(got, case.run(), strict=True))
    for name, changes in (
        ("request_order", {"request_order": order[:1]}),
        ("request_order", {"request_order": order.long()}),
        ("request_order_plan", {"request_order_plan": object()}),
    ):
        with pytest.raises((jitfp4.ArgumentError, jitfp4.ArgumentTypeError), match=name):
            case.run(**changes)


def test_the_wrapper_need_not_be_causal() -> None:
    case = Case(lengths=(40, 20), q_lens=3, kv_heads=1, group=2, causal=False)
    wrapper = jitfp4.BatchDecodeWithPagedKVCacheWrapper(case.workspace, "HND")
    columns = [-(-length // case.page) for length in case.lengths]
    ends = torch.tensor([0, *columns]).cumsum(0).to(torch.int32)
    pages = torch.cat([table[:n] for table, n in zip(case.block_tables, columns, strict=True)])
    last = torch.tensor([(length - 1) % case.page + 1 for length in case.lengths], dtype=torch.int32)
    kinds = {"q_data_type": "bfloat16", "kv_data_type": "nvfp4", "q_len_per_req": 3, "sm_scale": case.bmm1}
    wrapper.plan(ends, pages, last, 2, 1, 128, 16, is_causal=False, **kinds)
    got = wrapper.run_return_lse(case.query, case.kv_cache, v_scale=case.bmm2, kv_cache_sf=case.kv_cache_sf)
    assert all(torch.equal(a, b) for a, b in zip(got, case.run_context(), strict=True))


def _wrong(case: Case) -> dict[str, tuple[str, dict[str, Any]]]:
    (k, v), (ks, vs) = case.kv_cache, case.kv_cache_sf
    wide = torch.zeros(2, case.query.shape[1], 2 * case.head_dim, dtype=torch.bfloat16)
    return {
        "no scales": ("kv_cache_sf", {"kv_cache_sf": None}),
        "both names of the scales": ("kv_block_scales", {"kv_block_scales": (ks, vs)}),
        "scales of half the blocks": ("kv_cache_sf", {"kv_cache_sf": (ks[..., ::2], vs)}),
        "float scales": ("kv_cache_sf", {"kv_cache_sf": (ks.float(), vs.float())}),
        "scales of fewer pages": ("kv_cache_sf", {"kv_cache_sf": (ks[1:], vs[1:])}),
        "a bf16 cache of half the width": ("kv_cache", {"kv_cache": (k.bfloat16(), v.bfloat16())}),
        "an fp16 cache for bf16": ("kv_cache", {"kv_cache": (k.half(), v.half())}),
        "scales of an e4m3 cache": (
            "kv_cache_sf",
            {"kv_cache": tuple(torch.zeros(*t.shape[:3], 128, dtype=torch.float8_e4m3fn) for t in (k, v))},
        ),
        "three tensors": ("kv_cache", {"kv_cache": (k, v, v)}),
        "a layout": ("kv_layout", {"kv_layout": "DHN"}),
        "a scale layout": ("v_scale_layout", {"v_scale_layout": "swizzled"}),
        "query rows apart": ("query", {"query": wide[..., ::2]}),
        "float queries": ("query", {"query": case.query.float()}),
        "heads that do not divide": ("query", {"query": case.query[:, :-1]}),
        "a query too many": ("query", {"query": case.query[:1]}),
        "no queries": ("q_len_per_req", {"q_len_per_req": 0}),
        "long lengths": ("seq_lens", {"seq_lens": case.seq_lens.long()}),
        "tables for K and V": ("block_tables", {"uses_shared_paged_kv_idx": False}),
        "fewer tables": ("block_tables", {"block_tables": case.block_tables[:1]}),
        "a bound without ends": ("max_q_len", {"max_q_len": 2}),
        "a window": ("window_left", {"window_left": -2}),
        "sinks of some heads": ("sinks", {"sinks": torch.zeros(3)}),
        "two sinks": ("sinks", {"sinks": [torch.zeros(16), torch.zeros(16)]}),
        "an output of another shape": ("out", {"out": torch.empty(1, 2, 3, dtype=torch.bfloat16)}),
        "an output type": ("out_dtype", {"out_dtype": torch.float32}),
        "a double scale": ("bmm1_scale", {"bmm1_scale": torch.ones(1, dtype=torch.float64)}),
        "two scales": ("bmm2_scale", {"bmm2_scale": torch.ones(2)}),
        "a length beyond positions": ("max_seq_len", {"max_seq_len": -1}),
    }


def test_errors_of_head_dimensions_say_what_is_allowed() -> None:
    with pytest.raises(jitfp4.ArgumentError, match=r"^query: .*80, 96, 112"):
        Case(head_dim=48).run()
    with pytest.raises(jitfp4.ArgumentError, match=r"^v_scale_layout: got interleaved4 with d = 96; allowed: linear"):
        Case(head_dim=96).run(v_scale_layout="interleaved4")


@pytest.mark.parametrize("what", _wrong(Case()))
def test_errors_name_the_argument(what: str) -> None:
    case = Case()
    name, changes = _wrong(case)[what]
    with pytest.raises((jitfp4.ArgumentError, jitfp4.ArgumentTypeError), match=name):
        case.run(**changes)


@pytest.mark.parametrize("which", ["kv_cache", "kv_cache_sf"])
def test_both_sides_start_aligned(which: str) -> None:
    case = Case()
    sides = []
    for side in getattr(case, which):
        memory = torch.zeros(side.numel() + 8, dtype=torch.uint8)
        sides.append(memory[8:].view(side.shape))
    with pytest.raises(jitfp4.ArgumentError, match="16-byte alignment"):
        case.run(**{which: tuple(sides)})


def test_interleaved_scales_need_whole_groups() -> None:
    with pytest.raises(jitfp4.ArgumentError, match="multiple of 4"):
        Case(page=6).run(v_scale_layout="interleaved4")


def test_a_workspace_that_is_too_small() -> None:
    case = Case()
    tactic = DecodeTactic(4, 2, 1)  # clusters need none
    forced = ATTENTION.forced(tactic)
    with sim.device("sm_90a"), forced, pytest.raises(jitfp4.ArgumentError, match="workspace_buffer"):
        case.run(workspace_buffer=torch.zeros(64, dtype=torch.uint8))


def test_an_output_may_not_lie_in_the_workspace() -> None:
    case = Case()
    out = case.workspace[: case.query.numel() * 2].view(torch.bfloat16).view(case.query.shape)
    with pytest.raises(jitfp4.ArgumentError, match="memory"):
        case.run(out=out)


def test_the_same_said_otherwise_gives_the_same_bits() -> None:
    case = Case(lengths=(64, 64), page=16, with_sinks=True)
    out, lse = case.run()
    (k, v), (ks, vs) = case.kv_cache, case.kv_cache_sf
    one = torch.tensor([case.bmm1])
    for changes in (
        {"kv_cache": torch.stack((k, v), 1), "kv_cache_sf": torch.stack((ks, vs), 1)},
        {"kv_cache_sf": None, "kv_block_scales": (ks.view(torch.float8_e4m3fn), vs.view(torch.float8_e4m3fn))},
        {"bmm1_scale": one, "bmm2_scale": torch.tensor(case.bmm2)},
        {"sinks": [case.sinks]},
        {"backend": "trtllm-gen"},
        *({"kv_cache": tuple(side.view(dtype) for side in (k, v))} for dtype in CODE_DTYPES),
        {"q_len_per_req": None, "cum_seq_lens_q": torch.tensor([0, 1, 2], dtype=torch.int32), "max_q_len": 1},
        {"uses_shared_paged_kv_idx": False, "block_tables": torch.stack((case.block_tables,) * 2, 1)},
        {"out": torch.empty_like(out), "lse": torch.empty_like(lse)},
    ):
        got = case.run(**changes)
        assert torch.equal(got[0], out)
        assert (got[1] - lse).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["auto", "trtllm-gen"])
def test_the_wrapper_gives_the_same_bits(backend: str) -> None:
    """V's scales are linear, or interleaved as the backend of that name has them."""
    order = "linear" if backend == "auto" else "interleaved4"
    case = Case(lengths=(64, 50, 0), page=16, kv_layout="NHD", q_lens=2, v_scale_layout=order)
    kv_cache = tuple(side.view(CODE_DTYPES[-1]) for side in case.kv_cache)
    columns = [-(-length // 16) for length in case.lengths]
    indptr = torch.tensor([0, *columns]).cumsum(0).to(torch.int32)
    lists = [table[:n] for table, n in zip(case.block_tables, columns, strict=True)]
    last = torch.tensor([(length - 1) % 16 + 1 for length in case.lengths], dtype=torch.int32)
    workspace = torch.full((32 << 20,), 0x7F, dtype=torch.uint8)
    wrapper = jitfp4.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    few = dataclasses.replace(Arch.of("sm_90a"), num_sms=4)
    with sim.device(few), ATTENTION.forced(DecodeTactic(1, 2, 1)):  # which divide requests
        wrapper.plan(
            indptr,
            torch.cat(lists),
            last,
            16,
            2,
            128,
            16,
            q_data_type="bfloat16",
            kv_data_type=CODE_DTYPES[-1],
            sm_scale=case.bmm1 / 2,
            q_len_per_req=2,
        )
        got = wrapper.run(
            case.query, kv_cache, k_scale=2.0, v_scale=case.bmm2, kv_cache_sf=case.kv_cache_sf, return_lse=True
        )
        expected = case.run()
        other = torch.full_like(workspace, 0x7F)
        wrapper.reset_workspace_buffer(other, torch.empty(8 << 20, dtype=torch.uint8))
        workspace.fill_(0x7F)
        again = wrapper.run(case.query, kv_cache, k_scale=2.0, v_scale=case.bmm2, kv_cache_sf=case.kv_cache_sf)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(again, expected[0])
    assert not (other == 0x7F).all() and (workspace == 0x7F).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("cache", [torch.uint8, torch.bfloat16])
def test_what_is_not_divided_depends_on_no_other_request(cache: torch.dtype, prefill: bool) -> None:
    """Each request alone gives the bits that it has in a batch, which is not so where work is divided."""
    case = Case(lengths=(300, 40, 170), kv_layout="NHD", cache=cache, q_lens=9 if prefill else 1)

    def attend(requests: tuple[int, ...], whole: bool) -> torch.Tensor:
        lengths = [case.lengths[b] for b in requests]
        columns = [-(-length // 16) for length in lengths]
        lists = [
            torch.tensor([0, *columns]).cumsum(0).to(torch.int32),
            torch.cat([case.block_tables[b, :n] for b, n in zip(requests, columns, strict=True)]),
            torch.tensor([(length - 1) % 16 + 1 for length in lengths], dtype=torch.int32),
        ]
        query = torch.cat([case.query[case.ends[b] : case.ends[b + 1]] for b in requests])
        options = {"q_data_type": "bfloat16", "kv_data_type": cache, "disable_split_kv": whole}
        if prefill:
            wrapper = jitfp4.BatchPrefillWithPagedKVCacheWrapper(case.workspace, "NHD")
            wrapper.plan(torch.arange(len(requests) + 1).int() * 9, *lists, 16, 2, 128, 16, causal=True, **options)
        else:
            wrapper = jitfp4.BatchDecodeWithPagedKVCacheWrapper(case.workspace, "NHD")
            wrapper.plan(*lists, 16, 2, 128, 16, **options)
        return wrapper.run(query, case.kv_cache, kv_cache_sf=case.kv_cache_sf)

    few = dataclasses.replace(Arch.of("sm_90a"), num_sms=4)
    with sim.device(few):
        together = attend((0, 1, 2), True)
        assert relative_error(together, attend((0, 1, 2), False).double()) < 4e-3
        for b in range(3):
            assert torch.equal(attend((b,), True), together[case.ends[b] : case.ends[b + 1]])


def test_the_wrapper_refuses() -> None:
    wrapper = jitfp4.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    case = Case(kv_layout="NHD")
    with pytest.raises(jitfp4.ArgumentError, match="backend"):
        jitfp4.BatchDecodeWithPagedKVCacheWrapper(case.workspace, backend="cute-dsl")
    with pytest.raises(jitfp4.ArgumentError, match="plan"):
        wrapper.run(case.query, case.kv_cache, kv_cache_sf=case.kv_cache_sf)
    lists = (torch.tensor([0, 1, 2], dtype=torch.int32), torch.arange(2, dtype=torch.int32), torch.ones(2).int())
    sizes = (16, 2, 128, 16)
    for name, value in {
        "pos_encoding_mode": "ROPE_LLAMA",
        "logits_soft_cap": -30.0,
        "rope_theta": 1e4,
        "fixed_split_size": 64,
        "window_right": 1,
        "kv_data_type": torch.int8,
        "q_data_type": "float17",
    }.items():
        options = {"q_data_type": "bfloat16", "kv_data_type": torch.uint8} | {name: value}
        with pytest.raises(jitfp4.ArgumentError, match=name):
            wrapper.plan(*lists, *sizes, **options)
    wrapper.plan(*lists, *sizes, q_data_type="bfloat16", kv_data_type=torch.uint8)
    with pytest.raises(jitfp4.ArgumentError, match="q"):
        wrapper.run(case.query[..., :64], case.kv_cache, kv_cache_sf=case.kv_cache_sf)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_single_request_without_pages(kv_layout: str) -> None:
    case = Case(lengths=(48,), page=1, kv_layout="NHD")
    order = case.block_tables[0, :48].long()
    lay = (lambda t: t[order, 0].transpose(0, 1).contiguous()) if kv_layout == "HND" else (lambda t: t[order, 0])
    (k, v), (ks, vs) = case.kv_cache, case.kv_cache_sf
    out, lse = jitfp4.single_decode_with_kv_cache(
        case.query[0],
        lay(k),
        lay(v),
        kv_layout,
        kv_cache_sf=(lay(ks), lay(vs)),
        sm_scale=case.bmm1,
        v_scale=case.bmm2,
        return_lse=True,
    )
    expected = case.run()
    assert torch.equal(out, expected[0][0])
    assert (lse - expected[1][0]).abs().max() < 1e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "tactic",
    [DecodeTactic(2, 2, 1), DecodeTactic(4, 3, 3), DecodeTactic(8, 3, 1, head_warps=2), DecodeTactic(12, 3, 1)],
)
def test_how_the_work_is_split_hardly_matters(tactic: DecodeTactic) -> None:
    case = Case(lengths=(300, 40, 0, 7), kv_layout="NHD")
    expected, _ = case.expected()
    with sim.device("sm_90a"), ATTENTION.forced(tactic):
        out, _ = case.run()
    assert relative_error(out, expected) < 4e-3
