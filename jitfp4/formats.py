"""FP4 and block-scale number formats, and the two formats that combine them.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1, E4M3 and UE8M0; PTX ISA ``cvt`` for saturation and NaN.
"""

from __future__ import annotations

from enum import StrEnum

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of codes 0 to 7; bit 3 of a code is the sign. There is no Inf and no NaN."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0

INV_6_BITS = 0x3E2AAAAB
"""float32 nearest to 1/6."""


class DType(StrEnum):
    """Element types of kernel operands, under the names that specs and generated source use."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    E4M3 = "e4m3"


class BlockFormat(StrEnum):
    """A block-scaled FP4 format: ``block`` E2M1 elements share one scale of type ``scale``."""

    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"

    @property
    def block(self) -> int:
        return 16 if self is BlockFormat.NVFP4 else 32

    @property
    def scale(self) -> str:
        return "e4m3" if self is BlockFormat.NVFP4 else "ue8m0"


NVFP4, MXFP4 = BlockFormat.NVFP4, BlockFormat.MXFP4
