"""NaN in, NaN out: in queries, keys, values and sinks, but not what no query sees. The same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from jitfp4 import sim
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.kernels.prefill import PrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.attention.operation import ATTENTION
from tests.support.attention import FEW_SMS, NAN_BYTE, Case
from tests.support.gpu import needs_sm_90a
from tests.support.sample import some

_ONE: dict[str, Any] = {"kv_heads": 2, "group": 2, "lengths": (70, 33), "window_left": 20, "with_sinks": True}
_MANY: dict[str, Any] = _ONE | {"q_lens": (9, 10)}
_BF16 = {"cache": torch.bfloat16}
_E4M3 = {"cache": torch.float8_e4m3fn}
_BY_FOUR = {"v_scale_layout": "interleaved4"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "decode_nvfp4": (DecodeTactic(2, 2, 1), _ONE),
    "decode_interleaved": (DecodeTactic(2, 2, 1), _ONE | _BY_FOUR),
    "decode_bf16": (DecodeTactic(2, 2, 1), _ONE | _BF16),
    "decode_e4m3": (DecodeTactic(2, 2, 1), _ONE | _E4M3),
    "decode_cluster": (DecodeTactic(2, 2, 1, cluster=2), _ONE),
    "prefill_nvfp4": (PrefillTactic(4, 16, 64, 1), _MANY),
    "prefill_interleaved": (PrefillTactic(4, 16, 64, 1), _MANY | _BY_FOUR),
    "prefill_bf16": (PrefillTactic(4, 16, 64, 1), _MANY | _BF16),
    "wgmma_nvfp4": (WgmmaTactic(tile=64), _MANY | {"q_lens": (70, 33)}),
    "wgmma_bf16": (WgmmaTactic(tile=64), _MANY | _BF16 | {"q_lens": (70, 33)}),
}


def _spoil(case: Case, side: int, request: int, token: int) -> None:
    """Make K (0) or V (1) of a token NaN in head 0: one element, or with block scales one block."""
    page, slot = int(case.numbers[request, side, token // case.page]), token % case.page
    if case.kv_cache_sf is None:
        number = torch.full((), torch.nan).to(case.cache)
        case.kv_cache[side][page, 0, slot, 3] = number.to(case.device)
    elif side == 1 and case.v_scale_layout == "interleaved4":
        case.kv_cache_sf[side][page, 0, slot // 4 * 4, slot % 4] = NAN_BYTE
    else:
        case.kv_cache_sf[side][page, 0, slot, 0] = NAN_BYTE


def _first_seen(case: Case, request: int) -> int:
    """The first token that any query of a request sees."""
    return max(0, case.lengths[request] - (case.ends[request + 1] - case.ends[request]) - case.window_left)


SPOILED: dict[str, Callable[[Case], None]] = {
    "nothing": lambda _: None,
    "a key": lambda case: _spoil(case, 0, 0, case.lengths[0] - 1),
    "a key that no query sees": lambda case: _spoil(case, 0, 0, max(0, _first_seen(case, 0) - 1)),
    "a query": lambda case: case.query[case.ends[1] - 1, 1].fill_(torch.nan),
    "one of a query": lambda case: case.query[case.ends[1] - 1, 1, 5].fill_(torch.nan),
    "a sink": lambda case: case.sinks[2:3].fill_(torch.nan),
    "every value that no query sees": lambda case: [_spoil(case, 1, 1, t) for t in range(_first_seen(case, 1))],
}


def _call(case: Case, tactic: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(case.query, 7.0)
    with ATTENTION.forced(tactic):
        run = case.run if isinstance(tactic, DecodeTactic) else case.run_context
        return run(out=out)


def _check(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.cpu().isnan(), other.isnan())
        torch.testing.assert_close(one.cpu().float(), other.float(), rtol=2e-2, atol=2e-2, equal_nan=True)


def _spoiled(name: str, what: str, device: str = "cpu") -> Case:
    case = Case(**CASES[name][1], device=device)
    SPOILED[what](case)
    return case


@pytest.mark.parametrize("what", SPOILED)
def test_the_reference_says_where_nan_goes(what: str) -> None:
    case = _spoiled("decode_bf16", what)
    out, lse = _call(case, CASES["decode_bf16"][0])
    rows = {"a key": [(0, 0), (0, 1)], "a query": [(0, 1)], "one of a query": [(0, 1)], "a sink": [(0, 2), (1, 2)]}
    wanted = torch.zeros(2, 4, dtype=torch.bool)
    for row in rows.get(what, ()):
        wanted[row] = True
    assert torch.equal(out.isnan().all(-1), wanted) and torch.equal(out.isnan().any(-1), wanted)
    assert torch.equal(lse.isnan(), wanted)


def test_a_value_makes_its_own_dimension_nan() -> None:
    case = _spoiled("decode_bf16", "nothing")
    _spoil(case, 1, 0, case.lengths[0] - 1)
    out, lse = _call(case, CASES["decode_bf16"][0])
    assert out[0, :2, 3].isnan().all() and out.isnan().sum() == 2 and not lse.isnan().any()


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_nan_goes_where_the_reference_has_it(name: str, whole: bool) -> None:
    for what in some(3, SPOILED, whole=whole, name=lambda what: f"{name} {what}"):
        case = _spoiled(name, what)
        expected = _call(case, CASES[name][0])
        with sim.device(FEW_SMS):
            _check(_call(case, CASES[name][0]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_nan_goes_where_the_reference_has_it_on_a_gpu(name: str) -> None:
    if name.startswith("wgmma"):
        needs_sm_90a()
    for what in SPOILED:
        expected = _call(_spoiled(name, what), CASES[name][0])
        _check(_call(_spoiled(name, what, "cuda"), CASES[name][0]), expected)


# ---- lists that say nonsense -----------------------------------------------------------------------------------------

ENDS = {
    "negative": [-5, 3, 19],
    "beyond the queries": [0, 9, 1 << 30],
    "descending": [0, 12, 5],
    "the largest": [(1 << 31) - 1, 0, 19],
    "the smallest": [-(1 << 31), 9, (1 << 31) - 1],
}


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("which", ENDS)
def test_ends_of_queries_are_clamped_as_the_kernel_does(which: str) -> None:
    tactic, fields = CASES["prefill_bf16"]
    case = Case(**fields)
    case.cum_seq_lens_q = torch.tensor(ENDS[which], dtype=torch.int32)
    zeros = [torch.zeros(case.query.shape, dtype=case.query.dtype) for _ in range(2)]
    with ATTENTION.forced(tactic):
        expected = case.run_context(out=zeros[0], max_q_len=10, lse=torch.zeros(case.query.shape[:2]))
        with sim.device(FEW_SMS):
            got = case.run_context(out=zeros[1], max_q_len=10, lse=torch.zeros(case.query.shape[:2]))
    owned = torch.zeros(len(case.query), dtype=torch.bool)
    for first, end in zip(ENDS[which][:-1], ENDS[which][1:], strict=True):
        owned[max(0, min(first, len(owned))) : max(0, min(end, len(owned)))] = True
    _check((got[0][owned], got[1][owned]), (expected[0][owned], expected[1][owned]))
