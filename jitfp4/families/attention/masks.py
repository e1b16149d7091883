"""Masks of the caller's, as XQA's callers and FlashInfer's wrappers have them, to the bytes that kernels take."""

from __future__ import annotations

import torch

from jitfp4 import replay
from jitfp4.dispatch import differ
from jitfp4.errors import ArgumentError
from jitfp4.families.attention.call import Mask
from jitfp4.families.attention.checks import check_ints, check_query
from jitfp4.layouts import ceil_div
from jitfp4.tensors import check_contiguous, check_dtype, check_same_device

_WORD = 32  # bits of a draft mask's row are padded to


def draft_mask(mask: torch.Tensor, q_len: int, q_ends: torch.Tensor | None, query: torch.Tensor) -> Mask:
    """XQA's mask: for each query token, in words of 32 bits, whether it sees token j of its request's new ones.

    Such tokens are ``q_len`` for each request, or between ``q_ends``. Raises ArgumentError.
    """
    check_query(query)
    if q_ends is not None:
        check_ints("cum_seq_lens_q", q_ends, (None,), query)
        if not q_ends.numel():
            raise ArgumentError("cum_seq_lens_q", "no element", "[batch + 1]")
    tokens, width = query.shape[0], 2 * ceil_div(q_len, _WORD)
    shape = (tokens // q_len, q_len, width) if q_ends is None else (tokens, width)
    check_dtype("mask", mask, (torch.uint16,))
    check_same_device("mask", mask, query)
    if differ(mask.shape, shape):
        raise ArgumentError("mask", f"shape {tuple(mask.shape)}", f"{shape}")
    data = mask if mask.is_contiguous() else replay.temporary(torch.Tensor.contiguous, mask)
    return Mask(data.view(torch.uint8).flatten(), row_bytes=2 * width)


def whole_mask(
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    q_lens: torch.Tensor,
    lengths: torch.Tensor,
) -> Mask:
    """The mask of a batch of q_lens [batch] queries over lengths [batch] tokens.

    A request has a row of bits for each query, one for each token. Its first bit is the lowest of a byte. The host
    reads no length.
    """
    given = custom_mask if packed_custom_mask is None else packed_custom_mask
    if given is None:
        return Mask()
    given = given.to(lengths.device)
    bits = q_lens.long().clamp(min=0) * lengths.long().clamp(min=0)
    ends = torch.zeros(len(bits) + 1, dtype=torch.int32, device=bits.device)
    ends[1:] = ((bits + 7) // 8).cumsum(0)
    return Mask(_packed(given, bits, ends) if packed_custom_mask is None else given, ends)


def check_whole_mask(custom_mask: torch.Tensor | None, packed_custom_mask: torch.Tensor | None) -> None:
    """Check what whole_mask() takes. Raises ArgumentError, ArgumentTypeError."""
    name, given, dtype = "packed_custom_mask", packed_custom_mask, torch.uint8
    if given is None:
        name, given, dtype = "custom_mask", custom_mask, torch.bool
    if given is None:
        return
    check_dtype(name, given, (dtype,))
    check_contiguous(name, given)
    if given.dim() != 1:
        raise ArgumentError(name, f"shape {tuple(given.shape)}", "one dimension")


def _packed(mask: torch.Tensor, bits: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``mask`` [n], of so many ``bits`` for each request, as bytes; those of request b begin at byte ends[b]."""
    batch, at = len(bits), torch.arange(len(mask), device=mask.device)
    after = bits.cumsum(0)
    request = torch.searchsorted(after, at, right=True).clamp(max=max(0, batch - 1))
    spread = torch.zeros(8 * (ceil_div(len(mask), 8) + batch), dtype=torch.uint8, device=mask.device)
    if batch:
        spread[at + (8 * ends[:-1].long() - after + bits)[request]] = mask.to(torch.uint8)
    order = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (spread.view(-1, 8) << order).sum(-1, dtype=torch.uint8)


def check_buffers(data: torch.Tensor | None, ends: torch.Tensor | None, q_ends: torch.Tensor | None) -> None:
    """Check a wrapper's buffers of masks, beside that of q_ends: both or none. Raises ArgumentError."""
    if data is None and ends is None:
        return
    if q_ends is None:
        raise ArgumentError("custom_mask_buf, mask_indptr_buf", "tensors", "None, or both with use_cuda_graph")
    if data is not None:
        check_dtype("custom_mask_buf", data, (torch.uint8,))
        check_same_device("custom_mask_buf", data, q_ends)
        check_contiguous("custom_mask_buf", data)
        if data.dim() != 1:
            raise ArgumentError("custom_mask_buf", f"shape {tuple(data.shape)}", "one dimension")
    if ends is not None:
        check_ints("mask_indptr_buf", ends, (len(q_ends),), q_ends)
    if data is None or ends is None:
        raise ArgumentError("custom_mask_buf, mask_indptr_buf", "one of them", "None, or both")


def check_room(data: torch.Tensor | None, custom: torch.Tensor | None, packed: torch.Tensor | None, batch: int) -> None:
    """Check that the buffer ``data`` of a wrapper for CUDA graphs holds a mask. Raises ArgumentError."""
    given = custom if packed is None else packed
    if given is None:
        return
    if data is None:
        raise ArgumentError("custom_mask", "a mask", "None, or custom_mask_buf for the constructor")
    bytes_ = len(given) if packed is not None else ceil_div(len(given), 8) + batch
    if bytes_ > len(data):
        raise ArgumentError("custom_mask", f"up to {bytes_} bytes of bits", f"{len(data)}, as custom_mask_buf holds")


def fill(data: torch.Tensor, ends: torch.Tensor, mask: Mask) -> None:
    """Copy a mask, if there is one, into a wrapper's buffers, which hold it."""
    if mask.data is not None and mask.ends is not None:
        data[: len(mask.data)].copy_(mask.data)
        ends.copy_(mask.ends)
