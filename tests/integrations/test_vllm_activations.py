"""NVFP4 activations for vLLM's own products of FP4 by FP4, on the CPU and a pretended Blackwell.

vLLM makes a Llama whose layers have FlashInfer's kernels; their products, and the quantization of what is not made in
NVFP4, are jitfp4's functions of the same names. So every step of a fused run is that of a run step by step, bit by bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from torch import nn
from vllm import platforms
from vllm.config import CompilationConfig, DeviceConfig, LoRAConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.kernels.linear.nvfp4 import flashinfer
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as scheme
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.models.llama import LlamaMLP
from vllm.platforms.interface import DeviceCapability

import jitfp4
import jitfp4.integrations.vllm as plugin
from bench.engines.models import VARIANTS, config_of
from jitfp4.errors import ArgumentError
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.formats import NVFP4
from jitfp4.integrations.vllm import activations
from jitfp4.integrations.vllm.activations import QuantizedSwiGlu, reader_of
from jitfp4.integrations.vllm.norms import Fp4ModelRMSNorm
from jitfp4.integrations.vllm.options import activations_of
from jitfp4.operation import Operation
from jitfp4.reference.formats import swizzle
from tests.support.vllm_layers import PACKED, one_rank, packed

plugin.register()

__all__ = ["one_rank"]  # a fixture of all tests here
pytestmark = pytest.mark.usefixtures("one_rank")

LAYERS, TOKENS, ENCODE = 2, 5, 300.0
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
}


KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """vLLM's kernels of FlashInfer, by jitfp4 on the CPU; the shapes of rows that layers quantize themselves."""
    shapes: list[tuple[int, ...]] = []

    def quantize(x: torch.Tensor, scale: torch.Tensor, padded_n: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(tuple(x.shape))
        x = nn.functional.pad(x, (0, padded_n - x.shape[1]))
        codes, scales = jitfp4.nvfp4_quantize(x, scale, jitfp4.SfLayout.layout_128x4)
        return codes, scales.view(torch.float8_e4m3fn)

    def multiply(a: Any, b: Any, a_sf: Any, b_sf: Any, alpha: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        a_sf, b_sf = (scales.view(torch.uint8) for scales in (a_sf, b_sf))
        return jitfp4.mm_fp4(a, b.t(), a_sf, b_sf.t(), alpha, dtype)

    def swizzled(scales: torch.Tensor) -> torch.Tensor:
        return swizzle(scales.view(torch.uint8), jitfp4.SfLayout.layout_128x4).view(torch.float8_e4m3fn)

    kernel = flashinfer.FlashInferCutlassNvFp4LinearKernel
    monkeypatch.setattr(kernel, "is_supported", classmethod(lambda *_: (True, None)))
    monkeypatch.setattr(scheme, "init_nvfp4_linear_kernel", lambda **_: kernel(NvFp4LinearLayerConfig()))
    monkeypatch.setattr(flashinfer, "swizzle_blockscale", swizzled)
    monkeypatch.setattr(flashinfer, "scaled_fp4_quant", quantize)
    monkeypatch.setattr(flashinfer, "flashinfer_scaled_fp4_mm", multiply)
    platform = type(platforms.current_platform)
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda *_: DeviceCapability(10, 0)))
    monkeypatch.setattr(platform, "current_device", lambda *_: "cpu", raising=False)
    monkeypatch.setattr(platform, "get_attn_backend_cls", classmethod(lambda *_, **__: plugin.BACKEND))
    monkeypatch.setattr(Attention, "forward", lambda _, query, *__: query)
    return shapes


@pytest.fixture
def natively() -> Iterator[VllmConfig]:
    """A configuration for single layers with FP4 weights and activations."""
    config = VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(mode=0, custom_ops=["none", "+rms_norm"]),
        additional_config={"jitfp4_activations": "fp4"},
    )
    config.quant_config = CompressedTensorsConfig.from_config(packed(NVFP4, by_4_bits=True))
    config.quant_config.packed_modules_mapping = PACKED
    before = torch.get_default_dtype()
    with set_current_vllm_config(config), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        yield config
        torch.set_default_dtype(before)


