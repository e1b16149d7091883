"""What selection sees of calls that write and read a KV cache.

K and V are the two *sides* of a cache.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from jitfp4.arch import Arch
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div


class Addressing(StrEnum):
    """What gives the place of token i: i itself, a slot of the pool, or a position in the pages of a request."""

    WHOLE = "whole"
    SLOTS = "slots"
    POSITIONS = "positions"


class QuantizeProblem(NamedTuple):
    """Quantize, on each of ``sides`` sides, ``tokens`` tokens of ``blocks`` blocks of 16 elements."""

    in_dtype: DType
    addressing: Addressing
    tokens: int
    blocks: int
    sides: int

    def blocks_per_sm(self, arch: Arch) -> int:
        return ceil_div(self.tokens * self.blocks * self.sides, arch.num_sms)


class Lookup(StrEnum):
    """Who looks up pages: nobody; each thread, whose tokens then lie in one page; or the CTA for all its threads."""

    NONE = "none"
    THREAD = "thread"
    CTA = "cta"


class DequantizeProblem(NamedTuple):
    """Dequantize, on each of ``sides`` sides, ``sequences`` sequences of up to ``tokens`` tokens.

    A token is ``chunks`` chunks of 8 elements. ``page_size`` is 0 without a page table.
    """

    out_dtype: DType
    page_size: int
    sequences: int
    tokens: int
    chunks: int
    sides: int

    def chunks_per_sm(self, arch: Arch) -> int:
        return ceil_div(self.sequences * self.tokens * self.chunks * self.sides, arch.num_sms)
