"""SwiGLU in the product of gates and ups, in vLLM's own MLPs, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from torch.nn.functional import silu
from vllm.config import DeviceConfig, LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLP
from vllm.model_executor.models.gemma import GemmaMLP
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.qwen2 import Qwen2MLP
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

import jitfp4.integrations.vllm as plugin
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.formats import NVFP4
from jitfp4.operation import Operation
from tests.support.vllm_layers import CASES, Part, block_format_of, config_of, in_bfloat16, one_rank

plugin.register()

__all__ = ["in_bfloat16", "one_rank"]  # fixtures of all tests here
pytestmark = pytest.mark.usefixtures("one_rank", "in_bfloat16")
INTER, K = 96, 128


@pytest.fixture(autouse=True)
def natively() -> Iterator[None]:
    """vLLM's operators in torch, since its extension is not here."""
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.compilation_config.custom_ops = ["none"]
    with set_current_vllm_config(config):
        yield


def filled(mlp: Any, case: str, scales: tuple[float, float] = (0.02, 0.02)) -> list[torch.Tensor]:
    """Load random matrices into an MLP; returns them as float64: gates, ups, and the last."""
    shapes = ((INTER, K, scales[0]), (INTER, K, scales[1]), (K, INTER, 0.01))
    parts = [Part(n, k, block_format_of(case), scale, seed) for seed, (n, k, scale) in enumerate(shapes)]
    for i in range(2):
        parts[i].load(mlp.gate_up_proj, case, i)
    parts[2].load(mlp.down_proj, case)
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        layer.quant_method.process_weights_after_loading(layer)
    return [part.weight for part in parts]


def made(cls: Any, case: str = "nvfp4-w4a16", act: str = "silu", **options: Any) -> Any:
    """An MLP of vLLM with FP4 layers."""
    return cls(K, INTER, act, quant_config=config_of(CASES[case][0]), prefix="model.layers.0.mlp", **options)


def compared(mlp: Any, weights: list[torch.Tensor]) -> None:
    x = torch.randn(5, K) / 8
    gate, up = (x.double() @ weight.T for weight in weights[:2])
    want = (silu(gate) * up) @ weights[2].T
    assert torch.linalg.norm(mlp(x).double() - want) < 0.01 * torch.linalg.norm(want)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cls", [LlamaMLP, Qwen2MLP, DeepseekV2MLP])
def test_an_mlp_is_two_products(cls: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = made(cls, case)
    assert type(mlp.act_fn) is torch.nn.Identity and type(mlp.gate_up_proj.activation) is SiluAndMul
    weights = filled(mlp, case)
    assert mlp.gate_up_proj.fp4_parts[0].weight.gated
    assert mlp.gate_up_proj(torch.randn(5, K))[0].shape == (5, INTER)
    compared(mlp, weights)
    calls, call = [], Operation.__call__

    def counted(self: Operation[Any, Any], arguments: Any) -> Any:
        calls.append(self)
        return call(self, arguments)

    monkeypatch.setattr(Operation, "__call__", counted)
    mlp(torch.randn(2, K))
    assert calls == [MM_BF16_FP4] * 2


@pytest.mark.parametrize("options", [{"scales": (0.02, 0.03)}, {"bias": True}], ids=["two scales", "a bias"])
def test_without_one_product_the_layer_calls_the_activation(options: dict[str, Any]) -> None:
    mlp = made(LlamaMLP, bias=options.pop("bias", False))
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        if layer.bias is not None:
            layer.bias.data.zero_()
    weights = filled(mlp, "nvfp4-w4a16", **options)
    assert not mlp.gate_up_proj.fp4_parts[0].weight.gated
    compared(mlp, weights)


def test_it_is_traced_as_one_graph() -> None:
    mlp = made(LlamaMLP)
    filled(mlp, "nvfp4-w4a16")
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9):
        x = torch.randn(rows, K)
        assert torch.equal(compiled(x), mlp(x))


def test_a_shared_expert_has_a_gate_behind() -> None:
    gate = ReplicatedLinear(K, 1, bias=False)
    mlp = Qwen2MoeMLP(
        K, INTER, "silu", config_of(CASES["mxfp4"][0]), expert_gate=gate, prefix="model.layers.0.mlp.shared_expert"
    )
    assert type(mlp.act_fn) is torch.nn.Identity
    weights = filled(mlp, "mxfp4")
    gate.weight.data.normal_()
    x = torch.randn(5, K) / 8
    gates, ups = (x.double() @ weight.T for weight in weights[:2])
    want = (silu(gates) * ups) @ weights[2].T * (x.double() @ gate.weight.double().T).sigmoid()
    assert torch.linalg.norm(mlp(x).double() - want) < 0.01 * torch.linalg.norm(want)


class Kept(LlamaMLP):
    """Uses gates and ups twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act_fn(both) + both.chunk(2, -1)[0])
        return out


class Gated(Kept):
    """Has a gate of what is not its input."""

    expert_gate = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))
        return self.expert_gate(out)[0].sigmoid() * out


def test_other_mlps_keep_their_activation() -> None:
    assert type(made(GemmaMLP, act="gelu").act_fn) is GeluAndMul
    assert type(made(Kept).act_fn) is type(made(Gated).act_fn) is SiluAndMul
    assert type(LlamaMLP(K, INTER, "silu", prefix="model.layers.0.mlp").act_fn) is SiluAndMul  # in bf16
    lora = VllmConfig(device_config=DeviceConfig(device="cpu"))
    lora.lora_config = LoRAConfig(max_lora_rank=8)
    with set_current_vllm_config(lora):
        assert type(made(LlamaMLP).act_fn) is SiluAndMul


def test_a_half_that_is_padded_is_not_one_product() -> None:
    config = config_of(CASES["nvfp4-w4a16"][0])
    layer = MergedColumnParallelLinear(K, [20, 20], bias=False, quant_config=config, prefix="mlp.gate_up_proj")
    layer.activation = SiluAndMul()
    parts = [Part(20, K, NVFP4, 0.02, seed) for seed in range(2)]
    for i, part in enumerate(parts):
        part.load(layer, "nvfp4-w4a16", i)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(5, K)
    gate, up = (x.double() @ part.weight.T for part in parts)
    out, want = layer(x)[0], silu(gate) * up
    assert out.shape == (5, 20) and torch.linalg.norm(out.double() - want) < 0.01 * torch.linalg.norm(want)
