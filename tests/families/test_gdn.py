"""The gated delta rule: the recurrence itself, arguments, selection, generated code, and every kernel in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, sim
from jitfp4.arch import ARCHS, Arch
from jitfp4.families import gdn
from jitfp4.families.gdn import (
    DELTA_RULE,
    Problem,
    Spec,
    StateLayout,
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from jitfp4.formats import DType
from jitfp4.nvrtc import compile_cubin
from jitfp4.reference.gdn import fma
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.sass import disassemble

Case = dict[str, Any]
STATE_DTYPES = [torch.float32, torch.bfloat16]


def case(
    batch: int = 2,
    tokens: int = 3,
    heads: int = 1,
    value_heads: int = 2,
    head_dim: int = 64,
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    pool: int | None = None,
    exact_gates: bool = False,
    seed: int = 0,
) -> Case:
    """Arguments of gated_delta_rule_mtp(). With ``exact_gates`` decay is 1 and beta 0.5, whatever computes exp and log."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    gate_log = normal(value_heads) * 0.5
    return {
        "q": normal(batch, tokens, heads, head_dim).to(dtype),
        "k": normal(batch, tokens, heads, head_dim).to(dtype),
        "v": normal(batch, tokens, value_heads, head_dim).to(dtype),
        "initial_state": normal(pool or batch, value_heads, head_dim, head_dim).to(state_dtype),
        "initial_state_indices": torch.arange(batch),
        "A_log": torch.full_like(gate_log, -float("inf")) if exact_gates else gate_log,
        "a": normal(batch, tokens, value_heads).to(dtype),
        "dt_bias": normal(value_heads),
        "b": (torch.zeros if exact_gates else normal)(batch, tokens, value_heads).to(dtype),
    }


def moved(arguments: Case, device: str) -> Case:
    """A copy of the arguments on ``device``."""
    return {
        name: value.detach().clone().to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def recurrence(arguments: Case, *, scale: float | None = None, l2norm: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The textbook recurrence in float64, one request, head and token at a time: output and the state after each token."""
    q, k, v, a, b = (arguments[name].double() for name in "qkvab")
    batch, tokens, heads, head_dim = q.shape
    value_heads = v.shape[2]
    out = torch.empty(batch, tokens, value_heads, head_dim, dtype=torch.float64)
    states = torch.empty(*out.shape, head_dim, dtype=torch.float64)
    for n in range(batch):
        for head in range(value_heads):
            h = arguments["initial_state"][arguments["initial_state_indices"][n], head].double()
            for t in range(tokens):
                key, query = k[n, t, head * heads // value_heads], q[n, t, head * heads // value_heads]
                if l2norm:
                    key, query = (x / torch.sqrt((x * x).sum() + 1e-6) for x in (key, query))
                query = query * (head_dim**-0.5 if scale is None else scale)
                rate = torch.exp(arguments["A_log"][head].double())
                x = a[n, t, head] + arguments["dt_bias"][head].double()
                h = h * torch.exp(-rate * torch.nn.functional.softplus(x))
                u = (v[n, t, head] - h @ key) * torch.sigmoid(b[n, t, head])
                h = h + torch.outer(u, key)
                out[n, t, head], states[n, t, head] = h @ query, h
    return out, states


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, steps: int = 8) -> None:
    """Within ``steps`` rounding steps of got's dtype at the magnitude of the largest element of each row."""
    eps = max(torch.finfo(got.dtype).eps, 2e-6)  # sums of 64 to 128 float32 terms over a few tokens
    bound = steps * eps * want.abs().amax(-1, keepdim=True).clamp(min=1e-3)
    error = (got.double() - want).abs()
    assert (error <= bound).all(), f"{name}: {error.max().item():.3g} off, allowed {bound.max().item():.3g}"


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


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_steps_in_place_equal_one_long_sequence(state_dtype: torch.dtype) -> None:
    whole = case(2, 6, state_dtype=torch.float32)
    parts = moved(whole, "cpu")
    want_out, want_state = gated_delta_rule_mtp(**whole)
    for first, count in ((0, 1), (1, 2), (3, 3)):
        tokens = {name: parts[name][:, first : first + count] for name in "qkvab"}
        out, _ = gated_delta_rule_mtp(**{**parts, **{name: x.contiguous() for name, x in tokens.items()}})
        assert_same_bytes("output", out, want_out[:, first : first + count])
    assert_same_bytes("state", parts["initial_state"], want_state)
    assert state_dtype in STATE_DTYPES


# ---- states, pools and indices ---------------------------------------------------------------------------------------
