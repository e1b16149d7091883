"""RMSNorm, alone, behind a residual addition or before a gate, to 16-bit floats or fused with FP4 quantization."""

from jitfp4.families.norm.api import add_rmsnorm_fp4quant, rmsnorm_fp4quant, rmsnorm_gated_fp4quant
from jitfp4.families.norm.plain import (
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    rmsnorm,
    rmsnorm_gated,
)

__all__ = [
    "add_rmsnorm_fp4quant",
    "fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "rmsnorm",
    "rmsnorm_fp4quant",
    "rmsnorm_gated",
    "rmsnorm_gated_fp4quant",
]
