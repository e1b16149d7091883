"""Checks of caches, index lists and scales, before anything is written."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection
from dataclasses import dataclass

import torch

from jitfp4 import replay
from jitfp4.dispatch import differ, known, reaches
from jitfp4.dtypes import CODE_DTYPES, SF_DTYPES
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.kv.launches import MAX_THREADS, steps
from jitfp4.formats import NVFP4
from jitfp4.spec import MAX_GRID_YZ
from jitfp4.tensors import LEAST, Pair, check_device, check_dtype, check_same_device, number_f32, pair

APPEND_SF_DTYPES = (torch.float8_e4m3fn,)

_LAYOUTS = ("NHD", "HND")
_V_SF_LAYOUTS = {"linear": False, "interleaved4": True}
_LIMIT = 1 << 32  # of strides in bytes, and of slots: the kernels multiply and divide them in 32 bits
_MAX_TOKENS = 1 << 31
_MAX_BLOCKS = MAX_GRID_YZ // 4 * MAX_THREADS  # of a token. A block is two chunks, and there are two sides

_known_scales: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
"""By identity: a scale, and its version that was found positive and finite."""


@dataclass(frozen=True, slots=True)
class Side:
    """Codes [pages, tokens, heads, d/2] and scales [pages, tokens, heads, d/16] of K or V, as uint8 views."""

    codes: torch.Tensor
    sf: torch.Tensor

    @property
    def head_dim(self) -> int:
        return 2 * self.codes.shape[-1]

    def like(self, other: Side) -> bool:
        """Whether one launch can serve both: equal shapes and strides."""
        pairs = ((self.codes, other.codes), (self.sf, other.sf))
        return all(a.shape == b.shape and steps(a) == steps(b) for a, b in pairs)


def written_pair(name: str, cache: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a cache that is written."""
    k, v = pair(name, cache)
    if k is v:
        raise ArgumentError(name, "one tensor as K and as V", "memory of its own for each")
    return k, v


def sides(
    codes: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    kv_layout: str,
    sf_dtypes: Collection[torch.dtype] = SF_DTYPES[NVFP4],
) -> tuple[Side, Side]:
    """K and V of a paged cache, with scales in the same layout as the codes."""
    k, v = (
        Side(_as_nhd("paged_kv_cache", x, kv_layout, CODE_DTYPES), _as_nhd("kv_cache_sf", sf, kv_layout, sf_dtypes))
        for x, sf in zip(codes, scales, strict=True)
    )
    for side in (k, v):
        check_side("paged_kv_cache", "kv_cache_sf", side)
        check_same_device("paged_kv_cache", side.codes, k.codes)
    if v.codes.shape[:-1] != k.codes.shape[:-1]:
        raise ArgumentError("paged_kv_cache", f"V of {tuple(v.codes.shape)}", f"pages as K's, {tuple(k.codes.shape)}")
    return k, v


