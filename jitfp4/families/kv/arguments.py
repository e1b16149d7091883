"""Checks of caches, lists and scales, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.kv.operation import steps
from jitfp4.formats import NVFP4
from jitfp4.tensors import check_contiguous, check_dtype, check_same_device

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]

CODE_DTYPES = (torch.uint8, *([torch.float4_e2m1fn_x2] if hasattr(torch, "float4_e2m1fn_x2") else []))
APPEND_SF_DTYPES = (torch.float8_e4m3fn,)
SF_DTYPES = (*APPEND_SF_DTYPES, torch.uint8)
INDEX_DTYPES = (torch.int32, torch.int64)
_LAYOUTS = ("NHD", "HND")
_V_SF_LAYOUTS = {"linear": False, "interleaved4": True}
_LIMIT = 1 << 32  # of strides in bytes and of slots: the kernels multiply and divide in 32 bits

_known_scales = WeakTensorKeyDictionary()  # a scale to the version of it that was found positive and finite


class Side(NamedTuple):
    """Codes [pages, tokens, heads, d/2] and scales [pages, tokens, heads, d/16] of K or V, as uint8 views."""

    codes: torch.Tensor
    sf: torch.Tensor

    @property
    def head_dim(self) -> int:
        return 2 * self.codes.shape[-1]

    def like(self, other: Side) -> bool:
        """Whether one launch can serve both: equal shapes and strides."""
        return all(a.shape == b.shape and steps(a) == steps(b) for a, b in zip(self, other, strict=True))


def sides(
    cache: Cache, cache_sf: Cache, layout: str, sf_dtypes: Sequence[torch.dtype] = SF_DTYPES
) -> tuple[Side, Side]:
    """K and V of a paged cache, whose scales lie as its codes do."""
    codes = unpack("paged_kv_cache", cache, layout, CODE_DTYPES)
    scales = unpack("kv_cache_sf", cache_sf, layout, sf_dtypes)
    found = Side(codes[0], scales[0]), Side(codes[1], scales[1])
    for side in found:
        *place, width = side.codes.shape
        if width == 0 or 2 * width % NVFP4.block:
            raise ArgumentError("paged_kv_cache", f"d = {2 * width}", "a positive multiple of 16")
        if (want := (*place, width // 8)) != tuple(side.sf.shape):
            raise ArgumentError("kv_cache_sf", f"shape {tuple(side.sf.shape)}", f"{want}, as [page, token, head, d/16]")
        if place != list(codes[0].shape[:-1]):
            raise ArgumentError("paged_kv_cache", f"V of {place}", f"K's pages, tokens and heads: {codes[0].shape[:-1]}")
        check_same_device("paged_kv_cache", side.codes, codes[0])
        check_same_device("kv_cache_sf", side.sf, codes[0])
        _check_strides("paged_kv_cache", side.codes, 8)
        _check_strides("kv_cache_sf", side.sf, 1)
    if codes[0].shape[0] * codes[0].shape[1] >= _LIMIT:
        raise ArgumentError("paged_kv_cache", f"{codes[0].shape[0] * codes[0].shape[1]} slots", "less than 2^32")
    return found


def unpack(
    name: str, cache: Cache, layout: str, dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a cache, given stacked or as a pair, as [pages, tokens, heads, ...] views; bytes as uint8."""
    if isinstance(cache, torch.Tensor):
        check_dtype(name, cache, dtypes)
        if cache.dim() != 5 or cache.shape[1] != 2:
            raise ArgumentError(name, f"shape {tuple(cache.shape)}", "[pages, 2, ...], five dimensions, or a pair")
        cache = cache.unbind(1)
    if not isinstance(cache, (tuple, list)) or len(cache) != 2:
        raise ArgumentTypeError(name, type(cache).__name__, "a tensor [pages, 2, ...] or a pair of tensors, K and V")
    k, v = (_as_nhd(name, side, layout, dtypes) for side in cache)
    return k, v


