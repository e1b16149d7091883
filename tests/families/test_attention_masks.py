"""Masks of the caller's: trees of drafted tokens, and whole masks of prefills, in every kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, ArgumentTypeError, sim
from jitfp4.arch import ARCHS
from jitfp4.families.attention.kernels.decode_masked import MaskedDecodeTactic
from jitfp4.families.attention.kernels.prefill_masked import MaskedPrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.attention.kernels.prefill_wgmma_masked import MaskedWgmmaTactic
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.attention.problem import power_of_two
from tests.support.attention import FEW_SMS, Case

BOUND = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float8_e4m3fn: 5e-2}
FEW: dict[str, Any] = {"lengths": (70, 9, 33), "q_lens": (5, 0, 8), "kv_heads": 1, "group": 3, "page": 5}
MANY: dict[str, Any] = {"lengths": (170, 40), "q_lens": (45, 33), "kv_heads": 1, "group": 3}
CACHES: dict[str, dict[str, Any]] = {
    "nvfp4": {"with_sinks": True},
    "interleaved": {"v_scale_layout": "interleaved4", "page": 8, "kv_layout": "NHD"},
    "e4m3": {"cache": torch.float8_e4m3fn, "window_left": 25},
    "bf16": {"cache": torch.bfloat16, "head_dim": 64},
    "d_96": {"head_dim": 96},
    "missing": {"missing": ((0, 0, 1, -1),), "head_dim": 256, "page": 4},
}


def tree(case: dict[str, Any], seed: int = 7) -> tuple[torch.Tensor, ...]:
    """Each new token sees all old ones, itself, and what its random parent sees."""
    torch.manual_seed(seed)
    masks = []
    for count, length in zip(case["q_lens"], case["lengths"], strict=True):
        mask = torch.zeros(count, length, dtype=torch.bool)
        mask[:, : length - count] = True
        for i in range(count):
            if i:
                mask[i] |= mask[torch.randint(i, ())]
            mask[i, length - count + i] = True
        masks.append(mask)
    return tuple(masks)


def scattered(case: dict[str, Any], seed: int = 7) -> tuple[torch.Tensor, ...]:
    """Random tokens; the second query of a request sees none."""
    torch.manual_seed(seed)
    masks = tuple(
        torch.rand(count, length) < 0.6 for count, length in zip(case["q_lens"], case["lengths"], strict=True)
    )
    for mask in masks:
        mask[1:2] = False
    return masks


def words(masks: tuple[torch.Tensor, ...], q_len: int) -> torch.Tensor:
    """XQA's draft mask [tokens, 2 w]."""
    width = -(-q_len // 32) * 32
    rows = [torch.nn.functional.pad(mask[:, mask.shape[1] - len(mask) :], (0, width - len(mask))) for mask in masks]
    bits = torch.cat(rows).view(-1, width // 16, 16).int() << torch.arange(16)
    return bits.sum(-1).to(torch.int32).to(torch.int16).view(torch.uint16)


def drafts(case: Case) -> dict[str, Any]:
    """The arguments of a call with a draft mask."""
    assert not isinstance(case.q_lens, int)
    return {"mask": words(case.masks, max(case.q_lens)).to(case.device)}


def planned(case: Case, wrapper: Any = None, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The case by the prefill wrapper with a whole mask."""
    lists: list[int] = []
    ends, last = [0], []
    for b, length in enumerate(case.lengths):
        count = -(-length // case.page)
        lists += case.numbers[b, 0, :count].tolist()
        ends.append(len(lists))
        last.append(length - (count - 1) * case.page if count else 0)
    if wrapper is None:
        backend = "trtllm-gen" if case.v_scale_layout == "interleaved4" else "auto"
        wrapper = jitfp4.BatchPrefillWithPagedKVCacheWrapper(case.workspace, case.kv_layout, backend=backend)
    masks = {"custom_mask": torch.cat([mask.flatten() for mask in case.masks])} if case.masks else {}
    wrapper.plan(
        case.cum_seq_lens_q,
        *(torch.tensor(values, dtype=torch.int32) for values in (ends, lists, last)),
        case.query.shape[1],
        case.kv_heads,
        case.head_dim,
        case.page,
        **masks
        | {
            "causal": True,
            "window_left": case.window_left,
            "sm_scale": case.bmm1,
            "q_data_type": case.q_dtype,
            "kv_data_type": case.cache,
            "max_token_per_sequence": max(case.q_lens) if not isinstance(case.q_lens, int) else case.q_lens,
        }
        | changes,
    )
    result = wrapper.run(
        case.query,
        case.kv_cache,
        v_scale=case.bmm2,
        return_lse=True,
        sinks=case.sinks,
        kv_cache_sf=case.kv_cache_sf,
    )
    return result[0], result[1]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
def test_the_reference_takes_trees_and_whole_masks(sizes: dict[str, Any], cache: str) -> None:
    case = Case(**sizes | CACHES[cache], masks=tree(sizes))
    case.check(case.run(**drafts(case)), BOUND)
    case = Case(**sizes | CACHES[cache], masks=scattered(sizes))
    case.check(planned(case), BOUND)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(4)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("cluster", [0, 2])
def test_few_rows(cache: str, cluster: int) -> None:
    with sim.device(FEW_SMS, races=True), ATTENTION.forced(MaskedDecodeTactic(2, 2, 1, cluster=cluster)):
        case = Case(**FEW | CACHES[cache], masks=tree(FEW))
        case.check(case.run(**drafts(case)), BOUND)
        case = Case(**FEW | CACHES[cache], masks=scattered(FEW))
        case.check(planned(case), BOUND)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("cache", CACHES)
def test_many_rows(cache: str) -> None:
    d = CACHES[cache].get("head_dim", 128)
    tactic = {64: (4, 32, 64, 2), 128: (8, 16, 64, 1), 256: (4, 16, 16, 1)}[power_of_two(d)]
    with sim.device(FEW_SMS, races=True), ATTENTION.forced(MaskedPrefillTactic(*tactic)):
        case = Case(**MANY | CACHES[cache], masks=tree(MANY))
        case.check(case.run(**drafts(case)), BOUND)
        case = Case(**MANY | CACHES[cache], masks=scattered(MANY))
        case.check(planned(case), BOUND)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("cache", CACHES)
def test_many_rows_by_wgmma(cache: str) -> None:
    tactics = {"bf16": (2, 1, 128, 4, True), "e4m3": (2, 1, 64), "missing": (2, 1, 64)}
    tactic = MaskedWgmmaTactic(*tactics.get(cache, (2, 1, 128, 3, True, 2)))
    sizes = MANY | CACHES[cache] | ({"head_dim": 128} if cache == "missing" else {})
    with sim.device(FEW_SMS, races=True), ATTENTION.forced(tactic):
        case = Case(**sizes, masks=tree(MANY))
        case.check(case.run(**drafts(case)), BOUND)
        case = Case(**sizes, masks=scattered(MANY))
        case.check(planned(case), BOUND)


def test_what_is_masked_is_never_causal_and_gets_what_it_would_get_without_a_mask() -> None:
    for arch in ARCHS.values():
        for problem in ATTENTION.problems(arch):
            if problem.masked:
                tactic = ATTENTION.select(problem, arch)
                assert type(tactic).__name__.startswith("Masked")
                plain = ATTENTION.select(problem._replace(masked=False, causal=problem.blocks == 0), arch)
                if not isinstance(plain, WgmmaTactic):  # which may need registers that the mask takes
                    assert dataclasses.astuple(tactic) == dataclasses.astuple(plain)


def test_a_mask_comes_packed_too_and_from_another_place() -> None:
    case = Case(**MANY, masks=scattered(MANY))
    want = planned(case)
    packed = torch.cat([torch.from_numpy(np.packbits(mask.numpy(), bitorder="little")) for mask in case.masks])
    got = planned(case, custom_mask=None, packed_custom_mask=packed)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    short = planned(case, custom_mask=torch.cat([mask.flatten() for mask in case.masks])[:-100])
    assert torch.equal(short[0][:45], want[0][:45])
    assert short[1][-1].max() < want[1][-1].min(), "tokens behind its end are not seen"


def test_one_request_that_is_not_paged() -> None:
    case = Case(lengths=(40,), q_lens=(9,), kv_heads=2, group=2, page=1, kv_layout="NHD", cache=torch.bfloat16)
    case.masks = scattered({"lengths": (40,), "q_lens": (9,)})
    pages = case.numbers[0, 0, :40].long()
    k, v = (side[pages, 0] for side in case.kv_cache)
    options = {"sm_scale": case.bmm1, "v_scale": case.bmm2, "return_lse": True}
    got = jitfp4.single_prefill_with_kv_cache(case.query, k, v, custom_mask=case.masks[0], **options)
    case.check(got, BOUND)
    bits = torch.from_numpy(np.packbits(case.masks[0].numpy(), bitorder="little"))
    again = jitfp4.single_prefill_with_kv_cache(case.query, k, v, packed_custom_mask=bits, causal=True, **options)
    assert torch.equal(again[0], got[0]) and torch.equal(again[1], got[1])
    for name, wrong, message in (
        ("custom_mask", case.masks[0][:, 1:], r"\(9, 40\)"),
        ("custom_mask", case.masks[0].T.contiguous().T, "contiguous"),
        ("packed_custom_mask", bits[1:], r"\(45,\)"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: .*{message}"):
            jitfp4.single_prefill_with_kv_cache(case.query, k, v, **{name: wrong})
    for name, mask in (("custom_mask", case.masks[0].to(torch.uint8)), ("packed_custom_mask", bits.view(torch.int8))):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: "):
            jitfp4.single_prefill_with_kv_cache(case.query, k, v, **{name: mask})


def captured(case: Case, room: int = 4096, **changes: Any) -> jitfp4.BatchPrefillWithPagedKVCacheWrapper:
    """A wrapper with buffers for CUDA graphs, those of masks among them."""
    batch = len(case.lengths)
    sizes = {"qo_indptr_buf": batch + 1, "paged_kv_indptr_buf": batch + 1, "paged_kv_indices_buf": 100}
    buffers = {
        name: torch.zeros(size, dtype=torch.int32, device=case.device)
        for name, size in (sizes | {"paged_kv_last_page_len_buf": batch, "mask_indptr_buf": batch + 1}).items()
    }
    buffers["custom_mask_buf"] = torch.zeros(room, dtype=torch.uint8, device=case.device)
    return jitfp4.BatchPrefillWithPagedKVCacheWrapper(
        case.workspace, case.kv_layout, **{"use_cuda_graph": True} | buffers | changes
    )


def test_the_buffers_of_a_wrapper_for_graphs() -> None:
    case = Case(**MANY, masks=scattered(MANY))
    wrapper = captured(case)
    want = planned(case)
    assert torch.equal(planned(case, wrapper)[0], want[0])
    ends = wrapper._mask_indptr_buf
    assert ends.tolist() == [0, -(-170 * 45 // 8), -(-170 * 45 // 8) + 40 * 33 // 8]
    assert wrapper._custom_mask_buf.count_nonzero() > 0
    other = scattered(MANY, seed=8)
    bits = [torch.from_numpy(np.packbits(mask.numpy(), bitorder="little")) for mask in other]
    wrapper._custom_mask_buf[: int(ends[-1])] = torch.cat(bits)  # as SGLang's fast_prefill_plan() does
    changed = Case(**MANY, masks=other)
    changed.check(planned(case, wrapper, custom_mask=None), BOUND)
    with pytest.raises(ArgumentError, match=r"^custom_mask: .*custom_mask_buf holds"):
        planned(case, captured(case, room=100))
    with pytest.raises(ArgumentError, match=r"^custom_mask: .*custom_mask_buf"):
        planned(case, captured(case, custom_mask_buf=None, mask_indptr_buf=None))
    for changes, name in (
        ({"custom_mask_buf": None}, "custom_mask_buf, mask_indptr_buf"),
        ({"mask_indptr_buf": None}, "custom_mask_buf, mask_indptr_buf"),
        ({"use_cuda_graph": False}, "custom_mask_buf, mask_indptr_buf"),
        ({"mask_indptr_buf": torch.zeros(2, dtype=torch.int32)}, "mask_indptr_buf"),
        ({"custom_mask_buf": torch.zeros(2, 2, dtype=torch.uint8)}, "custom_mask_buf"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            captured(case, **changes)
    for mask, kind in ((torch.zeros(4, 4, dtype=torch.bool), ArgumentError), (torch.zeros(16), ArgumentTypeError)):
        with pytest.raises(kind, match=r"^custom_mask: "):
            planned(case, custom_mask=mask)


@pytest.mark.sim
@pytest.mark.compile
def test_a_mask_that_ends_early_or_lies_elsewhere_reads_nothing_else() -> None:
    """Lengths and beginnings are read on the device: bits outside of the mask are 0, wherever they say it is."""
    case = Case(**FEW, masks=scattered(FEW))
    wrapper = captured(case, room=200)
    for begin in (0, 60, 2**31 - 1, -(2**31)):
        with sim.device(FEW_SMS), ATTENTION.forced(MaskedDecodeTactic(2, 2, 1)):
            planned(case, wrapper)
            wrapper._mask_indptr_buf[:] = begin
            got = planned(case, wrapper, custom_mask=None)
        want = planned(case, wrapper, custom_mask=None)
        assert torch.equal(got[1].isfinite(), want[1].isfinite())
        seen = want[1].isfinite()
        assert torch.allclose(got[1][seen], want[1][seen], atol=1e-3)
        assert seen.any() == (begin in (0, 60))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
def test_masks_on_a_gpu(sizes: dict[str, Any], cache: str) -> None:
    case = Case(**sizes | CACHES[cache], masks=tree(sizes), device="cuda")
    case.check(case.run(**drafts(case)), BOUND)
    case = Case(**sizes | CACHES[cache], masks=scattered(sizes), device="cuda")
    case.check(planned(case), BOUND)


@pytest.mark.gpu
def test_the_mask_of_a_captured_run_is_that_of_the_latest_plan() -> None:
    case = Case(**MANY, masks=scattered(MANY), device="cuda")
    wrapper = captured(case)
    planned(case, wrapper)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(case.query)
    with torch.cuda.graph(graph):
        wrapper.run(case.query, case.kv_cache, v_scale=case.bmm2, kv_cache_sf=case.kv_cache_sf, out=out)
    other = Case(**MANY, masks=scattered(MANY, seed=8), device="cuda")
    want = planned(other)
    planned(other, wrapper)
    graph.replay()
    assert torch.equal(out, want[0])
