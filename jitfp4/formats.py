"""FP4 and block-scale number formats, and the two formats that combine them.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1, E4M3 and UE8M0; PTX ISA ``cvt`` for saturation and NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from jitfp4.errors import ArgumentError, ArgumentTypeError

__all__ = ["NVFP44Over6Config", "NVFP44Over6ErrMode"]

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


class NVFP44Over6ErrMode(IntEnum):
    """What chooses between the two scales of a block: the sum of absolute or of squared errors."""

    MAE = 0
    MSE = 1


@dataclass(frozen=True, slots=True)
class NVFP44Over6Config:
    """NVFP4 whose blocks choose between two scales, amax / 6 and amax / 4: the one with the smaller error.

    Attributes:
        e4m3_max: 448, or 256, the largest block scale that the global scale is made for. A scale of amax / 4 is 1.5
            times as large as one of amax / 6, and saturates at 448.
        err_mode: MAE or MSE, or its name.
        err_use_fast_math: compare the errors as multiples of the global scale, which takes fewer roundings.
    """

    e4m3_max: int = 448
    err_mode: NVFP44Over6ErrMode | str = NVFP44Over6ErrMode.MAE
    err_use_fast_math: bool = False

    def __post_init__(self) -> None:
        if type(self.e4m3_max) is not int:
            raise ArgumentTypeError("e4m3_max", type(self.e4m3_max).__name__, "an int")
        if self.e4m3_max not in (256, 448):
            raise ArgumentError("e4m3_max", str(self.e4m3_max)[:40], "256 or 448")
        if type(self.err_use_fast_math) is not bool:
            raise ArgumentTypeError("err_use_fast_math", type(self.err_use_fast_math).__name__, "a bool")
        if not isinstance(self.err_mode, str | IntEnum):  # FlashInfer has an enumeration of its own
            raise ArgumentTypeError("err_mode", type(self.err_mode).__name__, "an NVFP44Over6ErrMode or its name")
        name = self.err_mode.upper() if isinstance(self.err_mode, str) else self.err_mode.name
        if name not in NVFP44Over6ErrMode.__members__:
            raise ArgumentError("err_mode", repr(self.err_mode)[:40], "MAE or MSE")
        object.__setattr__(self, "err_mode", NVFP44Over6ErrMode[name])
