"""route_tokens: logits against float64, the choice against route_experts(), on CPU, simulator and GPU; refusals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    counters,
    fp4_experts,
    rmsnorm,
    route_experts,
    route_tokens,
    sim,
)
from jitfp4.arch import Arch
from jitfp4.families.experts.kernels.router import ROUTER, RouterTactic
from jitfp4.families.experts.router_operation import EXPERTS_ROUTER
from jitfp4.families.experts.router_problem import MOST_TOKENS, RouterProblem
from jitfp4.families.experts.topk_problem import Method
from jitfp4.formats import DType
from tests.support.experts import make_layer, make_x
from tests.support.routing import ROUTERS, Router

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TACTICS = [RouterTactic(1, 128), RouterTactic(2, 256), RouterTactic(4, 128), RouterTactic(4, 512)]


def make(router: Router, tokens: int, hidden: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    """x and a weight, for logits of about 3."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = 3 / hidden**0.5 * torch.randn(router.experts, hidden, generator=generator)
    return x, weight.to(dtype)


def make_bias(router: Router) -> torch.Tensor | None:
    return torch.randn(router.experts, generator=torch.Generator().manual_seed(1)) / 4 if router.biased else None


def assert_tokens(
    router: Router,
    x: torch.Tensor,
    weight: torch.Tensor,
    device: str,
    *,
    dtype: torch.dtype = F32,
    logit_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits, which are returned, are right within float32's error, and the choice is that by them."""
    bias = make_bias(router)
    options = router.options(None if bias is None else bias.to(device))
    logits = torch.full((len(x), router.experts), 7.0, dtype=dtype, device=device)
    shift = None if logit_bias is None else logit_bias.to(device)
    ids, weights = route_tokens(
        x.to(device), weight.to(device), router.top_k, logit_bias=shift, logits=logits, **options
    )
    a, b = x.double(), weight.double()
    want, size = a @ b.T, a.abs() @ b.abs().T
    if logit_bias is not None:
        want, size = want + logit_bias.double(), size + logit_bias.double().abs()
    rounding = 0.0 if dtype is F32 else torch.finfo(dtype).eps / 2
    got = logits.cpu()
    assert ((got.double() - want).abs() <= 2.0**-19 * size + rounding * want.abs()).all()
    assert_choice(router, logits, ids, weights, options)
    return got


def assert_choice(
    router: Router, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, options: dict[str, Any]
) -> None:
    """Bit by bit that of route_experts()."""
    want_ids, want_weights = route_experts(logits, router.top_k, **options)
    assert torch.equal(ids, want_ids)
    assert torch.equal(weights.view(torch.int32), want_weights.view(torch.int32))


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_routers_of_models(device: str, name: str, dtype: torch.dtype) -> None:
    router = ROUTERS[name]
    assert_tokens(router, *make(router, 3, 136, dtype), device)
    assert_tokens(router, *make(router, 2, 64, dtype), device, dtype=dtype)


@pytest.mark.parametrize("tactic", TACTICS, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 13])
def test_any_number_of_tokens(device: str, tokens: int, tactic: RouterTactic) -> None:
    router = ROUTERS["uneven groups"]
    with EXPERTS_ROUTER.forced(tactic):
        assert_tokens(router, *make(router, tokens, 1048), device)


def test_many_tokens_go_through_torchs_product(device: str) -> None:
    router = ROUTERS["deepseek-v3"]
    x, weight = make(router, MOST_TOKENS + 1, 128)
    shift = torch.randn(256, generator=torch.Generator().manual_seed(0))
    for dtype in (F32, BF16):
        assert_tokens(router, x, weight, device, dtype=dtype)
        assert_tokens(router, x, weight, device, dtype=dtype, logit_bias=shift.to(dtype))
    assert_tokens(router, x, weight.float(), device)


