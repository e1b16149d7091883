"""chunk_gated_delta_rule: whole prompts against the recurrence in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, chunk_gated_delta_rule, sim
from jitfp4.families.gdn.kernels.prefill import TACTICS, PrefillTactic
from jitfp4.families.gdn.kernels.prefill_wgmma import TACTICS as WGMMA_TACTICS
from jitfp4.families.gdn.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.gdn.parts_operation import PREFILL_JOIN_OPERATION, PREFILL_PARTS_OPERATION
from jitfp4.families.gdn.prefill_arguments import (
    CHUNK,
    LOWER_BYTES,
    PRODUCTS_BYTES,
    JoinArguments,
    PartsArguments,
    ProductsArguments,
    chunk_place,
    places,
)
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL
from jitfp4.families.gdn.products_operation import PREFILL_PRODUCTS_OPERATION
from jitfp4.layouts import ceil_div
from tests.support.compare import poisoned
from tests.support.sample import SIM_ARCHS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Case = dict[str, Any]

SIM = [pytest.mark.sim, pytest.mark.compile]
ON_WARPGROUPS = {"sm_90a, warpgroups": WgmmaTactic(64), "sm_90a, parts": WgmmaTactic(64, divided=True)}


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("sm_90a", marks=SIM),
        *(pytest.param(name, marks=SIM) for name in ON_WARPGROUPS),
        pytest.param("sm_100a", marks=[*SIM, pytest.mark.one_in(4)]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """As that of the family, with tactics of warpgroups; sm_90a without them runs the kernel of other architectures."""
    if request.param in ON_WARPGROUPS:
        with sim.device("sm_90a"), GATED_DELTA_RULE_PREFILL.forced(ON_WARPGROUPS[request.param]):
            yield "cpu"
    elif request.param == "sm_90a":
        with sim.device("sm_90a"), GATED_DELTA_RULE_PREFILL.forced(PrefillTactic(16, 3)):
            yield "cpu"
    elif request.param.startswith("sm_"):
        with sim.device(request.param):
            yield "cpu"
    else:
        yield request.param


def case(
    lengths: tuple[int, ...],
    heads: tuple[int, int, int] = (1, 1, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = BF16,
    state_dtype: torch.dtype = F32,
    seed: int = 0,
) -> Case:
    """Arguments; ``heads``: of q, k and v; ``dims``: K and V. Decays of 0.7 to 1."""
    generator = torch.Generator().manual_seed(seed)
    tokens, most = sum(lengths), max(heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": normal(tokens, heads[0], dims[0]).to(dtype),
        "k": normal(tokens, heads[1], dims[0]).to(dtype),
        "v": normal(tokens, heads[2], dims[1]).to(dtype),
        "g": 0.7 + 0.3 * torch.rand(tokens, most, generator=generator),
        "beta": torch.rand(tokens, most, generator=generator),
        "initial_state": normal(len(lengths), most, dims[1], dims[0]).to(state_dtype),
        "output_final_state": True,
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "use_qk_l2norm_in_kernel": True,
    }


def recurrence(given: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final states, token by token in float64."""
    q, k, v, g, beta = (given[name].double() for name in ("q", "k", "v", "g", "beta"))
    if given["use_qk_l2norm_in_kernel"]:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k, v = (x.repeat_interleave(g.shape[1] // x.shape[1], 1) for x in (q, k, v))
    states, out = given["initial_state"].double().clone(), torch.zeros_like(v)
    bounds = given["cu_seqlens"].tolist()
    for n, (first, end) in enumerate(itertools.pairwise(bounds)):
        h = states[n]
        for t in range(first, end):
            h = h * g[t, :, None, None]
            u = (v[t] - (h @ k[t].unsqueeze(-1)).squeeze(-1)) * beta[t].unsqueeze(-1)
            h = h + u.unsqueeze(-1) * k[t].unsqueeze(-2)
            out[t] = (h @ q[t].unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
        states[n] = h
    return out, states


def assert_near(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """The error's root mean square is below ``limit`` of the values', and no error is above 16 times that."""
    error = got.double().cpu() - want
    scale = want.square().mean().sqrt()
    assert error.square().mean().sqrt() <= limit * scale
    assert error.abs().max() <= 16 * limit * scale


def limit_of(dtype: torch.dtype) -> float:
    """A few roundings to ``dtype`` of what is multiplied."""
    return 2**-7 if dtype == BF16 else 2**-10


def moved(given: Case, device: str) -> Case:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def check(given: Case, device: str) -> None:
    dtype, want = given["q"].dtype, recurrence(given)
    got = chunk_gated_delta_rule(**moved(given, device))
    assert_near(got[0], want[0], limit_of(dtype))
    assert_near(got[1], want[1], 1.5 * max(limit_of(dtype), limit_of(given["initial_state"].dtype)))


@pytest.mark.parametrize("lengths", [(1,), (5, 0, 64, 67), (130,)], ids=str)
def test_lengths(device: str, lengths: tuple[int, ...]) -> None:
    check(case(lengths), device)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "state_dtype"),
    [
        ((1, 1, 3), (128, 128), BF16, F32),
        ((2, 2, 2), (128, 128), F16, BF16),
        ((2, 1, 1), (64, 64), F16, F32),
        ((1, 1, 1), (128, 256), BF16, F32),
    ],
)
def test_heads_and_dtypes(
    device: str, heads: tuple[int, int, int], dims: tuple[int, int], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    check(case((70,), heads, dims, dtype, state_dtype), device)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(3)
@pytest.mark.parametrize("tactic", [*WGMMA_TACTICS, *TACTICS], ids=str)
@pytest.mark.parametrize("name", SIM_ARCHS)
def test_every_tactic_has_no_race(name: str, tactic: PrefillTactic | WgmmaTactic) -> None:
    given = case((200, 3), heads=(1, 1, 1), dims=(128, 128))
    with sim.device(name, races=True), GATED_DELTA_RULE_PREFILL.forced(tactic):
        try:
            check(given, "cpu")
        except ArgumentError as error:
            assert "shared memory" in str(error) or (name != "sm_90a" and "instructions of sm_90a" in str(error))


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("where", [pytest.param("sm_90a", marks=SIM), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_of_sequences(where: str, rows: int) -> None:
    """Parts of 256 tokens, states that last through them, checkpoints in several."""
    lengths = (300, 0, 530)
    given = case(lengths, heads=(1, 1, 1), dims=(128, 128))
    given["g"] = 1.0 - 0.005 * torch.rand(830, 1, generator=torch.Generator().manual_seed(1))
    stored = torch.full((3, 1, 128, 128), 7.0)
    given |= {
        "state_checkpoints": stored,
        "checkpoint_cu_starts": torch.tensor([0, 1, 1, 3]),
        "checkpoint_every_n_tokens": 256,
    }
    simulated = where != "cuda"
    given = moved(given, "cpu" if simulated else where)
    on = sim.device(where, races=True) if simulated else nullcontext()
    with on, GATED_DELTA_RULE_PREFILL.forced(WgmmaTactic(rows, divided=True)):
        got = chunk_gated_delta_rule(**given)
    given = moved(given, "cpu")
    want = recurrence(given)
    for x, y in zip(got, want, strict=True):
        assert_near(x, y, limit_of(BF16))
    for place, (n, tokens) in enumerate(((0, 256), (2, 256), (2, 512))):
        start = int(given["cu_seqlens"][n])
        part = {name: given[name][start : start + tokens] for name in ("q", "k", "v", "g", "beta")}
        part |= {"initial_state": given["initial_state"][n : n + 1], "cu_seqlens": torch.tensor([0, tokens])}
        assert_near(given["state_checkpoints"][place], recurrence({**given, **part})[1][0], 1.5 * limit_of(BF16))


def adversarial(kind: str) -> Case:
    given = case((130,), dims=(128, 128))
    if kind == "no decay":
        given["g"] = torch.ones_like(given["g"])
    if kind == "forgetting":
        given["g"][::7] = 0.0
        given["g"][3::7] = 2e-22  # exp(-50)
    if kind == "beta 0 and 1":
        given["beta"] = (torch.arange(130) % 3 > 0).float().unsqueeze(1).expand(-1, 2).contiguous()
    if kind == "repeated keys":
        given["k"][1:] = given["k"][:1]
        given["beta"] = torch.ones_like(given["beta"])
    if kind == "opposite keys":
        given["k"][1::2] = -given["k"][:-1:2]
        given["beta"] = torch.ones_like(given["beta"])
    return given


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["no decay", "forgetting", "beta 0 and 1", "repeated keys", "opposite keys"])
def test_adversarial_values(device: str, kind: str) -> None:
    check(adversarial(kind), device)


FUSED = WgmmaTactic(128, fused=True)
OF_FUSED = {
    "lengths": lambda: case((5, 0, 64, 67), heads=(1, 1, 2), dims=(128, 128)),
    "f16": lambda: case((70,), (2, 1, 2), (128, 128), F16, BF16),
    "V 256": lambda: case((70,), (1, 1, 1), (128, 256)),
    **{kind: partial(adversarial, kind) for kind in ("no decay", "forgetting", "repeated keys", "opposite keys")},
    "seven chunks": lambda: case((400,), heads=(1, 1, 1), dims=(128, 128)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OF_FUSED)
@pytest.mark.parametrize("where", [pytest.param("sm_90a", marks=SIM), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_made_in_the_kernel(where: str, name: str) -> None:
    """The kernel that makes the products of chunks itself, which the table takes for many states."""
    with GATED_DELTA_RULE_PREFILL.forced(FUSED):
        if where == "cuda":
            check(OF_FUSED[name](), where)
        else:
            with sim.device(where):
                check(OF_FUSED[name](), "cpu")


def test_what_the_fused_kernel_cannot() -> None:
    given = case((70,), dims=(128, 128))
    for tactic in (WgmmaTactic(64, fused=True), WgmmaTactic(128, divided=True, fused=True)):
        with (
            sim.device("sm_90a"),
            GATED_DELTA_RULE_PREFILL.forced(tactic),
            pytest.raises(ArgumentError, match="whole sequences"),
        ):
            chunk_gated_delta_rule(**given)


def test_without_gates_norm_and_state(device: str) -> None:
    given = case((66,), dims=(128, 128))
    given["k"] *= 0.05
    given |= {"use_qk_l2norm_in_kernel": False, "g": torch.ones(66, 2), "beta": torch.ones(66, 2)}
    given["initial_state"].zero_()
    want = recurrence(given)
    got = chunk_gated_delta_rule(
        **moved({name: given[name] for name in ("q", "k", "v", "cu_seqlens")}, device), output_final_state=False
    )
    assert isinstance(got, torch.Tensor)
    assert_near(got, want[0], limit_of(BF16))


def test_pools_in_place_checkpoints_and_strides(device: str) -> None:
    """Slots of a pool, one of them outside it, states updated in place, views of a packed projection."""
    lengths = (130, 64, 20)
    given = case(lengths, dims=(64, 64))
    packed = torch.cat([given[name].flatten(1) for name in ("q", "k", "v")], 1).to(device)
    q, k, v = (part.unflatten(1, (-1, 64)) for part in packed.split([64, 64, 128], 1))
    want = recurrence(given)
    pool = poisoned((5, 2, 64, 64), F32, "cpu")
    slots = torch.tensor([3, 0, -1])
    pool[3], pool[0] = given["initial_state"][0], given["initial_state"][1]
    before, pool = pool.clone(), pool.to(device)
    stored = torch.full((4, 2, 64, 64), 7.0, device=device)
    rest = moved({name: given[name] for name in ("g", "beta", "cu_seqlens", "use_qk_l2norm_in_kernel")}, device)
    out, final = chunk_gated_delta_rule(
        q,
        k,
        v,
        **rest,
        initial_state=pool,
        output_final_state=True,
        output_state=pool,
        state_indices=slots.to(device),
        state_checkpoints=stored,
        checkpoint_cu_starts=torch.tensor([0, 2, 3, 3]).to(device),
        checkpoint_every_n_tokens=64,
    )
    assert final is pool
    assert_near(out[:194], want[0][:194], limit_of(BF16))
    assert not out[194:].any()
    for slot, n in ((3, 0), (0, 1)):
        assert_near(pool[slot], want[1][n], 1.5 * limit_of(BF16))
    assert torch.equal(pool[[1, 2, 4]].cpu(), before[[1, 2, 4]])
    for place, (first, n) in enumerate(((64, 0), (128, 0), (64, 1))):
        start = int(given["cu_seqlens"][n])
        part = {name: given[name][start : start + first] for name in ("q", "k", "v", "g", "beta")}
        part |= {"initial_state": given["initial_state"][n : n + 1], "cu_seqlens": torch.tensor([0, first])}
        assert_near(stored[place], recurrence({**given, **part})[1][0], 1.5 * limit_of(BF16))
    assert (stored[3] == 7.0).all()


def test_no_tokens(device: str) -> None:
    given = moved(case((0, 0)), device)
    out, final = chunk_gated_delta_rule(**given)
    assert out.shape == (0, 2, 64) and torch.equal(final, given["initial_state"])


def test_parts_as_they_are_defined() -> None:
    """On CPU tensors: states before parts, from parts alone and their maps, are those of the recurrence."""
    given = case((300, 0, 530), heads=(1, 1, 2), dims=(64, 64))
    given["g"] = 1.0 - 0.005 * torch.rand(830, 2, generator=torch.Generator().manual_seed(1))
    states = torch.zeros(places(830, 3, 256), 2, 128, 64)
    rest = given["cu_seqlens"], torch.zeros(0, dtype=torch.uint8), states, 4, True, None
    PREFILL_PARTS_OPERATION(PartsArguments(given["k"], given["v"], given["g"], given["beta"], *rest))
    PREFILL_JOIN_OPERATION(JoinArguments(states, given["cu_seqlens"], given["initial_state"], None, 4, 830, 3, None))
    for n, (first, end) in enumerate(itertools.pairwise(given["cu_seqlens"].tolist())):
        place = chunk_place(first, n, 256)
        assert torch.equal(states[place, :, :64], given["initial_state"][n])
        for at, tokens in enumerate(range(256, end - first, 256), 1):
            part = {name: given[name][first : first + tokens] for name in ("q", "k", "v", "g", "beta")}
            part |= {"initial_state": given["initial_state"][n : n + 1], "cu_seqlens": torch.tensor([0, tokens])}
            assert_near(states[place + at, :, :64], recurrence({**given, **part})[1][0], 1e-5)


@pytest.mark.sim
@pytest.mark.compile
def test_the_products_of_chunks() -> None:
    """The first kernel alone, every number, also of lists that are no list of bounds."""
    given = case((65, 3), heads=(1, 1, 2), dims=(128, 128))
    for bounds in ([0, 65, 68], [-5, 30, 1 << 40]):
        cu_seqlens = torch.tensor(bounds)
        count = places(68, 2)
        made = []
        for arch in (None, "sm_90a"):
            products = torch.zeros(count * 2 * PRODUCTS_BYTES, dtype=torch.uint8)
            arguments = ProductsArguments(
                given["q"], given["k"], given["g"], given["beta"], 0.1, cu_seqlens, products, 2, True, None
            )
            if arch is None:
                PREFILL_PRODUCTS_OPERATION(arguments)
            else:
                with sim.device(arch, races=True):
                    PREFILL_PRODUCTS_OPERATION(arguments)
            made.append(products.view(count, 2, -1))
        for n in range(2):
            first, end = (min(max(at, 0), 68) for at in bounds[n : n + 2])
            for chunk in range(ceil_div(end - first, CHUNK)):
                want, got = (one[chunk_place(first, n) + chunk] for one in made)
                matrices, factors = slice(0, 2 * LOWER_BYTES), slice(2 * LOWER_BYTES, None)
                for view, part in ((BF16, matrices), (F32, factors)):
                    x, y = (one[:, part].contiguous().view(view).float() for one in (want, got))
                    torch.testing.assert_close(y, x, rtol=2**-7 if view == BF16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"cu_seqlens": None}, "cu_seqlens: got None"),
        ({"backend": "triton"}, "backend: got 'triton'"),
        ({"use_cp": "never"}, "use_cp: got 'never'"),
        ({"_cp_chunk_len": 64}, "_cp_chunk_len: got 64"),
        ({"q": torch.zeros(66, 3, 64, dtype=BF16)}, "v: got 2 heads"),
        ({"v": torch.zeros(66, 2, 128, dtype=BF16)}, "v: got shape"),
        ({"g": torch.ones(66, 1)}, "g: got shape"),
        ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, "cu_seqlens: got shape"),
        ({"output_final_state": False, "output_state": torch.zeros(1, 2, 64, 64)}, "output_state: got given"),
        ({"state_indices": torch.zeros(1, dtype=torch.int32)}, "output_state: got None"),
        ({"checkpoint_every_n_tokens": 32}, "checkpoint_every_n_tokens: got 32"),
        ({"checkpoint_every_n_tokens": 64}, "state_checkpoints, checkpoint_every_n_tokens: got None"),
        (
            {"state_checkpoints": torch.zeros(1, 2, 64, 64)},
            "state_checkpoints, checkpoint_every_n_tokens: got a tensor",
        ),
        ({"initial_state": torch.zeros(2, 2, 64, 64)}, "initial_state: got shape"),
        ({"initial_state": torch.zeros(1, 2, 64, 64, dtype=F16)}, "initial_state: got torch.float16"),
    ],
)
def test_what_cannot_be(change: Case, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        chunk_gated_delta_rule(**{**case((66,)), **change})
