"""Linear layers with FP4 weights as torch modules: prepared from a checkpoint or from floats, and fused.

Layers that multiply the same activations, such as the projections to queries, keys and values, are fused where their
global scales allow it: one product gives the outputs of all. Scales that quantized() chooses always allow it, because
they are powers of two: the difference goes into the block scales, whose exponents have room in a prepared weight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.gemm import mm_bf16_fp4, prepare_fp4_weight
from jitfp4.families.quantize import mxfp4_quantize, nvfp4_quantize
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.integrations import fp8
from jitfp4.integrations.checkpoints import NAMES, Layer, Source, aligned, read_layer
from jitfp4.layouts import SfLayout, ceil_div, round_up
from jitfp4.weight import COLS, ROWS, TILE_COLS, TILE_ROWS, Fp4Weight, pack, tile_bytes, unpack

_RANGE = 448 * 6  # the largest scale times the largest code
_EXPONENT_STEP, _ROOM = 1 << 3, 11  # in a scale byte of a tile: one exponent, and how many lie below E4M3's smallest
_NAN = 0xFF
_PARTS = ("weight", "weight_size", "weight_row_scale", "alpha")


def quantized(weight: torch.Tensor, block_format: BlockFormat = NVFP4) -> Layer:
    """A layer without bias from a float weight [n, k] of any size, on its device.

    NVFP4's decode scale is the smallest power of two that does not saturate: block scales are floats, so this costs no
    precision. Columns are padded with zeros to a multiple of 32.
    """
    weight = pad(weight.to(torch.bfloat16), (0, -weight.shape[1] % COLS)).contiguous()
    rows = weight.shape[0]
    if block_format is MXFP4:
        codes, scales = mxfp4_quantize(weight, sfLayout=SfLayout.layout_linear)
        return Layer(codes=codes, scales=scales.view(torch.uint8).view(rows, -1), decode_scale=None)
    fraction, exponent = torch.frexp(weight.abs().amax().float().reshape(1) / _RANGE)
    exponent = torch.where(fraction > 0.5, exponent, exponent - 1)
    decode = torch.where(fraction > 0, torch.ldexp(torch.ones_like(fraction), exponent), 1.0)
    codes, scales = nvfp4_quantize(weight, 1 / decode, SfLayout.layout_linear)
    return Layer(
        codes=codes.view(torch.uint8),
        scales=scales.view(torch.float8_e4m3fn).view(rows, -1),
        decode_scale=decode,
    )


def prepared(layer: Layer, order: str | None = None) -> Fp4Weight:
    """The prepared weight of a layer of any size: n is padded to a multiple of 8, k to one of 32.

    ``order`` is prepare_fp4_weight()'s, of gates and ups: n is then a multiple of 16.
    """
    codes, scales = layer.codes, layer.scales.view(torch.uint8)
    below, right = -codes.shape[0] % ROWS, -2 * codes.shape[1] % COLS
    if below or right:
        codes = pad(codes, (0, right // 2, 0, below))
        scales = pad(scales, (0, right // layer.format.block, 0, below))
    return prepare_fp4_weight(
        aligned(codes), aligned(scales), layer.format.block, sf_layout=SfLayout.layout_linear, order=order
    )


class Expected(nn.Module):
    """Buffers for what a checkpoint has of a linear layer, under its names, until the layer is read.

    Args:
        in_features, out_features: of any size.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._source = Source.PREPARED
        self._expected: tuple[str, ...] = ()

    def expect(self, source: Source, kinds: Collection[str]) -> None:
        """Have buffers for the tensors ``kinds`` that a checkpoint of ``source`` has of this layer."""
        names = NAMES[source]
        empty = {
            names.codes: torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8),
            names.scales: torch.empty(self.out_features, self.in_features // NVFP4.block, dtype=torch.float8_e4m3fn),
            names.global_scale: torch.empty(1, dtype=torch.float32),
            names.input_scale: torch.empty(1, dtype=torch.float32),
        }
        self._source, self._expected = source, tuple(name for name in empty if name in kinds)
        for name in self._expected:
            self.register_buffer(name, empty[name])

    def read(self, name: str) -> Layer:
        """The layer of the tensors that were loaded, whose buffers are gone then. Raises ArgumentError."""
        found = {f"{name}.{kind}": getattr(self, kind) for kind in self._expected}
        layer = read_layer(found.get, name, self._source)
        for kind in self._expected:
            delattr(self, kind)
        self._expected, self._source = (), Source.PREPARED
        return layer


