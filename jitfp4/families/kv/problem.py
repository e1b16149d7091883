"""The problems, tactics, specs and launches of the kernels that write and read a KV cache.

K and V are the two *sides* of a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from jitfp4.arch import Arch
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div
from jitfp4.spec import Geometry, KernelSpec

MAX_GRID_YZ = 65535
MAX_THREADS = 256
_PLACE_BYTES = 8


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


class QuantizeTactic(NamedTuple):
    """How the quantize kernel divides the work: tokens of a thread, threads of a CTA."""

    tokens: int
    threads: int


class DequantizeTactic(NamedTuple):
    """How the dequantize kernel divides the work: tokens of a thread, threads of a CTA, and what looks up pages."""

    tokens: int
    threads: int
    by_cta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """What the specs of both kernels have in common."""

    @property
    def max_threads(self) -> int:
        """The most threads of a CTA."""
        return MAX_THREADS

    @property
    def place_bytes(self) -> int:
        """Bytes of shared memory for the place of one token."""
        return _PLACE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSpec(Spec):
    """Each thread quantizes one block, the same one of ``tokens_per_thread`` tokens."""

    in_dtype: DType
    addressing: Addressing
    tokens_per_thread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizeSpec(Spec):
    """Each thread writes 16 bytes for each of ``tokens_per_thread`` tokens."""

    out_dtype: DType
    lookup: Lookup
    tokens_per_thread: int


def quantize_rejects(_: QuantizeProblem, __: QuantizeTactic, ___: Arch) -> None:
    """Every tactic can run every problem."""


def dequantize_rejects(problem: DequantizeProblem, tactic: DequantizeTactic, _: Arch) -> str | None:
    """Why a tactic cannot run a problem; None where it can."""
    if tactic.by_cta and not problem.page_size:
        return "there are no pages to look up"
    if not tactic.by_cta and problem.page_size % tactic.tokens:
        return f"{tactic.tokens} tokens of a thread may lie in two pages of {problem.page_size}"
    return None


def quantize_spec(problem: QuantizeProblem, tactic: QuantizeTactic) -> QuantizeSpec:
    """The kernel that a tactic makes for a problem."""
    return QuantizeSpec(in_dtype=problem.in_dtype, addressing=problem.addressing, tokens_per_thread=tactic.tokens)


def dequantize_spec(problem: DequantizeProblem, tactic: DequantizeTactic) -> DequantizeSpec:
    """The kernel that a tactic makes for a problem."""
    lookup = Lookup.CTA if tactic.by_cta else Lookup.THREAD if problem.page_size else Lookup.NONE
    return DequantizeSpec(out_dtype=problem.out_dtype, lookup=lookup, tokens_per_thread=tactic.tokens)


def quantize_geometry(problem: QuantizeProblem, tactic: QuantizeTactic, _: Arch) -> Geometry:
    """Grid: x over tokens, y over the blocks of a token, z over sides."""
    across, strips, block = _cut(problem.tokens, problem.blocks, tactic.tokens, tactic.threads)
    shared = block[1] * tactic.tokens * _PLACE_BYTES if problem.addressing is not Addressing.WHOLE else 0
    return Geometry(grid=(across, strips, problem.sides), block=block, shared_bytes=shared)


def dequantize_geometry(problem: DequantizeProblem, tactic: DequantizeTactic, _: Arch) -> Geometry:
    """Grid: x over tokens, y over sequences, z over sides and the chunks of a token."""
    across, strips, block = _cut(problem.tokens, problem.chunks, tactic.tokens, tactic.threads)
    shared = block[1] * tactic.tokens * _PLACE_BYTES if tactic.by_cta else 0
    return Geometry(grid=(across, problem.sequences, strips * problem.sides), block=block, shared_bytes=shared)


def _cut(tokens: int, items: int, tokens_per_thread: int, threads: int) -> tuple[int, int, tuple[int, int, int]]:
    """CTAs over tokens, CTAs over the items of a token, and the shape of a CTA: x over items, y over tokens."""
    strips = ceil_div(items, threads)
    wide = ceil_div(items, strips)
    high = max(1, threads // wide)
    return ceil_div(tokens, high * tokens_per_thread), strips, (wide, high, 1)