def _as_nhd(name: str, tensor: torch.Tensor, layout: str, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    check_dtype(name, tensor, dtypes)
    if tensor.dim() != 4:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", "four dimensions for each of K and V")
    if tensor.stride(-1) != 1:
        raise ArgumentError(name, f"strides {tensor.stride()}", "unit stride in the last dimension")
    seen = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return seen.transpose(1, 2) if check_kv_layout(layout) == "HND" else seen


def check_kv_layout(layout: str) -> str:
    """``layout`` is one of the two orders of a page."""
    if layout not in _LAYOUTS:
        raise ArgumentError("kv_layout", repr(layout), " or ".join(_LAYOUTS))
    return layout


def check_v_sf_layout(layout: str, head_dim: int, page_size: int) -> bool:
    """Whether V's scales are interleaved by 4 tokens, which asks for whole groups of tokens and of columns."""
    if layout not in _V_SF_LAYOUTS:
        raise ArgumentError("v_sf_layout", repr(layout), " or ".join(_V_SF_LAYOUTS))
    if _V_SF_LAYOUTS[layout] and (page_size % 4 or head_dim % 64):
        raise ArgumentError(
            "v_sf_layout", f"{layout} with pages of {page_size} and d = {head_dim}", "page_size % 4 == 0, d % 64 == 0"
        )
    return _V_SF_LAYOUTS[layout]


def check_rows(name: str, x: torch.Tensor, dims: int, dtypes: Sequence[torch.dtype]) -> None:
    """``x`` has ``dims`` dimensions, a last one of whole blocks, contiguous, and the others at multiples of 16 bytes."""
    check_dtype(name, x, dtypes)
    if x.dim() != dims or x.shape[-1] == 0 or x.shape[-1] % NVFP4.block:
        raise ArgumentError(
            name, f"shape {tuple(x.shape)}", f"{dims} dimensions, the last a positive multiple of {NVFP4.block}"
        )
    if x.stride(-1) != 1:
        raise ArgumentError(name, f"strides {x.stride()}", "unit stride in the last dimension")
    _check_strides(name, x, 16)


def _check_strides(name: str, tensor: torch.Tensor, multiple: int) -> None:
    for step in steps(tensor):
        size = step * tensor.element_size()
        if size % multiple or size >= _LIMIT:
            raise ArgumentError(name, f"strides {tensor.stride()}", f"multiples of {multiple} bytes below 2^32")


def check_list(name: str, values: torch.Tensor, like: torch.Tensor, size: int | None = None) -> None:
    """``values`` is a contiguous list of integers on ``like``'s device, of ``size`` entries unless that is None."""
    check_dtype(name, values, INDEX_DTYPES)
    check_same_device(name, values, like)
    check_contiguous(name, values)
    if values.dim() != 1 or (size is not None and values.numel() != size):
        raise ArgumentError(name, f"shape {tuple(values.shape)}", "one dimension" if size is None else f"({size},)")


def decode_scales(
    k_scale: torch.Tensor | float, v_scale: torch.Tensor | float, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both decode scales as one float32 each on ``like``'s device, positive and finite.

    The values of tensors are read with one copy to the host, unless they were read before and have not changed since.
    While a CUDA graph is captured nothing may be read or made: only a tensor that is right is taken.
    """
    capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    given = {"k_scale": k_scale, "v_scale": v_scale}
    k, v = (_decode_scale(name, scale, like, capturing) for name, scale in given.items())
    if not (capturing or torch.compiler.is_compiling() or like.is_meta):
        unread = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and not _is_known(x)}
        if unread:
            values = torch.stack([x.detach().reshape(()).to(like.device) for x in unread.values()]).tolist()
            for (name, scale), value in zip(unread.items(), values, strict=True):
                _check_decode_scale(name, value)
                if not scale.is_inference():
                    _known_scales[scale] = scale._version
    return k, v


def _is_known(scale: torch.Tensor) -> bool:
    return not scale.is_inference() and _known_scales.get(scale) == scale._version


def _decode_scale(name: str, scale: torch.Tensor | float, like: torch.Tensor, capturing: bool) -> torch.Tensor:
    allowed = f"one float32 on {like.device}, while a CUDA graph is captured"
    if isinstance(scale, torch.Tensor):
        check_dtype(name, scale, (torch.float32,))
        if scale.numel() != 1:
            raise ArgumentError(name, f"{scale.numel()} elements", "one")
        if capturing and scale.device != like.device:
            raise ArgumentError(name, f"a tensor on {scale.device}", allowed)
        return scale if scale.device == like.device else scale.to(like.device)
    if not isinstance(scale, (int, float)):
        raise ArgumentTypeError(name, type(scale).__name__, "a number or a tensor")
    if capturing:
        raise ArgumentError(name, scale, allowed)
    _check_decode_scale(name, float(scale))
    return torch.full((1,), float(scale), dtype=torch.float32, device=like.device)


def _check_decode_scale(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(name, value, "a positive finite decode scale")
