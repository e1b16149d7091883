"""FP4 layers as checkpoints keep them, and as jitfp4 takes them.

A layer ``X`` has codes of E2M1, uint8 [n, k / 2], the even element in the low nibble, and block scales row by row: E4M3
in float8_e4m3fn [n, k / 16] for NVFP4, UE8M0 in uint8 [n, k / 32] for MXFP4. Kinds of checkpoints differ in names, and
in the direction of NVFP4's float32 scalars:

| | compressed-tensors, ``nvfp4-pack-quantized`` | ModelOpt, ``NVFP4`` |
|---|---|---|
| codes | ``X.weight_packed`` | ``X.weight`` |
| block scales | ``X.weight_scale`` | ``X.weight_scale`` |
| of the weight | ``X.weight_global_scale``: encode, 448 * 6 / amax | ``X.weight_scale_2``: decode, amax / (448 * 6) |
| of activations | ``X.input_global_scale``: encode | ``X.input_scale``: decode |
| bias | ``X.bias`` | ``X.bias`` |

An element is ``e2m1(code) * scale of its block * decode scale``. The scale of activations is that of a calibration; a
checkpoint that is meant for 16-bit activations has none. compressed-tensors' ``mxfp4-pack-quantized`` has the names of
the first column without the scalars. gpt-oss has the weights of all experts of a layer in one tensor: ``X_blocks``
uint8 [experts, n, k / 32, 16] and ``X_scales`` uint8 [experts, n, k / 32], in which rows of gate and up alternate.
What jitfp4 saves is prepared: ``X.weight`` are tiles, ``X.weight_size`` tells their order, see jitfp4.Fp4Weight;
experts are ``X.w13``, ``X.w2`` and so on, see Fp4Experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from safetensors import safe_open

from jitfp4.errors import ArgumentError
from jitfp4.formats import MXFP4, NVFP4, BlockFormat

STORED_SCALES = {NVFP4.block: torch.float8_e4m3fn, MXFP4.block: torch.uint8}
"""Of block scales, by the elements of a block."""
_SCALAR = "one positive float32"
Get = Callable[[str], torch.Tensor | None]


class Source(StrEnum):
    """Who wrote a layer: what its tensors are called."""

    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    GPT_OSS = "gpt-oss"
    PREPARED = "jitfp4"


@dataclass(frozen=True, slots=True)
class Names:
    """What the tensors of a layer are called, and whether global scales are encode scales."""

    codes: str
    scales: str
    global_scale: str
    input_scale: str
    encode: bool


NAMES = {
    Source.COMPRESSED_TENSORS: Names(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True
    ),
    Source.MODELOPT: Names("weight", "weight_scale", "weight_scale_2", "input_scale", False),
}
_MARKS = {  # the tensor by which a layer is known
    "weight_packed": Source.COMPRESSED_TENSORS,
    "weight_scale_2": Source.MODELOPT,
    "weight_size": Source.PREPARED,
}
_EXPERTS = "w13"  # of a layer of experts that jitfp4 saved
_OTHERS = ("weight_scale", "weight_scale_inv", "qweight")  # a layer that has these, but no mark, is not in FP4
_MORE = ("pre_quant_scale", "weight_zero_point", "weight_g_idx")  # what a product would have to know of


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A linear layer: see above. ``decode_scale`` is the weight's, ``input_encode_scale`` that of activations."""

    codes: torch.Tensor
    scales: torch.Tensor
    decode_scale: torch.Tensor | None
    input_encode_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def format(self) -> BlockFormat:
        """NVFP4 or MXFP4."""
        return MXFP4 if self.decode_scale is None else NVFP4


