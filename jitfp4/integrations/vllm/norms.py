"""RMSNorm for vLLM's registry of implementations, where it is called "jitfp4": used where the user puts it first.

Its launches depend on those before and after as the products' do: a product reads its weight while the norm runs.
"""

from __future__ import annotations

import torch
from vllm import ir

from jitfp4.dtypes import HALVES
from jitfp4.families.norm import fused_add_rmsnorm, rmsnorm
from jitfp4.families.norm.problem import MAX_HIDDEN, MIN_HIDDEN

PROVIDER = "jitfp4"
_MULTIPLE = 16  # of the elements of a row
_ALIGNED = 8  # elements of 16 bytes


def register_norms() -> None:
    """Register both operators; a second call changes nothing."""
    if PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=serves)(rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=serves_sum, inplace=True)(fused_add_rms_norm)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """``x / sqrt(mean(x * x) + epsilon) * weight``, rounded once."""
    del variance_size
    return rmsnorm(x, weight, epsilon)  # type: ignore[arg-type]  # serves() refuses None


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to the residual and normalise the sum, both in place."""
    del variance_size
    fused_add_rmsnorm(x, x_residual, weight, epsilon)  # type: ignore[arg-type]
    return x, x_residual


def serves(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether the kernel takes such rows: of 16-bit floats that begin at multiples of 16 bytes, and by whole rows."""
    h = x.shape[-1]
    return (
        variance_size is None
        and weight is not None
        and x.dtype in HALVES
        and weight.dtype == x.dtype
        and MIN_HIDDEN <= h <= MAX_HIDDEN
        and h % _MULTIPLE == 0
        and x.stride(-1) == 1
        and x.storage_offset() % _ALIGNED == 0
        and (x.is_contiguous() or (x.dim() == 2 and x.stride(0) % _ALIGNED == 0))
        and epsilon >= 0
    )


def serves_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """Whether the kernel takes such rows and residuals, which are contiguous."""
    aligned = x_residual.storage_offset() % _ALIGNED == 0 and x_residual.dtype == x.dtype
    whole = x.is_contiguous() and x_residual.is_contiguous()
    return aligned and whole and serves(x, weight, epsilon, variance_size)
