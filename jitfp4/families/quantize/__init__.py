"""FP4 quantization: floats to codes and block scales in every layout, back, and rearranged."""

from jitfp4.families.quantize.dequantize import (
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    nvfp4_dequantize,
)
from jitfp4.families.quantize.grouped import (
    nvfp4_batched_quantize,
    scaled_fp4_grouped_quantize,
    silu_and_mul_scaled_nvfp4_experts_quantize,
)
from jitfp4.families.quantize.quantize import (
    fp4_quantize,
    mxfp4_quantize,
    nvfp4_quantize,
    silu_and_mul,
    silu_and_mul_nvfp4_quantize,
)
from jitfp4.families.quantize.scales import (
    block_scale_interleave,
    make_nvfp4_global_scale,
    nvfp4_block_scale_interleave,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
)

__all__ = [
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "make_nvfp4_global_scale",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "scaled_fp4_grouped_quantize",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul",
    "silu_and_mul_nvfp4_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]
