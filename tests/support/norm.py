"""Inputs of the norm family's tests, and the check of every byte that its kernels write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jitfp4 import SfLayout
from jitfp4.families.norm import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from jitfp4.reference import norm as reference
from jitfp4.reference.formats import unswizzle
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.inputs import hard_blocks

DTYPES = [torch.bfloat16, torch.float16]
FORMATS = [(16, "e4m3"), (32, "e4m3"), (32, "ue8m0")]
LAYOUTS = ["linear", "128x4", "both"]
LINEAR, SWIZZLED = SfLayout.layout_linear, SfLayout.layout_128x4


def rows_of_all_kinds(m: int, h: int, dtype: torch.dtype) -> torch.Tensor:
    """[m, h] normal values of unlike magnitude; rows 1 to 5 hold hard blocks, zeros, maxima, an Inf, a NaN."""
    generator = torch.Generator().manual_seed(h + m)
    scale = torch.exp2(torch.randint(-8, 9, (m, 1), generator=generator).float())
    x = (torch.randn(m, h, generator=generator) * scale).to(dtype)
    hard = hard_blocks(dtype).flatten()
    kinds: list[Callable[[torch.Tensor], object]] = [
        lambda row: row[: hard.numel()].copy_(hard[: row.numel()]),
        lambda row: row.zero_(),
        lambda row: row.fill_(torch.finfo(dtype).max),
        lambda row: row[h // 2].fill_(torch.inf),
        lambda row: row[h // 3].fill_(torch.nan),
    ]
    for row, kind in zip(x[1:], kinds, strict=False):
        kind(row)
    return x


def assert_same_floats(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bytes, but for the bits of a NaN, which CPU and GPU choose differently."""
    assert torch.equal(got.isnan().cpu(), want.isnan()), f"{name}: NaN elsewhere"
    assert_same_bytes(name, got.cpu().nan_to_num(0, torch.inf, -torch.inf), want.nan_to_num(0, torch.inf, -torch.inf))


def check(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    layout: str,
    block: int,
    scale_format: str,
    device: torch.device | str,
    *,
    scale: float | None = 3.0,
    eps: float = 1e-6,
) -> None:
    """The kernel on ``device`` writes exactly the reference's bytes into poisoned outputs."""
    m, h = x.shape
    weight = torch.randn(h, generator=torch.Generator().manual_seed(h)).to(x.dtype)
    g = None if scale is None or scale_format == "ue8m0" else torch.tensor([scale])
    linear = poisoned((m, h // block), torch.uint8, device)
    swizzled = poisoned((SWIZZLED.numel(m, h // block),), torch.uint8, device)
    codes = poisoned((m, h // 2), torch.uint8, device)
    common: dict[str, Any] = {
        "global_scale": None if g is None else g.to(device),
        "eps": eps,
        "block_size": block,
        "scale_format": scale_format,
        "is_sf_swizzled_layout": layout == "128x4",
    }
    first = linear if layout == "linear" else swizzled
    hidden = x if residual is None else reference.add(x, residual)
    want_y = reference.rmsnorm(hidden, weight, eps)
    if residual is None:
        assert rmsnorm_fp4quant(x.to(device), weight.to(device), codes, first, **common)[0] is codes
    else:
        updated, y = residual.to(device, copy=True), poisoned((m, h), x.dtype, device)
        both = {"output_both_sf_layouts": True, "block_scale_unswizzled": linear} if layout == "both" else {}
        add_rmsnorm_fp4quant(x.to(device), updated, weight.to(device), codes, first, **common, **both, y_out=y)
        assert_same_floats("residual", updated, hidden)
        assert_same_floats("y_out", y, want_y)
    want_codes, want_scales = reference.quantize(want_y, block, scale_format, g)
    assert_same_bytes("codes", codes, want_codes)
    if layout != "128x4":
        assert_same_bytes("linear scales", linear, want_scales)
    if layout != "linear":
        padded = swizzled.cpu().view(SWIZZLED.shape(m, h // block))
        assert_same_bytes("swizzled scales", unswizzle(padded, SWIZZLED, m, h // block), want_scales)
        assert int(padded.int().sum()) == int(want_scales.int().sum()), "padding is not zero"
