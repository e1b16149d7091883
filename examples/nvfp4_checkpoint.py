"""NVFP4 linear layers as two kinds of checkpoint keep them, and as jitfp4 takes them.

A layer ``X`` has codes of E2M1, uint8 [n, k / 2], the even element in the low nibble, and block scales of E4M3,
float8_e4m3fn [n, k / 16], row by row. So both kinds agree but for names, and for the direction of the float32 scalars:

| | compressed-tensors, ``nvfp4-pack-quantized`` | ModelOpt, ``NVFP4`` |
|---|---|---|
| codes | ``X.weight_packed`` | ``X.weight`` |
| block scales | ``X.weight_scale`` | ``X.weight_scale`` |
| of the weight | ``X.weight_global_scale``: encode, 448 * 6 / amax | ``X.weight_scale_2``: decode, amax / (448 * 6) |
| of activations | ``X.input_global_scale``: encode | ``X.input_scale``: decode |
| bias | ``X.bias`` | ``X.bias`` |

An element is ``e2m1(code) * e4m3(block scale) * decode scale``. The scale of activations is that of a calibration; a
checkpoint that is meant for 16-bit activations has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

BLOCK = 16
_SCALAR = "one positive float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A linear layer: see above. ``decode_scale`` is the weight's, ``input_encode_scale`` that of activations."""

    codes: torch.Tensor
    scales: torch.Tensor
    decode_scale: torch.Tensor
    input_encode_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class Tensors:
    """All tensors of a checkpoint, a .safetensors file or a folder of them, by name. Read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._files = {}
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            with safe_open(file, framework="pt") as opened:
                self._files |= dict.fromkeys(opened.keys(), file)

    def names(self) -> list[str]:
        return sorted(self._files)

    def get(self, name: str) -> torch.Tensor | None:
        """None where there is none. A copy: kernels ask for 16-byte alignment, and the files only give 8."""
        if name not in self._files:
            return None
        with safe_open(self._files[name], framework="pt") as opened:
            return opened.get_tensor(name).clone()


def read_layers(path: Path) -> Iterator[tuple[str, Layer]]:
    """Name and layer of every NVFP4 linear layer, in name order. Raises ValueError for one that is incomplete."""
    tensors = Tensors(path)
    for name in tensors.names():
        layer, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            yield (
                layer,
                _read(tensors, layer, "weight_packed", "weight_global_scale", "input_global_scale", encode=True),
            )
        elif kind == "weight_scale_2":
            yield layer, _read(tensors, layer, "weight", "weight_scale_2", "input_scale", encode=False)


def _read(tensors: Tensors, layer: str, codes_name: str, scale_name: str, input_name: str, *, encode: bool) -> Layer:
    codes, scales = tensors.get(f"{layer}.{codes_name}"), tensors.get(f"{layer}.weight_scale")
    if codes is None or codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"{layer}.{codes_name}: codes must be uint8 [n, k / 2]")
    n, k = codes.shape[0], 2 * codes.shape[1]
    if scales is None or scales.dtype != torch.float8_e4m3fn or tuple(scales.shape) != (n, k // BLOCK):
        raise ValueError(f"{layer}.weight_scale: block scales must be float8_e4m3fn [{n}, {k // BLOCK}]")
    scale = _scalar(tensors.get(f"{layer}.{scale_name}"), f"{layer}.{scale_name}")
    if scale is None:
        raise ValueError(f"{layer}.{scale_name}: must be {_SCALAR}")
    of_input = _scalar(tensors.get(f"{layer}.{input_name}"), f"{layer}.{input_name}")
    return Layer(
        codes=codes,
        scales=scales,
        decode_scale=1 / scale if encode else scale,
        input_encode_scale=of_input if encode or of_input is None else 1 / of_input,
        bias=tensors.get(f"{layer}.bias"),
    )


def _scalar(value: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """A scale, which is written as [] or [1]."""
    if value is None:
        return None
    if value.dtype != torch.float32 or value.numel() != 1 or not 0 < value.item() < float("inf"):
        raise ValueError(f"{name}: must be {_SCALAR}")
    return value.reshape(1)
