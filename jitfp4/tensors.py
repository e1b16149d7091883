"""Checks of tensors and allocation of outputs, for all families.

The error of a check names the argument, what it got, and what is allowed. Checks run before anything is written. They
do not depend on addresses, which ``torch.compile`` does not see; operations check those.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum

import torch

from jitfp4 import replay
from jitfp4.arch import Arch
from jitfp4.dispatch import current_stream, differ, exchange_device, is_among, is_watched
from jitfp4.dtypes import FLOATS, INDEX_DTYPES
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.layouts import SfLayout

Pair = torch.Tensor | Sequence[torch.Tensor]
"""K and V of a cache: one tensor with both in its second dimension, or a pair of tensors."""

LEAST = 2.0**-150
"""float32 rounds it, and what is less, to 0."""
_MOST_NUMBERS = 1024
_numbers: dict[tuple[float, torch.device], torch.Tensor | None] = {}  # None for a number that came once
_LEAST_COUNTED, _MOST_COUNTED = 10, 1 << 20
_counts: dict[torch.device, list[torch.Tensor]] = {}  # int32 [0, 1, ...], each longer than the one before
_counted: dict[tuple[torch.device, int, int], torch.Tensor] = {}  # parts of them
_numbering = threading.Lock()
_LAYOUTS = {int(layout): layout for layout in SfLayout}


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Collection[torch.dtype]) -> None:
    """Check that ``tensor`` is a torch tensor of one of ``dtypes``."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(name, type(tensor).__name__, "a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise ArgumentTypeError(name, tensor.dtype, " or ".join(map(str, dtypes)))


def check_strided(name: str, *tensors: torch.Tensor) -> None:
    """Check that the memory of every tensor holds its values: none is sparse, quantized, or a negated view."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ArgumentTypeError(name, f"a tensor of layout {tensor.layout}", "a strided tensor")
        if torch.compiler.is_dynamo_compiling():
            continue
        if tensor.is_quantized:
            raise ArgumentTypeError(name, f"a quantized tensor, {tensor.dtype}", "a plain tensor")
        if tensor.is_neg():
            raise ArgumentTypeError(name, "a negated view", "a tensor whose memory holds its values: resolve_neg()")


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Check that ``tensor`` is on a CUDA device, on the CPU, or on the meta device."""
    if not (tensor.is_cuda or tensor.is_cpu or tensor.is_meta):
        raise ArgumentTypeError(name, f"a tensor on {tensor.device}", "a CUDA or CPU tensor")


