"""Where tensors lie: alignment, extents, and whether two of them share memory."""

from __future__ import annotations

import math
from typing import NamedTuple

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


class Places(NamedTuple):
    """Where two tensors may lie without sharing memory: their extents in bytes, and periods.

    K and V of a page, or of a head, lie beside each other, so that the extents of all pages meet. With a period, all
    outer strides of both tensors are multiples of it, and ``first`` and ``second`` bytes are used in each: if those lie
    beside each other in one period, they do in all.
    """

    first: int
    second: int
    periods: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, first: torch.Tensor, second: torch.Tensor) -> Places:
        """Of tensors with these shapes and strides."""
        dims = [_dims(tensor) for tensor in (first, second)]
        found = []
        for least in sorted({stride for both in dims for _, stride in both}):
            period = math.gcd(*(stride for both in dims for _, stride in both if stride >= least))
            a, b = (
                _used([dim for dim in both if dim[1] < least], t) for both, t in zip(dims, (first, second), strict=True)
            )
            if max(a, b) <= period:
                found.append((period, a, b))
        sizes = [high - low for low, high in map(extent, (first, second))]
        return cls(sizes[0], sizes[1], tuple(found))

    def meet(self, first: int, second: int) -> bool:
        """Whether tensors at these addresses may share memory."""
        if not (first < second + self.second and second < first + self.first):
            return False
        return not any(
            (ahead := (second - first) % period) >= a and ahead + b <= period for period, a, b in self.periods
        )


def _dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Size and stride in bytes of each dimension of more than one element."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride * tensor.element_size()) for size, stride in pairs if size > 1]


def _used(dims: list[tuple[int, int]], tensor: torch.Tensor) -> int:
    """Bytes from the first to the last of these dimensions."""
    return sum((size - 1) * stride for size, stride in dims) + tensor.element_size()
