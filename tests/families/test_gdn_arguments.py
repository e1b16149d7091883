"""The gated delta rule's arguments: what is refused, and what tracing sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError
from jitfp4.families.gdn import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.gdn import Case, case, moved

GOOD = case(2, 2)
STATE = GOOD["initial_state"]


def mtp(**changes: Any) -> Callable[[], object]:
    return lambda: gated_delta_rule_mtp(**(moved(GOOD, "cpu") | changes))


def decode(function: Callable[..., object], **changes: Any) -> Callable[[], object]:
    arguments = {name: x for name, x in GOOD.items() if not name.startswith("initial_state")}
    return lambda: function(**(arguments | changes))


BAD_CALLS: dict[str, tuple[type[ArgumentError], str, Callable[[], object]]] = {
    "not a tensor": (ArgumentTypeError, "q", mtp(q=[1.0])),
    "float32 q": (ArgumentTypeError, "q", mtp(q=GOOD["q"].float())),
    "rank of q": (ArgumentError, "q", mtp(q=GOOD["q"][0])),
    "no token": (ArgumentError, "q", mtp(q=GOOD["q"][:, :0])),
    "17 tokens": (ArgumentError, "q", mtp(q=torch.zeros(2, 17, 1, 64, dtype=torch.bfloat16))),
    "head dim": (ArgumentError, "q", mtp(q=torch.zeros(2, 2, 1, 96, dtype=torch.bfloat16))),
    "q strides": (ArgumentError, "q", mtp(q=torch.zeros(2, 2, 1, 128, dtype=torch.bfloat16)[..., ::2])),
    "q row stride": (ArgumentError, "q", mtp(q=torch.zeros(2, 2, 1, 68, dtype=torch.bfloat16)[..., :64])),
    "q address": (ArgumentError, "q", mtp(q=torch.zeros(257, dtype=torch.bfloat16)[1:].view(2, 2, 1, 64))),
    "k shape": (ArgumentError, "k", mtp(k=GOOD["k"][:, :1])),
    "k dtype": (ArgumentTypeError, "k", mtp(k=GOOD["k"].half())),
    "v heads": (ArgumentError, "v", mtp(q=GOOD["q"].repeat(1, 1, 2, 1), v=GOOD["v"].repeat(1, 1, 2, 1)[:, :, :3])),
    "v rows": (ArgumentError, "v", mtp(v=GOOD["v"][:1])),
    "a shape": (ArgumentError, "a", mtp(a=GOOD["a"][..., :1])),
    "a dtype": (ArgumentTypeError, "a", mtp(a=GOOD["a"].half())),
    "b dtype": (ArgumentTypeError, "b", mtp(b=GOOD["b"].double())),
    "128 values": (ArgumentError, "v", mtp(v=GOOD["v"].repeat(1, 1, 1, 2))),
    "256 values with a bf16 state": (
        ArgumentError,
        "v",
        lambda: gated_delta_rule_mtp(**case(2, 2, head_dim=128, value_dim=256, state_dtype=torch.bfloat16)),
    ),
    "A_log dtype": (ArgumentTypeError, "A_log", mtp(A_log=GOOD["A_log"].bfloat16())),
    "dt_bias dtype": (ArgumentTypeError, "dt_bias", mtp(dt_bias=GOOD["dt_bias"].double())),
    "dt_bias device": (ArgumentTypeError, "dt_bias", mtp(dt_bias=GOOD["dt_bias"].to("meta"))),
    "raw windows": (ArgumentError, "cache_replayssm", mtp(cache_replayssm=True)),
    "a raw window": (ArgumentError, "replayssm_g", mtp(replayssm_g=torch.zeros(1))),
    "backend": (ArgumentError, "backend", decode(gated_delta_rule_decode, state=STATE, backend="rubin")),
    "another backend": (
        ArgumentError,
        "backend",
        decode(gated_delta_rule_decode_pretranspose, state=STATE, backend="cudnn"),
    ),
    "state dtype": (ArgumentTypeError, "initial_state", mtp(initial_state=STATE.half())),
    "state shape": (ArgumentError, "initial_state", mtp(initial_state=STATE[:, :1])),
    "state strides": (ArgumentError, "initial_state", mtp(initial_state=STATE.mT)),
    "state slots on top of each other": (
        ArgumentError,
        "initial_state",
        mtp(initial_state=STATE[:1].expand(2, -1, -1, -1)),
    ),
    "state heads on top of each other": (
        ArgumentError,
        "initial_state",
        mtp(initial_state=STATE[:, :1].expand(-1, 2, -1, -1)),
    ),
    "slots that reach into each other": (
        ArgumentError,
        "initial_state",
        mtp(initial_state=torch.zeros(3, 64, 64).as_strided((2, 2, 64, 64), (4096, 4096, 64, 1))),
    ),
    "heads not at 16 bytes": (
        ArgumentError,
        "initial_state",
        mtp(initial_state=torch.zeros(5 * 4096).as_strided((2, 2, 64, 64), (2 * 4096 + 8, 4096 + 2, 64, 1))),
    ),
    "indices dtype": (ArgumentTypeError, "initial_state_indices", mtp(initial_state_indices=torch.zeros(2))),
    "indices shape": (
        ArgumentError,
        "initial_state_indices",
        mtp(initial_state_indices=torch.zeros(3, dtype=torch.int32)),
    ),
    "output indices": (
        ArgumentError,
        "output_state_indices",
        mtp(output_state_indices=torch.zeros(1, dtype=torch.int32)),
    ),
    "step indices": (ArgumentError, "ssm_state_indices", mtp(ssm_state_indices=torch.zeros(2, dtype=torch.int32))),
    "step indices without update": (
        ArgumentError,
        "disable_state_update",
        mtp(ssm_state_indices=torch.zeros(2, 2, dtype=torch.int32), disable_state_update=True),
    ),
    "two places for steps": (
        ArgumentError,
        "intermediate_states_buffer",
        mtp(
            ssm_state_indices=torch.zeros(2, 2, dtype=torch.int32),
            intermediate_states_buffer=torch.zeros(2, 2, 2, 64, 64),
        ),
    ),
    "steps too short": (
        ArgumentError,
        "intermediate_states_buffer",
        mtp(intermediate_states_buffer=torch.zeros(2, 1, 2, 64, 64)),
    ),
    "steps dtype": (
        ArgumentTypeError,
        "intermediate_states_buffer",
        mtp(intermediate_states_buffer=torch.zeros(2, 2, 2, 64, 64).bfloat16()),
    ),
    "output dtype": (ArgumentTypeError, "output", mtp(output=torch.zeros(2, 2, 2, 64, dtype=torch.int32))),
    "output strides": (
        ArgumentError,
        "output",
        mtp(output=torch.zeros(2, 2, 2, 128, dtype=torch.bfloat16)[..., :64]),
    ),
    "no state": (ArgumentError, "state, initial_state", decode(gated_delta_rule_decode_pretranspose, state=None)),
    "two states": (
        ArgumentError,
        "state, initial_state",
        decode(gated_delta_rule_decode_pretranspose, state=STATE, initial_state=STATE),
    ),
    "pool without indices": (
        ArgumentError,
        "initial_state_indices",
        decode(gated_delta_rule_decode_pretranspose, state=None, initial_state=STATE),
    ),
    "states for other requests": (
        ArgumentError,
        "state",
        decode(gated_delta_rule_decode_pretranspose, state=STATE[:1]),
    ),
    "output indices without a pool": (
        ArgumentError,
        "output_state_indices",
        decode(
            gated_delta_rule_decode_pretranspose, state=STATE, output_state_indices=torch.zeros(2, dtype=torch.int32)
        ),
    ),
    "two tokens on [K, V]": (ArgumentError, "q", decode(gated_delta_rule_decode, state=STATE)),
    "bf16 [K, V]": (
        ArgumentTypeError,
        "state",
        decode(
            gated_delta_rule_decode,
            **{name: GOOD[name][:, :1] for name in "qkvab"},
            state=STATE.bfloat16(),
        ),
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_are_named(name: str) -> None:
    error, argument, call = BAD_CALLS[name]
    with pytest.raises(error) as caught:
        call()
    assert caught.value.name == argument
    assert "allowed" in str(caught.value)


def test_nothing_is_written_when_an_argument_is_bad() -> None:
    output = poisoned((2, 2, 2, 64), torch.bfloat16, "cpu")
    arguments = moved(GOOD, "cpu")
    with pytest.raises(ArgumentError):
        gated_delta_rule_mtp(**arguments, output=output, intermediate_states_buffer=torch.zeros(1))
    assert_same_bytes("output", output, poisoned((2, 2, 2, 64), torch.bfloat16, "cpu"))
    assert_same_bytes("state", arguments["initial_state"], STATE)


def test_no_requests() -> None:
    arguments = {name: x if name in ("initial_state", "A_log", "dt_bias") else x[:0] for name, x in GOOD.items()}
    out, state = gated_delta_rule_mtp(**arguments)
    assert out.shape == (0, 2, 2, 64) and state is STATE


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_traces_the_whole_function() -> None:
    def model(arguments: Case) -> tuple[torch.Tensor, torch.Tensor]:
        out, state = gated_delta_rule_mtp(**arguments)
        return out * 2, state

    want = model(moved(GOOD, "cpu"))
    apart = GOOD | {"initial_state": STATE.repeat_interleave(2, dim=1)[:, ::2]}  # strides are numbers that it traces
    got = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)(apart)
    for left, right in zip(got, want, strict=True):
        assert_same_bytes("result", left, right)


def test_meta_tensors_give_shapes() -> None:
    out, _ = gated_delta_rule_mtp(**moved(GOOD, "meta"))
    assert out.is_meta and out.shape == (2, 2, 2, 64)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_tells_one_list_of_slots_from_two() -> None:
    steps = torch.tensor([[2, 3], [4, 5]])

    def model(arguments: Case, targets: torch.Tensor) -> torch.Tensor:
        return gated_delta_rule_mtp(**arguments, ssm_state_indices=steps, output_state_indices=targets)[1]

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for make in (lambda slots: slots, torch.clone, lambda slots: slots + 6):
            want, got = moved(case(2, 2, pool=8), "cpu"), moved(case(2, 2, pool=8), "cpu")
            model(want, make(want["initial_state_indices"]))
            compiled(got, make(got["initial_state_indices"]))
            assert_same_bytes("states", got["initial_state"], want["initial_state"])