def fill(model: nn.Module) -> None:
    """Random weights: codes, scales, and all that is in floats."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("global_scale"):
            parameter.data.fill_(ENCODE)
        elif parameter.dtype == torch.uint8:
            parameter.data.random_(generator=generator)
        else:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path, quantized: Any) -> Iterator[Any]:
    """A model with FP4 weights and activations, but for the layers that are named, and vLLM's configuration."""
    kind, names = request.param
    ignored = [f"re:.*{name}$" for name in names]
    document = config_of("llama-3.1-8b", VARIANTS["own"], LAYERS) | SMALL | KINDS[kind]
    document["quantization_config"] = packed(NVFP4, by_4_bits=True) | {"ignore": ["lm_head", *ignored]}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = VllmConfig(
        model_config=ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512),
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(mode=0, custom_ops=["none", "+rms_norm"]),
        additional_config={"jitfp4_activations": "fp4"},
    )
    before = torch.get_default_dtype()
    with set_current_vllm_config(config), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config=config)
        fill(model)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        yield model, config
        torch.set_default_dtype(before)


def run(model: nn.Module, config: VllmConfig) -> torch.Tensor:
    with set_forward_context(None, config, num_tokens=TOKENS):
        return model(torch.arange(TOKENS), torch.arange(TOKENS))


def by_jitfp4(model: nn.Module) -> None:
    """Let norms and SwiGLU that give 16 bits be jitfp4's: vLLM's operators are not here."""
    for module in model.modules():
        if isinstance(module, Fp4ModelRMSNorm):
            module.by_jitfp4 = True
        elif isinstance(module, SiluAndMul):
            module.forward = jitfp4.silu_and_mul


def step_by_step(model: nn.Module) -> None:
    """Let norms and SwiGLU give 16 bits, by jitfp4."""
    for module in model.modules():
        if isinstance(module, Fp4ModelRMSNorm):
            module.rows = None
        elif isinstance(module, QuantizedSwiGlu):
            module.forward = jitfp4.silu_and_mul


QKV, GATES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
CASES = {
    ("llama", ()): (1, 4),
    ("qwen2", ()): (1, 4),
    ("qwen3", ()): (1, 4),
    ("llama", QKV): (1, 3),
    ("llama", (*GATES, "down_proj")): (1, 2),
    ("llama", ("o_proj",)): (0, 3),
}


@pytest.mark.parametrize(("made", "counts"), CASES.items(), ids=str, indirect=["made"])
def test_a_model_is_that_of_single_steps(made: Any, counts: tuple[int, int], quantized: list[Any]) -> None:
    """Only what attention gives is quantized by the layer that reads it; layers in bf16 get rows of 16 bits."""
    model, config = made
    by_jitfp4(model)
    fused = run(model, config)
    assert len(quantized) == counts[0] * LAYERS and fused.isfinite().all() and fused.float().std() > 0.1
    quantized.clear()
    step_by_step(model)
    assert torch.equal(run(model, config), fused)
    assert len(quantized) == counts[1] * LAYERS