@pytest.mark.parametrize("logit_bias", [F32, BF16, F16])
@pytest.mark.parametrize("weight_dtype", [F32, F16])
def test_dtypes_of_weight_and_bias(device: str, weight_dtype: torch.dtype, logit_bias: torch.dtype) -> None:
    router = ROUTERS["gpt-oss"]
    x, weight = make(router, 4, 200, F16)
    shift = torch.randn(router.experts, generator=torch.Generator().manual_seed(2)).to(logit_bias)
    exact = weight.to(weight_dtype) if weight_dtype is F16 else weight.float() * 1.000123  # no 16-bit floats
    assert_tokens(router, x, exact, device, logit_bias=shift)


def test_no_tokens(device: str) -> None:
    x, weight = torch.empty(0, 64, device=device).bfloat16(), torch.empty(128, 64, device=device).bfloat16()
    ids, weights = route_tokens(x, weight, 4, method="softmax", renormalize=True)
    assert ids.shape == weights.shape == (0, 4)


def test_rows_apart_and_given_outputs(device: str) -> None:
    router = ROUTERS["qwen3"]
    x, weight = make(router, 6, 128)
    wide = torch.full((6, 160), torch.nan, dtype=BF16, device=device)
    wide[:, 16:144] = x.to(device)
    logits = torch.full((6, 140), 7.0, device=device)
    out = torch.full((6, 8), -7, dtype=torch.int32, device=device), torch.full((6, 8), 7.0, device=device)
    options = router.options(None)
    ids, weights = route_tokens(
        wide[:, 16:144],
        weight.to(device),
        8,
        **options,
        logits=logits[:, 5:133],
        out_ids=out[0],
        out_weights=out[1],
    )
    assert ids is out[0]
    assert weights is out[1]
    assert (logits[:, :5] == 7).all()
    assert (logits[:, 133:] == 7).all()
    assert_choice(router, logits[:, 5:133], ids, weights, options)


def test_logits_that_nobody_wants_are_the_same(device: str) -> None:
    router = ROUTERS["qwen3-next"]
    x, weight = (one.to(device) for one in make(router, 3, 96))
    logits = torch.empty(3, router.experts, device=device)
    seen = route_tokens(x, weight, 10, logits=logits, **router.options(None))
    unseen = route_tokens(x, weight, 10, **router.options(None))
    assert all(map(torch.equal, seen, unseen))


def test_nan_infinity_and_zero(device: str) -> None:
    """Also beside columns and rows that do not exist, which are multiplied too."""
    router = ROUTERS["qwen2"]
    x, weight = make(router, 4, 104)
    x[0], x[1, 103], x[2, 7] = 0, torch.inf, torch.nan
    weight[:, 103] = weight[:, 103].abs() + 1  # every logit is infinite
    logits = torch.empty(4, 60, device=device)
    options = router.options(None)
    with EXPERTS_ROUTER.forced(RouterTactic(8, 128)):
        ids, weights = route_tokens(x.to(device), weight.to(device), 4, logits=logits, **options)
    assert logits[0].eq(0).all()
    assert logits[1].eq(torch.inf).all()
    assert logits[2].isnan().all()
    assert logits[3].isfinite().all()
    assert ids[:3].tolist() == [[0, 1, 2, 3]] * 3
    assert weights[0].eq(torch.tensor(1 / 60)).all()
    assert weights[1:3].isnan().all()
    assert weights[3].isfinite().all()


