"""The plugin for vLLM against vLLM's own classes, on the CPU. vLLM's Python imports without its extensions."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import platforms
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers import fused_moe, linear, quantization
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import jitfp4.integrations.vllm as plugin
from jitfp4 import ArgumentError, fp4_experts
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.integrations import partitioned_experts
from jitfp4.integrations.fp8 import LEAST_ROWS_OF_EXPERT
from jitfp4.integrations.vllm.experts import Fp4ExpertsMethod, GptOssFp4ExpertsMethod
from jitfp4.integrations.vllm.linear import Fp4LinearMethod
from jitfp4.reference.formats import decode_e2m1, decode_e4m3, decode_ue8m0, unpack_e2m1

plugin.register()

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
K = 128
QKV = (("q", 256), ("k", 128), ("v", 128))


@pytest.fixture(scope="module", autouse=True)
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """One rank on the CPU, with bfloat16 as the dtype of new parameters."""
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    path = Path(tmp_path_factory.mktemp("rendezvous")) / "file"
    before = torch.get_default_dtype()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
        initialize_model_parallel(1)
        torch.set_default_dtype(torch.bfloat16)
        yield config
        torch.set_default_dtype(before)


def packed(block_format: BlockFormat, *, by_4_bits: bool = False, **changes: Any) -> dict[str, Any]:
    """A quantization config of compressed-tensors."""
    nvfp4 = block_format is NVFP4
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "tensor_group" if nvfp4 else "group", "group_size": block_format.block} | changes
    inputs = {**weights, "dynamic": "local"} if by_4_bits else None
    name = "nvfp4-pack-quantized" if nvfp4 else "mxfp4-pack-quantized"
    group = {"targets": ["Linear"], "format": name, "weights": weights, "input_activations": inputs}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head"], "config_groups": groups}


def modelopt(algorithm: str = "NVFP4") -> dict[str, Any]:
    """A quantization config of ModelOpt."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": ["lm_head", "*router*"]}


CASES = {
    "nvfp4-w4a16": (packed(NVFP4), "weight_packed", "weight_global_scale", True),
    "nvfp4-w4a4": (packed(NVFP4, by_4_bits=True), "weight_packed", "weight_global_scale", True),
    "mxfp4": (packed(MXFP4), "weight_packed", None, False),
    "modelopt": (modelopt(), "weight", "weight_scale_2", False),
    "modelopt-w4a16": (modelopt("W4A16_NVFP4"), "weight", "weight_scale_2", False),
}


def config_of(document: dict[str, Any]) -> Any:
    """What vLLM makes of a checkpoint's config, after it asked every registered config."""
    for name in quantization.QUANTIZATION_METHODS:
        if name.startswith("jitfp4-"):
            cls = quantization.get_quantization_config(name)
            if cls.override_quantization_method(document, None) is not None:
                made = cls.from_config(document)
                made.packed_modules_mapping = PACKED
                return made
    raise AssertionError("no config of jitfp4 claims it")


class Part:
    """One matrix of a checkpoint."""

    def __init__(self, n: int, k: int, block_format: BlockFormat, scale: float, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=made)
        rows = (n, k // block_format.block)
        if block_format is NVFP4:
            self.scales = (torch.rand(rows, generator=made) + 0.5).to(torch.float8_e4m3fn)
            values = decode_e4m3(self.scales.view(torch.uint8))
        else:
            self.scales = torch.randint(124, 129, rows, dtype=torch.uint8, generator=made)
            values = decode_ue8m0(self.scales)
            scale = 1.0
        self.scale = scale
        weight = decode_e2m1(unpack_e2m1(self.codes)).double().unflatten(-1, (-1, block_format.block))
        self.weight = (weight * values.double().unsqueeze(-1)).flatten(-2) * scale

    def load(self, layer: torch.nn.Module, case: str, *shard: Any) -> None:
        """Give the matrix to the layer as vLLM's loader does."""
        _, codes, global_scale, is_encode = CASES[case]
        tensors = {codes: self.codes, "weight_scale": self.scales}
        if global_scale is not None:
            tensors[global_scale] = torch.tensor([1 / self.scale if is_encode else self.scale], dtype=torch.float32)
        for name, tensor in tensors.items():
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, tensor, *shard)


