"""The linear layers of a model from NVFP4 weights: float models, and checkpoints of two kinds, written here."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4.integrations.checkpoints import read_layers
from tests.support.programs import load, run_main
from tests.unit.test_examples import installed

save_file = pytest.importorskip("safetensors.torch").save_file
N, K = 24, 96


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("nvfp4_linear")


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(3))


def encoded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = (2688 / weight.abs().max()).reshape(1)
    codes, scales = jitfp4.nvfp4_quantize(weight.bfloat16(), scale, jitfp4.SfLayout.layout_linear)
    return codes.view(torch.uint8), scales.view(torch.float8_e4m3fn).view(N, K // 16), scale


def checkpoint(kind: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One layer, the tensors that must stay as they are beside it."""
    codes, scales, scale = encoded(weight)
    bias, rest = torch.linspace(-1, 1, N), {"norm.weight": torch.ones(K), "embed.weight": torch.ones(8, 32)}
    if kind == "compressed-tensors":
        named = {"weight_packed": codes, "weight_global_scale": scale, "input_global_scale": torch.tensor([500.0])}
    else:
        named = {"weight": codes, "weight_scale_2": (1 / scale).reshape(()), "input_scale": torch.tensor(1 / 500.0)}
    layer = named | {"weight_scale": scales, "bias": bias}
    return rest | {f"model.layers.0.up_proj.{name}": tensor for name, tensor in layer.items()}


