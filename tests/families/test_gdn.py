"""The gated delta rule: the recurrence itself, arguments, selection, generated code, and every kernel simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, sim
from jitfp4.arch import ARCHS, Arch
from jitfp4.families.gdn import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
    kernel,
    operator,
)
from jitfp4.families.gdn.kernel import DELTA_RULE, Problem, Shape, StateLayout
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
    """Arguments of gated_delta_rule_mtp(). ``exact_gates``: decay is 1 and beta 0.5, whatever computes exp and log."""
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


def recurrence(
    arguments: Case, *, scale: float | None = None, l2norm: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The textbook recurrence in float64, token by token: outputs, and the states after each token."""
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


def check_pool(device: str, index_dtype: torch.dtype = torch.int64) -> None:
    """Slots in random order, with holes and a skipped request: no other slot changes, skipped output is zero."""
    arguments = moved(case(4, 3, pool=9), device)
    slots = [7, -1, 0, 5]
    arguments["initial_state_indices"] = torch.tensor(slots, dtype=index_dtype, device=device)
    before = arguments["initial_state"].clone()
    steps = poisoned((5, 4, *before.shape[1:]), torch.float32, device)
    untouched = steps.clone()
    output = poisoned(tuple(arguments["v"].shape), torch.bfloat16, device)
    out, pool = gated_delta_rule_mtp(**arguments, output=output, intermediate_states_buffer=steps)
    assert out is output and pool is arguments["initial_state"]
    assert not out[1].any()
    for n, slot in enumerate(slots):
        if slot < 0:
            assert_same_bytes("skipped steps", steps[n], untouched[n])
            continue
        tokens = {name: arguments[name][n : n + 1] for name in "qkvab"}
        alone = arguments | tokens | {"initial_state": before[slot : slot + 1], "initial_state_indices": None}
        alone.pop("initial_state_indices")
        want_out, want_state = gated_delta_rule_decode_pretranspose(
            **{"state" if name == "initial_state" else name: x.clone() for name, x in alone.items()}
        )
        assert_same_bytes("output", out[n : n + 1], want_out)
        assert_same_bytes("state", pool[slot : slot + 1], want_state)
        assert_same_bytes("last step", steps[n : n + 1, 2], want_state)
        assert_same_bytes("steps past the last token", steps[n, 3], untouched[n, 3])
    holes = [slot for slot in range(9) if slot not in slots]
    assert_same_bytes("other slots", pool[holes], before[holes])
    assert_same_bytes("steps of other requests", steps[4], untouched[4])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_pool_with_holes_and_a_skipped_request(index_dtype: torch.dtype) -> None:
    check_pool("cpu", index_dtype)


def check_other_writes(device: str) -> None:
    """Final states to other slots, states of every token to slots of the pool, and no write at all."""
    arguments = moved(case(2, 3, pool=8), device)
    arguments["initial_state_indices"] = torch.tensor([6, 1], device=device)
    before = arguments["initial_state"].clone()
    wanted = torch.empty(2, 3, *before.shape[1:], device=device)
    out, pool = gated_delta_rule_mtp(**arguments, intermediate_states_buffer=wanted, disable_state_update=True)
    assert_same_bytes("pool without update", pool, before)

    targets = torch.tensor([0, -1], dtype=torch.int32, device=device)
    again, pool = gated_delta_rule_mtp(**arguments, output_state_indices=targets)
    assert_same_bytes("output", again, out)
    assert_same_bytes("written slot", pool[0], wanted[0, 2])
    assert_same_bytes("other slots", pool[1:], before[1:])

    arguments["initial_state"] = before.clone()
    slots = torch.tensor([[2, 3, -1], [4, -1, 5]], dtype=torch.int32, device=device)
    again, pool = gated_delta_rule_mtp(**arguments, ssm_state_indices=slots)
    assert_same_bytes("output", again, out)
    for (n, t), slot in zip(((0, 0), (0, 1), (1, 0), (1, 2)), (2, 3, 4, 5), strict=True):
        assert_same_bytes(f"slot of request {n}, token {t}", pool[slot], wanted[n, t])
    assert_same_bytes("other slots", pool[[0, 1, 6, 7]], before[[0, 1, 6, 7]])


def test_other_writes() -> None:
    check_other_writes("cpu")


