"""The gated delta rule: the recurrence itself, states, pools and indices."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from jitfp4 import ArgumentError, sim
from jitfp4.families.gdn import (
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from jitfp4.reference.gdn import fma
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.gdn import (
    STATE_DTYPES,
    assert_close,
    case,
    check_both_orders,
    check_float_gates,
    check_heads_apart,
    check_other_writes,
    check_pool,
    check_strides,
    check_wide_values,
    moved,
    recurrence,
)

# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_follows_the_recurrence(head_dim: int, dtype: torch.dtype, state_dtype: torch.dtype, l2norm: bool) -> None:
    arguments = case(2, 4, 2, 4, head_dim, dtype=dtype, state_dtype=state_dtype)
    if not l2norm:
        arguments["k"] *= 0.1
    want_out, want_states = recurrence(arguments, l2norm=l2norm)
    steps = torch.empty(*want_states.shape).to(state_dtype)
    out, state = gated_delta_rule_mtp(**arguments, intermediate_states_buffer=steps, use_qk_l2norm=l2norm)
    assert_close("output", out, want_out)
    assert_close("intermediate states", steps, want_states)
    assert_close("state", state, want_states[:, -1])


def test_a_token_by_hand() -> None:
    unit = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    unit[..., 5] = 1.0
    state = torch.zeros(1, 1, 64, 64)
    state[..., 5] = 3.0
    out, state = gated_delta_rule_decode_pretranspose(
        unit,
        unit,
        torch.full((1, 1, 1, 64), 7.0, dtype=torch.bfloat16),
        state,
        torch.full((1,), -float("inf")),  # decay 1
        torch.zeros(1, 1, 1, dtype=torch.bfloat16),
        torch.zeros(1),
        torch.zeros(1, 1, 1, dtype=torch.bfloat16),  # beta 0.5
        scale=2.0,
        use_qk_l2norm=False,
    )
    assert (state[0, 0, :, 5] == 5.0).all()  # 3 + (7 - 3) / 2
    assert (out == 10.0).all()
    assert state.count_nonzero() == 64


@pytest.mark.parametrize("gate", [-1e4, -100.0, 88.0, 100.0, 1e4])
def test_extreme_gates_stay_finite(gate: float) -> None:
    arguments = case(1, 2)
    arguments["a"].fill_(gate)
    arguments["b"].fill_(gate)
    want_out, want_states = recurrence(arguments)
    out, state = gated_delta_rule_mtp(**arguments)
    assert_close("output", out, want_out)
    assert_close("state", state, want_states[:, -1])


def test_zero_keys_and_queries() -> None:
    arguments = case(1, 2)
    arguments["q"].zero_()
    arguments["k"].zero_()
    out, state = gated_delta_rule_mtp(**arguments)
    assert not out.any() and state.isfinite().all()


def test_fma_rounds_once() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(20000, generator=generator) for _ in range(2))
    c = -(a * b) * (1 + torch.randint(-3, 4, a.shape, generator=generator) * 2.0**-23)  # cancels all but the last bits
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), fma(a, b, c).tolist(), strict=True):
        exact = int(x * 2.0**60) * int(y * 2.0**60) + int(z * 2.0**60) * 2**60 if abs(x) > 2**-30 else None
        if exact is not None and abs(y) > 2**-30 and abs(z) > 2**-30:
            assert got == torch.tensor(exact / 2**120, dtype=torch.float64).float().item()
    infinity = torch.tensor([float("inf"), 1.0, float("nan")])
    assert fma(infinity, torch.ones(3), -infinity)[1] == 0
    assert fma(infinity, torch.ones(3), -infinity)[[0, 2]].isnan().all()


def test_steps_in_place_equal_one_long_sequence() -> None:
    whole = case(2, 6)
    parts = moved(whole, "cpu")
    want_out, want_state = gated_delta_rule_mtp(**whole)
    for first, count in ((0, 1), (1, 2), (3, 3)):
        tokens = {name: parts[name][:, first : first + count] for name in "qkvab"}
        out, _ = gated_delta_rule_mtp(**(parts | tokens))
        assert_same_bytes("output", out, want_out[:, first : first + count])
    assert_same_bytes("state", parts["initial_state"], want_state)


# ---- states, pools and indices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_pool_with_holes_and_a_skipped_request(index_dtype: torch.dtype) -> None:
    check_pool("cpu", index_dtype)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_other_writes(state_dtype: torch.dtype) -> None:
    check_other_writes("cpu", state_dtype)


POOL = 4
NEGATIVE = (-1, -(1 << 31), -(1 << 31) - 1, -(1 << 32), -(1 << 40), -(1 << 63))
BEYOND = (POOL, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 40, (1 << 63) - 1)
INDICES = [
    (slot, dtype)
    for slot in (*NEGATIVE, *BEYOND)
    for dtype in (torch.int32, torch.int64)
    if torch.iinfo(dtype).min <= slot <= torch.iinfo(dtype).max
]
SIM = [pytest.mark.sim, pytest.mark.compile]


@pytest.mark.parametrize(
    "place",
    [
        "cpu",
        pytest.param("sm_90a", marks=SIM),
        pytest.param("sm_100a", marks=[*SIM, pytest.mark.one_in(4)]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("tokens", [2, 6], ids=["walked", "chunkwise"])
@pytest.mark.parametrize("name", ["initial_state_indices", "output_state_indices", "ssm_state_indices"])
def test_a_slot_outside_the_pool_touches_nothing(name: str, tokens: int, place: str) -> None:
    """A negative slot is skipped, whatever its upper bits say. So is one beyond the pool where the host reads no
    values; on the CPU it is an error before anything is written.
    """
    device = "cuda" if place == "cuda" else "cpu"
    start = moved(case(2, tokens, pool=POOL), device)
    start["initial_state_indices"] = torch.tensor([1, 2], device=device)
    rows = [2, tokens] if name == "ssm_state_indices" else [2]
    skipping = torch.full(rows, -1, device=device)
    skipping[1] = torch.arange(tokens, device=device) % POOL if len(rows) == 2 else 3
    with sim.device(place) if place.startswith("sm_") else nullcontext():
        want = moved(start, device)
        want_out = gated_delta_rule_mtp(**(want | {name: skipping}))[0]
        for slot, dtype in INDICES:
            given, slots = moved(start, device), skipping.to(dtype)
            slots[0] = slot
            output = poisoned(tuple(given["v"].shape), torch.bfloat16, device)
            if place == "cpu" and slot >= 0:
                with pytest.raises(ArgumentError, match=f"slot {slot}") as caught:
                    gated_delta_rule_mtp(**(given | {name: slots}), output=output)
                assert caught.value.name == name
                assert_same_bytes("state", given["initial_state"], start["initial_state"])
                assert_same_bytes("output", output, poisoned(tuple(output.shape), torch.bfloat16, device))
                continue
            gated_delta_rule_mtp(**(given | {name: slots}), output=output)
            assert_same_bytes(f"output with slot {slot}", output, want_out)
            assert_same_bytes(f"states with slot {slot}", given["initial_state"], want["initial_state"])
    assert want_out[0].any() == (name != "initial_state_indices")


@pytest.mark.parametrize(
    "place", ["cpu", pytest.param("sm_90a", marks=SIM), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_without_a_slot_nothing_is_written_but_zeroes(state_dtype: torch.dtype, place: str) -> None:
    """Neither slot 0 nor what lies before the pool, in both functions and into outputs of every dtype. FlashInfer's
    kernels of bf16 states would use slot 0, and gated_delta_rule_mtp() there leaves rows of an output alone.
    """
    device = "cuda" if place == "cuda" else "cpu"
    given = moved(case(3, 1, head_dim=128, state_dtype=state_dtype, pool=4), device)
    given["initial_state_indices"] = torch.tensor([2, -1, -1], device=device)
    memory = torch.cat([given["initial_state"][:1] * 0 + 7, given["initial_state"]])
    alone = {name: x[:1] if name in "qkvab" else x for name, x in moved(given, device).items()}
    alone["initial_state_indices"] = given["initial_state_indices"][:1]
    with sim.device(place) if place.startswith("sm_") else nullcontext():
        want, _ = gated_delta_rule_mtp(**alone)
        for function, state in ((gated_delta_rule_mtp, {}), (gated_delta_rule_decode_pretranspose, {"state": None})):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                whole, output = memory.clone(), poisoned((3, 1, 2, 128), dtype, device)
                out, pool = function(**(given | {"initial_state": whole[1:]}), **state, output=output)
                assert out is output and not output[1:].any()
                assert_same_bytes("output", output[:1], want.to(dtype))
                assert_same_bytes("state", pool[2], alone["initial_state"][2])
                assert_same_bytes("other slots", whole[[0, 1, 2, 4]], memory[[0, 1, 2, 4]])


def test_update_is_the_default() -> None:
    arguments = case(1, 1)
    before = arguments["initial_state"].clone()
    gated_delta_rule_mtp(**moved(arguments, "cpu"), disable_state_update=None)
    _, state = gated_delta_rule_mtp(**arguments)
    assert not torch.equal(state, before)


def test_strides() -> None:
    check_strides("cpu")


def test_heads_apart() -> None:
    check_heads_apart("cpu")


def test_float_gates() -> None:
    check_float_gates("cpu")


def test_wide_values() -> None:
    check_wide_values("cpu")


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (128, 256)])
def test_both_orders_of_the_state_agree(head_dim: int, value_dim: int) -> None:
    check_both_orders(head_dim, value_dim)


def test_slots_of_steps_leave_the_final_write_where_slots_of_its_own_are_given() -> None:
    """As FlashInfer's kernels of bf16 states have it: one list given twice is no list of its own."""
    given = case(2, 3, pool=8)
    slots, targets = torch.tensor([[2, 3, 4], [5, -1, 6]]), torch.tensor([7, 0])
    want_out, want = gated_delta_rule_mtp(**moved(given, "cpu"), ssm_state_indices=slots)
    same = moved(given, "cpu")
    gated_delta_rule_mtp(**same, ssm_state_indices=slots, output_state_indices=same["initial_state_indices"])
    assert_same_bytes("pool, one list", same["initial_state"], want)
    out, pool = gated_delta_rule_mtp(**moved(given, "cpu"), ssm_state_indices=slots, output_state_indices=targets)
    assert_same_bytes("output", out, want_out)
    assert_same_bytes("final slots", pool[targets], pool[slots[:, -1]])
    assert_same_bytes("other slots", pool[1:7], want[1:7])


def test_drafts_on_states_of_their_own_keep_every_state() -> None:
    """gated_delta_rule_decode_pretranspose() with several tokens, as FlashInfer's has it for bf16 states."""
    arguments = case(2, 3)
    steps = torch.zeros(2, 3, 2, 64, 64)
    want, _ = gated_delta_rule_mtp(
        **moved(arguments, "cpu"), intermediate_states_buffer=steps, disable_state_update=True
    )
    own = {name: x for name, x in arguments.items() if not name.startswith("initial_state")}
    state, kept = arguments["initial_state"].clone(), torch.zeros_like(steps)
    got, _ = gated_delta_rule_decode_pretranspose(
        **own, state=state, intermediate_states_buffer=kept, disable_state_update=True, backend="flashinfer"
    )
    assert_same_bytes("output", got, want)
    assert_same_bytes("kept states", kept, steps)
    assert_same_bytes("state", state, arguments["initial_state"])
    gated_delta_rule_decode_pretranspose(**own, state=state, intermediate_states_buffer=kept)
    assert_same_bytes("final state", state, kept[:, -1])
