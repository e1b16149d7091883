"""The plugin for SGLang against SGLang's own classes, on the CPU. They need triton; packages that they only name, or
use on a GPU, are stood in for where they are not installed.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.support.sglang_stand_ins  # noqa: F401 - before SGLang

pytest.importorskip("sglang")
pytest.importorskip("triton")

from sglang.srt.layers import linear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs

from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.integrations import sglang as plugin
from jitfp4.reference.formats import decode_e2m1, decode_e4m3, decode_ue8m0, unpack_e2m1

K = 128
QKV = (("q", 256), ("k", 128), ("v", 128))
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """SGLang's settings, and its hooks as they are in a server; one rank."""
    plugin.register()
    HookRegistry.apply_hooks()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with (
        get_context().override_server_args(device="cpu"),
        get_parallel().override(tp_group=None, moe_ep_size=1, moe_ep_rank=0, moe_tp_size=1, moe_tp_rank=0),
    ):
        yield
    torch.set_default_dtype(before)


def packed(block_format: BlockFormat, by_4_bits: bool = False) -> CompressedTensorsConfig:
    """A quantization config of compressed-tensors."""
    nvfp4 = block_format is NVFP4
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "tensor_group" if nvfp4 else "group", "group_size": block_format.block}
    inputs = {**weights, "dynamic": "local"} if by_4_bits else None
    name = "nvfp4-pack-quantized" if nvfp4 else "mxfp4-pack-quantized"
    group = {"targets": ["Linear"], "format": name, "weights": weights, "input_activations": inputs}
    document = {"quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head", "re:.*gate$"]}
    config = CompressedTensorsConfig.from_config(document | {"config_groups": {"group_0": group}})
    config.packed_modules_mapping = PACKED
    return config


def modelopt(algorithm: str = "NVFP4") -> ModelOptFp4Config:
    """A quantization config of ModelOpt."""
    document = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": ["lm_head", "*gate"]}
    return ModelOptFp4Config.from_config(document | {"packed_modules_mapping": PACKED})


CONFIGS = {
    "nvfp4": lambda: packed(NVFP4),
    "nvfp4-w4a4": lambda: packed(NVFP4, by_4_bits=True),
    "mxfp4": lambda: packed(MXFP4),
    "modelopt": modelopt,
    "modelopt-w4a16": lambda: modelopt("W4A16_NVFP4"),
}