def test_update_is_the_default() -> None:
    arguments = case(1, 1)
    before = arguments["initial_state"].clone()
    gated_delta_rule_mtp(**moved(arguments, "cpu"), disable_state_update=None)
    _, state = gated_delta_rule_mtp(**arguments)
    assert not torch.equal(state, before)


def check_strides(device: str) -> None:
    """Views of a packed projection, a paged pool and a larger steps buffer read and write as dense tensors do."""
    dense = moved(case(2, 3, 1, 2), device)
    packed = torch.randn(2, 5, 400, device=device).bfloat16()
    strided = dict(dense)
    for name, first, heads in (("q", 0, 1), ("k", 64, 1), ("v", 128, 2)):
        view = packed[:, :3, first : first + 64 * heads].unflatten(-1, (heads, 64))
        view.copy_(dense[name])
        strided[name] = view
    for name, first in (("a", 256), ("b", 258)):
        strided[name] = packed[:, 1:4, first : first + 2]
        strided[name].copy_(dense[name])
    pages = poisoned((3, 2 * 64 * 64 + 64), torch.float32, device)
    strided["initial_state"] = pages[:2, : 2 * 64 * 64].view(2, 2, 64, 64)
    strided["initial_state"].copy_(dense["initial_state"])
    edges = pages.clone()
    whole = poisoned((2, 4, 3, 64, 64), torch.float32, device)
    steps = torch.empty(2, 3, 2, 64, 64, device=device)
    want_out, want_state = gated_delta_rule_mtp(**dense, intermediate_states_buffer=steps)
    out, state = gated_delta_rule_mtp(**strided, intermediate_states_buffer=whole[:, :, :2])
    assert_same_bytes("output", out, want_out)
    assert_same_bytes("state", state, want_state)
    assert_same_bytes("steps", whole[:, :3, :2], steps)
    assert_same_bytes("between pages", pages[:, 2 * 64 * 64 :], edges[:, 2 * 64 * 64 :])
    assert_same_bytes("head past the last", whole[:, :, 2], poisoned((2, 4, 64, 64), torch.float32, device))


def test_strides() -> None:
    check_strides("cpu")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_both_orders_of_the_state_agree(head_dim: int) -> None:
    arguments = case(2, 1, head_dim=head_dim)
    arguments.pop("initial_state_indices")
    state = arguments.pop("initial_state")
    k_major = state.mT.contiguous()
    out, state = gated_delta_rule_decode_pretranspose(**arguments, state=state)
    same, k_major = gated_delta_rule_decode(**arguments, state=k_major)
    assert_same_bytes("output", same, out)
    assert_same_bytes("state", k_major.mT.contiguous(), state)