class Fp4Linear(Expected):
    """``x @ weight.T + bias`` with a prepared weight; for float32 inputs x is rounded to bf16 first.

    Buffers: ``weight``, ``weight_size`` and, for MXFP4, ``weight_row_scale`` are Fp4Weight.tensors(); ``alpha`` float32
    [1] is NVFP4's decode scale. They hold nothing before load(), assign() or finish(). Until finish(), a layer that
    expects the tensors of a checkpoint has buffers of their names instead.

    Args:
        in_features, out_features: of any size.
        bias: whether there is one.
        dtype: of the bias.
        block_format: NVFP4 or MXFP4.
    """

    weight: torch.Tensor
    weight_size: torch.Tensor
    weight_row_scale: torch.Tensor | None
    alpha: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, block_format: BlockFormat = NVFP4
    ) -> None:
        super().__init__(in_features, out_features)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        tiles, chunks = ceil_div(out_features, TILE_ROWS), ceil_div(in_features, TILE_COLS)
        row_scale = torch.empty(tiles * TILE_ROWS, dtype=torch.float32) if block_format is MXFP4 else None
        self.register_buffer("weight", torch.empty(tiles, chunks, tile_bytes(block_format), dtype=torch.uint8))
        self.register_buffer("weight_size", torch.empty(3, dtype=torch.int64))
        self.register_buffer("weight_row_scale", row_scale)
        self.register_buffer("alpha", torch.empty(1, dtype=torch.float32) if block_format is NVFP4 else None)
        self._weight: Fp4Weight | None = None
        self._siblings: Siblings | None = None
        self._place = 0
        self.fp8_scale: torch.Tensor | None = None

    def expect(self, source: Source, kinds: Collection[str]) -> None:
        """As of Expected; what jitfp4 saved has the buffers that are there."""
        if source is not Source.PREPARED:
            for name in _PARTS:
                setattr(self, name, None)
            super().expect(source, kinds)

    def expect_floats(self, dtype: torch.dtype) -> None:
        """Have ``weight`` in floats [out_features, in_features]: somebody replaces it by prepared tensors."""
        self.weight = torch.empty(self.out_features, self.in_features, dtype=dtype)

    def finish(self, name: str) -> None:
        """Prepare the weight of the tensors that were loaded; ``name`` is the layer's. Raises ArgumentError."""
        if self.bias is not None:
            self.bias = nn.Parameter(aligned(self.bias), requires_grad=False)
        if self._source is Source.PREPARED:
            named = {"data": aligned(self.weight), "size": self.weight_size}
            if self.weight_row_scale is not None:
                named["row_scale"] = aligned(self.weight_row_scale)
            self.assign(Fp4Weight.from_tensors(named), self.alpha)
            return
        layer = self.read(name)
        for kind in _PARTS:
            self.register_buffer(kind, None)
        self.load(layer)

    def load(self, layer: Layer, order: str | None = None) -> None:
        """Prepare a layer and take it; its bias, too, if it has one. ``order``: as of prepared()."""
        weight = prepared(layer, order)
        size, allowed = (weight.n, weight.k), (round_up(self.out_features, ROWS), round_up(self.in_features, COLS))
        if size != allowed:
            raise ArgumentError("layer", f"a weight of {size}", f"{allowed}")
        self.assign(weight, layer.decode_scale)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias, requires_grad=False)

    def assign(self, weight: Fp4Weight, alpha: torch.Tensor | None) -> None:
        """Take a prepared weight and, for NVFP4, its decode scale, float32 [1]."""
        named = weight.tensors()
        self.weight, self.weight_size = named["data"], named["size"]
        self.weight_row_scale, self.alpha = named.get("row_scale"), alpha
        self._weight, self._siblings, self.fp8_scale = weight, None, None

    @property
    def fused(self) -> bool:
        """Whether the weight is a part of a larger tensor."""
        return self._siblings is not None

    @property
    def prepared(self) -> Fp4Weight:
        """The weight. Raises ArgumentError if none was loaded."""
        if self._weight is None:
            raise ArgumentError("weight", "a layer that has none yet", "load(), assign() or finish() first")
        return self._weight

    @prepared.setter
    def prepared(self, weight: Fp4Weight) -> None:
        self.weight, self._weight = weight.data, weight

    @property
    def in_fp8(self) -> bool:
        """Whether multiply_in_fp8() was called."""
        return (self if self._siblings is None else self._siblings).fp8_scale is not None

    @property
    def multiplied(self) -> Fp4Weight:
        """The weight of the product that is called: of all siblings, where the layer is fused."""
        return self.prepared if self._siblings is None else self._siblings.weight

    def multiply_in_fp8(self) -> None:
        """Quantize activations to E4M3 where there are many rows; see jitfp4.integrations.fp8.

        To be called once the weight is on its device, and after fuse(). Raises ArgumentError.
        """
        if self._siblings is None:
            self.fp8_scale = fp8.row_scale_of(self.prepared)
        elif self._siblings.fp8_scale is None:
            self._siblings.fp8_scale = fp8.row_scale_of(self._siblings.weight)

    def dequantize(self) -> torch.Tensor:
        """The weight in float32 [out_features, in_features]."""
        values = self.prepared.dequantize()[: self.out_features, : self.in_features]
        return values if self.alpha is None else values * self.alpha

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[..., in_features] of a float dtype to [..., out_features] of the same; ``residual`` is added to them."""
        if self._siblings is not None:
            out = self._siblings.output(self._place, x)
        elif residual is not None and residual.dtype == x.dtype in HALVES and self.prepared.n == self.out_features:
            added = regular(residual)
            return product(x, self.prepared, self.alpha, self.bias, self.in_features, added, self.fp8_scale)
        else:
            out = product(x, self.prepared, self.alpha, self.bias, self.in_features, None, self.fp8_scale)
            out = out[..., : self.out_features]
        return out if residual is None else residual + out

    def _apply(self, fn: Any, recurse: bool = True) -> Fp4Linear:
        """As torch's, but alpha and scales of rows keep their dtype. What was fused no longer is, nor in FP8."""
        before = self.alpha, self.weight_row_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in zip(("alpha", "weight_row_scale"), before, strict=True):
            if tensor is not None:
                tensor = getattr(self, name) if tensor.is_meta else tensor
                setattr(self, name, tensor.to(self.weight.device, torch.float32))
        if self._weight is not None:
            self._weight = replace(self._weight, data=self.weight, row_scale=self.weight_row_scale)
        self._siblings = self.fp8_scale = None
        return self

    def extra_repr(self) -> str:
        """What repr() tells of the layer."""
        kind = "" if self._weight is None else f", {'mxfp4' if self.alpha is None else 'nvfp4'}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{kind}"


