"""The plugin's norms in vLLM's registry, on the CPU: called by vLLM's layer, in place, traced, and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from torch.fx.experimental.proxy_tensor import make_fx
from vllm import ir
from vllm.config import DeviceConfig, KernelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

import jitfp4.integrations.vllm as plugin
from jitfp4 import fused_add_rmsnorm, rmsnorm
from jitfp4.integrations.vllm.norms import PROVIDER, rms_norm

plugin.register()
OPERATORS = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)
H = 192
EPS = 1e-5


@pytest.fixture(autouse=True)
def ours_first() -> Iterator[None]:
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    priority = [PROVIDER, "native"]
    with set_current_vllm_config(config), OPERATORS[0].set_priority(priority), OPERATORS[1].set_priority(priority):
        yield


def layer_of(dtype: torch.dtype = torch.bfloat16, **arguments: object) -> RMSNorm:
    layer = RMSNorm(H, EPS, dtype=dtype, **arguments)
    layer.weight.data.copy_(torch.randn(H))
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrap", [True, False], ids=["operator", "direct"])
def test_a_layer_gives_the_bytes_of_jitfp4(dtype: torch.dtype, wrap: bool) -> None:
    layer = layer_of(dtype)
    wide = torch.randn(5, 2 * H).to(dtype)
    x, residual = wide[:, :H], torch.randn(5, H).to(dtype)
    with ir.enable_torch_wrap(wrap):
        assert torch.equal(layer(x), rmsnorm(x, layer.weight.data, EPS))
        x = x.contiguous()
        expected, total = x.clone(), residual.clone()
        fused_add_rmsnorm(expected, total, layer.weight.data, EPS)
        out, left = layer(x, residual)
    assert torch.equal(out, expected) and torch.equal(left, total)
    exact = total.double() * (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * layer.weight.double()
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_the_norm_of_a_sum_is_in_place() -> None:
    layer, x, residual = layer_of(), torch.randn(3, H).bfloat16(), torch.randn(3, H).bfloat16()
    before = x.clone()
    with ir.enable_torch_wrap(False):
        out, left = layer(x, residual)
    assert out.data_ptr() == x.data_ptr() and left.data_ptr() == residual.data_ptr()
    assert not torch.equal(x, before)


def test_without_in_place_the_operands_stay() -> None:
    layer, x, residual = layer_of(), torch.randn(3, H).bfloat16(), torch.randn(3, H).bfloat16()
    kept = x.clone(), residual.clone()
    ir.ops.fused_add_rms_norm(x, residual, layer.weight.data, EPS)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


def test_rows_that_the_kernel_does_not_take_go_to_the_next() -> None:
    bf16, weight = torch.bfloat16, torch.ones(H, dtype=torch.bfloat16)
    x = torch.randn(4, H).to(bf16)
    by_heads = torch.randn(4, 5 * H).to(bf16)[:, : 2 * H].view(4, 2, H)
    refused = {
        "float32": (x.float(), weight.float(), EPS),
        "weights of another dtype": (x, weight.float(), EPS),
        "no weight": (x, None, EPS),
        "a part of the variance": (x, weight, EPS, 64),
        "a part of a row": (torch.randn(4, H + 8).to(bf16), torch.ones(H + 8, dtype=bf16), EPS),
        "rows off 16 bytes": (torch.randn(4, H + 4).to(bf16)[:, 4:], weight, EPS),
        "rows apart by heads": (by_heads, weight, EPS),
    }
    operator = ir.ops.rms_norm
    for name, arguments in refused.items():
        assert operator.dispatch(*arguments).provider == "native", name
        operator(*arguments)
    assert operator.dispatch(x, weight, EPS).provider == operator.dispatch(x[None], weight, EPS).provider == PROVIDER
    summed = ir.ops.fused_add_rms_norm
    assert summed.dispatch(x, x.clone(), weight, EPS).provider == PROVIDER
    assert summed.dispatch(x, torch.randn(4, 2 * H).to(bf16)[:, :H], weight, EPS).provider == "native"


def test_it_is_traced_as_one_operator_with_a_number_of_rows_that_is_a_symbol() -> None:
    x, weight = torch.randn(6, H).bfloat16(), torch.randn(H).bfloat16()
    graph = make_fx(lambda x, w: rms_norm(x, w, EPS), tracing_mode="symbolic")(x, weight)
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("jitfp4" in call for call in calls) == 1
    rows = torch.randn(11, H).bfloat16()
    assert torch.equal(graph(rows, weight), rmsnorm(rows, weight, EPS))


def test_registering_again_changes_nothing() -> None:
    before = [operator.impls[PROVIDER] for operator in OPERATORS]
    plugin.register()
    assert before == [operator.impls[PROVIDER] for operator in OPERATORS]


def test_the_option_that_the_guide_names_puts_it_first() -> None:
    guide = (Path(__file__).parents[2] / "docs/engines.md").read_text()
    (given,) = set(re.findall(r"--ir-op-priority '(.*?)'", guide + str(plugin.__doc__)))
    kernels = KernelConfig(ir_op_priority=json.loads(given))
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), kernel_config=kernels)
    chosen = config.kernel_config.ir_op_priority
    assert chosen.rms_norm == chosen.fused_add_rms_norm == [PROVIDER, "native"]