def run(example: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    run_main(example, *arguments)
    return capsys.readouterr().out


def layers(example: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(example, capsys, *arguments, "--json"))["layers"]
    return found


@pytest.mark.parametrize("kind", ["compressed-tensors", "modelopt"])
def test_a_checkpoint_gives_the_values_that_it_was_made_of(
    kind: str, example: ModuleType, weight: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = checkpoint(kind, weight)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    ((name, layer),) = read_layers(tmp_path / "model.safetensors")
    codes, scales, scale = encoded(weight)
    assert name == "model.layers.0.up_proj"
    assert torch.equal(layer.codes, codes) and torch.equal(layer.scales.view(torch.uint8), scales.view(torch.uint8))
    assert layer.decode_scale.item() == pytest.approx(1 / scale.item(), rel=1e-6)
    assert layer.input_encode_scale.item() == pytest.approx(500.0, rel=1e-6)
    ((_, _, values),) = example.layers(tmp_path / "model.safetensors")
    assert torch.linalg.norm(values - weight) < 0.12 * torch.linalg.norm(weight)

    (row,) = layers(example, capsys, tmp_path / "model.safetensors", "--rows", 5)
    assert row["shape"] == [N, K] and row["bytes_float32"] == 4 * N * K
    assert row["snr_w4a16_db"] > 40  # the weight is the same: only bfloat16's rounding of the output
    assert 15 < row["snr_w4a4_db"] < 25
    assert row["bytes_w4a4"] == N * K // 2 + 128 * 8


@pytest.mark.parametrize("padding", [0, 8])
def test_tensors_may_lie_anywhere_in_the_file(
    padding: int, weight: torch.Tensor, example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The header's length decides whether they lie at multiples of 16 bytes, as kernels want them, or of 8."""
    metadata = {"": "-" * padding}
    save_file(checkpoint("compressed-tensors", weight), tmp_path / "fp4.safetensors", metadata)
    save_file({"b.weight": weight.bfloat16()}, tmp_path / "bf16.safetensors", metadata)
    for name in ("fp4", "bf16"):
        (row,) = layers(example, capsys, tmp_path / f"{name}.safetensors", "--rows", 5)
        assert row["snr_w4a4_db"] > 14
    (weights,) = json.loads(run(load("quantize_weights"), capsys, tmp_path / "bf16.safetensors", "--json"))["weights"]
    assert weights["snr_db"] > 18


def test_a_folder_of_files_is_one_checkpoint(example: ModuleType, weight: torch.Tensor, tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(checkpoint("compressed-tensors", weight).items()):
        if not name.endswith("input_global_scale"):
            save_file({name: tensor.contiguous()}, tmp_path / f"model-{number}.safetensors")
    ((_, layer),) = read_layers(tmp_path)
    assert layer.bias is not None and layer.input_encode_scale is None


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("weight_packed", torch.zeros(N, K // 2), "allowed: codes: uint8"),
        ("weight_scale", torch.zeros(N, K // 32), "block scales: float8_e4m3fn \\[24, 6\\]"),
        ("weight_scale", None, "no tensor; allowed: block scales"),
        ("weight_global_scale", torch.zeros(1), "allowed: one positive float32"),
        ("weight_global_scale", torch.ones(3), "allowed: one positive float32"),
        ("input_global_scale", torch.tensor([float("inf")]), "allowed: one positive float32"),
    ],
)
def test_an_incomplete_layer_is_an_error_that_names_the_tensor(
    name: str, tensor: torch.Tensor | None, message: str, weight: torch.Tensor, example: ModuleType, tmp_path: Path
) -> None:
    tensors = checkpoint("compressed-tensors", weight)
    full = f"model.layers.0.up_proj.{name}"
    del tensors[full]
    save_file(tensors | ({} if tensor is None else {full: tensor}), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        list(read_layers(tmp_path / "model.safetensors"))
    assert full in str(caught.value)


def test_float_weights_are_quantized_and_what_does_not_fit_is_left_out(
    example: ModuleType, weight: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {"b.weight": weight, "b.bias": torch.ones(N), "a.weight": weight[:, :32].contiguous()}
    odd = {"odd.weight": torch.ones(12, 32), "flat.weight": torch.ones(8, 48), "norm.weight": torch.ones(K)}
    save_file(tensors | odd, tmp_path / "model.safetensors")
    rows = layers(example, capsys, tmp_path / "model.safetensors")
    assert [row["name"] for row in rows] == ["a", "b"]
    assert all(18 < row["snr_w4a16_db"] < 25 and 14 < row["snr_w4a4_db"] < 22 for row in rows)
    text = run(example, capsys, tmp_path / "model.safetensors", "--layers", 1)
    assert text.splitlines()[0].startswith("a ") and "bytes of weights" in text
    with pytest.raises(SystemExit, match="no linear layer"):
        save_file(odd, tmp_path / "odd.safetensors")
        run(example, capsys, tmp_path / "odd.safetensors")


def test_torch_gets_operands_as_it_takes_them(example: ModuleType, weight: torch.Tensor) -> None:
    """Stands in for torch._scaled_mm, which only Blackwell has: packed codes, B by columns, swizzled scales, flat."""

    def product(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.float4_e2m1fn_x2 and a.is_contiguous() and b.T.is_contiguous()
        assert scale_a.dtype == scale_b.dtype == torch.float8_e4m3fn
        assert scale_a.shape == scale_b.shape == (128 * 8,)  # 5 and 24 rows, 6 scales each
        left, right = (
            jitfp4.nvfp4_dequantize(codes.view(torch.uint8), scales.view(torch.uint8), 1.0)
            for codes, scales in ((a, scale_a), (b.T, scale_b))
        )
        return (left @ right.T).to(out_dtype)

    layer = example.quantized(weight, torch.linspace(-1, 1, N))
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(4)).bfloat16()
    want = example.w4a4(layer, jitfp4.mm_fp4)[0](x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", product)
        got = example.w4a4(layer, example.scaled_mm)[0](x)
    assert got.dtype == want.dtype == torch.bfloat16
    assert (got.float() - want.float()).abs().max() <= 2**-7 * want.float().abs().max()  # rounded twice


def test_where_torch_cannot_the_example_says_why(
    example: ModuleType, weight: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    text = run(example, capsys, tmp_path / "model.safetensors")
    assert text.splitlines()[-1] == "torch._scaled_mm is not run: torch has no product of NVFP4 operands on the CPU"
    (row,) = layers(example, capsys, tmp_path / "model.safetensors")
    assert row["snr_torch_db"] is None and row["us_torch"] is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert "compute capability 10.0 or later; NVIDIA H200 has 9.0" in example.why_not_torch("cuda")
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
        assert example.why_not_torch("cuda") is None


@pytest.mark.skipif(not installed(), reason="needs jitfp4[examples]")
def test_layers_of_a_real_model(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = layers(example, capsys, "--layers", 2, "--rows", 4)
    assert [row["shape"] for row in rows] == [[384, 384]] * 2
    assert all(row["bytes_float32"] / row["bytes_w4a16"] > 7 for row in rows)
    assert all(19 < row["snr_w4a16_db"] < 22 and 16 < row["snr_w4a4_db"] < 19 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not installed(), reason="needs jitfp4[examples]")
def test_a_gpu_gives_the_same_quality(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = layers(example, capsys, "--layers", 2, "--device", "cuda")
    assert all(19 < row["snr_w4a16_db"] < 22 and 16 < row["snr_w4a4_db"] < 19 for row in rows)
    if example.why_not_torch("cuda") is None:
        assert all(abs(row["snr_torch_db"] - row["snr_w4a4_db"]) < 0.5 for row in rows)
