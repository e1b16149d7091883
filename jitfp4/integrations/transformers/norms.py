"""Norms of transformers' models by jitfp4's kernels: rows are rounded once, after the weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, TypeGuard

import torch
from torch import nn

from jitfp4.dtypes import HALVES
from jitfp4.families.norm import gemma_rmsnorm, rmsnorm
from jitfp4.families.norm.kernels.linear import MOST_ROWS, Problem
from jitfp4.families.norm.linear import RMSNORM_LINEAR, joins_norm
from jitfp4.formats import DType
from jitfp4.integrations.checkpoints import aligned
from jitfp4.integrations.delta_rule import is_normalised
from jitfp4.integrations.layers import regular

_MOST = 65536  # elements of a row


class Norm(nn.Module):
    """RMSNorm."""

    weight: torch.Tensor
    variance_epsilon: float
    weight_bias: ClassVar[float] = 0.0

    @staticmethod
    def fits(module: Any) -> bool:
        return is_normalised(module.weight.shape[0]) and module.weight.shape[0] <= _MOST

    @staticmethod
    def prepare(module: Any) -> None:
        """Read from a file, it may begin anywhere."""
        module.weight = nn.Parameter(aligned(module.weight.data), requires_grad=False)

    @property
    def epsilon(self) -> float:
        """What is added to the mean of squares."""
        return self.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        if x.dtype not in HALVES or x.dtype != self.weight.dtype:
            return super().forward(x)  # type: ignore[no-any-return]
        function = gemma_rmsnorm if self.weight_bias else rmsnorm
        return function(regular(x.flatten(0, -2)), self.weight, self.epsilon).view(x.shape)


class GemmaNorm(Norm):
    """RMSNorm whose weights are what is added to 1."""

    eps: float
    weight_bias: ClassVar[float] = 1.0

    @property
    def epsilon(self) -> float:
        return self.eps


def joins(norm: Any, x: torch.Tensor, matrix: torch.Tensor) -> TypeGuard[Norm]:
    """Whether rmsnorm_linear() can compute a norm of rows x [m, h] and the product by ``matrix`` behind it."""
    known = isinstance(norm, Norm) and not hasattr(norm, "_hf_hook") and joins_norm(*x.shape)
    return known and x.dtype in HALVES and x.dtype == norm.weight.dtype == matrix.dtype


def joined_product(dtype: DType, hidden: int, rows: int, max_tokens: int) -> Iterator[tuple[Any, Any, str, int]]:
    """What load_growing() needs for norms with the product by a matrix [rows, hidden] behind them, of their dtype."""
    most = max((m for m in range(1, min(MOST_ROWS, max_tokens) + 1) if joins_norm(m, hidden)), default=0)
    if most:
        yield RMSNORM_LINEAR, Problem(dtype, dtype, 1, hidden, rows), "m", most