@pytest.mark.parametrize("tactic", TACTICS[:3], ids=str)
def test_a_token_has_the_same_bits_among_any_number(device: str, tactic: RouterTactic) -> None:
    router = ROUTERS["kimi-k2"]
    x, weight = make(router, 13, 264)
    found = []
    with EXPERTS_ROUTER.forced(tactic):
        for tokens in (1, 2, 3, 8, 13):
            logits = torch.empty(tokens, router.experts, device=device)
            options = router.options(torch.zeros(router.experts, device=device))
            route_tokens(x[:tokens].to(device), weight.to(device), 8, logits=logits, **options)
            found.append(logits[0])
    if device == "cpu" and sim.active_device() is None:  # torch's order of sums is its own
        torch.testing.assert_close(found[0], found[-1], rtol=1e-5, atol=1e-5)
    else:
        assert all(torch.equal(one, other) for one, other in pairwise(found))


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("given", [False, True])
def test_an_expert_that_all_tokens_have(device: str, tokens: int, given: bool) -> None:
    router = ROUTERS["qwen2"]
    x, weight = (one.to(device) for one in make(router._replace(experts=61), tokens, 128))
    logits, options = torch.empty(tokens, 61, device=device), router.options(None) | {"scale": 2.0}
    out: dict[str, torch.Tensor] = {}
    if given:
        out = {
            "out_ids": torch.full((tokens, 5), -7, dtype=torch.int32, device=device),
            "out_weights": torch.full((tokens, 5), 7.0, device=device),
        }
    ids, weights = route_tokens(x, weight, 4, shared=True, logits=logits, **options, **out)
    assert_choice(router, logits[:, :60], ids[:, :4], weights[:, :4], options)
    assert ids[:, 4].eq(60).all()
    torch.testing.assert_close(weights[:, 4], 2 * logits[:, 60].sigmoid(), rtol=2.0**-20, atol=0)


def test_which_calls_are_one_launch() -> None:
    """What the table selects, for routers of models and at the limits."""
    arch = Arch.of("sm_90a")

    def problem(tokens: int, experts: int, hidden: int) -> RouterProblem:
        return RouterProblem(
            DType.BF16, DType.BF16, DType.F32, DType.F32, Method.SOFTMAX, tokens, experts, hidden, False
        )

    for experts, hidden in ((1, 8), (60, 2048), (128, 2880), (384, 7168), (512, 8192), (1024, 4096), (1024, 8192)):
        for tokens in (1, 16):
            for weight in (DType.BF16, DType.F32):
                EXPERTS_ROUTER.select(problem(tokens, experts, hidden)._replace(weight=weight), arch)
    for tokens, experts, hidden in ((17, 128, 2048), (1, 128, 8200)):
        assert "it is for up to" in str(ROUTER.rejects(problem(tokens, experts, hidden), RouterTactic(1, 512), arch))
    assert "do not fit" in str(ROUTER.rejects(problem(1, 128, 8192), RouterTactic(8, 256), arch))


