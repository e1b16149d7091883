"""RMSNorm, alone, behind an addition or before a gate, to 16-bit floats, or fused with quantization to FP4 or FP8."""

from jitfp4.families.norm.api import add_rmsnorm_fp4quant, rmsnorm_fp4quant, rmsnorm_gated_fp4quant
from jitfp4.families.norm.fp8 import add_rmsnorm_fp8quant, rmsnorm_fp8quant, rows_fp8quant
from jitfp4.families.norm.linear import rmsnorm_linear
from jitfp4.families.norm.plain import (
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    rmsnorm,
    rmsnorm_gated,
)

__all__ = [
    "add_rmsnorm_fp4quant",
    "add_rmsnorm_fp8quant",
    "fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "rmsnorm",
    "rmsnorm_fp4quant",
    "rmsnorm_fp8quant",
    "rmsnorm_gated",
    "rmsnorm_gated_fp4quant",
    "rmsnorm_linear",
    "rows_fp8quant",
]
