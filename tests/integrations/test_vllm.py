"""The plugin for vLLM against vLLM's own classes, on the CPU. vLLM's Python imports without its extensions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import platforms
from vllm.model_executor.layers import linear, quantization
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import jitfp4.integrations.vllm as plugin
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.integrations.vllm.linear import Fp4LinearMethod
from tests.support.vllm_layers import (
    CASES,
    Part,
    block_format_of,
    check,
    config_of,
    in_bfloat16,
    modelopt,
    one_rank,
    packed,
)

plugin.register()

__all__ = ["in_bfloat16", "one_rank"]  # fixtures of all tests here
pytestmark = pytest.mark.usefixtures("one_rank", "in_bfloat16")

K = 128
QKV = (("q", 256), ("k", 128), ("v", 128))


# ---- registration ----------------------------------------------------------------------------------------------------


def test_registering_again_changes_nothing() -> None:
    before = list(quantization.QUANTIZATION_METHODS), AttentionBackendEnum.CUSTOM.get_path()
    plugin.register()
    assert before == (quantization.QUANTIZATION_METHODS, AttentionBackendEnum.CUSTOM.get_path())
    assert sorted(name for name in before[0] if name.startswith("jitfp4")) == [
        "jitfp4-compressed-tensors",
        "jitfp4-gpt-oss",
        "jitfp4-modelopt",
    ]
    assert AttentionBackendEnum.CUSTOM.get_class().__module__ == "jitfp4.integrations.vllm.attention"


def test_a_backend_of_another_plugin_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.attention.backends import registry

    monkeypatch.setitem(registry._ATTN_OVERRIDES, AttentionBackendEnum.CUSTOM, "another.Backend")
    with caplog.at_level("WARNING", "jitfp4.integrations.vllm"):
        plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "another.Backend"
    assert "CUSTOM is another.Backend already" in caplog.text


def claims(document: dict[str, Any], user: str | None = None) -> set[str]:
    configs = (quantization.get_quantization_config(name) for name in ("jitfp4-compressed-tensors", "jitfp4-modelopt"))
    return {name for cls in configs if (name := cls.override_quantization_method(document, user)) is not None}


def test_fp4_checkpoints_are_claimed_and_others_are_not() -> None:
    for document in (packed(NVFP4), packed(NVFP4, by_4_bits=True), packed(MXFP4)):
        assert claims(document) == {"jitfp4-compressed-tensors"}
    for algorithm in ("NVFP4", "W4A16_NVFP4"):
        assert claims(modelopt(algorithm)) == {"jitfp4-modelopt"}
    for changes in ({"type": "int"}, {"num_bits": 8}, {"group_size": 64}, {"symmetric": False}):
        assert claims(packed(NVFP4, **changes)) == set()
    assert claims(modelopt("FP8")) == claims({"quant_method": "fp8"}) == set()


def test_the_user_can_keep_the_kernels_of_vllm() -> None:
    assert claims(packed(NVFP4), "compressed-tensors") == claims(modelopt(), "modelopt_fp4") == set()
    assert claims(packed(NVFP4), "jitfp4-compressed-tensors") == {"jitfp4-compressed-tensors"}


def test_blackwell_keeps_its_own_products_of_fp4_by_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(major: int) -> None:
        fake = type("Fake", (), {"get_device_capability": staticmethod(lambda: DeviceCapability(major, 0))})
        monkeypatch.setattr(platforms, "_current_platform", fake)

    on(9)
    assert claims(packed(NVFP4, by_4_bits=True)) and claims(modelopt())
    on(10)
    assert claims(packed(NVFP4, by_4_bits=True)) == claims(modelopt()) == set()
    assert claims(packed(NVFP4)) and claims(modelopt("W4A16_NVFP4"))


# ---- linear layers ---------------------------------------------------------------------------------------------------


def qkv(case: str, **arguments: Any) -> Any:
    config = config_of(CASES[case][0])
    return linear.QKVParallelLinear(K, 64, 4, 2, quant_config=config, prefix="model.layers.0.qkv_proj", **arguments)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("same", [True, False], ids=["one scale", "a scale each"])
def test_fused_projections_equal_the_checkpoint(case: str, same: bool) -> None:
    layer = qkv(case, bias=False)
    assert type(layer.quant_method) is Fp4LinearMethod
    scales = (0.01,) * 3 if same else (0.01, 0.03, 0.007)
    parts = []
    for i, (shard, n) in enumerate(QKV):
        parts.append(Part(n, K, block_format_of(case), scales[i], seed=i))
        parts[-1].load(layer, case, shard)
    layer.quant_method.process_weights_after_loading(layer)
    assert len(layer.fp4_parts) == (1 if same or case == "mxfp4" else 3)
    x = torch.randn(5, K)
    out, _ = layer(x)
    check(out, x, torch.cat([part.weight for part in parts]))
    assert not hasattr(layer, "weight_packed")


@pytest.mark.parametrize("same", [True, False], ids=["one scale", "a scale each"])
def test_biases_and_the_two_halves_of_an_mlp(same: bool) -> None:
    config = config_of(CASES["modelopt"][0])
    layer = linear.MergedColumnParallelLinear(
        K, [96, 96], bias=True, quant_config=config, prefix="model.layers.0.mlp.gate_up_proj"
    )
    parts = [Part(96, K, NVFP4, scale, seed) for seed, scale in enumerate((0.02, 0.02 if same else 0.05))]
    for i, part in enumerate(parts):
        part.load(layer, "modelopt", i)
    layer.bias.data = torch.randn(192)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, 2, K)
    out, _ = layer(x)
    check(out, x, torch.cat([part.weight for part in parts]), layer.bias.double())


@pytest.mark.parametrize(("n", "k"), [(64, 48), (20, 64), (20, 80)])
@pytest.mark.parametrize("bias", [True, False])
def test_sizes_that_are_not_whole_are_padded(n: int, k: int, bias: bool) -> None:
    config = config_of(CASES["nvfp4-w4a16"][0])
    layer = linear.RowParallelLinear(k, n, bias=bias, quant_config=config, prefix="model.layers.0.mlp.down_proj")
    part = Part(n, k, NVFP4, 0.02, seed=0)
    part.load(layer, "nvfp4-w4a16")
    if bias:
        layer.bias.data = torch.randn(n)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(5, k)
    out, _ = layer(x)
    assert out.shape == (5, n)
    check(out, x, part.weight, layer.bias.double() if bias else 0.0)


def test_a_part_of_a_block_is_an_error() -> None:
    config = config_of(CASES["nvfp4-w4a16"][0])
    with pytest.raises(ValueError, match="down_proj: got 40 input features of a rank; allowed: a multiple of 16"):
        linear.RowParallelLinear(40, 64, bias=False, quant_config=config, prefix="down_proj")


@pytest.mark.parametrize("same", [True, False], ids=["one scale", "a scale each"])
def test_a_layer_is_traced_as_one_graph(same: bool) -> None:
    layer = qkv("nvfp4-w4a4", bias=False)
    for i, (shard, n) in enumerate(QKV):
        Part(n, K, NVFP4, 0.01 if same else 0.01 * (i + 1), seed=i).load(layer, "nvfp4-w4a4", shard)
    layer.quant_method.process_weights_after_loading(layer)
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9):
        x = torch.randn(rows, K)
        assert torch.equal(compiled(x), layer(x)[0])


@pytest.mark.parametrize("case", ["nvfp4-w4a16", "modelopt"])
def test_layers_that_the_checkpoint_excludes_stay(case: str) -> None:
    config = config_of(CASES[case][0])
    layer = linear.ReplicatedLinear(K, 64, bias=False, quant_config=config, prefix="lm_head")
    assert type(layer.quant_method) is linear.UnquantizedLinearMethod


def test_the_entry_point_names_the_function() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["jitfp4"].partition(":")
    assert (module, getattr(plugin, name)) == (plugin.__name__, plugin.register)
    assert os.environ.get("VLLM_PLUGINS") is None
