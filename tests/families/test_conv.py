"""causal_conv1d_fn and causal_conv1d_update: against float64, against each other, and against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, causal_conv1d_fn, causal_conv1d_update, sim
from jitfp4.families.conv.kernels.causal import ConvTactic
from jitfp4.families.conv.operation import CONV
from tests.support.conv import Sequences, assert_convolved, make_sequences
from tests.support.sample import SIM_ARCHS

BF16, F16 = torch.bfloat16, torch.float16
RAGGED = [5, 1, 0, 33, 2, 3, 20, 4]


def prompts(given: Sequences, device: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [tokens, channels], and the states."""
    g = given.to(device)
    states = g.states.clone()  # keeps the order of memory
    has = options.pop("has", None)
    if has is not None:
        options["has_initial_state"] = torch.tensor(has, device=device)
    out = causal_conv1d_fn(g.x.T, g.weight, g.bias, states, g.starts, g.slots, **options)
    return out.T.cpu(), states.cpu()


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("channels", [72, 13])
@pytest.mark.parametrize("channels_last", [True, False])
def test_ragged_prompts(device: str, dtype: torch.dtype, width: int, channels: int, channels_last: bool) -> None:
    given = make_sequences(RAGGED, channels, width, dtype, channels_last=channels_last)
    has = [number % 3 != 1 for number in range(len(RAGGED))]
    out, states = prompts(given, device, has=has)
    assert_convolved(given, out, states, has=has)


@pytest.mark.parametrize(("vec", "tokens"), [(2, 4), (8, 8), (4, 16), (2, 32), (4, 64)])
def test_any_block_of_tokens(device: str, vec: int, tokens: int) -> None:
    """Sequences that begin just before the end of a block, and ones that have several."""
    given = make_sequences([tokens - 1, 1, tokens - 2, 3 * tokens + 1, 1, 1, 1, 1, tokens], 40)
    with CONV.forced(ConvTactic(vec, 64, tokens)):
        out, states = prompts(given, device, has=[True] * 9)
    assert_convolved(given, out, states)


def test_without_states_before_without_bias_and_activation(device: str) -> None:
    given = make_sequences(RAGGED, 24, biased=False)
    out, states = prompts(given, device, activation=None)
    assert_convolved(given, out, states, has=[False] * len(RAGGED), silu=False)


def test_large_sums(device: str) -> None:
    """Where exp(-sum) overflows, or is nothing beside 1."""
    given = make_sequences(RAGGED, 24)
    given = given._replace(x=given.x * 2000, states=given.states * 2000)
    out, states = prompts(given, device, has=[True] * 8)
    assert_convolved(given, out, states)
    assert (out.abs() > 1000).any()


def test_slots_that_are_none(device: str) -> None:
    given = make_sequences(RAGGED, 24)
    given.slots[[1, 3, 4, 6]] = torch.tensor([-1, 0, 99, 1 << 30], dtype=torch.int32)
    out, states = prompts(given, device, has=[True] * 8, null_block_id=0)
    assert_convolved(given, out, states)


def test_slot_0_is_one_if_no_block_is_null(device: str) -> None:
    given = make_sequences([5, 6], 24)
    given = given._replace(slots=torch.tensor([2, 1], dtype=torch.int32), states=given.states)
    moved = given._replace(slots=given.slots - 1, states=given.states[1:])
    first, _ = prompts(given, device, has=[True, True])
    second, states = prompts(moved, device, has=[True, True], null_block_id=None)
    assert torch.equal(first, second)
    assert not torch.equal(states[0], moved.states[0])


def test_no_tokens_and_no_sequences(device: str) -> None:
    given = make_sequences([0, 0], 24)
    out, states = prompts(given, device)
    assert out.shape == (0, 24)
    assert torch.equal(states, given.states)
    out, _ = prompts(make_sequences([], 24), device)
    assert out.shape == (0, 24)


def test_prompts_in_parts_are_whole_prompts(device: str) -> None:
    """Chunked prefill: a prompt in three calls, of which the last are shorter than a filter, gives the same bits."""
    given = make_sequences([30], 24)
    whole, after = prompts(given, device)
    parts, states = [], given.states
    for first, last in ((0, 27), (27, 28), (28, 30)):
        part = given._replace(
            x=given.x[first:last], starts=torch.tensor([0, last - first], dtype=torch.int32), states=states
        )
        out, states = prompts(part, device, has=[first > 0])
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(states, after)