# ---- arguments -------------------------------------------------------------------------------------------------------

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
    "b dtype": (ArgumentTypeError, "b", mtp(b=GOOD["b"].float())),
    "A_log dtype": (ArgumentTypeError, "A_log", mtp(A_log=GOOD["A_log"].bfloat16())),
    "dt_bias dtype": (ArgumentTypeError, "dt_bias", mtp(dt_bias=GOOD["dt_bias"].double())),
    "dt_bias device": (ArgumentTypeError, "dt_bias", mtp(dt_bias=GOOD["dt_bias"].to("meta"))),
    "state dtype": (ArgumentTypeError, "initial_state", mtp(initial_state=STATE.half())),
    "state shape": (ArgumentError, "initial_state", mtp(initial_state=STATE[:, :1])),
    "state strides": (ArgumentError, "initial_state", mtp(initial_state=STATE.mT)),
    "state slots on top of each other": (
        ArgumentError,
        "initial_state",
        mtp(initial_state=STATE[:1].expand(2, -1, -1, -1)),
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
    "output dtype": (ArgumentTypeError, "output", mtp(output=torch.zeros(2, 2, 2, 64))),
    "output strides": (
        ArgumentError,
        "output",
        mtp(output=torch.zeros(2, 2, 2, 128, dtype=torch.bfloat16)[..., :64]),
    ),
    "no state": (ArgumentError, "state", decode(gated_delta_rule_decode_pretranspose, state=None)),
    "two states": (
        ArgumentError,
        "state",
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
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(moved(GOOD, "cpu"))
    for left, right in zip(got, want, strict=True):
        assert_same_bytes("result", left, right)


def test_meta_tensors_give_shapes() -> None:
    out, _ = gated_delta_rule_mtp(**moved(GOOD, "meta"))
    assert out.is_meta and out.shape == (2, 2, 2, 64)


# ---- specialisations -------------------------------------------------------------------------------------------------

SM_90A = Arch.of("sm_90a")
PROBLEM = Problem(
    dtype=DType.BF16,
    state_dtype=DType.F32,
    state_layout=StateLayout.VK,
    head_dim=128,
    tokens=4,
    heads=32,
    store_steps=True,
)


def test_selection_and_warm_up_agree() -> None:
    listed = set(kernel.specs(SM_90A))
    met = {
        kernel.select(
            replace(
                PROBLEM,
                dtype=dtype,
                state_dtype=state_dtype,
                head_dim=head_dim,
                tokens=tokens,
                heads=heads,
                store_steps=steps,
            )
        )
        for dtype in kernel.DTYPES
        for state_dtype in kernel.STATE_DTYPES
        for head_dim in kernel.HEAD_DIMS
        for tokens in range(1, 17)
        for steps in (True, False)
        for heads in (1, 32, 64, 65, 128, 256, 512, 1024, 4096, 65536)
    }
    met |= {
        kernel.select(
            replace(PROBLEM, state_layout=StateLayout.KV, dtype=dtype, head_dim=head_dim, tokens=1, store_steps=False)
        )
        for dtype in kernel.DTYPES
        for head_dim in kernel.HEAD_DIMS
    }
    assert met == listed


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 96},
        {"max_tokens": 5},
        {"ilp_rows": 3},
        {"warps": 3},
        {"tile_v": 8, "ilp_rows": 4},
        {"head_dim": 64, "tile_v": 128},
        {"state_layout": StateLayout.KV, "ilp_rows": 2},
        {"state_layout": StateLayout.KV, "state_dtype": DType.BF16, "ilp_rows": 4, "warps": 2},
    ],
    ids=str,
)
def test_impossible_specialisations_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        replace(kernel.specialise(PROBLEM, Shape(32, 2, 4)), **change)


