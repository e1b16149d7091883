"""fp4_experts against the modules of transformers: their routers, their experts in float64, the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from jitfp4 import fp4_experts
from jitfp4.formats import MXFP4, NVFP4
from tests.support.experts import make_raw, make_x, prepared

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3  # noqa: E402

EXPERTS, SLOTS, HIDDEN, INTER = 16, 4, 96, 160
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": SLOTS}


def filled(kind: Callable[[Any], Any], config: Any, **parts: torch.Tensor) -> Any:
    """A module in float64 with these weights; others are random."""
    config._experts_implementation = "eager"
    module = kind(config).double()
    generator = torch.Generator().manual_seed(5)
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        with torch.no_grad():
            value.copy_(parts[name] if name in parts else torch.randn(value.shape, generator=generator) / HIDDEN**0.5)
    assert parts.keys() <= {name for name, _ in module.named_parameters()}
    return module


def gpt_oss_modules(raw: Any) -> tuple[Any, Any]:
    config = transformers.GptOssConfig(**SIZES, num_local_experts=EXPERTS, intermediate_size=INTER)
    w13, w2 = raw.values()
    experts = filled(
        gpt_oss.GptOssExperts,
        config,
        gate_up_proj=w13.mT,
        down_proj=w2.mT,
        gate_up_proj_bias=raw.w13_bias,
        down_proj_bias=raw.w2_bias,
    )
    return filled(gpt_oss.GptOssTopKRouter, config), experts


def qwen3_modules(raw: Any) -> tuple[Any, Any]:
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=INTER, norm_topk_prob=True)
    w13, w2 = raw.values()
    experts = filled(qwen3.Qwen3MoeExperts, config, gate_up_proj=w13, down_proj=w2)
    return filled(qwen3.Qwen3MoeTopKRouter, config), experts


def deepseek_modules(raw: Any) -> tuple[Any, Any]:
    config = transformers.DeepseekV3Config(
        **SIZES, n_routed_experts=EXPERTS, n_group=4, topk_group=2, moe_intermediate_size=INTER
    )
    w13, w2 = raw.values()
    experts = filled(deepseek.DeepseekV3Experts, config, gate_up_proj=w13, down_proj=w2)
    return filled(deepseek.DeepseekV3TopkRouter, config), experts


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("tokens", [1, 7, 60])
@pytest.mark.parametrize(
    ("modules", "order", "activation", "block_format"),
    [
        (gpt_oss_modules, "interleaved", "swigluoai", MXFP4),
        (qwen3_modules, "concatenated gate,up", "swiglu", NVFP4),
        (deepseek_modules, "concatenated gate,up", "swiglu", NVFP4),
    ],
    ids=["gpt-oss", "qwen3-moe", "deepseek-v3"],
)
def test_a_layer_is_that_of_the_model(
    device: str, tokens: int, modules: Any, order: str, activation: str, block_format: Any
) -> None:
    """Only h, y and the output are rounded to bf16, so an element is off by little more than its 2^-8."""
    raw = make_raw(EXPERTS, HIDDEN, INTER, block_format, biases=modules is gpt_oss_modules)
    router, experts = modules(raw)
    x = make_x(tokens, HIDDEN)
    with torch.no_grad():
        _, weights, ids = router(x.double())
        want = experts(x.double(), ids, weights)
    layer = prepared(raw, order, device)
    given = (value.to(device) for value in (ids, weights.float()))
    out = fp4_experts(x.to(device), layer, *given, activation=activation).cpu()
    assert want.std() > 0.05
    assert (out.double() - want).norm() < 2.0**-8 * want.norm()
