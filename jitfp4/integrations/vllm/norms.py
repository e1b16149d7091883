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
from jitfp4.families.norm.kernels.rmsnorm import Problem
from jitfp4.families.norm.plain import RMSNORM
from jitfp4.families.norm.problem import MAX_HIDDEN, MIN_HIDDEN
from jitfp4.integrations.kernels import load_growing
from jitfp4.integrations.vllm.quantization import CONFIGS

_MULTIPLE = 16  # of the elements of a row
_ALIGNED = 8  # elements of 16 bytes

_log = logging.getLogger("jitfp4.integrations.vllm")


class Fp4ModelRMSNorm(RMSNorm):
    """RMSNorm of 16-bit rows, alone or of a sum, in place then; vLLM's own for other rows and in other models."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        has_fp4 = isinstance(config.quant_config, tuple(CONFIGS.values()))
        h = self.weight.shape[0]
        served = MIN_HIDDEN <= h <= MAX_HIDDEN and h % _MULTIPLE == 0 and self.weight.dtype in HALVES
        plain = self.has_weight and self.variance_size_override is None and not envs.VLLM_BATCH_INVARIANT
        self.by_jitfp4 = has_fp4 and served and plain
        if self.by_jitfp4:
            heads = config.model_config.get_num_attention_heads(config.parallel_config)
            rows = heads * config.scheduler_config.max_num_batched_tokens
            for add in (False, True):
                problem = Problem(HALVES[self.weight.dtype], add, False, 1, h)
                load_growing(RMSNORM, problem, "m", rows, self.weight)

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``x / sqrt(mean(x * x) + epsilon) * weight``, rounded once, of ``x``, or of ``x`` plus ``residual``."""
        if not (self.by_jitfp4 and self._serves(x, residual)):
            return super().forward_cuda(x, residual)  # type: ignore[no-any-return]
        if residual is None:
            return rmsnorm(x, self.weight.data, self.variance_epsilon)
        fused_add_rmsnorm(x, residual, self.weight.data, self.variance_epsilon)
        return x, residual

    def _serves(self, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
        """Whether the kernel takes such rows: whole, and at multiples of 16 bytes; contiguous if they are added."""
        added = (x,) if residual is None else (x, residual)
        by_rows = x.dim() == 2 and x.stride(1) == 1 and x.stride(0) % _ALIGNED == 0 and residual is None
        return (
            x.shape[-1] == self.weight.shape[0]
            and all(each.dtype == self.weight.dtype and each.storage_offset() % _ALIGNED == 0 for each in added)
            and (by_rows or all(each.is_contiguous() for each in added))
        )


def register_norms() -> None:
    """Give models this layer for RMSNorm; a second call changes nothing. Another plugin's stays, with a warning."""
    registered = op_registry_oot.setdefault(RMSNorm.__name__, Fp4ModelRMSNorm)
    if registered is not Fp4ModelRMSNorm:
        _log.warning("RMSNorm is %s already; jitfp4's is not registered", registered.__qualname__)