def shapes(head_dim: int) -> Iterator[Shape]:
    """Every number of rows that a lane can hold, in tiles of every size, v in registers and in shared memory."""
    for ilp_rows in (1, 2, 4, 8):
        for tile_v in (4, 16, 64, 128):
            warps = min(4, tile_v // (4 * ilp_rows))
            if warps and tile_v <= head_dim:
                yield Shape(tile_v, ilp_rows, warps, use_smem_v=(tile_v == 16) == (ilp_rows < 4))


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_everywhere_without_local_memory(arch: str) -> None:
    problems = [
        PROBLEM,
        replace(PROBLEM, dtype=DType.F16, state_dtype=DType.BF16, tokens=16),
        replace(PROBLEM, state_layout=StateLayout.KV, tokens=1, store_steps=False),
    ]
    for problem in problems:
        spec = kernel.select(problem)
        code = disassemble(
            compile_cubin(DELTA_RULE.render(spec, Arch.of(arch)), Arch.of(arch), symbol=DELTA_RULE.symbol)
        )
        assert not [line for line in code if line.startswith(("LDL", "STL"))]
        assert any(line.startswith("LDG.E.128") or ".128" in line for line in code)
        packed = sum(line.startswith("FFMA2") for line in code)
        assert (packed > 0) == (arch in ("sm_100a", "sm_103a"))  # elsewhere ptxas splits fma.rn.f32x2 in two


# ---- simulator -------------------------------------------------------------------------------------------------------


def force(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """Have every problem cut into ``shape``."""
    operator._plan.cache_clear()
    monkeypatch.setattr(operator, "shape_of", lambda _: shape)
    monkeypatch.setattr(operator, "select", lambda problem: kernel.specialise(problem, shape))


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    yield
    operator._plan.cache_clear()


def check_kernel(
    arguments: Case, device: str, arch: str | None = None, *, l2norm: bool = True, update: bool = True
) -> None:
    """The kernel on ``device``, or simulated, writes the reference's bytes into poisoned outputs."""
    batch, tokens, value_heads, head_dim = arguments["v"].shape
    state_dtype, dtype = arguments["initial_state"].dtype, arguments["q"].dtype
    results = []
    for place in ("cpu", device):
        given = moved(arguments, place)
        steps = poisoned((batch, tokens, value_heads, head_dim, head_dim), state_dtype, place)
        out = poisoned((batch, tokens, value_heads, head_dim), dtype, place)
        with sim.device(arch) if arch and results else nullcontext():
            gated_delta_rule_mtp(
                **given,
                output=out,
                intermediate_states_buffer=steps if tokens > 1 else None,
                disable_state_update=not update,
                use_qk_l2norm=l2norm,
            )
        results.append((out, given["initial_state"], steps))
    for name, want, got in zip(("output", "state", "steps"), *results, strict=True):
        assert_same_bytes(name, got, want)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_simulated_kernels(arch: str, state_dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, shape in enumerate(shapes(head_dim)):
        force(monkeypatch, shape)
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        arguments = case(2, 3, 1, 2, head_dim, dtype=dtype, state_dtype=state_dtype, exact_gates=True, seed=number)
        arguments["initial_state_indices"] = torch.tensor([1, -1] if number % 3 == 0 else [1, 0])
        check_kernel(arguments, "cpu", arch, l2norm=number % 4 != 3, update=number % 5 != 4)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("tokens", [1, 4, 5, 16])
def test_simulated_token_counts(tokens: int) -> None:
    check_kernel(case(1, tokens, exact_gates=True), "cpu", "sm_90a")


@pytest.mark.sim
@pytest.mark.compile
def test_simulated_gates_are_close() -> None:
    arguments = case(2, 3)
    want_out, want_states = recurrence(arguments)
    with sim.device("sm_90a"):
        out, state = gated_delta_rule_mtp(**arguments)
    assert_close("output", out, want_out)
    assert_close("state", state, want_states[:, -1])


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_simulated_pools_strides_and_orders(arch: str) -> None:
    with sim.device(arch):
        check_pool("cpu", torch.int32)
        check_other_writes("cpu")
        check_strides("cpu")
        test_both_orders_of_the_state_agree(64)


# ---- GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_every_shape(self, head_dim: int, state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        for number, shape in enumerate(shapes(head_dim)):
            force(monkeypatch, shape)
            dtype = (torch.bfloat16, torch.float16)[number % 2]
            arguments = case(5, 4, 2, 4, head_dim, dtype=dtype, state_dtype=state_dtype, exact_gates=True, seed=number)
            check_kernel(arguments, "cuda", l2norm=number % 4 != 3, update=number % 5 != 4)

    @pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 16])
    def test_every_token_count_and_table_row(self, tokens: int) -> None:
        for batch in (1, 9, 40):
            check_kernel(case(batch, tokens, 2, 16, exact_gates=True), "cuda")

    @pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
    def test_follows_the_recurrence(self, state_dtype: torch.dtype) -> None:
        arguments = case(3, 4, 2, 4, 128, state_dtype=state_dtype)
        want_out, want_states = recurrence(arguments)
        out, state = gated_delta_rule_mtp(**moved(arguments, "cuda"))
        assert_close("output", out.cpu(), want_out)
        assert_close("state", state.cpu(), want_states[:, -1])

    def test_pools_strides_and_orders(self) -> None:
        check_pool("cuda", torch.int32)
        check_pool("cuda", torch.int64)
        check_other_writes("cuda")
        check_strides("cuda")

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_k_major(self, head_dim: int) -> None:
        arguments = case(7, 1, 2, 4, head_dim, exact_gates=True)
        arguments.pop("initial_state_indices")
        arguments["state"] = arguments.pop("initial_state").mT.contiguous()
        want_out, want_state = gated_delta_rule_decode(**moved(arguments, "cpu"))
        out, state = gated_delta_rule_decode(**moved(arguments, "cuda"))
        assert_same_bytes("output", out, want_out)
        assert_same_bytes("state", state, want_state)

    def test_graph_replay(self) -> None:
        arguments = moved(case(4, 4, 2, 4, 128), "cuda")
        fresh = arguments["initial_state"].clone()
        want_out, want_state = gated_delta_rule_mtp(**moved(arguments, "cuda"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, state = gated_delta_rule_mtp(**arguments)
        state.copy_(fresh)
        graph.replay()
        assert_same_bytes("output", out, want_out)
        assert_same_bytes("state", state, want_state)