class Tensors:
    """All tensors of a checkpoint, a .safetensors file or a folder of them, by name. Read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            with safe_open(file, framework="pt") as opened:
                self._files |= dict.fromkeys(opened.keys(), file)

    def names(self) -> list[str]:
        return sorted(self._files)

    def get(self, name: str) -> torch.Tensor | None:
        """None where there is none, else a tensor that kernels take: see aligned()."""
        if name not in self._files:
            return None
        with safe_open(self._files[name], framework="pt") as opened:
            return aligned(opened.get_tensor(name))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and 16-byte aligned: kernels ask for 16 bytes, and safetensors files only give 8."""
    if tensor.is_meta or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def fp4_layers(names: Iterable[str]) -> dict[str, Source]:
    """The FP4 linear layers among the tensors of a checkpoint, by name.

    Raises:
        ArgumentError: if a layer is quantized in another way: its codes would be taken for weights.
    """
    kinds = [name.rpartition(".")[::2] for name in names]
    found = {layer: _MARKS[kind] for layer, kind in kinds if kind in _MARKS}
    for layer, kind in kinds:
        if kind in _MORE:
            raise ArgumentError("checkpoint", f"{layer}.{kind}", "codes, block scales and global scales")
        if kind in _OTHERS and layer not in found:
            raise ArgumentError("checkpoint", f"{layer}.{kind}, of a layer that is not in FP4", "NVFP4 and MXFP4")
    return found


def fp4_experts_of(names: Iterable[str]) -> dict[str, Source]:
    """The layers of experts among the tensors of a checkpoint whose weights of all experts are together, by name."""
    kinds = [name.rpartition(".")[::2] for name in names]
    marks = {_EXPERTS: Source.PREPARED, "gate_up_proj_blocks": Source.GPT_OSS}
    return {layer: marks[kind] for layer, kind in kinds if kind in marks}


def read_layers(path: Path) -> Iterator[tuple[str, Layer]]:
    """Name and layer of every FP4 linear layer of compressed-tensors or ModelOpt, in name order.

    Raises:
        ArgumentError: for a layer that is incomplete, or quantized in another way.
    """
    tensors = Tensors(path)
    for layer, source in sorted(fp4_layers(tensors.names()).items()):
        if source in NAMES:
            yield layer, read_layer(tensors.get, layer, source)


def read_layer(get: Get, layer: str, source: Source) -> Layer:
    """One linear layer; ``get`` gives its tensors by full name, or None. Raises ArgumentError."""
    names = NAMES[source]
    codes, scales = get(f"{layer}.{names.codes}"), get(f"{layer}.{names.scales}")
    if codes is None or codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ArgumentError(f"{layer}.{names.codes}", _told(codes), "codes: uint8 [n, k / 2]")
    n, k = codes.shape[0], 2 * codes.shape[1]
    if scales is not None and scales.dtype == torch.uint8 and tuple(scales.shape) == (n, k // MXFP4.block):
        return Layer(codes=codes, scales=scales, decode_scale=None, bias=get(f"{layer}.bias"))
    if scales is None or scales.dtype != torch.float8_e4m3fn or tuple(scales.shape) != (n, k // NVFP4.block):
        allowed = f"block scales: float8_e4m3fn [{n}, {k // NVFP4.block}] or uint8 [{n}, {k // MXFP4.block}]"
        raise ArgumentError(f"{layer}.{names.scales}", _told(scales), allowed)
    scale = _scalar(get(f"{layer}.{names.global_scale}"), f"{layer}.{names.global_scale}")
    if scale is None:
        raise ArgumentError(f"{layer}.{names.global_scale}", None, _SCALAR)
    of_input = _scalar(get(f"{layer}.{names.input_scale}"), f"{layer}.{names.input_scale}")
    return Layer(
        codes=codes,
        scales=scales,
        decode_scale=1 / scale if names.encode else scale,
        input_encode_scale=of_input if names.encode or of_input is None else 1 / of_input,
        bias=get(f"{layer}.bias"),
    )


def _scalar(value: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """A scale, which is written as [] or [1]."""
    if value is None:
        return None
    if value.dtype != torch.float32 or value.numel() != 1 or not 0 < value.item() < float("inf"):
        raise ArgumentError(name, _told(value), _SCALAR)
    return value.reshape(1)


def _told(tensor: torch.Tensor | None) -> str:
    """A tensor in an error."""
    if tensor is None:
        return "no tensor"
    value = f" of {tensor.item()}" if tensor.numel() == 1 and not tensor.is_meta else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{value}"