def check_side(name: str, sf_name: str, side: Side) -> None:
    """Check that codes and scales fit together, and that the kernels can address them."""
    *place, width = side.codes.shape
    if width == 0 or 2 * width % NVFP4.block:
        raise ArgumentError(name, f"d = {2 * width}", f"a positive multiple of {NVFP4.block}")
    if differ(want := (*place, width // 8), side.sf.shape):
        raise ArgumentError(sf_name, f"{tuple(side.sf.shape)}", f"{want}: pages, tokens, heads and d/16 of the codes")
    check_device(name, side.codes)
    check_same_device(sf_name, side.sf, side.codes)
    _check_strides(name, side.codes, 1)
    _check_strides(sf_name, side.sf, 1)
    if reaches(place[0] * place[1], _LIMIT):
        raise ArgumentError(name, f"{place[0] * place[1]} tokens", "less than 2^32")


def _as_nhd(name: str, tensor: torch.Tensor, kv_layout: str, dtypes: Collection[torch.dtype]) -> torch.Tensor:
    check_dtype(name, tensor, dtypes)
    if tensor.dim() != 4:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", "four dimensions for each of K and V")
    check_unit_stride(name, tensor)
    return nhd(tensor.view(torch.uint8), kv_layout)


def nhd(tensor: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """A view [pages, tokens, heads, ...] of a tensor whose order ``kv_layout`` names."""
    if kv_layout not in _LAYOUTS:
        raise ArgumentError("kv_layout", repr(kv_layout), " or ".join(_LAYOUTS))
    return tensor.transpose(1, 2) if kv_layout == "HND" else tensor


def is_interleaved(v_sf_layout: str, head_dim: int, page_size: int) -> bool:
    """Whether V's scales are interleaved by 4 tokens. Raises ArgumentError where pages or rows are not whole groups."""
    if v_sf_layout not in _V_SF_LAYOUTS:
        raise ArgumentError("v_sf_layout", repr(v_sf_layout), " or ".join(_V_SF_LAYOUTS))
    if _V_SF_LAYOUTS[v_sf_layout] and (page_size % 4 or head_dim % 64):
        got = f"{v_sf_layout} with pages of {page_size} tokens and d = {head_dim}"
        raise ArgumentError("v_sf_layout", got, "page_size % 4 == 0 and d % 64 == 0")
    return _V_SF_LAYOUTS[v_sf_layout]


def check_rows(name: str, x: torch.Tensor, dims: int, dtypes: Collection[torch.dtype]) -> None:
    """Check ``x``: ``dims`` dimensions, the last of contiguous whole blocks, other strides multiples of 16 bytes."""
    check_dtype(name, x, dtypes)
    check_device(name, x)
    if x.dim() != dims or x.shape[-1] == 0 or x.shape[-1] % NVFP4.block:
        allowed = f"{dims} dimensions, the last a positive multiple of {NVFP4.block}"
        raise ArgumentError(name, f"shape {tuple(x.shape)}", allowed)
    check_unit_stride(name, x)
    _check_strides(name, x, 16)


def check_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Check that the last dimension is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ArgumentError(name, f"strides {tensor.stride()}", "unit stride in the last dimension")


def _check_strides(name: str, tensor: torch.Tensor, multiple: int) -> None:
    if known(tensor.numel() == 0):
        return
    for size, step in zip(tensor.shape, steps(tensor), strict=False):
        step *= tensor.element_size()
        if step % multiple or step >= _LIMIT or (step == 0 and size > 1):
            allowed = f"positive multiples of {multiple} bytes below 2^32"
            raise ArgumentError(name, f"strides {tensor.stride()}", allowed)


def check_work(name: str, tokens: int, blocks: int) -> None:
    """Check the limits of the kernels: tokens are counted in 31 bits, and a grid holds _MAX_BLOCKS of a token."""
    if reaches(tokens, _MAX_TOKENS) or blocks > _MAX_BLOCKS:
        allowed = f"less than 2^31 tokens, of at most {_MAX_BLOCKS} blocks of 16 elements"
        raise ArgumentError(name, f"{tokens} tokens of {blocks} blocks", allowed)


def decode_scales(
    k_scale: torch.Tensor | float, v_scale: torch.Tensor | float, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both decode scales, checked to be positive and finite: one float32 each on ``like``'s device.

    The values of tensors are read with one copy to the host, unless they were read before and have not changed since.
    While a CUDA graph is captured, no value may be read: then tensors must be on ``like``'s device, and their values
    are not checked.
    """
    capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    given = {"k_scale": k_scale, "v_scale": v_scale}
    tensors = {name: scale for name, scale in given.items() if isinstance(scale, torch.Tensor)}
    k, v = (_decode_scale(name, scale, like, capturing) for name, scale in given.items())
    if not (capturing or torch.compiler.is_compiling() or like.is_meta):
        unread = {name: scale for name, scale in tensors.items() if not _is_known(scale)}
        for (name, scale), value in zip(unread.items(), _read(unread.values(), like.device), strict=True):
            _check_decode_scale(name, value)
            _know(scale)
    if tensors:
        replay.require(_are_good, *tensors.values())
    return k, v


def _are_good(*scales: torch.Tensor) -> bool:
    """Whether decode_scales() would take scales that differ from those of an earlier call only in their values."""
    for scale in scales:
        if not (scale.is_cuda and _is_known(scale)):
            break
    else:
        return True
    if torch.cuda.is_current_stream_capturing():
        return all(scale.is_cuda for scale in scales)
    unread = [scale for scale in scales if not _is_known(scale)]
    good = not unread or all(_is_decode_scale(value) for value in _read(unread, unread[0].device))
    for scale in unread if good else ():
        _know(scale)
    return good


def _read(scales: Collection[torch.Tensor], device: torch.device) -> list[float]:
    """The values of scales, by one copy to the host."""
    return torch.stack([x.detach().reshape(()).to(device) for x in scales]).tolist() if scales else []


def _is_known(scale: torch.Tensor) -> bool:
    known = _known_scales.get(id(scale))
    return known is not None and known[0]() is scale and known[1] == scale._version


def _know(scale: torch.Tensor) -> None:
    """Remember that a scale was checked. A tensor of inference mode has no version: it is read each time."""
    if not scale.is_inference():
        number = id(scale)
        _known_scales[number] = weakref.ref(scale, lambda _: _known_scales.pop(number, None)), scale._version


def _decode_scale(name: str, scale: torch.Tensor | float, like: torch.Tensor, capturing: bool) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        check_dtype(name, scale, (torch.float32,))
        if scale.is_meta and not like.is_meta:
            raise ArgumentTypeError(name, "a tensor on meta", "a tensor with a value")
        if scale.numel() != 1:
            raise ArgumentError(name, f"{scale.numel()} elements", "one")
        if capturing and scale.device != like.device:
            allowed = f"a number or a tensor on {like.device}, while a CUDA graph is captured"
            raise ArgumentError(name, f"a tensor on {scale.device}", allowed)
        device = like.device
        return scale if scale.device == device else replay.temporary(lambda x: x.to(device), scale)
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise ArgumentTypeError(name, type(scale).__name__, "a number or a tensor")
    _check_decode_scale(name, float(scale))
    return number_f32(float(scale), like)


def _is_decode_scale(value: float) -> bool:
    return math.isfinite(value) and value > LEAST


def _check_decode_scale(name: str, value: float) -> None:
    if not _is_decode_scale(value):
        raise ArgumentError(name, value, "a positive finite decode scale")
