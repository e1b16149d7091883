"""Hard inputs: the values at which quantizers go wrong."""

from __future__ import annotations

import torch

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def hard_blocks(dtype: torch.dtype, block: int = 16) -> torch.Tensor:
    """[n, block] rows, each one case: zeros of both signs, ties, subnormals, extremes, NaN and Inf in every mixture."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * torch.finfo(dtype).eps  # the smallest subnormal
    ties = torch.tensor([*MIDPOINTS, *(-m for m in MIDPOINTS), 6.0, -0.0])
    ramp = torch.linspace(-6, 6, 16)
    rows = [
        torch.zeros(16),
        -torch.zeros(16),
        torch.tensor([0.0, -0.0] * 8),
        torch.full((16,), tiny),
        torch.cat([torch.full((15,), tiny), torch.tensor([-info.max])]),
        torch.full((16,), info.smallest_normal),
        torch.full((16,), info.max),
        torch.full((16,), -info.max),
        torch.full((16,), float("nan")),
        torch.full((16,), float("inf")),
        torch.full((16,), float("-inf")),
        torch.cat([torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0]), torch.randn(11)]),
        torch.cat([torch.tensor([float("nan")]), torch.zeros(15)]),
        torch.cat([torch.tensor([-float("nan")]), torch.randn(15)]),
        torch.cat([torch.tensor([float("inf")]), torch.randn(15)]),
        torch.cat([torch.tensor([1e-30]), torch.zeros(15)]),
        ties,
        torch.roll(ties, 5) * 448,
        ramp,
        ramp * 1e-4,
    ]
    return torch.stack(rows).to(dtype).repeat(1, block // 16)


def all_half_patterns(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 bit patterns of a 16-bit float as [4096, 16], shuffled so that blocks mix magnitudes; seed fixed."""
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    return order.to(torch.int32).sub(1 << 15).to(torch.int16).view(dtype).view(-1, 16)


def random_matrix(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values whose rows differ in magnitude over 2^-8 to 2^8."""
    generator = torch.Generator().manual_seed(seed + 31 * m + k)
    scale = torch.exp2(torch.randint(-8, 9, (m, 1), generator=generator).float())
    return (torch.randn(m, k, generator=generator) * scale).to(dtype)


def far_gates(gate: torch.Tensor) -> torch.Tensor:
    """Gates [..., m, k], of which some are +-100, where silu is taken apart, each beside others that are not."""
    row, col = torch.meshgrid(*map(torch.arange, gate.shape[-2:]), indexing="ij")
    far = torch.where(row % 4 < 2, 100.0, -100.0).to(gate.dtype)
    return torch.where((row + col) % 5 == 0, far, gate)