def check_same_device(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Check that ``tensor`` is on the device of ``like``."""
    if tensor.device != like.device:
        raise ArgumentTypeError(name, f"a tensor on {tensor.device}", f"a tensor on {like.device}, as the input")


def as_rows(name: str, tensor: torch.Tensor, block: int) -> torch.Tensor:
    """``tensor`` as [m, k], its leading dimensions flattened without a copy.

    Checks that k is a positive multiple of ``block``, that the elements of a row are adjacent, that rows do not
    overlap, and that the distance between rows is a multiple of 16 bytes.
    """
    if tensor.dim() < 2:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", "[..., m, k]")
    k = tensor.shape[-1]
    if k == 0 or k % block:
        raise ArgumentError(name, f"k = {k}", f"a positive multiple of {block}")
    if tensor.stride(-1) != 1:
        raise ArgumentError(name, f"strides {tensor.stride()}", "unit stride in the last dimension")
    try:
        rows = tensor if tensor.dim() == 2 else tensor.view(-1, k)
    except RuntimeError:
        raise ArgumentError(name, f"strides {tensor.stride()}", "dimensions that flatten to rows") from None
    stride = rows.stride(0)
    if stride != k and rows.shape[0] > 1:
        if stride < k:
            raise ArgumentError(name, f"strides {tensor.stride()}", "rows that do not overlap")
        if stride * rows.element_size() % 16:
            raise ArgumentError(name, f"a row stride of {stride} elements", "a multiple of 16 bytes")
    return rows


def pair(name: str, tensors: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a pair, or of one tensor with both."""
    if isinstance(tensors, torch.Tensor):
        if tensors.dim() != 5 or tensors.shape[1] != 2:
            raise ArgumentError(name, f"shape {tuple(tensors.shape)}", "[pages, 2, ...], five dimensions, or a pair")
        check_strided(name, tensors)
        return tensors[:, 0], replay.part(tensors[:, 1], tensors)
    allowed = "a tensor [pages, 2, ...] or a pair of tensors, K and V"
    if not isinstance(tensors, (tuple, list)):
        raise ArgumentTypeError(name, type(tensors).__name__, allowed)
    if len(tensors) != 2 or not all(isinstance(side, torch.Tensor) for side in tensors):
        raise ArgumentTypeError(name, f"({', '.join(type(side).__name__ for side in tensors)})", allowed)
    check_strided(name, *tensors)
    return tensors[0], tensors[1]


def scales_f32(name: str, scales: torch.Tensor | float, sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """``scales`` as contiguous float32 on ``like``'s device, of one of ``sizes`` elements (1 also for a Python number).

    The values of a tensor are never read by the host.
    """
    if isinstance(scales, (int, float)):
        if not scales > LEAST:
            raise ArgumentError(name, scales, "a finite number above 0, as float32")
        return number_f32(float(scales), like)
    check_dtype(name, scales, FLOATS)
    if not is_among(scales.numel(), sizes):
        raise ArgumentError(name, f"{scales.numel()} elements", " or ".join(map(str, dict.fromkeys(sizes))))
    check_same_device(name, scales, like)
    check_contiguous(name, scales)
    return scales if scales.dtype == torch.float32 else replay.temporary(torch.Tensor.float, scales)


def number_f32(value: float, like: torch.Tensor) -> torch.Tensor:
    """A number as one float32 on ``like``'s device, for a launch to read."""
    return replay.temporary(functools.partial(_number, value, like.device))


def _number(value: float, device: torch.device) -> torch.Tensor:
    """A new tensor; for a number that comes again on a GPU one that stays, which nobody writes.

    The host waits until that one is filled, because launches on every stream and in every graph may read it.
    """
    if device.type == "cuda" and not (torch.compiler.is_dynamo_compiling() or is_watched()):
        key = value, device
        if (known := _numbers.get(key)) is not None:
            return known
        if not torch.cuda.is_current_stream_capturing():
            with _numbering, torch.inference_mode(False):
                if key in _numbers:
                    if (known := _numbers[key]) is None:
                        known = _numbers[key] = torch.tensor([value], dtype=torch.float32, device=device)
                    return known
                if len(_numbers) < _MOST_NUMBERS:
                    _numbers[key] = None
    return torch.full((1,), value, dtype=torch.float32, device=device)


def counting_i32(start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """The int32 numbers from ``start`` to ``stop`` on ``like``'s device, for a launch to read."""
    return replay.temporary(functools.partial(_count, start, stop, like.device))


def _count(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """On a GPU part of a tensor that stays, which nobody writes; a new tensor where that cannot be made."""
    if device.type == "cuda" and not (torch.compiler.is_dynamo_compiling() or is_watched()):
        if (known := _counted.get((device, start, stop))) is not None:
            return known
        if stop <= _MOST_COUNTED and not torch.cuda.is_current_stream_capturing():
            with _numbering, torch.inference_mode(False):
                if device not in _counts or len(_counts[device][-1]) < stop:  # graphs may read the others
                    size = 1 << max(_LEAST_COUNTED, (stop - 1).bit_length())
                    numbers = torch.arange(size, dtype=torch.int32, device="cpu")
                    _counts.setdefault(device, []).append(numbers.to(device))  # the host waits, as for _number()
                if len(_counted) >= _MOST_NUMBERS:
                    _counted.clear()
                return _counted.setdefault((device, start, stop), _counts[device][-1][start:stop])
    return torch.arange(start, stop, dtype=torch.int32, device=device)


def scalar_f32(name: str, scalar: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """``scalar`` as one float32 on ``like``'s device."""
    return scales_f32(name, scalar, (1,), like)


def check_layout(name: str, layout: object) -> SfLayout:
    """The SfLayout for ``layout``: an SfLayout of FlashInfer or of this package, or its integer value."""
    if not (type(layout) is int or isinstance(layout, IntEnum)) or int(layout) not in _LAYOUTS:
        raise ArgumentError(name, repr(layout), "layout_128x4 (0), layout_8x4 (1) or layout_linear (2)")
    return _LAYOUTS[int(layout)]


def layout_of_flags(swizzled: bool, tile_8x4: bool) -> SfLayout:
    """The layout that FlashInfer's is_sf_swizzled_layout and is_sf_8x4_layout name together."""
    if tile_8x4 and not swizzled:
        raise ArgumentError("is_sf_8x4_layout", "True without is_sf_swizzled_layout", "8x4 only as a swizzled layout")
    return SfLayout.layout_8x4 if tile_8x4 else SfLayout.layout_128x4 if swizzled else SfLayout.layout_linear


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Check that ``tensor`` is dense in row-major order; it is never copied to make it so."""
    if not tensor.is_contiguous():
        raise ArgumentError(name, f"strides {tensor.stride()}", "a contiguous tensor")


def check_list(name: str, values: torch.Tensor, like: torch.Tensor, size: int | None = None) -> None:
    """Check that ``values`` is a contiguous list of integers on ``like``'s device, of ``size`` entries unless None."""
    check_dtype(name, values, INDEX_DTYPES)
    check_same_device(name, values, like)
    check_contiguous(name, values)
    if values.dim() != 1 or (size is not None and differ(values.shape, (size,))):
        raise ArgumentError(name, f"shape {tuple(values.shape)}", "one dimension" if size is None else f"({size},)")


def output(
    name: str,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtypes: Sequence[torch.dtype],
    like: torch.Tensor,
) -> torch.Tensor:
    """``out``, checked, or a new tensor of ``shape`` and ``dtypes[0]`` if the caller gave none."""
    if out is None:
        return torch.empty(shape, dtype=dtypes[0], device=like.device)
    check_dtype(name, out, dtypes)
    check_same_device(name, out, like)
    if differ(out.shape, shape):
        raise ArgumentError(name, f"shape {tuple(out.shape)}", f"{shape}")
    check_contiguous(name, out)
    return out


def writing(*tensors: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which torch's operations write into ``tensors`` as a kernel does: without autograd, and also into
    those that were made in torch.inference_mode().
    """
    if not torch.compiler.is_dynamo_compiling() and any(tensor.is_inference() for tensor in tensors):
        return torch.inference_mode()
    return torch.no_grad()


@functools.cache
def device_arch(index: int) -> Arch:
    """The architecture of CUDA device ``index``."""
    return Arch.of_capability(*torch.cuda.get_device_capability(index))


@functools.cache
def device_name(index: int) -> str:
    """The driver's name of CUDA device ``index``, such as ``NVIDIA H200``."""
    return torch.cuda.get_device_name(index)


class on_device:  # noqa: N801 - used as a statement: with on_device(index) as stream
    """Makes CUDA device ``index`` current and yields its current raw stream."""

    __slots__ = ("_index", "_previous")

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> int:
        self._previous = exchange_device(self._index)
        return current_stream(self._index)

    def __exit__(self, *_: object) -> None:
        if self._previous != self._index:
            exchange_device(self._previous)
