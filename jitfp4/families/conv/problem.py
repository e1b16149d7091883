"""What selection sees of a call."""

from __future__ import annotations

from typing import NamedTuple

from jitfp4.formats import DType


class Problem(NamedTuple):
    """Convolutions of ``width`` taps over ``tokens`` of all sequences.

    ``wide``: channels and strides are multiples of 8 elements, so that accesses have 16 bytes. ``by_sequence``: a CTA
    has all tokens of one of the ``sequences``, else a block of tokens.
    """

    dtype: DType
    width: int
    wide: bool
    by_sequence: bool
    tokens: int
    sequences: int
    channels: int