def check(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | float = 0.0) -> None:
    """Products in bf16 are exact products, rounded once, but for the order of float32 sums."""
    exact = x.double() @ weight.T + bias
    size = x.double().abs() @ weight.abs().T
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + size * 2**-20).all()


def block_format_of(case: str) -> BlockFormat:
    return MXFP4 if case == "mxfp4" else NVFP4


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


# ---- experts ---------------------------------------------------------------------------------------------------------

EXPERTS, HIDDEN, INTER = 4, 64, 32


def experts_of(case: str, **changes: Any) -> Any:
    """A layer of experts as vLLM makes it."""
    arguments: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": INTER}
    document = CASES[case][0]
    arguments |= {"quant_config": config_of(document), "prefix": f"model.layers.{len(_made)}.mlp.experts"} | changes
    _made.append(_new_experts(params_dtype=torch.bfloat16, **arguments))
    return _made[-1].routed_experts


_new_experts = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE  # its name until vLLM 0.26
_made: list[Any] = []  # vLLM keeps layers by name: each test has its own


@pytest.mark.parametrize("case", ["nvfp4-w4a16", "nvfp4-w4a4", "mxfp4", "modelopt"])
def test_experts_equal_the_checkpoint(case: str) -> None:
    layer = experts_of(case)
    method = layer.quant_method
    assert isinstance(method, Fp4ExpertsMethod)
    _, codes, global_scale, is_encode = CASES[case]
    weights = {}
    for expert in range(EXPERTS):
        for place, (shard, n, k) in enumerate((("w1", INTER, HIDDEN), ("w3", INTER, HIDDEN), ("w2", HIDDEN, INTER))):
            part = Part(n, k, block_format_of(case), 0.02 * (1 + expert + place), seed=3 * expert + place)
            weights[expert, shard] = part.weight
            tensors = {codes: part.codes, "weight_scale": part.scales}
            if global_scale is not None:
                tensors[global_scale] = torch.tensor(1 / part.scale if is_encode else part.scale, dtype=torch.float32)
            for name, tensor in tensors.items():
                full = f"{'w2' if shard == 'w2' else 'w13'}_{name}"
                parameter = getattr(layer, full)
                parameter.weight_loader(parameter, tensor, f"experts.{full}", shard_id=shard, expert_id=expert)
    method.process_weights_after_loading(layer)
    x = torch.randn(5, HIDDEN) / 4
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 3], [2, 0]], dtype=torch.int32)
    router = torch.rand(5, 2, dtype=torch.float32)
    out = method.apply(layer, x, router, ids, None, None)
    exact = torch.zeros(5, HIDDEN, dtype=torch.float64)
    for token in range(5):
        for slot in range(2):
            own = {shard: weights[int(ids[token, slot]), shard] for shard in ("w1", "w2", "w3")}
            gate, up = own["w1"] @ x[token].double(), own["w3"] @ x[token].double()
            h = (torch.nn.functional.silu(gate) * up).bfloat16().double()
            exact[token] += router[token, slot].double() * (own["w2"] @ h)
    assert torch.nn.functional.cosine_similarity(out.double(), exact).min() > 0.9999
    assert ((out.double() - exact).abs() <= 2**-6 * exact.abs().amax(1, keepdim=True)).all()


def gpt_oss_claimed(model_type: str = "gpt_oss", user: str | None = None) -> str | None:
    cls = quantization.get_quantization_config("jitfp4-gpt-oss")
    given = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return cls.override_quantization_method(given, user, hf_config=SimpleNamespace(model_type=model_type))


def test_gpt_oss_is_claimed_and_other_mxfp4_is_not() -> None:
    assert gpt_oss_claimed() == gpt_oss_claimed(user="jitfp4-gpt-oss") == "jitfp4-gpt-oss"
    assert gpt_oss_claimed("llama") is None and gpt_oss_claimed(user="gpt_oss_mxfp4") is None