# ---- simulated -------------------------------------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_no_race(arch: str, seed: int | None) -> None:
    """More tokens than a tile, and than warps; experts and columns that are not whole."""
    router = ROUTERS["uneven groups"]
    with sim.device(arch, races=True, seed=seed), EXPERTS_ROUTER.forced(RouterTactic(4, 128)):
        assert_tokens(router, *make(router, 11, 1048), "cpu")


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("seed", [None, 5])
def test_between_a_norm_and_a_layer_by_dependent_launch(seed: int | None) -> None:
    """Norm, router, layer, and the same again: nothing but weights is read before it is complete."""
    layer, x, (_, weight) = make_layer(8, 64, 64), make_x(3, 64), make(Router(8, 2, "softmax", True), 1, 64)
    scale, shift = torch.ones(64).bfloat16(), torch.zeros(8)
    constant = [*layer.tensors().values(), weight, scale, shift]
    chain = sim.Chain(constant=constant, after_unknown=True)
    with sim.device("sm_90a", races=True, chain=chain, seed=seed):
        for _ in range(2):
            normed = rmsnorm(x, scale, 1e-6)
            chosen = route_tokens(normed, weight, 2, method="softmax", renormalize=True, logit_bias=shift)
            x = fp4_experts(normed, layer, *chosen)
    assert x.isfinite().all()


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "qwen3-next", "deepseek-v3"])
def test_words_are_left_zero(name: str) -> None:
    """Call by call and in a graph; results are those of the first call."""
    router = ROUTERS[name]
    x, weight = (one.cuda() for one in make(router, 9, 2048))
    bias = make_bias(router)
    options = router.options(None if bias is None else bias.cuda())
    out = torch.empty(9, router.top_k, dtype=torch.int32, device="cuda"), torch.empty(9, router.top_k, device="cuda")

    def call() -> None:
        route_tokens(x, weight, router.top_k, out_ids=out[0], out_weights=out[1], **options)

    call()
    first = [one.clone() for one in out]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    for run in (call, graph.replay):
        for _ in range(50):
            for one in out:
                one.fill_(7)
            run()
            assert all(map(torch.equal, out, first))
            assert not counters.of(out[0]).any()


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    router = ROUTERS["qwen3-next"]
    x, weight = (one.cuda() for one in make(router, 8, 2048))
    want = route_tokens(x, weight, 10, **router.options(None))
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(100):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(route_tokens(x, weight, 10, **router.options(None)))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for each in found for one, other in zip(each, want, strict=True))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 60).bfloat16()}, "x: got k = 60; allowed: a positive multiple of 8"),
        ({"x": torch.zeros(3, 64)}, "x: got torch.float32"),
        ({"x": torch.zeros(1, 3, 64).bfloat16()}, r"x: got shape \(1, 3, 64\)"),
        ({"weight": torch.zeros(16, 64).half()}, "weight: got torch.float16"),
        ({"weight": torch.zeros(16, 72).bfloat16()}, r"weight: got shape \(16, 72\)"),
        ({"weight": torch.zeros(1025, 64).bfloat16()}, "1 to 1024 experts"),
        ({"weight": torch.zeros(64, 16).bfloat16().T}, "weight: got strides"),
        ({"logit_bias": torch.zeros(15)}, r"logit_bias: got shape \(15,\)"),
        ({"bias": torch.zeros(15)}, r"bias: got shape \(15,\)"),
        ({"logits": torch.zeros(3, 15)}, r"logits: got shape \(3, 15\)"),
        ({"logits": torch.zeros(3, 16).half()}, "logits: got torch.float16"),
        ({"top_k": 17}, "top_k: got 17; allowed: 1 to 8"),
        ({"method": "tanh"}, "method: got 'tanh'"),
        ({"shared": True, "groups": 5, "topk_groups": 1, "bias": None}, "shared: got True; allowed: False for sigmoid"),
        ({"out_ids": torch.zeros(3, 2)}, "out_ids: got torch.float32"),
        ({"out_weights": torch.zeros(3, 3)}, r"out_weights: got shape \(3, 3\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [3, 40])
def test_what_cannot_be(change: dict[str, Any], words: str, tokens: int) -> None:
    good = {
        "x": torch.zeros(tokens, 64).bfloat16(),
        "weight": torch.zeros(16, 64).bfloat16(),
        "top_k": 2,
        "method": "sigmoid",
        "renormalize": True,
        "bias": torch.zeros(16),
        "groups": 4,
        "topk_groups": 2,
        "logit_bias": torch.zeros(16),
    }
    route_tokens(**good)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=words):
        route_tokens(**(good | change))  # type: ignore[arg-type]


def test_memory_that_cannot_be() -> None:
    x, weight = torch.zeros(3, 64).bfloat16(), torch.zeros(32, 64).bfloat16()
    with pytest.raises(ArgumentError, match="logits: got strides"):
        route_tokens(x, weight, 2, method="softmax", renormalize=True, logits=torch.zeros(32, 3).T)
    memory = torch.zeros(3, 32)
    out = memory.view(torch.int32).view(-1)[:6].view(3, 2)
    with pytest.raises(ArgumentError, match="out_ids: got memory of logits"):
        route_tokens(x, weight, 2, method="softmax", renormalize=True, logits=memory, out_ids=out)
    wide = torch.zeros(3 * 64 + 1).bfloat16()
    with pytest.raises(ArgumentError, match="x: got an address 2 bytes past a multiple of 16"):
        route_tokens(wide[1:].view(3, 64), weight, 2, method="softmax", renormalize=True)
