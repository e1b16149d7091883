"""Checks of the arguments of the public functions, all but addresses, before anything is written."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from jitfp4 import replay
from jitfp4.dispatch import differ, reaches
from jitfp4.dtypes import CODE_DTYPES, HALVES
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.attention.arguments import by_token
from jitfp4.families.attention.problem import (
    CACHES,
    DTYPES,
    HEAD_DIMS,
    MAX_GROUP,
    MAX_PAGE,
    MAX_Q_LEN,
    MAX_TOKENS,
    TILE,
)
from jitfp4.formats import NVFP4
from jitfp4.layouts import ceil_div
from jitfp4.tensors import Pair as Pair
from jitfp4.tensors import check_contiguous, check_device, check_dtype, check_same_device, check_strided
from jitfp4.tensors import pair as pair

_MAX_WORK = 1 << 31
_GROUP = 4  # tokens whose V scales are interleaved


@dataclass(frozen=True, slots=True)
class CheckedCache:
    """K and V of a checked cache, and their scales."""

    key: torch.Tensor
    value: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    heads: int
    page: int
    interleaved: bool


def check_layout(kv_layout: str) -> bool:
    """Whether ``kv_layout`` puts heads before tokens. Raises ArgumentError for an unknown one."""
    if kv_layout not in ("HND", "NHD"):
        raise ArgumentError("kv_layout", repr(kv_layout), "'HND' or 'NHD'")
    return kv_layout == "HND"


def check_query(query: torch.Tensor) -> None:
    """Check that ``query`` is [tokens, heads, d] with aligned rows of d elements."""
    check_dtype("query", query, tuple(DTYPES))
    check_device("query", query)
    if query.dim() != 3 or query.shape[2] not in HEAD_DIMS:
        raise ArgumentError("query", f"shape {tuple(query.shape)}", f"[tokens, heads, d] with d one of {HEAD_DIMS}")
    bytes_ = [stride * query.element_size() for stride in query.stride()]
    if query.stride(2) != 1 or bytes_[0] % 16 or bytes_[1] % 16:
        raise ArgumentError("query", f"strides {query.stride()}", "rows of d elements at multiples of 16 bytes")


def check_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    query: torch.Tensor,
    *,
    hnd: bool,
    interleaved: bool,
) -> CheckedCache:
    """Check that a cache fits ``query``, and that it has scales if it is NVFP4 (uint8), else none."""
    for side in (key, value):
        check_dtype("kv_cache", side, tuple(CACHES))
    key, value = (side.view(torch.uint8) if side.dtype in CODE_DTYPES else side for side in (key, value))
    if key.dtype.itemsize == 2:
        check_dtype("kv_cache", key, (query.dtype,))
    d = query.shape[2]
    _, page, heads = _sizes(key, hnd)
    for side in (key, value):
        _check_side("kv_cache", side, (*key.shape[:3], d // 2 if key.dtype == torch.uint8 else d), (key.dtype,), query)
    sides = [side for side in (key_scales, value_scales) if side is not None]
    if len(sides) != (2 if key.dtype == torch.uint8 else 0):
        what = "None" if key.dtype == torch.uint8 else "scales"
        raise ArgumentError("kv_cache_sf", what, "the block scales of an NVFP4 cache, None for others")
    for side in sides:
        dtypes = (torch.float8_e4m3fn, torch.uint8)
        _check_side("kv_cache_sf", side, (*key.shape[:3], d // NVFP4.block), dtypes, query)
    if not 1 <= page <= MAX_PAGE:
        raise ArgumentError("kv_cache", f"pages of {page} tokens", f"1 to {MAX_PAGE}")
    interleaved = interleaved and len(sides) > 0
    if interleaved and page % _GROUP:
        raise ArgumentError("kv_cache", f"pages of {page} tokens", f"a multiple of {_GROUP} for interleaved scales")
    if interleaved and d % (_GROUP * NVFP4.block):
        allowed = f"linear, or d a multiple of {_GROUP * NVFP4.block}"
        raise ArgumentError("v_scale_layout", f"interleaved4 with d = {d}", allowed)
    group = query.shape[1] // max(1, heads)
    if query.shape[1] != group * heads or not 1 <= group <= MAX_GROUP:
        raise ArgumentError("query", f"{query.shape[1]} heads", f"1 to {MAX_GROUP} for each of {heads} KV heads")
    scales = [side.view(torch.uint8) for side in sides]
    key_scales, value_scales = scales or (None, None)
    return CheckedCache(key, value, key_scales, value_scales, heads, page, interleaved)


def _check_side(
    name: str, side: torch.Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], query: torch.Tensor
) -> None:
    check_dtype(name, side, dtypes)
    check_same_device(name, side, query)
    if tuple(side.shape) != shape or side.dim() != 4:
        raise ArgumentError(name, f"shape {tuple(side.shape)}", f"{shape}, for queries of {query.shape[2]}")
    size = side.element_size()
    row = shape[3] * size
    align = min(16, row & -row)  # what rows without gaps are aligned to
    strides = [stride * size for stride in side.stride()]
    if side.stride(3) != 1 or any(stride % align or not 0 <= stride < _MAX_WORK for stride in strides[:3]):
        allowed = f"unit stride in the last dimension, others multiples of {align} bytes, below 2**31"
        raise ArgumentError(name, f"strides {side.stride()}", allowed)


def _sizes(side: torch.Tensor, hnd: bool) -> tuple[int, ...]:
    """Pages, tokens of a page, heads."""
    if side.dim() != 4:
        raise ArgumentError("kv_cache", f"shape {tuple(side.shape)}", "four dimensions")
    return tuple(by_token(side, hnd).shape[:3])


def check_ints(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], like: torch.Tensor) -> None:
    """Check that ``tensor`` is int32 of this shape, where None is any size, and contiguous in the last dimension."""
    check_dtype(name, tensor, (torch.int32,))
    check_same_device(name, tensor, like)
    sizes = [(own, size) for own, size in zip(tensor.shape, shape, strict=False) if size is not None]
    fits = tensor.dim() == len(shape) and not any(differ((own,), (size,)) for own, size in sizes)
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"[{wanted}]")
    if tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ArgumentError(name, f"strides {tensor.stride()}", "unit stride in the last dimension")


def check_q_len(name: str, q_len: int, most: int = MAX_TOKENS) -> None:
    """Check the number of query tokens of a request, or a bound of it."""
    if not 1 <= q_len <= most:
        raise ArgumentError(name, q_len, f"1 to {most}")


def check_work(query: torch.Tensor, q_len: int, max_tokens: int) -> None:
    """Check that 32 bits hold all positions and, for few query tokens, units of work; for many, query rows."""
    if not 0 <= max_tokens <= MAX_TOKENS:
        raise ArgumentError("max_seq_len", max_tokens, f"0 to {MAX_TOKENS}")
    tiles = ceil_div(max(1, max_tokens), TILE) if q_len <= MAX_Q_LEN else 1
    if reaches(query.shape[0] * query.shape[1] * tiles, _MAX_WORK):
        raise ArgumentError("query", f"{query.shape[0]} tokens over {max_tokens}", "less work than 2**31 tiles")


def check_sinks(sinks: torch.Tensor | None, query: torch.Tensor) -> None:
    """Check that ``sinks`` is None or has one float32 for each query head."""
    if sinks is None:
        return
    check_dtype("sinks", sinks, (torch.float32,))
    check_same_device("sinks", sinks, query)
    check_contiguous("sinks", sinks)
    if sinks.shape != (query.shape[1],):
        raise ArgumentError("sinks", f"shape {tuple(sinks.shape)}", f"({query.shape[1]},)")


def one_tensor(name: str, tensors: torch.Tensor | Sequence[torch.Tensor] | None) -> torch.Tensor | None:
    """The tensor, which may also be given as a list of one."""
    if tensors is None or isinstance(tensors, torch.Tensor):
        return tensors
    if not isinstance(tensors, (tuple, list)) or len(tensors) != 1:
        raise ArgumentTypeError(name, type(tensors).__name__, "a tensor, or a list of one")
    if not isinstance(tensors[0], torch.Tensor):
        raise ArgumentTypeError(name, f"a list of {type(tensors[0]).__name__}", "a tensor, or a list of one")
    check_strided(name, tensors[0])
    return tensors[0]


Factor = torch.Tensor | float | None
"""A number, a tensor of one float, or None for 1."""


def product(query: torch.Tensor, number: float, **factors: Factor) -> torch.Tensor | float:
    """``number`` times the factors: a float32 tensor where one of them is on query's device, so that no host waits."""
    tensors = []
    for name, value in factors.items():
        if not isinstance(value, torch.Tensor):
            number *= 1.0 if value is None else float(value)
            continue
        check_dtype(name, value, (torch.float32, torch.float64, torch.float16, torch.bfloat16))
        if value.numel() != 1:
            raise ArgumentError(name, f"{value.numel()} elements", "1")
        if value.device.type == "cpu":
            number *= value.item()
            if query.is_cuda:
                replay.note(None)  # the next call may have another value
        else:
            check_same_device(name, value, query)
            tensors.append(value)
    if not tensors:
        return number
    if number == 1 and len(tensors) == 1 and tensors[0].dtype == torch.float32:
        return tensors[0].view(1)
    return replay.temporary(functools.partial(_multiplied, number), *tensors)


