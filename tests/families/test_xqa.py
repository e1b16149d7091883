"""Decode attention as XQA's callers ask for it: its function, its backend's name, its masks and scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import sim
from tests.support.attention import Case

LENGTHS = (70, 33, 20)


def packed(rows: list[int], requests: int | None = None) -> torch.Tensor:
    """A draft mask of these words; the same for each of ``requests``."""
    words = torch.tensor([[row, 0] for row in rows], dtype=torch.int16).view(torch.uint16)
    return words if requests is None else words.view(torch.int16).expand(requests, -1, -1).view(torch.uint16)


def xqa(case: Case, **changes: Any) -> torch.Tensor:
    """xqa_batch_decode_with_kv_cache() of a case."""
    arguments = case.decode_arguments()
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale")
    more = ("bmm2_scale", "window_left", "sinks", "kv_layout", "q_len_per_req", "kv_cache_sf")
    return jitfp4.xqa_batch_decode_with_kv_cache(**({name: arguments[name] for name in (*names, *more)} | changes))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16])
def test_it_is_the_same_attention(cache: torch.dtype, layout: str) -> None:
    case = Case(cache, LENGTHS, q_lens=3, kv_layout=layout, window_left=25, with_sinks=True)
    out = torch.empty_like(case.query)
    assert xqa(case, out=out) is out
    assert torch.equal(out, case.run()[0])
    lengths = case.seq_lens.view(torch.uint32)
    assert torch.equal(xqa(case, seq_lens=lengths), out)
    assert torch.equal(case.run(seq_lens=lengths)[0], out)
    assert torch.equal(case.run(backend="xqa", v_scale_layout=None)[0], out)


def test_pages_are_nhd_unless_told() -> None:
    case = Case(kv_layout="NHD")
    arguments = (case.query, case.kv_cache, case.workspace, case.block_tables, case.seq_lens, 70, case.bmm1, case.bmm2)
    got = jitfp4.xqa_batch_decode_with_kv_cache(*arguments, kv_cache_sf=case.kv_cache_sf)
    assert torch.equal(got, case.run()[0])


@pytest.mark.parametrize("backend", ["auto", "trtllm-gen"])
def test_other_backends_have_scales_of_v_interleaved(backend: str) -> None:
    case = Case(v_scale_layout="interleaved4")
    assert torch.equal(case.run(backend=backend, v_scale_layout=None)[0], case.run()[0])


def test_a_causal_mask_says_nothing() -> None:
    case = Case(lengths=LENGTHS, q_lens=3)
    for mask in (packed([1, 3, 7], 3), packed([0b11111001, 3, 0b1000111], 3)):  # bits past the new tokens are ignored
        for bmm2 in (torch.tensor([case.bmm2]), case.bmm2):
            assert torch.equal(xqa(case, mask=mask, bmm2_scale=bmm2), case.run()[0])
    out, lse = case.run(mask=packed([1, 3, 7], 3), backend="xqa")
    assert torch.equal(out, case.run()[0]) and torch.equal(lse, case.run()[1])


def test_a_causal_mask_of_ragged_requests() -> None:
    case = Case(lengths=(*LENGTHS, 9), q_lens=(3, 0, 1, 2))
    mask = packed([1, 3, 7, 1, 1, 3])
    ragged = {"q_cu_seq_lens": case.cum_seq_lens_q, "q_len_per_req": 3}
    assert torch.equal(xqa(case, mask=mask, **ragged), case.run()[0])
    assert torch.equal(xqa(case, **ragged), case.run()[0])
    assert torch.equal(case.run(mask=mask)[0], case.run()[0])
    ends = case.cum_seq_lens_q.view(torch.uint32)
    assert torch.equal(xqa(case, mask=mask, **ragged | {"q_cu_seq_lens": ends}), case.run()[0])
    assert torch.equal(xqa(case, mask=packed([1, 3, 7, 3, 1, 3]), **ragged), case.run()[0]), "a bit past the new tokens"


def test_a_mask_of_tokens_that_belong_to_no_request() -> None:
    """Engines pad a captured batch: rows behind the last end are not looked at."""
    case = Case(lengths=LENGTHS, q_lens=(2, 1, 2))
    ends = torch.tensor([0, 2, 3, 3], dtype=torch.int32)
    mask = packed([1, 3, 1, 0, 5])
    got = xqa(case, mask=mask, q_cu_seq_lens=ends, q_len_per_req=2)
    assert torch.equal(got[:3], case.run()[0][:3])


@pytest.mark.parametrize(
    "rows", [[1, 3, 5], [7, 7, 7], [1, 3, 6], [0, 3, 7]], ids=["a tree", "full", "not itself", "0"]
)
def test_any_other_mask_says_which_new_tokens_are_seen(rows: list[int]) -> None:
    case = Case(lengths=LENGTHS, q_lens=3, window_left=60)
    bits = torch.tensor([[row >> j & 1 for j in range(3)] for row in rows], dtype=torch.bool)
    case.masks = tuple(torch.cat((torch.ones(3, length - 3).bool(), bits), 1) for length in LENGTHS)
    for length, mask in zip(LENGTHS, case.masks, strict=True):
        for i in range(3):
            mask[i, : max(0, length - 3 + i - 60)] = False
    out, lse = case.run(mask=packed(rows, 3), backend="xqa")
    case.check((out, lse), {torch.bfloat16: 4e-3})
    assert torch.equal(xqa(case, mask=packed(rows, 3)), out)


@pytest.mark.sim
@pytest.mark.compile
def test_a_kernel_gives_the_same_with_a_causal_mask() -> None:
    case = Case(lengths=(9, 5), q_lens=2, group=2, head_dim=64)
    with sim.device("sm_90a"):
        assert torch.equal(xqa(case, mask=packed([1, 3], 2)), xqa(case))


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("q_len", [9, 40])
def test_more_drafted_tokens_than_the_decode_kernel_takes(q_len: int) -> None:
    case = Case(lengths=(70, 41), q_lens=q_len, kv_heads=1, group=2, head_dim=64)
    with sim.device("sm_90a"):
        got = case.run()
        case.check(got, {torch.bfloat16: 4e-3})
        rows = [(2 << i) - 1 for i in range(q_len)]
        words = torch.tensor([[row >> 16 * j & 0xFFFF for j in range(-(-q_len // 32) * 2)] for row in rows] * 2)
        mask = words.to(torch.int16).view(torch.uint16).unflatten(0, (2, q_len))
        assert torch.equal(xqa(case, mask=mask), got[0])


@pytest.mark.gpu
def test_masks_on_a_gpu_and_in_a_captured_graph() -> None:
    case = Case(lengths=LENGTHS, q_lens=3, device="cuda")
    mask, out = packed([1, 3, 7], 3).contiguous().cuda(), torch.empty_like(case.query)
    want = xqa(case)
    assert torch.equal(xqa(case, mask=mask, out=out), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        xqa(case, mask=mask, out=out)
    mask.copy_(packed([1, 3, 5], 3))
    graph.replay()
    assert torch.equal(out, xqa(case, mask=mask)) and not torch.equal(out, want)
    mask.copy_(packed([1, 3, 7], 3))
    graph.replay()
    assert torch.equal(out, want)


def test_masks_are_traced() -> None:
    case, mask = Case(lengths=LENGTHS, q_lens=3), packed([1, 3, 7], 3)
    torch.compiler.reset()
    compiled = torch.compile(xqa, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case, mask=mask), xqa(case, mask=mask))


def test_the_scale_of_a_float8_output_is_in_bmm2_already() -> None:
    case = Case(lengths=LENGTHS, q_lens=2)
    out = torch.zeros(case.query.shape, dtype=torch.float8_e4m3fn)
    want = case.run(out_dtype=torch.float8_e4m3fn)[0]
    assert torch.equal(xqa(case, out=out, o_scale=0.5).view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(case.run(out=out, o_scale=2)[0].view(torch.uint8), want.view(torch.uint8))
    for wrong in (0.0, -1.0):
        with pytest.raises(jitfp4.ArgumentError, match="o_scale"):
            xqa(case, out=out, o_scale=wrong)
    with pytest.raises(jitfp4.ArgumentError, match="o_scale"):
        xqa(case, o_scale=0.5)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (packed([1, 3, 7], 3).view(torch.int16), "uint16"),
        (packed([1, 3, 7], 2), r"\(3, 3, 2\)"),
        (packed([1, 3, 7], 3)[..., :1], r"\(3, 3, 2\)"),
        (packed([1, 3, 7]), r"\(3, 3, 2\)"),
    ],
)
def test_masks_of_another_kind_are_errors(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(jitfp4.ArgumentError, match=f"mask: .*{message}"):
        xqa(Case(lengths=LENGTHS, q_lens=3), mask=mask)


def test_errors_have_the_names_of_the_function() -> None:
    case = Case(lengths=LENGTHS, q_lens=(1, 1, 1))
    for wrong in (torch.tensor([0, 1, 2]), torch.tensor([0, 1], dtype=torch.int32)):
        with pytest.raises(jitfp4.ArgumentError, match="q_cu_seq_lens"):
            xqa(case, q_cu_seq_lens=wrong)
    with pytest.raises(jitfp4.ArgumentError, match="q_len_per_req"):
        xqa(case, q_len_per_req=0)