def product(
    x: torch.Tensor,
    weight: Fp4Weight,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    in_features: int,
    residual: torch.Tensor | None = None,
    fp8_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., in_features] by a weight whose n and k are padded; [..., weight.n] in x's dtype, which a residual has too.

    By a weight of gates and ups, silu(gate) * up of their products; [..., weight.n / 2]. With fp8_scale, that of
    fp8.row_scale_of(), many rows are multiplied in FP8.
    """
    dtype = x.dtype if x.dtype in HALVES else torch.bfloat16
    rows = x.to(dtype)
    if weight.k != in_features:
        rows = pad(rows, (0, weight.k - in_features))
    rows = regular(rows)
    if bias is not None:
        bias = pad(bias.to(dtype), (0, weight.n - bias.shape[0])) if weight.n != bias.shape[0] else bias.to(dtype)
    if fp8_scale is not None:
        return fp8.product(rows, weight, fp8_scale, alpha, bias, residual).to(x.dtype)
    activation = "swiglu" if weight.gated else None
    return mm_bf16_fp4(rows, weight, alpha, bias, activation=activation, residual=residual).to(x.dtype)


def regular(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a 16-bit dtype as kernels take them, elements adjacent and rows 16-byte aligned: a copy where need be."""
    aligned_start = torch.compiler.is_dynamo_compiling() or rows.storage_offset() % 8 == 0
    if rows.stride(-1) == 1 and aligned_start and not any(stride % 8 for stride in rows.stride()[:-1]):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