def _multiplied(number: float, *tensors: torch.Tensor) -> torch.Tensor:
    """The product of numbers, float32 [1], one rounding for each factor in order."""
    factors = [tensor.float().view(1) for tensor in tensors]
    return functools.reduce(torch.mul, factors if number == 1 else [number * factors[0], *factors[1:]])


def scale(name: str, value: torch.Tensor | float, query: torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """A factor as the product of a number and, if it is a tensor, of that."""
    if not isinstance(value, torch.Tensor):
        return float(value), None
    check_dtype(name, value, (torch.float32,))
    check_same_device(name, value, query)
    if value.numel() != 1:
        raise ArgumentError(name, f"{value.numel()} elements", "1")
    return 1.0, value.view(1)


def signed(integers: torch.Tensor) -> torch.Tensor:
    """uint32 as int32, which holds every length; others as they are."""
    return integers.view(torch.int32) if integers.dtype == torch.uint32 else integers


def soft_cap(logits_soft_cap: float | None) -> float:
    """The cap of logits; 0 for none."""
    if logits_soft_cap is not None and logits_soft_cap < 0:
        raise ArgumentError("logits_soft_cap", logits_soft_cap, "None, or 0 or more")
    return float(logits_soft_cap or 0)


def check_o_scale(o_scale: float | None, out: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    """bmm2_scale already divides by it: only a float8 output may have one."""
    dtype = out_dtype if out is None else out.dtype
    if o_scale is not None and (o_scale <= 0 if dtype == torch.float8_e4m3fn else o_scale != 1):
        raise ArgumentError("o_scale", o_scale, "1, or a positive number where the output is float8_e4m3fn")


def one_name(
    kv_cache_sf: Pair | None, kv_block_scales: Pair | None
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """The scales of K and V, under either name."""
    if kv_cache_sf is not None and kv_block_scales is not None:
        raise ArgumentError("kv_block_scales", "a value besides kv_cache_sf", "one of the two")
    scales = kv_cache_sf if kv_block_scales is None else kv_block_scales
    return (None, None) if scales is None else pair("kv_cache_sf", scales)


def check_workspace(workspace: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Check that ``workspace`` is a contiguous tensor of any dtype; returns it as bytes."""
    if not isinstance(workspace, torch.Tensor):
        raise ArgumentTypeError("workspace_buffer", type(workspace).__name__, "a torch.Tensor")
    check_same_device("workspace_buffer", workspace, query)
    check_contiguous("workspace_buffer", workspace)
    if workspace.dim() == 0:
        raise ArgumentError("workspace_buffer", "a single element", "a buffer; 32 MiB are enough")
    return workspace.view(torch.uint8).flatten()


def check_unread(name: str, tensor: torch.Tensor | None, query: torch.Tensor) -> None:
    """Check a tensor that FlashInfer's kernels need and these do not: None, or any tensor on the device."""
    if tensor is not None:
        check_same_device(name, tensor, query)


def check_backend(backend: str, allowed: Sequence[str]) -> None:
    """Check a name of a FlashInfer backend. All names select the same kernels."""
    if backend not in allowed:
        raise ArgumentError("backend", repr(backend), " or ".join(map(repr, allowed)))


class Output(NamedTuple):
    """What attention itself writes: a tensor or None for a new one, its dtype or None for query's, and whether that is
    quantized to NVFP4 then.
    """

    out: torch.Tensor | None
    dtype: torch.dtype | None
    to_fp4: bool


def output_of(
    out: object,
    out_dtype: torch.dtype | str | None,
    sf_scale: float | None,
    sf_vec_size: int | None,
    like: torch.Tensor,
) -> Output:
    """Which output a call asks for. Raises ArgumentError, ArgumentTypeError."""
    if out_dtype == "nvfp4" or (out_dtype is None and type(out).__name__ == "FP4Tensor"):
        return Output(None, like.dtype if like.dtype in HALVES else torch.bfloat16, True)
    unused("o_sf_scale", sf_scale, None, "it is for NVFP4 output")
    unused("o_sf_vec_size", sf_vec_size, None, "it is for NVFP4 output")
    if isinstance(out_dtype, str):
        raise ArgumentError("out_dtype", repr(out_dtype), "a torch.dtype or 'nvfp4'")
    if out is not None and not isinstance(out, torch.Tensor):
        raise ArgumentTypeError("out", type(out).__name__, "a torch.Tensor, None, or an FP4Tensor for NVFP4 output")
    return Output(out, out_dtype, False)


def unused(
    name: str, value: object, default: object, why: str = "it belongs to kernels that FlashInfer ships as binaries"
) -> None:
    """Check that a parameter that the kernels do not support has its default."""
    if value is not default and value != default:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
        raise ArgumentError(name, what, f"{default}: {why}")