# ---- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("channels", [72, 13])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_token_of_each(device: str, dtype: torch.dtype, width: int, channels: int, in_place: bool) -> None:
    given = make_sequences([1] * 5, channels, width, dtype, room=2)
    g = given.to(device)
    states, x = g.states.clone(), g.x.clone()
    out = None if in_place else torch.full_like(x, 7)
    got = causal_conv1d_update(x, states, g.weight, g.bias, "silu", g.slots, out=out)
    assert got is (x if in_place else out)
    assert_convolved(given, got.cpu(), states.cpu())
    assert in_place or torch.equal(x, g.x)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("activation", [True, "swish", False, None])
def test_several_tokens_of_each(device: str, tokens: int, activation: Any) -> None:
    """[sequences, channels, tokens], channels adjacent."""
    given = make_sequences([tokens] * 3, 24)
    g = given.to(device)
    states = g.states.clone()
    x = g.x.clone().view(3, tokens, 24).transpose(1, 2)
    out = causal_conv1d_update(x, states, g.weight, g.bias, activation, g.slots)
    assert out is x
    assert_convolved(given, out.transpose(1, 2).reshape(-1, 24).cpu(), states.cpu(), silu=bool(activation))


def test_tokens_without_a_slot(device: str) -> None:
    given = make_sequences([1] * 5, 24)
    given.slots[:4] = torch.tensor([-1, 99, 0, 1 << 30], dtype=torch.int32)
    g = given.to(device)
    states, x = g.states.clone(), g.x.clone()
    causal_conv1d_update(x, states, g.weight, g.bias, "silu", g.slots)
    assert_convolved(given, x.cpu(), states.cpu())
    assert torch.equal(x[:4], g.x[:4])


def test_rows_apart(device: str) -> None:
    given = make_sequences([1] * 4, 24)
    g = given.to(device)
    states, wide = g.states.clone(), torch.full((4, 64), 5.0, dtype=BF16, device=device)
    wide[:, 16:40] = g.x
    causal_conv1d_update(wide[:, 16:40], states, g.weight, g.bias, "silu", g.slots)
    assert_convolved(given, wide[:, 16:40].cpu(), states.cpu())
    assert wide[:, :16].eq(5).all()
    assert wide[:, 40:].eq(5).all()


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_drafted_tokens(device: str, ragged: bool, in_place: bool) -> None:
    """The states begin behind what was accepted of the call before."""
    lengths = [4, 1, 3, 0, 4] if ragged else [4] * 5
    given = make_sequences(lengths, 24, room=3)
    accepted = [1, 2, 4, 3, 1]
    g = given.to(device)
    states, x = g.states.clone(), g.x.clone()
    out = None if in_place else torch.empty_like(x)
    slots = torch.stack((g.slots, g.slots), 1)[:, 0]  # vLLM passes a column
    options: dict[str, Any] = {"num_accepted_tokens": torch.tensor(accepted, dtype=torch.int32, device=device)}
    if ragged:
        options |= {"query_start_loc": g.starts, "max_query_len": 4}
        got = causal_conv1d_update(x, states, g.weight, g.bias, "silu", slots, out=out, **options)
    else:
        view, of_out = (None if v is None else v.view(5, 4, 24).transpose(1, 2) for v in (x, out))
        causal_conv1d_update(view, states, g.weight, g.bias, "silu", slots, out=of_out, **options)
        got = x if in_place else out
    assert_convolved(given, got.cpu(), states.cpu(), accepted=accepted)


def test_what_is_accepted_is_what_decoding_gives(device: str) -> None:
    """Three drafted tokens of which two stay, and one more: the outputs of decoding one by one."""
    given = make_sequences([4], 24, room=2)
    g = given.to(device)
    one, drafted = g.states.clone(), g.states.clone()
    want = [causal_conv1d_update(g.x[t : t + 1].clone(), one, g.weight, g.bias, "silu", g.slots) for t in (0, 1, 3)]
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    accepted = [torch.tensor([n], dtype=torch.int32, device=device) for n in (1, 2)]
    options = {"query_start_loc": starts, "max_query_len": 3}
    first = causal_conv1d_update(g.x[:3].clone(), drafted, g.weight, g.bias, "silu", g.slots, accepted[0], **options)
    options["query_start_loc"] = torch.tensor([0, 1], dtype=torch.int32, device=device)
    then = causal_conv1d_update(g.x[3:].clone(), drafted, g.weight, g.bias, "silu", g.slots, accepted[1], **options)
    assert torch.equal(torch.cat((first[:2], then)), torch.cat(want))


