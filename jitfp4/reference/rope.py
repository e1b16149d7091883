"""Rotary position embedding in float32, as the kernel behind a projection computes it."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, *, is_neox: bool) -> torch.Tensor:
    """[tokens, heads, d] rotated by the rows ``positions`` of cos_sin [max_position, rotary], in x's dtype.

    The first ``rotary`` elements of each head are pairs: (i, i + rotary / 2) with is_neox, else (2 i, 2 i + 1). Pair i
    becomes ``(a * cos[i] - b * sin[i], b * cos[i] + a * sin[i])`` in float32, every operation rounded, then rounded to
    x's dtype. A position outside of the cache gives NaN.
    """
    rotary = cos_sin.shape[1]
    inside = (positions >= 0) & (positions < cos_sin.shape[0])
    rows = torch.where(inside.unsqueeze(-1), cos_sin[torch.where(inside, positions, 0).long()], torch.nan)
    cos, sin = rows.unsqueeze(1).chunk(2, -1)
    pairs = x[..., :rotary].float()
    a, b = pairs.chunk(2, -1) if is_neox else (pairs[..., 0::2], pairs[..., 1::2])
    first, second = a * cos - b * sin, b * cos + a * sin
    turned = torch.cat((first, second), -1) if is_neox else torch.stack((first, second), -1).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., rotary:]), -1)
