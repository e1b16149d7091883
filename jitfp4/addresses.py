"""Where tensors lie: alignment, extents, and whether two of them share memory."""

from __future__ import annotations

import torch

ALIGNMENT = 16
"""Bytes of the widest access that every kernel makes."""


def meet(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two extents have a byte in common."""
    return first[0] < second[1] and second[0] < first[1]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last, gaps included; equal when it is empty."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
