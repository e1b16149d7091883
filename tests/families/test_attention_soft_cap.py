"""Logits that are capped by a tanh, in every kernel, under masks, windows and sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import sim
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.kernels.prefill import PrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.attention.operation import ATTENTION
from tests.support.attention import FEW_SMS, Case, relative_error
from tests.support.gpu import needs_sm_90a

CAP = 3.0
_CASE: dict[str, Any] = {"lengths": (70, 33), "page": 16, "kv_layout": "NHD", "steep": 6.0, "with_sinks": True}
_WINDOW = {"window_left": 40}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "decode_nvfp4": (DecodeTactic(2, 2, 1), _CASE),
    "decode_d_96": (DecodeTactic(2, 2, 1), _CASE | {"head_dim": 96}),
    "decode_bf16": (DecodeTactic(2, 2, 1), _CASE | {"cache": torch.bfloat16, "q_lens": 2} | _WINDOW),
    "decode_e4m3": (DecodeTactic(2, 2, 1), _CASE | {"cache": torch.float8_e4m3fn, "spikes": True}),
    "prefill_nvfp4": (PrefillTactic(4, 16, 64, 1), _CASE | {"q_lens": (20, 9)} | _WINDOW),
    "prefill_bf16": (PrefillTactic(4, 16, 32, 1), _CASE | {"q_lens": (20, 9), "cache": torch.bfloat16}),
    "wgmma_nvfp4": (WgmmaTactic(tile=64), _CASE | {"q_lens": (20, 9)}),
    "wgmma_d_80": (WgmmaTactic(tile=64), _CASE | {"q_lens": (20, 9), "head_dim": 80}),
    "wgmma_bf16": (WgmmaTactic(tile=64), _CASE | {"q_lens": (20, 9), "cache": torch.bfloat16} | _WINDOW),
}
_BOUND = 6e-3


def _run(case: Case, tactic: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """By a wrapper, the only functions that cap."""
    columns = [-(-length // case.page) for length in case.lengths]
    ends = torch.tensor([0, *columns]).cumsum(0).int()
    pages = torch.cat([table[:n] for table, n in zip(case.block_tables.cpu(), columns, strict=True)])
    last = torch.tensor([(length - 1) % case.page + 1 for length in case.lengths], dtype=torch.int32)
    heads = case.query.shape[1], case.kv_heads
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": case.cache, "sm_scale": case.bmm1, "logits_soft_cap": CAP}
    if isinstance(tactic, DecodeTactic):
        wrapper: Any = jitfp4.BatchDecodeWithPagedKVCacheWrapper(case.workspace, case.kv_layout)
        wrapper.plan(ends, pages, last, *heads, case.head_dim, case.page, q_len_per_req=case.ends[1], **kinds)
    else:
        wrapper = jitfp4.BatchPrefillWithPagedKVCacheWrapper(case.workspace, case.kv_layout)
        wrapper.plan(
            case.cum_seq_lens_q.cpu(), ends, pages, last, *heads, case.head_dim, case.page, causal=True, **kinds
        )
    assert wrapper._logits_soft_cap == CAP
    options = {"v_scale": case.bmm2, "sinks": case.sinks, "kv_cache_sf": case.kv_cache_sf}
    with ATTENTION.forced(tactic):
        return wrapper.run_return_lse(case.query, case.kv_cache, window_left=case.window_left, **options)


def _check(got: tuple[torch.Tensor, torch.Tensor], case: Case, bound: float = _BOUND) -> None:
    out, lse = case.expected(CAP)
    assert relative_error(got[0], out) < bound
    assert (got[1].cpu().double() - lse).abs().max() < 1e-4
    assert relative_error(case.expected()[0], out) > 10 * bound, "the cap matters"


@pytest.mark.parametrize("name", CASES)
def test_the_reference_caps(name: str) -> None:
    tactic, fields = CASES[name]
    case = Case(**fields)
    _check(_run(case, tactic), case)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_the_simulated_kernel_caps(name: str) -> None:
    tactic, fields = CASES[name]
    case = Case(**fields)
    with sim.device(FEW_SMS):
        _check(_run(case, tactic), case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_caps(name: str) -> None:
    tactic, fields = CASES[name]
    if isinstance(tactic, WgmmaTactic):
        needs_sm_90a()
    case = Case(**fields, device="cuda")
    _check(_run(case, tactic), case)


def test_the_single_functions_and_forward_cap() -> None:
    case = Case(**_CASE | {"lengths": (48,), "cache": torch.bfloat16, "with_sinks": False})
    k, v = (side[case.block_tables[0, :3].long()].flatten(0, 1).contiguous() for side in case.kv_cache)
    options = {"sm_scale": case.bmm1, "v_scale": case.bmm2}
    one = jitfp4.single_decode_with_kv_cache(case.query[0], k, v, logits_soft_cap=CAP, **options)
    many = jitfp4.single_prefill_with_kv_cache(case.query, k, v, logits_soft_cap=CAP, **options)
    plain = jitfp4.single_decode_with_kv_cache(case.query[0], k, v, logits_soft_cap=0.0, **options)
    assert torch.equal(one, many[0]) and not torch.allclose(one, plain, rtol=0.1)
    wrapper = jitfp4.BatchDecodeWithPagedKVCacheWrapper(case.workspace, case.kv_layout)
    lists = torch.tensor([0, 3]).int(), case.block_tables[0, :3].contiguous(), torch.tensor([16]).int()
    wrapper.plan(*lists, 16, 2, 128, 16, q_data_type=torch.bfloat16)
    forward = {"sm_scale": case.bmm1, "v_scale": case.bmm2}
    assert torch.equal(wrapper.forward(case.query, case.kv_cache, logits_soft_cap=CAP, **forward)[0], one)
    assert torch.equal(wrapper.forward(case.query, case.kv_cache, **forward)[0], plain)
    with pytest.raises(jitfp4.ArgumentError, match="logits_soft_cap"):
        wrapper.forward(case.query, case.kv_cache, logits_soft_cap=-1.0, **forward)
