"""route_experts: against float64 on CPU, simulator and GPU, against routers of transformers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, fp4_experts, fused_topk_deepseek, route_experts, sim
from jitfp4.families.experts.kernels.topk import TopkTactic
from jitfp4.families.experts.topk_operation import EXPERTS_TOPK
from tests.support.experts import make_layer, make_x
from tests.support.routing import ROUTERS, assert_routing, make_logits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_routers_of_models(device: str, name: str, dtype: torch.dtype) -> None:
    router = ROUTERS[name]
    logits, bias = make_logits(router, 7, dtype)
    given = None if bias is None else bias.to(device)
    ids, weights = route_experts(logits.to(device), router.top_k, **router.options(given))
    assert weights.dtype is F32
    assert_routing(router, logits, bias, ids, weights)


@pytest.mark.parametrize("tactic", [TopkTactic(1), TopkTactic(4), TopkTactic(8)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_any_number_of_tokens(device: str, tokens: int, tactic: TopkTactic) -> None:
    router = ROUTERS["deepseek-v3"]
    logits, bias = make_logits(router, tokens)
    assert bias is not None
    out = torch.full((tokens, 8), -7, dtype=torch.int32, device=device), torch.full((tokens, 8), 7.0, device=device)
    with EXPERTS_TOPK.forced(tactic):
        ids, weights = route_experts(
            logits.to(device), 8, **router.options(bias.to(device)), out_ids=out[0], out_weights=out[1]
        )
    assert ids is out[0]
    assert weights is out[1]
    assert_routing(router, logits, bias, ids, weights)


def test_no_tokens(device: str) -> None:
    ids, weights = route_experts(torch.empty(0, 128, device=device), 4, method="softmax", renormalize=True)
    assert ids.shape == weights.shape == (0, 4)


def test_rows_apart(device: str) -> None:
    router = ROUTERS["qwen2"]
    logits, _ = make_logits(router, 6)
    wide = torch.full((6, 100), 50.0)
    wide[:, 20:80] = logits
    ids, weights = route_experts(wide.to(device)[:, 20:80], 4, method="softmax", renormalize=False)
    assert_routing(router, logits, None, ids, weights)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("name", ["qwen3-next", "qwen2", "all"])
def test_an_expert_that_all_tokens_have(device: str, name: str, dtype: torch.dtype) -> None:
    """Its slot is the last, its number that of the last column, its weight the sigmoid of that."""
    router = ROUTERS[name]
    logits, _ = make_logits(router, 7, dtype)
    gate = torch.tensor([-40.0, -5.0, -1.5, 0.0, 2.0, 9.0, torch.inf]).to(dtype)
    both = torch.cat((logits, gate.unsqueeze(1)), 1).to(device)
    options = {"method": "softmax", "renormalize": router.renormalize}
    ids, weights = route_experts(both, router.top_k, shared=True, **options)  # type: ignore[arg-type]
    assert ids.shape == weights.shape == (7, router.top_k + 1)
    assert (ids[:, -1] == router.experts).all()
    torch.testing.assert_close(weights[:, -1].cpu(), gate.float().sigmoid(), rtol=2.0**-20, atol=0)
    assert_routing(router, logits, None, ids[:, :-1], weights[:, :-1].contiguous())


@pytest.mark.parametrize("bias_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_dtypes_of_bias_and_weights(device: str, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    router = ROUTERS["deepseek-v3"]
    logits, bias = make_logits(router, 5, dtype)
    assert bias is not None
    bias, weights = bias.to(bias_dtype), torch.empty(5, 8, dtype=dtype, device=device)
    ids, _ = route_experts(logits.to(device), 8, **router.options(bias.to(device)), out_weights=weights)
    assert_routing(router, logits, bias, ids, weights)


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_of_equal_ones_the_lower_number_is_taken(device: str) -> None:
    logits = torch.zeros(3, 96)
    logits[1, :50] = -0.0  # which is 0, no less
    logits[2, [90, 33, 34]] = 1.0
    ids, weights = route_experts(logits.to(device), 4, method="softmax", renormalize=True)
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [33, 34, 90, 0]]
    assert weights[:2].eq(0.25).all()
    ids, _ = route_experts(
        logits.to(device),
        4,
        method="sigmoid",
        renormalize=True,
        groups=8,
        topk_groups=2,
        bias=torch.ones(96).to(device),
    )
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [33, 34, 90, 24]]


def test_nan_is_above_all_numbers_and_shows(device: str) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    logits[1, [7, 35]] = torch.tensor([torch.nan, -torch.nan])
    for options in ({"method": "softmax"}, {"method": "sigmoid"}, {"method": "sigmoid", "groups": 5, "topk_groups": 2}):
        for renormalize in (True, False):
            ids, weights = route_experts(logits.to(device), 3, renormalize=renormalize, **options)  # type: ignore[arg-type]
            assert ids[1, :2].tolist() == [7, 35]
            assert weights[0].isfinite().all()
            assert weights[1, :2].isnan().all()
            assert weights[1, 2].isnan() == (renormalize or options["method"] == "softmax")


def test_infinite_logits(device: str) -> None:
    """-inf masks an expert: it is taken last, within the groups that count."""
    logits = torch.full((1, 40), -torch.inf)
    logits[0, [38, 5]] = torch.tensor([1.0, 1.0])
    ids, weights = route_experts(logits.to(device), 3, method="softmax", renormalize=False)
    assert ids.tolist() == [[5, 38, 0]]
    assert weights.tolist() == [[0.5, 0.5, 0.0]]
    bias = torch.full((40,), -torch.inf)
    bias[[20, 21, 39]] = 0
    ids, weights = route_experts(
        logits.to(device), 3, method="sigmoid", renormalize=True, groups=4, topk_groups=1, bias=bias.to(device)
    )
    assert ids.tolist() == [[20, 21, 22]]
    assert not weights.any()  # 0 / 1e-20


def test_large_logits(device: str) -> None:
    logits = torch.tensor([[3e38, -3e38, 1e38, 0.0], [-200.0, -300.0, 500.0, 100.0]]).to(device)
    _, weights = route_experts(logits, 4, method="softmax", renormalize=False)
    assert weights.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    ids, weights = route_experts(logits, 4, method="sigmoid", renormalize=False)
    assert ids.tolist() == [[0, 2, 3, 1], [2, 3, 0, 1]]  # both 1: the lower first
    assert weights[:, :2].eq(1).all()
    assert weights[:, 3].abs().max() < 2.0**-126


def test_flashinfers_name_is_the_same(device: str) -> None:
    router = ROUTERS["deepseek-v3"]
    logits, bias = make_logits(router, 9)
    assert bias is not None
    values, indices = torch.empty(9, 8, device=device), torch.empty(9, 8, dtype=torch.int32, device=device)
    fused_topk_deepseek(logits.to(device), bias.to(device), 8, 4, 8, 2.5, values, indices, launch_with_pdl=True)
    ids, weights = route_experts(logits.to(device), 8, **router.options(bias.to(device)))
    assert torch.equal(ids, indices)
    assert torch.equal(weights, values)


def test_a_second_call_gives_equal_bits(device: str) -> None:
    router = ROUTERS["deepseek-v3"]
    logits, bias = make_logits(router, 50)
    assert bias is not None
    given = logits.to(device), bias.to(device)
    first, second = (route_experts(given[0], 8, **router.options(given[1])) for _ in range(2))
    assert all(map(torch.equal, first, second))


# ---- against transformers --------------------------------------------------------------------------------------------


def transformers_routers() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

    size = {"hidden_size": 32, "num_experts_per_tok": 8}
    return {
        "qwen3": qwen3.Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**size, num_experts=128, norm_topk_prob=True)),
        "qwen3 as it is": qwen3.Qwen3MoeTopKRouter(
            transformers.Qwen3MoeConfig(**size, num_experts=128, norm_topk_prob=False)
        ),
        "gpt-oss": gpt_oss.GptOssTopKRouter(transformers.GptOssConfig(**size, num_local_experts=128)),
        "deepseek-v3": deepseek.DeepseekV3TopkRouter(
            transformers.DeepseekV3Config(**size, n_routed_experts=256, n_group=8, topk_group=4)
        ),
    }


@pytest.mark.parametrize("name", ["qwen3", "qwen3 as it is", "gpt-oss", "deepseek-v3"])
def test_the_choice_is_that_of_the_model(device: str, name: str) -> None:
    router, generator = transformers_routers()[name], torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
        logits, want_weights, want = router(torch.randn(20, 32, generator=generator))
    options: dict[str, Any] = {"method": "softmax", "renormalize": name != "qwen3 as it is"}
    if name == "deepseek-v3":
        bias = router.e_score_correction_bias.to(device)
        scale = router.routed_scaling_factor
        options |= {"method": "sigmoid", "bias": bias, "groups": 8, "topk_groups": 4, "scale": scale}
    ids, weights = route_experts(logits.to(device), 8, **options)
    order = want_weights.gather(1, want.argsort(-1)), weights.cpu().gather(1, ids.cpu().argsort(-1).long())
    assert torch.equal(ids.cpu().sort(-1).values.long(), want.sort(-1).values)
    torch.testing.assert_close(order[1], order[0], rtol=2.0**-19, atol=0)


# ---- simulated -------------------------------------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("name", ["qwen2", "deepseek-v3", "pairs", "kimi-k3"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_no_race(name: str, arch: str) -> None:
    router = ROUTERS[name]
    logits, bias = make_logits(router, 6, BF16)
    with sim.device(arch, races=True):
        ids, weights = route_experts(logits, router.top_k, **router.options(bias))
    assert_routing(router, logits, bias, ids, weights)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("tokens", [4, 20])
@pytest.mark.parametrize("seed", [None, 5])
def test_before_a_layer_by_dependent_launch(tokens: int, seed: int | None) -> None:
    """Logits, choice, layer, and the same again: nothing is read before it is complete."""
    layer, x = make_layer(8, 64, 64), make_x(tokens, 64)
    logits = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(1))
    chain = sim.Chain(constant=list(layer.tensors().values()), after_unknown=True)
    with sim.device("sm_90a", races=True, chain=chain, seed=seed):
        for _ in range(2):
            ids, weights = route_experts(logits, 2, method="softmax", renormalize=True)
            out = fp4_experts(x, layer, ids, weights)
    with sim.device("sm_90a"):
        assert torch.equal(out, fp4_experts(x, layer, ids, weights))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 0}, "top_k: got 0; allowed: 1 to 16"),
        ({"top_k": 17}, "top_k: got 17; allowed: 1 to 16"),
        ({"groups": 5}, "groups: got 5"),
        ({"groups": 64}, "groups: got 64; allowed: 1, or up to 32 groups"),
        ({"groups": 32, "topk_groups": 33}, "topk_groups: got 33; allowed: 1 to 32"),
        ({"method": "softmax"}, "bias: got a tensor; allowed: None for softmax"),
        ({"method": "softmax", "bias": None}, "groups: got 4; allowed: 1 for softmax"),
        ({"method": "tanh"}, "method: got 'tanh'; allowed: 'softmax' or 'sigmoid'"),
        ({"logits": torch.zeros(2, 1025)}, "1 to 1024 experts"),
        ({"logits": torch.zeros(64, 3).T}, "rows that do not overlap, of adjacent elements"),
        ({"bias": torch.zeros(63)}, r"bias: got shape \(63,\)"),
        ({"shared": True, "groups": 1}, "shared: got True; allowed: False for sigmoid"),
        (
            {"shared": True, "top_k": 32, "method": "softmax", "bias": None, "groups": 1},
            "top_k: got 32; allowed: 1 to 31",
        ),
    ],
    ids=str,
)
def test_what_cannot_be(change: dict[str, Any], words: str) -> None:
    good = {
        "logits": torch.zeros(3, 64),
        "top_k": 2,
        "method": "sigmoid",
        "renormalize": True,
        "bias": torch.zeros(64),
        "groups": 4,
        "topk_groups": 1,
    }
    route_experts(**good)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=words):
        route_experts(**(good | change))  # type: ignore[arg-type]


def test_flashinfers_call_names_its_own_arguments() -> None:
    values, indices = torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int32)
    good = (torch.zeros(3, 8), torch.zeros(8), 4, 2, 2, 1.0, values, indices)
    fused_topk_deepseek(*good)
    with pytest.raises(ArgumentError, match="n_group: got 3"):
        fused_topk_deepseek(*good[:2], 3, *good[3:])
    with pytest.raises(ArgumentTypeError, match="topk_indices"):
        fused_topk_deepseek(*good[:7], indices.long())
    with pytest.raises(ArgumentError, match="routing_replay_out: got a tensor"):
        fused_topk_deepseek(*good, True, torch.zeros(3, 2, dtype=torch.int16))
    with pytest.raises(ArgumentError, match="backend: got 'tensor'"):
        fused_topk_deepseek(*good, backend="tensor")
