"""Paged NVFP4 caches in every arrangement, and slow models of what is written to them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from tests.support.compare import POISON

Pair = tuple[torch.Tensor, torch.Tensor]

ARRANGEMENTS = ("pair", "stacked", "one page")


@dataclass(frozen=True)
class PagedCache:
    """A cache filled with a pattern, as its functions take it. ``memory`` holds all of it, gaps included."""

    codes: torch.Tensor | Pair
    sf: torch.Tensor | Pair
    layout: str
    memory: tuple[torch.Tensor, ...]

    def sides(self) -> tuple[Pair, Pair]:
        """(codes, scales) of K and of V as uint8 [pages, tokens, heads, ...] views."""
        codes = self.codes.unbind(1) if isinstance(self.codes, torch.Tensor) else self.codes
        scales = self.sf.unbind(1) if isinstance(self.sf, torch.Tensor) else self.sf
        k, v = (
            tuple(x.view(torch.uint8).transpose(1, 2) if self.layout == "HND" else x.view(torch.uint8) for x in pair)
            for pair in zip(codes, scales, strict=True)
        )
        return (k[0], k[1]), (v[0], v[1])


def paged_cache(
    pages: int,
    page_size: int,
    heads: int,
    dims: tuple[int, int],
    layout: str,
    arrangement: str,
    device: str,
) -> PagedCache:
    """A poisoned cache. "one page": each page holds K's codes, K's scales, V's codes and V's scales, as vLLM's do."""
    place = (page_size, heads) if layout == "NHD" else (heads, page_size)

    def filled(*shape: int) -> torch.Tensor:
        return torch.full(shape, POISON, dtype=torch.uint8, device=device)

    if arrangement == "stacked":
        assert dims[0] == dims[1]
        codes, sf = filled(pages, 2, *place, dims[0] // 2), filled(pages, 2, *place, dims[0] // 16)
        return PagedCache(codes, sf.view(torch.float8_e4m3fn), layout, (codes, sf))
    if arrangement == "pair":
        k, v = (filled(pages, *place, d // 2) for d in dims)
        k_sf, v_sf = (filled(pages, *place, d // 16) for d in dims)
        typed = k_sf.view(torch.float8_e4m3fn), v_sf.view(torch.float8_e4m3fn)
        return PagedCache((k, v), typed, layout, (k, v, k_sf, v_sf))
    widths = [w for d in dims for w in (d // 2, d // 16)]
    memory = filled(pages, page_size * heads * sum(widths) + 15)
    parts, start = [], 0
    for width in widths:
        size = page_size * heads * width
        parts.append(memory[:, start : start + size].unflatten(1, (*place, width)))
        start += size
    k, k_sf, v, v_sf = parts
    return PagedCache((k, v), (k_sf.view(torch.float8_e4m3fn), v_sf.view(torch.float8_e4m3fn)), layout, (memory,))


def quantize_by_hand(x: torch.Tensor, decode_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """nvfp4_kv_quantize() of finite [m, k], element by element in NumPy's float32."""
    gd, sixth = np.float32(decode_scale), np.float32(1 / 6)
    codes, scales = [], []
    for block in x.float().reshape(-1, 16).numpy():
        s = np.abs(block).max() * ((np.float32(1) / gd) * sixth)
        b = np.minimum(s, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        scales.append(int(b.view(np.uint8)))
        with np.errstate(divide="ignore", over="ignore"):
            o = np.minimum(np.float32(1) / (np.float32(b) * gd), np.finfo(np.float32).max)
            y = np.clip(block * o, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
        codes += [int(low | high << 4) for low, high in zip(y[0::2], y[1::2], strict=True)]
    m, k = x.shape
    return (
        torch.tensor(codes, dtype=torch.uint8).view(m, k // 2),
        torch.tensor(scales, dtype=torch.uint8).view(m, k // 16),
    )


def interleave_by_hand(sf: torch.Tensor) -> torch.Tensor:
    """Linear scales [pages, tokens, heads, cols] interleaved by 4 tokens, byte by byte."""
    pages, tokens, heads, cols = sf.shape
    out = torch.empty(pages, heads, tokens * cols, dtype=torch.uint8)
    for t in range(tokens):
        for s in range(cols):
            out[:, :, t // 4 * 4 * cols + s * 4 + t % 4] = sf[:, t, :, s]
    return out.view(pages, heads, tokens, cols).transpose(1, 2).contiguous()
