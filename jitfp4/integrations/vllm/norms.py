"""RMSNorm, and Gemma's, which adds 1 to its weight, in vLLM's models with FP4 layers, in place of vLLM's own layers.

Their launches depend on those before and after as the products' do: a product reads its weight while the norm runs.
vLLM's registry of layers gives models these classes. Where torch.compile makes kernels of vLLM's native norms, it does
so still: such layers do not call ``forward_cuda``. Elsewhere Gemma's, which Qwen3-Next has, is a dozen launches of
torch's in vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from jitfp4.dtypes import HALVES
from jitfp4.families.norm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from jitfp4.families.norm.kernels.rmsnorm import Problem
from jitfp4.families.norm.plain import RMSNORM
from jitfp4.families.norm.problem import MAX_HIDDEN, MIN_HIDDEN
from jitfp4.integrations.kernels import load_growing
from jitfp4.integrations.vllm.quantization import has_fp4_layers

_MULTIPLE = 16  # of the elements of a row
_ALIGNED = 8  # elements of 16 bytes

_log = logging.getLogger("jitfp4.integrations.vllm")


class _ByJitfp4:
    """What both do: jitfp4's kernel, alone or of a sum, in place then; vLLM's own for other rows and other models."""

    alone: Callable[..., torch.Tensor]
    of_sum: Callable[..., None]
    by_jitfp4: bool
    weight: torch.Tensor
    variance_epsilon: float

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``x``, or of ``x`` plus ``residual``, rounded once."""
        if not (self.by_jitfp4 and _serves(self.weight, x, residual)):
            return super().forward_cuda(x, residual)  # type: ignore[misc, no-any-return]
        if residual is None:
            return self.alone(x, self.weight.data, self.variance_epsilon)
        self.of_sum(x, residual, self.weight.data, self.variance_epsilon)
        return x, residual


class Fp4ModelRMSNorm(_ByJitfp4, RMSNorm):
    """``x / sqrt(mean(x * x) + epsilon) * weight`` of 16-bit rows; quantized to NVFP4, where their reader takes that.

    ``rows``: a QuantizedRows, or None.
    """

    alone, of_sum = staticmethod(rmsnorm), staticmethod(fused_add_rmsnorm)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.is_plain = self.has_weight and self.variance_size_override is None
        self.by_jitfp4 = self.is_plain and _prepared(self.weight)
        self.rows: Any = None

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """As of Gemma's; or quantized rows in place of the norm's."""
        if self.rows is not None and not torch.compiler.is_dynamo_compiling() and _serves(self.weight, x, residual):
            quantized = self.rows.of(self, x, residual)
            if quantized is not None:
                return quantized
        return super().forward_cuda(x, residual)


class Fp4ModelGemmaRMSNorm(_ByJitfp4, GemmaRMSNorm):
    """As Fp4ModelRMSNorm, with 1 plus the weight, in float32, in place of the weight."""

    alone, of_sum = staticmethod(gemma_rmsnorm), staticmethod(gemma_fused_add_rmsnorm)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.by_jitfp4 = _prepared(self.weight)


def register_norms() -> None:
    """Give models these layers; a second call changes nothing. Another plugin's stay, with a warning."""
    for name, own in {"RMSNorm": Fp4ModelRMSNorm, "GemmaRMSNorm": Fp4ModelGemmaRMSNorm}.items():
        registered = op_registry_oot.setdefault(name, own)
        if registered is not own:
            _log.warning("%s is %s already; jitfp4's is not registered", name, registered.__qualname__)


def _prepared(weight: Any) -> bool:
    """Whether the kernel is for norms with this weight in the model that is made now; it is loaded then."""
    config = get_current_vllm_config()
    h = weight.shape[0]
    served = MIN_HIDDEN <= h <= MAX_HIDDEN and h % _MULTIPLE == 0 and weight.dtype in HALVES
    if not (has_fp4_layers() and served) or envs.VLLM_BATCH_INVARIANT:
        return False
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    rows = heads * config.scheduler_config.max_num_batched_tokens
    for add in (False, True):
        load_growing(RMSNORM, Problem(HALVES[weight.dtype], add, False, 1, h), "m", rows, weight)
    return True


def _serves(weight: Any, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether the kernel takes such rows: whole, and at multiples of 16 bytes; contiguous if they are added."""
    added = (x,) if residual is None else (x, residual)
    by_rows = x.dim() == 2 and x.stride(1) == 1 and x.stride(0) % _ALIGNED == 0 and residual is None
    traced = torch.compiler.is_dynamo_compiling()  # no offset is known then
    return (
        x.shape[-1] == weight.shape[0]
        and all(each.dtype == weight.dtype for each in added)
        and (traced or all(each.storage_offset() % _ALIGNED == 0 for each in added))
        and (by_rows or all(each.is_contiguous() for each in added))
    )