class Siblings:
    """Layers of one input as one weight. The first to be called computes all outputs; the others get theirs.

    They get them for the same tensor, unless it was written since the first call. While a call is traced, and in
    inference mode, tensors do not count how often they are written: there, nothing may write between siblings.
    """

    def __init__(self, layers: Sequence[Fp4Linear], weight: Fp4Weight, alpha: torch.Tensor | None) -> None:
        self.weight, self.alpha, self.in_features = weight, alpha, layers[0].in_features
        self.bias = _joined_bias(layers)
        self.starts = [0]
        for layer in layers[:-1]:
            self.starts.append(self.starts[-1] + layer.weight.shape[0] * TILE_ROWS)
        self.sizes = [layer.out_features for layer in layers]
        self.fp8_scale: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._written = 0  # how often, when the outputs were computed
        self._outputs: dict[int, torch.Tensor] = {}

    def output(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of the layer at ``place``."""
        written = 0 if torch.compiler.is_dynamo_compiling() or x.is_inference() else x._version
        if self._input is not x or self._written != written or place not in self._outputs:
            out = product(x, self.weight, self.alpha, self.bias, self.in_features, None, self.fp8_scale)
            self._outputs = {
                i: out[..., start : start + size]
                for i, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True))
            }
            self._input, self._written = x, written
        own = self._outputs.pop(place)
        if not self._outputs:
            self._input = None
        return own


def _joined_bias(layers: Sequence[Fp4Linear]) -> torch.Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = []
    for layer in layers:
        size = layer.weight.shape[0] * TILE_ROWS
        bias = layer.weight.new_zeros(layer.out_features, dtype=torch.bfloat16) if layer.bias is None else layer.bias
        parts.append(pad(bias, (0, size - layer.out_features)))
    return torch.cat(parts)


def fuse(layers: Sequence[Fp4Linear]) -> bool:
    """Let layers that get the same input share one product. Returns whether their scales allow it.

    Their weights become parts of one tensor. The sums of a fused layer are those of the layer alone, in an order that
    may differ, as it does for other shapes.
    """
    common = with_one_scale(layers)
    if common is None:
        return False
    weights, alpha = common
    first, data = weights[0], torch.cat([weight.data for weight in weights])
    scales = [weight.row_scale for weight in weights if weight.row_scale is not None]
    row_scale = torch.cat(scales) if scales else None
    whole = Fp4Weight(data, row_scale, data.shape[0] * TILE_ROWS, first.k, first.format)
    siblings, tiles = Siblings(layers, whole, alpha), 0
    for place, (layer, own) in enumerate(zip(layers, weights, strict=True)):
        part = data[tiles : tiles + own.data.shape[0]]
        layer.prepared = replace(own, data=part)
        layer.alpha, layer._siblings, layer._place = alpha, siblings, place
        tiles += own.data.shape[0]
    return True


def with_one_scale(layers: Sequence[Fp4Linear]) -> tuple[list[Fp4Weight], torch.Tensor | None] | None:
    """The weights of layers of one input for one decode scale, and this; None where none gives the same numbers."""
    kinds = {(layer.in_features, layer.prepared.format, layer.weight.device) for layer in layers}
    if len(kinds) != 1 or len(layers) < 2:
        return None
    alphas = [layer.alpha for layer in layers if layer.alpha is not None]
    lowered = _common(alphas) if alphas else [0] * len(layers)
    if lowered is None:
        return None
    alpha = torch.stack(alphas).amax(0) if alphas else None
    weights = (layer.prepared for layer in layers)
    return [replace(own, data=_lowered(own, steps)) for own, steps in zip(weights, lowered, strict=True)], alpha


def _common(alphas: list[torch.Tensor]) -> list[int] | None:
    """By how many powers of two each decode scale is below the largest; None if that is not how they differ."""
    values = [float(alpha) for alpha in alphas]
    steps = []
    for value in values:
        fraction, exponent = torch.frexp(torch.tensor(max(values) / value, dtype=torch.float64))
        if fraction != 0.5 or exponent - 1 > _ROOM:
            return None
        steps.append(int(exponent) - 1)
    return steps


def _lowered(weight: Fp4Weight, steps: int) -> torch.Tensor:
    """The tiles of a weight with block scales divided by 2^steps, exactly."""
    if steps == 0:
        return weight.data
    codes, scales = unpack(weight.data, weight.format)
    scales = torch.where(scales == _NAN, scales, scales - steps * _EXPONENT_STEP)
    return pack(codes, scales)
