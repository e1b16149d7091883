"""RMSNorm, alone or behind a residual addition, fused with FP4 quantization."""

from jitfp4.families.norm.api import add_rmsnorm_fp4quant, rmsnorm_fp4quant

__all__ = ["add_rmsnorm_fp4quant", "rmsnorm_fp4quant"]
