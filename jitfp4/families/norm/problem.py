"""What selection sees of a norm that quantizes, and the sizes of rows."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from jitfp4.arch import Arch
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div
from jitfp4.spec import WARP

MIN_HIDDEN, MAX_HIDDEN = 64, 65536

UNIT = 16  # elements of a unit, which one thread takes
TURN = UNIT * WARP
"""Elements of a turn: a unit for each lane of a warp."""

_FEW_ELEMENTS = 8192  # of each SM


class Scale(StrEnum):
    """Type of a block scale."""

    E4M3 = "e4m3"
    UE8M0 = "ue8m0"


class Problem(NamedTuple):
    """m rows of h elements. ``padded``: the padding rows of the 128x4 layout must be written too.

    ``gate``: each head of a row is normalised by itself, and multiplied by the silu of a gate.
    """

    in_dtype: DType
    block: int
    scale: Scale
    add: bool
    gate: bool
    padded: bool
    m: int
    h: int

    def few(self, arch: Arch) -> bool:
        """Whether there is so little work that each row should be spread over many threads."""
        return self.m * self.h <= _FEW_ELEMENTS * arch.num_sms or 2 * self.m <= arch.num_sms

    def elements_per_sm(self, arch: Arch) -> int:
        return ceil_div(self.m * self.h, arch.num_sms)
