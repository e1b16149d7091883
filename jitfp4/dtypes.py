"""torch's dtypes: which element type of a kernel's operand each is, and which hold codes, block scales and indices."""

from __future__ import annotations

import torch

from jitfp4.formats import MXFP4, NVFP4, DType

HALVES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16}
FLOATS = {torch.float32: DType.F32, **HALVES}
ACTIVATIONS = {**HALVES, torch.float8_e4m3fn: DType.E4M3}

INDEX_DTYPES = (torch.int32, torch.int64)


def _known(*names: str) -> tuple[torch.dtype, ...]:
    """Those of them that this version of torch has."""
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


CODE_DTYPES = _known("uint8", "float4_e2m1fn_x2")
"""The dtypes of tensors with two codes in a byte."""

SF_DTYPES = {NVFP4: _known("uint8", "float8_e4m3fn"), MXFP4: _known("uint8", "float8_e8m0fnu")}
"""The dtypes of block scales, by format."""
