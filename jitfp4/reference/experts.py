"""A layer of experts whose weights are known exactly: its steps in float64, and how far a kernel may be from them."""

from __future__ import annotations

import torch

from jitfp4.reference.formats import decode_e4m3
from jitfp4.reference.gemm import error_bound, matmul
from jitfp4.reference.norm import quantize_rows


def experts_of(ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> torch.Tensor:
    """int64, as ids: the expert of each slot on this GPU, or -1 where the slot is skipped."""
    local = ids.long()
    if expert_map is not None:
        inside = (local >= 0) & (local < len(expert_map))
        local = torch.where(inside, expert_map.long()[torch.where(inside, local, 0)], -1)
    return torch.where((local >= 0) & (local < experts), local, -1)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """float32: rows of x as they are after they were quantized."""
    codes, scale = quantize_rows(x)
    return decode_e4m3(codes) * scale.unsqueeze(-1)


def activation(gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    """``g * sigmoid(alpha * g) * (u + beta)`` with g = min(gate, limit), u = up between -limit and limit."""
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + beta)


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float64 [m, n]: ``scale * (x weight^T) + bias`` with a scale and a bias for each row of the weight."""
    product = matmul(x, weight, None, None) * scale.double()
    return product if bias is None else product + bias.double()


def linear_bound(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, fp8: bool = False
) -> torch.Tensor:
    """How far float32 results of a kernel may be from linear()."""
    scaled = weight.double() * scale.double().unsqueeze(-1)
    return error_bound(x, scaled, None, bias, torch.float32, fp8=fp8)


def activation_bound(
    gate: torch.Tensor,
    up: torch.Tensor,
    errors: tuple[torch.Tensor, torch.Tensor],
    alpha: float,
    beta: float,
    limit: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """How far h may be from activation(gate, up), if the float32 sums are off by ``errors``.

    The slope of g * sigmoid(alpha * g) is at most 1.1. In float32 the sigmoid is off by (4 + |alpha g|) * 2^-22 of
    itself: exp by its argument's rounding, and an approximate reciprocal. Then h is rounded to ``dtype``.
    """
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    h = activation(gate, up, alpha, beta, limit).abs()
    swish = (g * torch.sigmoid(alpha * g)).abs()
    absolute = 1.1 * errors[0] * ((u + beta).abs() + errors[1]) + swish * errors[1]
    absolute = absolute + h * (4 + (alpha * g).abs()) * 2.0**-22 + swish * 2.0**-22 * abs(beta)
    units = torch.finfo(dtype)
    return absolute + (h + absolute) * units.eps / 2 + units.smallest_normal * units.eps


def combine(y: torch.Tensor, weights: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    """float64 [tokens, hidden] of y [tokens, slots, hidden]: for each token the sum of weight times y, without skipped
    slots.
    """
    taken = local >= 0
    factors = taken.double() if weights is None else torch.where(taken, weights.double(), 0.0)
    return (torch.where(taken.unsqueeze(-1), y.double(), 0.0) * factors.unsqueeze(-1)).sum(1)
