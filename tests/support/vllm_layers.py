"""Layers of vLLM with FP4 weights, and the checkpoints that they are given; importing it needs vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.model_executor.layers import quantization

from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.reference.formats import decode_e2m1, decode_e4m3, decode_ue8m0, unpack_e2m1

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """vLLM's groups of processes, on the CPU; other tests of this process may have made them."""
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    makes = not model_parallel_is_initialized()
    with set_current_vllm_config(config):
        if makes:
            path = tmp_path_factory.mktemp("rendezvous") / "file"
            init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
            initialize_model_parallel(1)
        yield config
    if makes:
        destroy_model_parallel()
        destroy_distributed_environment()


@pytest.fixture
def in_bfloat16() -> Iterator[None]:
    """The dtype of new parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
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


def define_routing() -> torch.library.Library:
    """vLLM's operator that chooses experts; its extension is not here."""
    library = torch.library.Library("_moe_C", "FRAGMENT")
    name = "topk_softmax"
    if not hasattr(torch.ops._moe_C, name):
        outs = "Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) places"
        rest = "Tensor? bias=None, Tensor? is_padding=None"  # the last since vLLM 0.33
        library.define(f"{name}({outs}, Tensor logits, bool renormalize, {rest}) -> ()")

        def choose(weights: Any, ids: Any, _: Any, logits: Any, renormalize: bool, *rest: Any) -> None:
            assert not any(tensor is not None for tensor in rest)
            values, chosen = logits.float().softmax(-1).topk(weights.shape[1])
            weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
            ids.copy_(chosen)

        library.impl(name, choose, "CPU")
    return library
