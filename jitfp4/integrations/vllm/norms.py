"""RMSNorm in vLLM's models with FP4 layers, in place of vLLM's own layer of this name.

Its launches depend on those before and after as the products' do: a product reads its weight while the norm runs.
vLLM's registry of layers gives models this class. Where torch.compile makes kernels of vLLM's native norms, it does so
still: such layers do not call ``forward_cuda``.
"""

from __future__ import annotations

import logging

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm

from jitfp4.dtypes import HALVES
from jitfp4.families.norm import fused_add_rmsnorm, rmsnorm
from jitfp4.families.norm.problem import MAX_HIDDEN, MIN_HIDDEN
from jitfp4.integrations.vllm.quantization import CONFIGS

_MULTIPLE = 16  # of the elements of a row
_ALIGNED = 8  # elements of 16 bytes

_log = logging.getLogger("jitfp4.integrations.vllm")


class Fp4ModelRMSNorm(RMSNorm):
    """RMSNorm of 16-bit rows, alone or of a sum, in place then; vLLM's own for other rows and in other models."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        has_fp4 = isinstance(get_current_vllm_config().quant_config, tuple(CONFIGS.values()))
        self.by_jitfp4 = has_fp4 and not envs.VLLM_BATCH_INVARIANT

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``x / sqrt(mean(x * x) + epsilon) * weight``, rounded once, of ``x``, or of ``x`` plus ``residual``."""
        if not (self.by_jitfp4 and self._serves(x) and (residual is None or _serves_sum(x, residual))):
            return super().forward_cuda(x, residual)
        if residual is None:
            return rmsnorm(x, self.weight.data, self.variance_epsilon)
        fused_add_rmsnorm(x, residual, self.weight.data, self.variance_epsilon)
        return x, residual

    def _serves(self, x: torch.Tensor) -> bool:
        """Whether the kernel takes such rows: of 16-bit floats that begin at multiples of 16 bytes, and whole."""
        h = x.shape[-1]
        return (
            self.has_weight
            and self.variance_size_override is None
            and x.dtype in HALVES
            and self.weight.dtype == x.dtype
            and MIN_HIDDEN <= h <= MAX_HIDDEN
            and h % _MULTIPLE == 0
            and x.stride(-1) == 1
            and x.storage_offset() % _ALIGNED == 0
            and (x.is_contiguous() or (x.dim() == 2 and x.stride(0) % _ALIGNED == 0))
        )


def register_norms() -> None:
    """Give models this layer for RMSNorm; a second call changes nothing. Another plugin's stays, with a warning."""
    registered = op_registry_oot.setdefault(RMSNorm.__name__, Fp4ModelRMSNorm)
    if registered is not Fp4ModelRMSNorm:
        _log.warning("RMSNorm is %s already; jitfp4's is not registered", registered.__qualname__)


def _serves_sum(x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether the kernel takes such sums: contiguous, in one dtype."""
    aligned = residual.storage_offset() % _ALIGNED == 0 and residual.dtype == x.dtype
    return aligned and x.is_contiguous() and residual.is_contiguous()
