"""The plugin's norms in vLLM's registry of layers, on the CPU: who gets them, in place, traced, and what they leave."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("vllm")

from torch.fx.experimental.proxy_tensor import make_fx
from vllm import envs
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

import jitfp4.integrations.vllm as plugin
from jitfp4 import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from jitfp4.families.norm.kernels.rmsnorm import Problem
from jitfp4.families.norm.plain import RMSNORM
from jitfp4.formats import DType
from jitfp4.integrations.vllm import norms
from jitfp4.integrations.vllm.norms import Fp4ModelGemmaRMSNorm, Fp4ModelRMSNorm, register_norms
from jitfp4.integrations.vllm.quantization import Jitfp4ModelOptConfig

plugin.register()
H = 192
HEADS = 4
EPS = 1e-5
FP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []}


@pytest.fixture(autouse=True)
def config() -> Iterator[VllmConfig]:
    """Of a model whose FP4 layers jitfp4 runs."""
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.quant_config = Jitfp4ModelOptConfig.from_config(FP4)
    config.model_config = SimpleNamespace(get_num_attention_heads=lambda _: HEADS)
    with set_current_vllm_config(config):
        yield config


def layer_of(dtype: torch.dtype = torch.bfloat16, h: int = H, **arguments: object) -> RMSNorm:
    layer = RMSNorm(h, EPS, dtype=dtype, **arguments)
    layer.weight.data.copy_(torch.randn(h))
    return layer


def is_ours(layer: RMSNorm, *rows: torch.Tensor) -> bool:
    """Whether a call reaches jitfp4's kernels."""
    with patch.object(RMSNorm, "forward_cuda", return_value=None) as own:
        layer.forward_cuda(*rows)
    return not own.called


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_gives_the_bytes_of_jitfp4(dtype: torch.dtype) -> None:
    layer = layer_of(dtype)
    assert type(layer) is Fp4ModelRMSNorm and layer.name == "rms_norm"
    wide = torch.randn(5, 2 * H).to(dtype)
    x, residual = wide[:, :H], torch.randn(5, H).to(dtype)
    assert is_ours(layer, x)
    assert torch.equal(layer.forward_cuda(x), rmsnorm(x, layer.weight.data, EPS))
    x = x.contiguous()
    expected, total = x.clone(), residual.clone()
    fused_add_rmsnorm(expected, total, layer.weight.data, EPS)
    out, left = layer.forward_cuda(x, residual)
    assert torch.equal(out, expected) and torch.equal(left, total)
    exact = total.double() * (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * layer.weight.double()
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_gemma_s_layer_adds_one_to_its_weight() -> None:
    layer = GemmaRMSNorm(H, EPS).bfloat16()
    assert not layer.by_jitfp4  # made in float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    layer = GemmaRMSNorm(H, EPS)
    torch.set_default_dtype(before)
    assert type(layer) is Fp4ModelGemmaRMSNorm and layer.by_jitfp4
    layer.weight.data.copy_(torch.randn(H))
    x, residual = torch.randn(2, 5, H).bfloat16()
    expected, total = x.clone(), residual.clone()
    gemma_fused_add_rmsnorm(expected, total, layer.weight.data, EPS)
    native = layer.forward_native(x, residual)
    with patch.object(GemmaRMSNorm, "forward_cuda") as own:
        alone = layer.forward_cuda(x)
        out, left = layer.forward_cuda(x, residual)
        assert not own.called
        layer.forward_cuda(x.float())
        assert own.called
    assert torch.equal(out, expected) and torch.equal(left, total) and torch.equal(left, native[1])
    assert ((out.double() - native[0].double()).abs() <= native[0].double().abs() * 2**-6 + 1e-3).all()
    assert out.data_ptr() == x.data_ptr() and not torch.equal(alone, out)


def test_gemma_s_layer_alone() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    layer = GemmaRMSNorm(H, EPS)
    torch.set_default_dtype(before)
    layer.weight.data.copy_(torch.randn(H))
    x = torch.randn(5, H).bfloat16()
    assert torch.equal(layer.forward_cuda(x), gemma_rmsnorm(x, layer.weight.data, EPS))


def test_a_layer_loads_the_kernels_of_all_rows_that_a_step_can_have(config: VllmConfig) -> None:
    with patch.object(norms, "load_growing") as load:
        layer = layer_of()
    rows = HEADS * config.scheduler_config.max_num_batched_tokens
    expected = [(RMSNORM, Problem(DType.BF16, add, False, 1, H), "m", rows) for add in (False, True)]
    assert [call.args[:-1] for call in load.call_args_list] == expected
    assert all(call.args[-1] is layer.weight for call in load.call_args_list)


def test_the_norm_of_a_sum_is_in_place() -> None:
    layer, x, residual = layer_of(), torch.randn(3, H).bfloat16(), torch.randn(3, H).bfloat16()
    before = x.clone()
    out, left = layer.forward_cuda(x, residual)
    assert out.data_ptr() == x.data_ptr() and left.data_ptr() == residual.data_ptr()
    assert not torch.equal(x, before)


def test_other_models_keep_the_norm_of_vllm(config: VllmConfig) -> None:
    x = torch.randn(3, H).bfloat16()
    config.quant_config = None
    assert not is_ours(layer_of(), x)


def test_results_that_do_not_depend_on_the_batch_are_those_of_vllm() -> None:
    with patch.object(envs, "VLLM_BATCH_INVARIANT", True, create=True):
        layer = layer_of()
    assert not is_ours(layer, torch.randn(3, H).bfloat16())


def test_rows_that_the_kernel_does_not_take_are_left_to_vllm() -> None:
    layer, x = layer_of(), torch.randn(4, H).bfloat16()
    refused = {
        "float32": (layer_of(torch.float32), x.float()),
        "weights of another dtype": (layer_of(torch.float32), x),
        "no weight": (layer_of(has_weight=False), x),
        "a part of the variance": (layer_of(var_hidden_size=64), x),
        "a part of a row": (layer_of(h=H + 8), torch.randn(4, H + 8).bfloat16()),
        "rows off 16 bytes": (layer, torch.randn(4, H + 4).bfloat16()[:, 4:]),
        "rows apart by heads": (layer, torch.randn(4, 5 * H).bfloat16()[:, : 2 * H].view(4, 2, H)),
        "residuals that are apart": (layer, x, torch.randn(4, 2 * H).bfloat16()[:, :H]),
        "residuals of another dtype": (layer, x, x.half()),
    }
    for name, (of, *rows) in refused.items():
        assert not is_ours(of, *rows), name
    assert is_ours(layer, x) and is_ours(layer, x[None]) and is_ours(layer, x, x.clone())


def test_it_is_traced_as_one_operator_with_a_number_of_rows_that_is_a_symbol() -> None:
    layer = layer_of()
    trace = make_fx(lambda x: layer.forward_cuda(x), tracing_mode="symbolic", _allow_non_fake_inputs=True)
    graph = trace(torch.randn(6, H).bfloat16())
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("jitfp4" in call for call in calls) == 1
    rows = torch.randn(11, H).bfloat16()
    assert torch.equal(graph(rows), rmsnorm(rows, layer.weight.data, EPS))


def test_registering_again_changes_nothing_and_leaves_another_plugin_s(caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    assert op_registry_oot["RMSNorm"] is Fp4ModelRMSNorm
    assert op_registry_oot["GemmaRMSNorm"] is Fp4ModelGemmaRMSNorm
    with patch.dict(op_registry_oot, {"RMSNorm": RMSNorm}):
        register_norms()
        assert op_registry_oot["RMSNorm"] is RMSNorm
    assert "RMSNorm is RMSNorm already" in caplog.text
