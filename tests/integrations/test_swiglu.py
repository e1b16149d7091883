"""Gates, ups and SwiGLU as one product: the weight's bytes, the numbers, what is saved, and which MLPs it is for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("transformers")
from safetensors.torch import load_file

from jitfp4 import weight as weights
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.integrations.layers import Fp4Linear, prepared, quantized
from jitfp4.integrations.swiglu import SwiGlu, swiglu_of
from jitfp4.integrations.transformers import Jitfp4Config, register
from jitfp4.operation import Operation
from tests.support.tiny_models import load, prompts, save, to_fp4

register()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16()


@pytest.mark.parametrize("block_format", [NVFP4, MXFP4])
@pytest.mark.parametrize("inter", [8, 64, 72, 200])
def test_a_weight_is_that_of_both_and_both_again(
    inter: int, block_format: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = quantized(random(2 * inter, 160) * torch.logspace(-3, 3, 2 * inter).unsqueeze(1), block_format)
    sides = [prepared(replace_rows(both, rows)) for rows in (slice(0, inter), slice(inter, None))]
    want = prepared(both, "concatenated gate,up")
    for slab in (weights._SLAB, 1):
        monkeypatch.setattr(weights, "_SLAB", slab)
        got = weights.with_gates(*sides)
        assert got.gated and (got.n, got.k) == (want.n, want.k)
        for name, tensor in want.tensors().items():
            assert torch.equal(got.tensors()[name], tensor), name
        for again, side in zip(weights.without_gates(got), sides, strict=True):
            for name, tensor in side.tensors().items():
                assert torch.equal(again.tensors()[name], tensor), name


def replace_rows(layer: Any, rows: slice) -> Any:
    return replace(layer, codes=layer.codes[rows], scales=layer.scales[rows])


def model_of(tmp_path: Path, fuse: bool = True, weights: str = "nvfp4", **changes: Any) -> Any:
    folder = save("llama", tmp_path / "floats", **changes)
    return load(folder, quantization_config=Jitfp4Config(weights, fuse=fuse))


@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("inter", [192, 100])
def test_an_mlp_gives_what_its_layers_give_alone(inter: int, format_name: str, tmp_path: Path) -> None:
    one, alone = (
        model_of(tmp_path, fuse, format_name, intermediate_size=inter, hidden_size=120).model.layers[1].mlp
        for fuse in (True, False)
    )
    assert isinstance(one, SwiGlu) and isinstance(alone.gate_proj, Fp4Linear)
    x = random(2, 5, 120)
    gate, up = (x.float() @ layer.dequantize().T for layer in (alone.gate_proj, alone.up_proj))
    want = functional.silu(gate) * up
    torch.testing.assert_close(one.gate_up(x)[..., :inter].float(), want, rtol=2**-7, atol=1e-3 * float(want.std()))
    exact = want @ one.down_proj.dequantize().T
    error, separate = (torch.linalg.norm(out.float() - exact) for out in (one(x), alone(x)))
    assert error < 0.01 * torch.linalg.norm(exact) and error <= separate


def test_an_mlp_has_two_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of(tmp_path), []
    call = Operation.__call__

    def counted(self: Operation[Any, Any], arguments: Any) -> Any:
        calls.append(self)
        return call(self, arguments)

    monkeypatch.setattr(Operation, "__call__", counted)
    model.model.layers[0].mlp(random(3, 128))
    assert calls == [MM_BF16_FP4] * 2


def test_gates_and_ups_are_saved_alone(tmp_path: Path) -> None:
    one, alone = (model_of(tmp_path, fuse) for fuse in (True, False))
    for model, name in ((one, "one"), (alone, "alone")):
        model.save_pretrained(tmp_path / name)
    got, want = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "alone"))
    assert got.keys() == want.keys() and "model.layers.0.mlp.gate_proj.weight_size" in got
    again = load(tmp_path / "alone")  # whose config says that nothing is fused
    assert isinstance(again.model.layers[0].mlp.gate_proj, Fp4Linear)
    config = json.loads((tmp_path / "alone/config.json").read_text())
    config["quantization_config"]["fuse"] = True
    (tmp_path / "alone/config.json").write_text(json.dumps(config))
    mixed = load(tmp_path / "alone")
    assert isinstance(mixed.model.layers[0].mlp, SwiGlu)
    assert torch.equal(mixed(prompts()).logits, one(prompts()).logits)


@pytest.mark.parametrize("shards", [1, 3])
def test_checkpoints_of_others_are_joined_and_saved(shards: int, tmp_path: Path) -> None:
    folder = to_fp4(save("llama", tmp_path / "floats"), tmp_path / "fp4", "modelopt", NVFP4, shards)
    model = load(folder)
    assert isinstance(model.model.layers[1].mlp, SwiGlu)
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert isinstance(again.model.layers[1].mlp, SwiGlu)
    assert torch.equal(again(prompts()).logits, model(prompts()).logits)


def test_it_moves_and_keeps_its_scales(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    want = model(prompts()).logits
    moved = model.to(torch.float32).model.layers[0].mlp
    assert moved.gate_up.prepared.gated and moved.gate_up.alpha.dtype == torch.float32
    assert torch.linalg.norm(model(prompts()).logits - want) < 0.05 * torch.linalg.norm(want)


class Mlp(nn.Module):
    """As transformers' MLPs, of FP4 layers."""

    def __init__(self, act_fn: nn.Module, bias: bool = False, up_factor: float = 2.0) -> None:
        super().__init__()
        self.act_fn = act_fn
        for name, n, k, factor in (("gate", 64, 32, 1.0), ("up", 64, 32, up_factor), ("down", 32, 64, 1.0)):
            layer = Fp4Linear(k, n, bias and name != "down", torch.bfloat16)
            own = quantized(random(n, k))
            layer.load(replace(own, decode_scale=own.decode_scale * factor))
            setattr(self, f"{name}_proj", layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Multiplied(Mlp):
    """With a factor that is no module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(0.5 * self.gate_proj(x)) * self.up_proj(x))


class Dropping(Mlp):
    """With more than four attributes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.training)


def test_other_mlps_stay_as_they_are() -> None:
    assert isinstance(swiglu_of(Mlp(nn.SiLU())), SwiGlu)
    hooked = Mlp(nn.SiLU())
    hooked._hf_hook = MethodType(lambda _: None, hooked)
    others = (
        Mlp(nn.GELU()),
        Mlp(nn.SiLU(), bias=True),
        Mlp(nn.SiLU(), up_factor=1.7),  # no power of two: one scale would round
        Multiplied(nn.SiLU()),
        Dropping(nn.SiLU()),
        hooked,
        nn.Sequential(Mlp(nn.SiLU())),
    )
    assert [swiglu_of(mlp) for mlp in others] == [None] * len(others)
