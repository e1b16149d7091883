"""The NVFP4 KV cache: quantization with a decode scale, scattering into pages, and back.

A side (K or V) of a cache is seen as codes [pages, tokens, heads, d/2] and scales [pages, tokens, heads, d/16], strided
views of whatever layout the caller has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from jitfp4.errors import ArgumentError
from jitfp4.formats import INV_6_BITS, NVFP4
from jitfp4.reference.formats import (
    FLT_MAX,
    block_amax,
    decode_e2m1,
    decode_e4m3,
    divide,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    unpack_e2m1,
)

_GROUP = 4  # tokens whose V scales are interleaved


def quantize(x: torch.Tensor, decode_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., k] floats to packed E2M1 [..., k/2] and E4M3 scales [..., k/16], both uint8.

    With gd the decode scale, every operation of float32 and correctly rounded, for each block of 16::

        g = min(1 / gd, FLT_MAX);   s = amax * (g * float32(1/6));   b = e4m3(s)
        o = min(1 / (dec8(b) * gd), FLT_MAX);   codes = e2m1(x * o)
    """
    blocks = x.float().unflatten(-1, (-1, NVFP4.block))
    gd = decode_scale.float().reshape(())
    sixth = torch.tensor(INV_6_BITS, dtype=torch.int32, device=x.device).view(torch.float32)
    encode = divide(1.0, gd).clamp(max=FLT_MAX)
    scales = encode_e4m3(block_amax(blocks) * (encode * sixth))
    factor = divide(1.0, decode_e4m3(scales) * gd).nan_to_num(nan=FLT_MAX).clamp(max=FLT_MAX)
    return pack_e2m1(encode_e2m1(blocks * factor.unsqueeze(-1)).flatten(-2)), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, decode_scale: torch.Tensor) -> torch.Tensor:
    """Codes [..., k/2] and scales [..., k/16] to float32 [..., k]: ``e2m1(code) * (dec8(b) * gd)``, rounded twice."""
    factor = decode_e4m3(scales.view(torch.uint8)) * decode_scale.float().reshape(())
    return decode_e2m1(unpack_e2m1(codes)) * factor.repeat_interleave(NVFP4.block, dim=-1)


def scale_places(tokens: torch.Tensor, cols: int, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column, each [tokens, cols], at which a page keeps scale ``col`` of its token ``tokens[i]``.

    Interleaved, the scales of four tokens are one run of ``4 * cols`` bytes, column by column, the tokens side by side.
    """
    token, col = torch.broadcast_tensors(tokens.unsqueeze(-1), torch.arange(cols, device=tokens.device))
    if not interleaved:
        return token, col
    at = col * _GROUP + token % _GROUP
    return token // _GROUP * _GROUP + at // cols, at % cols


def slots_in_pages(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    page_size: int,
    num_pages: int,
) -> torch.Tensor:
    """The slot of each token, int64: position p of request b lies in page ``indices[indptr[b] + p // page_size]``.

    A negative request or position gives -1. Raises ArgumentError for what points outside of its list.
    """
    request, position = batch_indices.long(), positions.long()
    live = (request >= 0) & (position >= 0)
    request, position = request[live], position[live]
    _check_below("batch_indices", request, indptr.numel() - 1)
    bounds = indptr.long()
    if ((bounds < 0) | (bounds > indices.numel())).any():
        raise ArgumentError("kv_indptr", bounds.tolist(), f"0 to {indices.numel()}, the number of kv_indices")
    page_of = bounds[request] + position // page_size
    if (page_of >= bounds[request + 1]).any():
        raise ArgumentError("positions", "a position behind the last page of its request", "positions in its pages")
    pages = indices.long()[page_of]
    _check_below("kv_indices", pages, num_pages)
    slots = torch.full_like(batch_indices, -1, dtype=torch.int64)
    slots[live] = torch.where(pages < 0, -1, pages * page_size + position % page_size)
    return slots


def append(
    x: torch.Tensor,
    slots: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    decode_scale: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rows [n, heads, d] quantized into one side of a cache: row i to slot ``slots[i]``, nowhere when negative."""
    live = slots >= 0
    slot = slots[live].long()
    page, token = slot // codes.shape[1], slot % codes.shape[1]
    new_codes, new_scales = quantize(x[: slots.numel()][live], decode_scale)
    codes[page, token] = new_codes
    row, col = scale_places(token, scales.shape[-1], interleaved=interleaved)
    scales.view(torch.uint8)[page.unsqueeze(-1), row, :, col] = new_scales.transpose(-1, -2)


def check_slots(slots: torch.Tensor, num_slots: int) -> None:
    """Raises ArgumentError when a slot lies beyond the cache."""
    _check_below("slot_mapping", slots, num_slots)


class Places(NamedTuple):
    """Tokens of a sequence, and the page and the token of the page where each lies."""

    position: torch.Tensor
    page: torch.Tensor
    token: torch.Tensor


def places(table: torch.Tensor, length: int, page_size: int) -> Places:
    """Where the first ``length`` tokens of the sequence with these pages lie; those in negative pages are left out."""
    position = torch.arange(max(length, 0), device=table.device)
    page = table.long()[position // page_size]
    live = page >= 0
    return Places(position[live], page[live], position[live] % page_size)


def check_tables(tables: torch.Tensor, lengths: Sequence[int], num_pages: int, page_size: int) -> None:
    """Raises ArgumentError when a page of a sequence lies beyond the cache."""
    for table, length in zip(tables, lengths, strict=True):
        _check_below("block_tables", places(table, length, page_size).page, num_pages)


def gather(
    codes: torch.Tensor, scales: torch.Tensor, place: Places, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, [tokens, heads, ...], of the tokens at ``place``."""
    row, col = scale_places(place.token, scales.shape[-1], interleaved=interleaved)
    found = scales.view(torch.uint8)[place.page.unsqueeze(-1), row, :, col]
    return codes[place.page, place.token], found.transpose(-1, -2)


def _check_below(name: str, values: torch.Tensor, limit: int) -> None:
    if values.numel() and int(values.max()) >= limit:
        raise ArgumentError(name, f"{int(values.max())}", f"less than {limit}; negative values are skipped")
