"""Products with FP4 weights, and of two FP4 matrices."""

from jitfp4.families.gemm.api import mm_bf16_fp4, prepare_fp4_weight
from jitfp4.families.gemm.fp4_api import mm_fp4
from jitfp4.families.gemm.fp8_api import mm_fp8_fp4
from jitfp4.families.gemm.fp8_weight import fp8_row_scale
from jitfp4.families.gemm.masked_api import grouped_gemm_nt_masked
from jitfp4.weight import Fp4Weight

__all__ = [
    "Fp4Weight",
    "fp8_row_scale",
    "grouped_gemm_nt_masked",
    "mm_bf16_fp4",
    "mm_fp4",
    "mm_fp8_fp4",
    "prepare_fp4_weight",
]