@pytest.mark.parametrize("made", [("llama", ())], indirect=True)
def test_what_a_step_launches_is_loaded_in_the_first(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = made
    loaded, called, call = set(), set(), Operation.__call__

    def counted(operation: Any, arguments: Any) -> Any:
        if operation is RMSNORM or (operation is QUANTIZE and arguments.silu):
            called.add((operation.name, operation.problem(arguments)._replace(m=1)))
        return call(operation, arguments)

    def load(operation: Any, problem: Any, field: str, most: int, _: Any) -> None:
        assert (field, most) == ("m", config.scheduler_config.max_num_batched_tokens)
        loaded.add((operation.name, problem))

    by_jitfp4(model)
    with monkeypatch.context() as change:
        change.setattr(activations, "load_growing", load)
        run(model, config)
    monkeypatch.setattr(Operation, "__call__", counted)
    run(model, config)
    assert {name for name, _ in called} == {"rmsnorm_fp4quant", "quantize"} and called <= loaded


@pytest.mark.parametrize(("inter", "apart"), [(128, 0), (96, 1)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_of_two_ranks(
    rank: int, inter: int, apart: int, quantized: list[Any], natively: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SwiGLU gives a rank's columns; 48 of them are padded to 64 by vLLM, and the layer quantizes them itself."""
    for name, value in {"world_size": 2, "rank": rank}.items():
        monkeypatch.setattr(linear, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    monkeypatch.setattr(linear, "tensor_model_parallel_all_reduce", lambda x: x)
    mlp = LlamaMLP(128, inter, "silu", natively.quant_config, prefix="model.layers.0.mlp")
    fill(mlp)
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        layer.quant_method.process_weights_after_loading(layer)
    assert mlp.down_proj.weight.shape[1] == 32 and isinstance(mlp.act_fn, QuantizedSwiGlu)
    x = torch.randn(TOKENS, 128)
    by_jitfp4(mlp)
    fused = mlp(x)
    assert len(quantized) == 1 + apart
    step_by_step(mlp)
    assert torch.equal(mlp(x), fused) and fused.isfinite().all()


def test_what_is_compiled_gives_16_bits(quantized: list[Any], natively: VllmConfig) -> None:
    """vLLM's passes look for the norm, the activation and the quantization apart."""
    layer = Layer(lambda self, rows: self.first(rows)[0], natively.quant_config)
    fill(layer)
    layer.first.quant_method.process_weights_after_loading(layer.first)
    x = torch.randn(2, TOKENS, 128)
    by_jitfp4(layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)(*x.clone())
    assert len(quantized) == 1
    fused = layer(*x.clone())
    assert len(quantized) == 1
    assert all(torch.equal(one, other) for one, other in zip(compiled, fused, strict=True))


class Layer(nn.Module):
    """Norms the sum of two, and gives the rows to modules as ``use`` says."""

    def __init__(self, use: Any, config: Any) -> None:
        super().__init__()
        self.use = use
        self.first, self.second = (ReplicatedLinear(128, 32, quant_config=config, prefix=name) for name in "ab")
        self.norm = RMSNorm(128)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual, rows = x, self.norm(x)
        else:
            rows, residual = self.norm(x, residual)
        return self.use(self, rows), residual


class Inner(nn.Module):
    """Gives its second argument to a linear layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, places: Any, rows: torch.Tensor) -> torch.Tensor:
        out, _ = self.layer(rows)
        return out.view(*out.shape[:-1], 2, -1) + places


def test_only_one_linear_layer_may_read_the_rows(quantized: Any, natively: VllmConfig) -> None:
    def read(use: Any) -> Any:
        layer = Layer(use, natively.quant_config)
        layer.inner = Inner(layer.first)
        return reader_of(layer, "norm"), layer.first

    for use in (
        lambda self, rows: self.first(rows),
        lambda self, rows: self.inner(0, rows),
        lambda self, rows: self.inner(rows=rows, places=0),
    ):
        found, first = read(use)
        assert found is first
    for use in (
        lambda self, rows: (self.first(rows), self.second(rows)),
        lambda self, rows: (self.first(rows), rows),
        lambda self, rows: self.first(rows * 2),
        lambda self, rows: self.first(rows) if rows.sum() > 0 else 0,
        lambda self, rows: self.inner(rows, 0),
        lambda self, rows: self.inner(rows, rows),
        lambda _, rows: rows,
    ):
        assert read(use)[0] is None


def test_it_is_asked_for_and_not_with_adapters(quantized: Any, natively: VllmConfig) -> None:
    def is_fused() -> bool:
        mlp = LlamaMLP(128, 128, "silu", natively.quant_config, prefix="model.layers.0.mlp")
        layer = Layer(None, natively.quant_config)
        kinds = isinstance(mlp.act_fn, QuantizedSwiGlu), layer.norm.rows is not None
        assert len(set(kinds)) == 1
        return kinds[0]

    assert is_fused()
    natively.lora_config = LoRAConfig(max_lora_rank=8)
    assert not is_fused()
    natively.lora_config, natively.additional_config = None, {}
    assert not is_fused()
    natively.additional_config = {"jitfp4_activations": "int8"}
    with pytest.raises(ArgumentError, match="'fp8', 'fp4' or None"):
        activations_of(natively)
