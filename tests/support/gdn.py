"""Cases of the gated delta rule, the recurrence in float64, and checks that run on every device."""

from __future__ import annotations

from typing import Any

import torch

from jitfp4.families.gdn import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from tests.support.compare import assert_same_bytes, poisoned

Case = dict[str, Any]
# Of A_log, and of a where softplus(a) = a: decays of 0.17 to 0.96 on which an H200, CPUs and the simulator agree.
_EXACT_LOGS = (-3.3125, -4.125, -4.6875, -5.3125, -6.4375)
_EXACT_RATES = (24.0, 32.0, 48.0)
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
    gates: torch.dtype | None = None,
    value_dim: int | None = None,
    pool: int | None = None,
    exact_gates: bool = False,
    seed: int = 0,
) -> Case:
    """Arguments of gated_delta_rule_mtp(). ``exact_gates``: those that CPU, GPU and simulator get the same bits for;
    ``gates``: their dtype, ``dtype`` when None."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def one_of(values: tuple[float, ...], *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]

    rows, value_dim, gates = (batch, tokens, value_heads), value_dim or head_dim, gates or dtype
    return {
        "q": normal(batch, tokens, heads, head_dim).to(dtype),
        "k": normal(batch, tokens, heads, head_dim).to(dtype),
        "v": normal(*rows, value_dim).to(dtype),
        "initial_state": normal(pool or batch, value_heads, value_dim, head_dim).to(state_dtype),
        "initial_state_indices": torch.arange(batch),
        "A_log": one_of(_EXACT_LOGS, value_heads) if exact_gates else normal(value_heads) * 0.5,
        "a": (one_of(_EXACT_RATES, *rows) if exact_gates else normal(*rows)).to(gates),
        "dt_bias": torch.zeros(value_heads) if exact_gates else normal(value_heads),
        "b": (one_of((0.0, 100.0, -100.0), *rows) if exact_gates else normal(*rows)).to(gates),
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
    out = torch.empty(v.shape, dtype=torch.float64)
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


def check_other_writes(device: str, state_dtype: torch.dtype = torch.float32) -> None:
    """Final states to other slots, states of every token to slots of the pool, both, and no write at all."""
    arguments = moved(case(2, 3, pool=8, state_dtype=state_dtype), device)
    arguments["initial_state_indices"] = torch.tensor([6, 1], device=device)
    before = arguments["initial_state"].clone()
    wanted = before.new_empty(2, 3, *before.shape[1:])
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

    arguments["initial_state"] = before.clone()
    slots = torch.tensor([[2, 2, 2], [4, 5, 4]], dtype=torch.int32, device=device)
    pool = gated_delta_rule_mtp(**arguments, ssm_state_indices=slots)[1]
    for (n, t), slot in zip(((0, 2), (1, 2), (1, 1)), (2, 4, 5), strict=True):
        assert_same_bytes(f"slot {slot}, written more than once", pool[slot], wanted[n, t])

    slots = torch.tensor([[2, 3, -1], [4, -1, 5]], dtype=torch.int32, device=device)
    stay = arguments["initial_state_indices"]
    for name, targets, finals in (
        ("other slots", [7, -1], {7: 0}),
        ("a slot of a token", [3, 0], {3: 0, 0: 1}),
        ("the initial slots in another tensor", stay, {6: 0, 1: 1}),
        ("the initial slots' own tensor", None, {}),
    ):
        arguments["initial_state"] = before.clone()
        given = stay if targets is None else torch.as_tensor(targets, device=device).clone()
        again, pool = gated_delta_rule_mtp(**arguments, ssm_state_indices=slots, output_state_indices=given)
        assert_same_bytes(f"output, {name}", again, out)
        states = {2: wanted[0, 0], 3: wanted[0, 1], 4: wanted[1, 0], 5: wanted[1, 2]}
        states |= {slot: wanted[n, 2] for slot, n in finals.items()}
        for slot in range(8):
            assert_same_bytes(f"slot {slot}, {name}", pool[slot], states.get(slot, before[slot]))


def check_graph_replay(tokens: int) -> None:
    """A captured call replays the eager one."""
    arguments = moved(case(4, tokens, 2, 4, 128), "cuda")
    fresh = arguments["initial_state"].clone()
    want_out, want_state = gated_delta_rule_mtp(**moved(arguments, "cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, state = gated_delta_rule_mtp(**arguments)
    state.copy_(fresh)
    graph.replay()
    assert_same_bytes("output", out, want_out)
    assert_same_bytes("state", state, want_state)


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


def check_heads_apart(device: str) -> None:
    """Heads that are not neighbours, in the pool and in a buffer of steps, read and write as dense ones do."""
    dense = moved(case(2, 3, pool=3), device)
    slots = torch.tensor([[0, 1, -1], [2, 2, 0]], device=device)
    steps = torch.empty(2, 3, 2, 64, 64, device=device)
    want_out, want_state = gated_delta_rule_mtp(**moved(dense, device), intermediate_states_buffer=steps)
    scattered = gated_delta_rule_mtp(**moved(dense, device), ssm_state_indices=slots)[1]
    wide = poisoned((3, 4, 64, 64), torch.float32, device)
    by_head = poisoned((2, 3, 64, 64), torch.float32, device)
    untouched = wide[:, 1::2].clone()
    for name, pool in (("every second head", wide[:, ::2]), ("one head after the other", by_head.transpose(0, 1))):
        for buffer in (torch.empty_like(steps), torch.empty_like(steps.repeat(1, 1, 3, 1, 1))[:, :, ::3]):
            pool.copy_(dense["initial_state"])
            given = dense | {"initial_state": pool}
            out, state = gated_delta_rule_mtp(**given, intermediate_states_buffer=buffer)
            assert_same_bytes(f"output, {name}", out, want_out)
            assert_same_bytes(f"state, {name}", state, want_state)
            assert_same_bytes(f"steps, {name}", buffer, steps)
        pool.copy_(dense["initial_state"])
        state = gated_delta_rule_mtp(**given, ssm_state_indices=slots)[1]
        assert_same_bytes(f"slots of steps, {name}", state, scattered)
    assert_same_bytes("between the heads", wide[:, 1::2], untouched)


def check_float_gates(device: str) -> None:
    """Gates are used as they are: a float32 that bf16 holds gives the same bits, and others are not rounded to it."""
    halves = moved(case(2, 3), device)
    want_out, want_state = gated_delta_rule_mtp(**moved(halves, device))
    for names in ("a", "b", "ab"):
        out, state = gated_delta_rule_mtp(**(moved(halves, device) | {name: halves[name].float() for name in names}))
        assert_same_bytes(f"output, float32 {names}", out, want_out)
        assert_same_bytes(f"state, float32 {names}", state, want_state)
    floats = case(2, 3, gates=torch.float32, seed=1)
    want_out, want_states = recurrence(floats)
    out, state = gated_delta_rule_mtp(**moved(floats, device))
    assert_close("output", out.cpu(), want_out)
    assert_close("state", state.cpu(), want_states[:, -1])


def check_wide_values(device: str, tokens: int = 2) -> None:
    """V = 256 with K = 128 follows the recurrence."""
    arguments = case(2, tokens, head_dim=128, value_dim=256)
    want_out, want_states = recurrence(arguments)
    steps = torch.empty(want_states.shape, device=device)
    out, state = gated_delta_rule_mtp(**moved(arguments, device), intermediate_states_buffer=steps)
    assert_close("output", out.cpu(), want_out)
    assert_close("steps", steps.cpu(), want_states)
    assert_same_bytes("state", state, steps[:, -1])


def check_both_orders(head_dim: int, value_dim: int | None = None) -> None:
    """A [K, V] state and its transpose give the same bits."""
    arguments = case(2, 1, head_dim=head_dim, value_dim=value_dim)
    arguments.pop("initial_state_indices")
    state = arguments.pop("initial_state")
    k_major = state.mT.contiguous()
    out, state = gated_delta_rule_decode_pretranspose(**arguments, state=state)
    same, k_major = gated_delta_rule_decode(**arguments, state=k_major)
    assert_same_bytes("output", same, out)
    assert_same_bytes("state", k_major.mT.contiguous(), state)