def test_experts_of_gpt_oss_equal_the_checkpoint() -> None:
    """Biases, gates and up projections in turn, and its own SwiGLU; tensors as GptOssModel's loader gives them."""
    config = quantization.get_quantization_config("jitfp4-gpt-oss").from_config({"quant_method": "mxfp4"})
    layer = experts_of("mxfp4", quant_config=config, has_bias=True, activation="swigluoai")
    method = layer.quant_method
    assert type(method) is GptOssFp4ExpertsMethod
    parts = {
        name: [Part(n, k, MXFP4, 1.0, seed=10 * (name == "w2") + expert) for expert in range(EXPERTS)]
        for name, n, k in (("w13", 2 * INTER, HIDDEN), ("w2", HIDDEN, INTER))
    }
    biases = {name: torch.randn(EXPERTS, own[0].weight.shape[0]).bfloat16() for name, own in parts.items()}
    for name, own in parts.items():
        stacked = {
            f"{name}_weight": torch.stack([part.codes for part in own]),
            f"{name}_weight_scale": torch.stack([part.scales for part in own]),
            f"{name}_bias": biases[name],
        }
        for full, tensor in stacked.items():
            parameter = getattr(layer, full)
            parameter.weight_loader(parameter, tensor, weight_name=f"experts.{full}", shard_id=None, expert_id=None)
    method.process_weights_after_loading(layer)
    x = torch.randn(5, HIDDEN) / 64
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [2, 0]], dtype=torch.int32)
    router = torch.rand(5, 2, dtype=torch.float32)
    out = method.apply(layer, x, router, ids, None, None)
    exact = torch.zeros(5, HIDDEN, dtype=torch.float64)
    for token, slot in itertools.product(range(5), range(2)):
        expert = int(ids[token, slot])
        both = parts["w13"][expert].weight @ x[token].double() + biases["w13"][expert].double()
        gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
        h = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).bfloat16().double()
        own = parts["w2"][expert].weight @ h + biases["w2"][expert].double()
        exact[token] += router[token, slot].double() * own
    assert torch.nn.functional.cosine_similarity(out.double(), exact).min() > 0.9999
    assert ((out.double() - exact).abs() <= 2**-6 * exact.abs().amax(1, keepdim=True)).all()
    assert not hasattr(layer, "w13_weight") and not hasattr(layer, "w2_bias")


def test_experts_of_many_tokens_are_in_fp8_where_it_is_asked_for(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[int, ...]] = []
    monkeypatch.setattr(partitioned_experts, "load_fp8_experts", lambda _, __, *sizes: loads.append(sizes))
    many, made = EXPERTS * LEAST_ROWS_OF_EXPERT // 2, torch.Generator().manual_seed(0)  # of two experts each
    x = torch.randn(many, HIDDEN, generator=made)
    ids = torch.randint(EXPERTS, (many, 2), generator=made)
    router = torch.ones(many, 2, dtype=torch.float32)
    for asked in ({}, {"jitfp4_activations": "fp8"}):
        with monkeypatch.context() as patch:
            patch.setattr(config, "additional_config", asked)
            layer = experts_of("mxfp4")
        for name, parameter in layer.named_parameters():
            low, high = (0, 256) if name.endswith("packed") else (123, 125)  # codes; scales of 1 / 16 and 1 / 8
            parameter.data = torch.randint(low, high, parameter.shape, generator=made).byte()
        layer.quant_method.process_weights_after_loading(layer)
        for tokens in (many, many - 1):
            given = x[:tokens], layer.fp4_experts, ids[:tokens], router[:tokens]
            out = layer.quant_method.apply(layer, given[0], given[3], given[2])
            by_mode = [fp4_experts(*given, activations=mode) for mode in (None, "fp8")]
            equal = [torch.equal(out, own) for own in by_mode]
            assert equal == ([False, True] if asked and tokens == many else [True, False])
    assert loads == [(2, many, config.scheduler_config.max_num_batched_tokens)]
    monkeypatch.setattr(config, "additional_config", {"jitfp4_activations": "fp4"})
    with pytest.raises(ArgumentError, match="jitfp4_activations: got 'fp4'; allowed: 'fp8' or None"):
        experts_of("mxfp4")


def test_experts_that_jitfp4_does_not_have_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts_of("nvfp4-w4a16")
    for name, value in (("has_bias", True), ("hidden_dim", 72), ("activation", MoEActivation.GELU)):
        with monkeypatch.context() as patch:
            assert Fp4ExpertsMethod.serves(layer.moe_config)
            patch.setattr(layer.moe_config, name, value)
            assert not Fp4ExpertsMethod.serves(layer.moe_config)
