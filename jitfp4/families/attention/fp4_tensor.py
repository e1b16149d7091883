"""Attention whose output is NVFP4: an FP4Tensor, which a second launch fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from jitfp4 import replay
from jitfp4.addresses import ALIGNMENT, extent, meet
from jitfp4.dispatch import differ
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.attention.arguments import OutputArguments
from jitfp4.families.attention.call import Call, attend
from jitfp4.families.attention.output_operation import ATTENTION_QUANTIZE
from jitfp4.formats import NVFP4
from jitfp4.layouts import SfLayout
from jitfp4.replay import replayed
from jitfp4.tensors import LEAST, check_contiguous, check_dtype, check_same_device

_ROWS = 128  # of a tile of scales


@dataclass(frozen=True, slots=True, eq=False)
class FP4Tensor:
    """Codes and scales of an NVFP4 tensor, with FlashInfer's names. Its scales may be rows of a larger matrix.

    Attributes:
        data: uint8 [..., k/2], two codes in each byte.
        scale: float8_e4m3fn [rows, columns], block scales in the 128x4 layout; rows is a multiple of 128.
        scale_start_index: the row of ``scale`` that belongs to the first row of ``data``.
        original_shape: the shape [..., k] of what was quantized, or None.
    """

    data: torch.Tensor
    scale: torch.Tensor
    scale_start_index: int = 0
    original_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check(self, "")
        shape, codes = self.original_shape, self.data.shape
        if shape is not None and not isinstance(shape, tuple):
            raise ArgumentTypeError("original_shape", type(shape).__name__, "a tuple or None")
        if shape is not None and differ(shape, (*codes[:-1], 2 * codes[-1])):
            raise ArgumentError("original_shape", f"{shape}", f"{(*codes[:-1], 2 * codes[-1])}")

    @property
    def dtype(self) -> str:
        """ "nvfp4"."""
        return "nvfp4"


def _check(tensor: Any, prefix: str) -> None:
    """Check an FP4Tensor of this package or of FlashInfer; ``prefix`` goes before the names in errors."""
    data, scale, start = tensor.data, tensor.scale, tensor.scale_start_index
    check_dtype(f"{prefix}data", data, (torch.uint8,))
    check_dtype(f"{prefix}scale", scale, (torch.float8_e4m3fn,))
    check_same_device(f"{prefix}scale", scale, data)
    check_contiguous(f"{prefix}data", data)
    check_contiguous(f"{prefix}scale", scale)
    if data.dim() < 2:
        raise ArgumentError(f"{prefix}data", f"shape {tuple(data.shape)}", "[..., k/2], two dimensions or more")
    if scale.dim() != 2 or scale.shape[0] % _ROWS:
        raise ArgumentError(f"{prefix}scale", f"shape {tuple(scale.shape)}", "[rows, columns], rows a multiple of 128")
    if type(start) is not int:
        raise ArgumentTypeError(f"{prefix}scale_start_index", type(start).__name__, "an int")
    if data.shape[0] > scale.shape[0]:
        raise ArgumentError(f"{prefix}scale", f"{scale.shape[0]} rows", f"at least {data.shape[0]}, as data has")
    if not 0 <= start <= scale.shape[0] - data.shape[0]:
        allowed = f"0 to {scale.shape[0] - data.shape[0]}: {data.shape[0]} rows in {scale.shape[0]}"
        raise ArgumentError(f"{prefix}scale_start_index", start, allowed)


def attend_to_fp4(call: Call, out: object, o_sf_scale: float | None, o_sf_vec_size: int | None) -> tuple[Any, ...]:
    """attend(), then its output, which ``call.out_dtype`` rounds, to NVFP4. Returns (FP4Tensor,) or (FP4Tensor, lse).

    ``out`` is an FP4Tensor, also FlashInfer's, or None. Raises ArgumentError, ArgumentTypeError before anything is
    written.
    """
    if o_sf_scale is None or not o_sf_scale > LEAST:
        raise ArgumentError("o_sf_scale", o_sf_scale, "a finite number above 0, as float32, for NVFP4 output")
    if o_sf_vec_size not in (None, NVFP4.block):
        raise ArgumentError("o_sf_vec_size", o_sf_vec_size, f"None or {NVFP4.block}")
    query = call.query
    tokens, heads, d = query.shape
    shape, columns = (tokens, heads, d // 2), SfLayout.layout_128x4.shape(1, heads * d // NVFP4.block)[1]
    if out is None:
        rows = SfLayout.layout_128x4.shape(tokens, 1)[0]
        data = torch.empty(shape, dtype=torch.uint8, device=query.device)
        scale = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=query.device)
        result: Any = FP4Tensor(data, scale, 0, tuple(query.shape))
    else:
        result = _given(out, shape, columns, query)
    results = _attend_again(result.data, result.scale.view(torch.uint8), result.scale_start_index, o_sf_scale, *call)
    return (result, *results[1:])


def _given(out: Any, shape: tuple[int, ...], columns: int, query: torch.Tensor) -> Any:
    """The FP4Tensor of a caller, checked."""
    if type(out).__name__ != FP4Tensor.__name__:
        raise ArgumentTypeError("out", type(out).__name__, "an FP4Tensor or None, for NVFP4 output")
    _check(out, "out.")
    data, scale = out.data, out.scale
    check_same_device("out.data", data, query)
    if differ(data.shape, shape):
        raise ArgumentError("out.data", f"shape {tuple(data.shape)}", f"{shape}")
    if differ(scale.shape[1:], (columns,)):
        raise ArgumentError("out.scale", f"shape {tuple(scale.shape)}", f"[rows, {columns}]")
    for name, tensor in (("out.data", data), ("out.scale", scale)):
        if not torch.compiler.is_dynamo_compiling() and tensor.data_ptr() % ALIGNMENT:
            raise ArgumentError(name, "an unaligned address", f"a multiple of {ALIGNMENT} bytes")
    if not torch.compiler.is_dynamo_compiling() and data.numel() and meet(extent(data), extent(scale)):
        raise ArgumentError("out.scale", "memory of out.data", "memory of its own")
    return out


@replayed
def _attend_again(
    data: torch.Tensor, scales: torch.Tensor, first_row: int, encode_scale: float, *fields: Any
) -> tuple[torch.Tensor, ...]:
    call = Call(*fields)
    tokens, heads, d = call.query.shape
    values = replay.scratch((tokens, heads, d), call.out_dtype or call.query.dtype, call.query)
    results = attend(call._replace(out=values))
    ATTENTION_QUANTIZE(
        OutputArguments(
            x=values.view(tokens, heads * d),
            out=data.view(tokens, heads * d // 2),
            out_scales=scales,
            first_row=first_row,
            encode_scale=encode_scale,
            enable_pdl=call.enable_pdl,
        )
    )
    return (data, *results[1:])