def matrix(case: str, n: int, k: int, scale: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A random matrix [n, k]: the tensors of a checkpoint, and its values, float64."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    if case == "mxfp4":
        tensors = {"weight_packed": codes, "weight_scale": torch.randint(124, 129, (n, k // 32), dtype=torch.uint8)}
        values, scale = decode_ue8m0(tensors["weight_scale"]), 1.0
    else:
        scales = (torch.rand(n, k // 16, dtype=torch.float32) + 0.5).to(torch.float8_e4m3fn)
        values = decode_e4m3(scales.view(torch.uint8))
        names = ("weight_packed", "weight_global_scale") if case.startswith("nvfp4") else ("weight", "weight_scale_2")
        given = 1 / scale if case.startswith("nvfp4") else scale
        tensors = {names[0]: codes, "weight_scale": scales, names[1]: torch.tensor([given], dtype=torch.float32)}
    blocks = decode_e2m1(unpack_e2m1(codes)).double().unflatten(-1, (values.shape[-1], -1))
    return tensors, (blocks * values.double().unsqueeze(-1)).flatten(-2) * scale


def loaded(layer: Any, case: str, n: int, k: int, scale: float, *shard: Any) -> torch.Tensor:
    """Give the layer a random matrix [n, k] as SGLang's loader does; returns its values."""
    tensors, values = matrix(case, n, k, scale)
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, *shard)
    return values


def check(layer: Any, weight: torch.Tensor) -> None:
    """The layer multiplies by ``weight``: exact products, rounded once, but for the order of float32 sums."""
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(5, weight.shape[1]).bfloat16()
    out, bias = layer(x)
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    assert bias is None and out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + size * 2**-20).all()


def test_the_entry_point_names_the_function() -> None:
    installed = [point for point in entry_points(group="sglang.srt.plugins") if point.name == "jitfp4"]
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text().partition('"sglang.srt.plugins"]\n')[2]
    value = text.splitlines()[0].partition(" = ")[2].strip('"')
    assert all(point.value == value for point in installed)
    assert EntryPoint("jitfp4", value, "sglang.srt.plugins").load() is plugin.register


def test_the_commands_of_the_guide_are_sglangs() -> None:
    guide = (Path(__file__).parents[2] / "docs/engines.md").read_text()
    (command,) = re.findall(r"sglang\.launch_server (.*?)  #", guide)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert parser.parse_args(shlex.split(command)).model_path == "MODEL"


def test_registering_again_changes_nothing() -> None:
    before = (
        {target: len(hooks) for target, hooks in HookRegistry._hooks.items()},
        list(linear.WEIGHT_LOADER_V2_SUPPORTED),
    )
    plugin.register()
    assert before == (
        {target: len(hooks) for target, hooks in HookRegistry._hooks.items()},
        linear.WEIGHT_LOADER_V2_SUPPORTED,
    )


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("case", CONFIGS)
def test_fused_projections_equal_the_checkpoint(case: str, same: bool) -> None:
    layer = linear.QKVParallelLinear(
        K, 64, 4, 2, bias=False, quant_config=CONFIGS[case](), prefix="model.layers.0.self_attn.qkv_proj"
    )
    assert isinstance(layer.quant_method, plugin.Jitfp4LinearMethod)
    scales = (0.25, 0.25, 0.25) if same else (0.25, 0.3, 0.7)
    parts = [loaded(layer, case, n, K, scale, shard) for (shard, n), scale in zip(QKV, scales, strict=True)]
    check(layer, torch.cat(parts))
    assert len(layer.fp4_parts) == (1 if same or case == "mxfp4" else 3)


@pytest.mark.parametrize("case", CONFIGS)
def test_layers_of_every_kind_equal_the_checkpoint(case: str) -> None:
    config = CONFIGS[case]()
    first = linear.MergedColumnParallelLinear(
        K, [192, 192], bias=False, quant_config=config, prefix="model.layers.0.mlp.gate_up_proj"
    )
    check(first, torch.cat([loaded(first, case, 192, K, 0.5, shard) for shard in (0, 1)]))
    second = linear.RowParallelLinear(
        192, K, bias=False, quant_config=config, prefix="model.layers.0.mlp.down_proj", reduce_results=False
    )
    check(second, loaded(second, case, K, 192, 0.125))
    third = linear.ReplicatedLinear(K, 96, bias=False, quant_config=config, prefix="model.layers.0.mlp.shared")
    check(third, loaded(third, case, 96, K, 2.0))


@pytest.mark.parametrize("case", CONFIGS)
def test_layers_that_the_checkpoint_excludes_stay(case: str) -> None:
    layer = linear.ReplicatedLinear(K, 8, bias=False, quant_config=CONFIGS[case](), prefix="model.layers.0.mlp.gate")
    assert type(layer.quant_method) is UnquantizedLinearMethod


def experts(case: str, **changes: Any) -> FusedMoE:
    """A layer of experts as SGLang makes it."""
    arguments: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 96}
    arguments |= {"layer_id": 0, "quant_config": CONFIGS[case](), "prefix": "model.layers.0.mlp.experts"}
    return FusedMoE(**arguments | changes)


@pytest.mark.parametrize("case", CONFIGS)
def test_experts_equal_the_checkpoint(case: str) -> None:
    layer = experts(case)
    assert isinstance(layer.quant_method, plugin.Jitfp4ExpertsMethod)
    weights = {}
    for expert in range(4):
        for number, (shard, n, k) in enumerate((("w1", 96, 64), ("w3", 96, 64), ("w2", 64, 96))):
            tensors, weights[expert, shard] = matrix(case, n, k, 0.01 * (1 + expert + number))
            for name, tensor in tensors.items():
                full = f"{'w2' if shard == 'w2' else 'w13'}_{name}"
                parameter = getattr(layer, full)
                given = tensor if tensor.dim() > 1 else tensor[0]
                parameter.weight_loader(parameter, given, f"experts.{full}", shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)
    x = (torch.randn(4, 64) / 16).bfloat16()
    ids = torch.tensor([[0, 1], [2, 3], [1, -1], [3, 3]], dtype=torch.int32)
    router = torch.rand(4, 2, dtype=torch.float32)
    out = layer(x, StandardTopKOutput(router, ids, torch.zeros(4, 4)))
    exact = torch.zeros(4, 64, dtype=torch.float64)
    for token, slot in ((token, slot) for token in range(4) for slot in range(2) if ids[token, slot] >= 0):
        first, second, last = (weights[int(ids[token, slot]), shard] for shard in ("w1", "w3", "w2"))
        h = (torch.nn.functional.silu(first @ x[token].double()) * (second @ x[token].double())).bfloat16().double()
        exact[token] += router[token, slot].double() * (last @ h)
    assert ((out.double() - exact).abs() <= 2**-6 * exact.abs().amax(1, keepdim=True)).all()


def test_experts_that_jitfp4_does_not_have_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, prefix = experts("nvfp4"), "model.layers.0.mlp.experts"
    for owner, name, value in (
        (layer.moe_runner_config, "swiglu_limit", 7.0),
        (layer.moe_runner_config, "activation", "gelu"),
        (layer, "intermediate_size_per_partition", 80),
        (layer, "with_bias", True),
        (layer, "num_fused_shared_experts", 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert plugin.method_of_compressed_tensors(lambda *_: "own", CONFIGS["nvfp4"](), layer, prefix) == "own"
            assert plugin.method_of_modelopt(lambda *_: "own", CONFIGS["modelopt"](), layer, prefix) == "own"
    assert plugin.method_of_compressed_tensors(lambda *_: "own", CONFIGS["nvfp4"](), layer, prefix) != "own"


def test_scaled_inputs_stay() -> None:
    config = modelopt("NVFP4_AWQ")
    config.is_awq = True
    layer = linear.ReplicatedLinear(K, 8, bias=False, quant_config=config, prefix="model.layers.0.mlp.up")
    assert not isinstance(layer.quant_method, plugin.Jitfp4LinearMethod)


def test_blackwell_keeps_its_own_products_of_fp4_by_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "get_device_capability", lambda: (10, 0))
    for case, is_ours in (("modelopt", False), ("modelopt-w4a16", True), ("nvfp4", True)):
        layer = linear.ReplicatedLinear(K, 64, bias=False, quant_config=CONFIGS[case](), prefix="model.layers.0.mlp.up")
        assert isinstance(layer.quant_method, plugin.Jitfp4LinearMethod) == is_ours


def test_older_versions_have_fewer_fields() -> None:
    config = SimpleNamespace(activation="silu", is_gated=True, no_combine=False, gemm1_alpha=None)
    layer = SimpleNamespace(moe_runner_config=config, with_bias=False, num_fused_shared_experts=0)
    layer.hidden_size, layer.intermediate_size_per_partition = 128, 64
    assert plugin.Jitfp4ExpertsMethod.serves(layer)
    config.gemm1_alpha = 1.702
    assert not plugin.Jitfp4ExpertsMethod.serves(layer)