def test_numbers_that_are_not_finite_stay_in_their_channel(device: str) -> None:
    given = make_sequences([6], 24)
    given.x[2, 5], given.x[3, 7] = torch.nan, torch.inf
    out, _ = prompts(given, device)
    assert out[2:6, 5].isnan().all()
    assert not out[3:6, 7].isfinite().all()
    out[:, [5, 7]] = 0
    assert out.isfinite().all()


# ---- against transformers --------------------------------------------------------------------------------------------


def test_a_prompt_and_its_tokens_are_those_of_qwen3_next(device: str) -> None:
    """Its functions in float64: only the outputs are rounded here."""
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given, token = make_sequences([9], 24), make_sequences([1], 24).x
    g, (weight, bias) = given.to(device), (given.weight.double(), given.bias.double())  # type: ignore[union-attr]
    x = given.x.double().T.unsqueeze(0)
    want = qwen3_next.causal_conv1d_fn(x, weight, bias, "silu")[0].T
    then = qwen3_next.causal_conv1d_update(token.double().T.unsqueeze(0), x[..., -3:].clone(), weight, bias, "silu")
    out, states = prompts(given, device)
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=2.0**-18)
    got = causal_conv1d_update(token.to(device), states.to(device), g.weight, g.bias, "silu", g.slots).cpu()
    torch.testing.assert_close(got.double(), then[..., 0], rtol=2.0**-8, atol=2.0**-18)


# ---- simulated -------------------------------------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("channels", [72, 13])
@pytest.mark.parametrize("arch", [*SIM_ARCHS, "sm_80", "sm_120a"])
def test_no_race(arch: str, channels: int) -> None:
    given = make_sequences(RAGGED, channels, room=1)
    with sim.device(arch, races=True):
        with CONV.forced(ConvTactic(4 if channels % 8 == 0 else 1, 64, 4)):
            out, states = prompts(given, "cpu", has=[True] * 8)
        assert_convolved(given, out, states)
        x, after = given.x.clone(), given.states.clone()
        starts = {"query_start_loc": given.starts, "max_query_len": 33}
        causal_conv1d_update(x, after, given.weight, given.bias, "silu", given.slots, **starts)
    assert torch.equal(x, out)
    assert torch.equal(after, states)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("seed", [None, 5])
def test_dependent_launches(seed: int | None) -> None:
    """A prompt, then tokens, each behind the other: nothing is read before it is complete."""
    given = make_sequences([6, 9], 24)
    chain = sim.Chain(constant=[given.weight, given.bias], after_unknown=True)
    with sim.device("sm_90a", races=True, chain=chain, seed=seed):
        states = given.states.clone()
        out = causal_conv1d_fn(given.x.T, given.weight, given.bias, states, given.starts, given.slots)
        token = out.T[:2]
        for _ in range(2):
            causal_conv1d_update(token, states, given.weight, given.bias, "silu", given.slots)
    assert out.isfinite().all()


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be() -> None:
    g = make_sequences([1, 1], 24, room=0)
    good = (g.x, g.states, g.weight, g.bias, "silu", g.slots)
    causal_conv1d_update(*good)
    with pytest.raises(ArgumentError, match="conv_state, max_query_len: got 3 columns"):
        starts = {"query_start_loc": g.starts, "max_query_len": 2}
        causal_conv1d_update(*good, torch.ones(2, dtype=torch.int32), **starts)
    with pytest.raises(ArgumentError, match="conv_state: got memory of out"):
        causal_conv1d_update(*good, out=g.states.transpose(1, 2).reshape(-1)[:48].view(2, 24))
    with pytest.raises(ArgumentError, match="conv_state: got 1 slots; allowed: 2"):
        causal_conv1d_update(g.x, g.states[:1], *good[2:5])
    with pytest.raises(ArgumentError, match="activation: got 'gelu'"):
        causal_conv1d_update(*good[:4], "gelu", g.slots)
    with pytest.raises(ArgumentError, match="channels adjacent"):
        causal_conv1d_fn(g.x.T.contiguous(), g.weight, g.bias, g.states, g.starts, g.slots)
    with pytest.raises(ArgumentError, match="pad_slot_id: got 3"):
        causal_conv1d_fn(g.x.T, g.weight, g.bias, g.states, g.starts, g.slots, pad_slot_id=3)
