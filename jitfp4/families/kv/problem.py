"""What selection sees of a KV cache that is written or read back, how the kernels are cut, and how they are launched.

K and V are the two *sides* of a cache. A *run* of tokens lies in one page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from jitfp4.arch import Arch
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div
from jitfp4.spec import Geometry, KernelSpec

DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16}

MAX_RUN = 8
"""The most tokens of a thread."""

MAX_GRID_YZ = 65535
MAX_THREADS = 256


class Addressing(StrEnum):
    """What tells the place of token i: i itself, a slot of the pool, or a position of a request that owns pages."""

    WHOLE = "whole"
    SLOTS = "slots"
    POSITIONS = "positions"


class QuantizeProblem(NamedTuple):
    """``tokens`` tokens of ``blocks`` blocks of 16 elements, on each of ``sides`` sides.

    ``run``: the most tokens of a thread that certainly lie in one page, where the kernel asks for that.
    """

    in_dtype: DType
    addressing: Addressing
    tokens: int
    blocks: int
    sides: int
    run: int

    def blocks_per_sm(self, arch: Arch) -> int:
        return ceil_div(self.tokens * self.blocks * self.sides, arch.num_sms)


class DequantizeProblem(NamedTuple):
    """``sequences`` of up to ``tokens`` tokens of ``chunks`` chunks of 8 elements, on each of ``sides`` sides.

    ``run``: the most tokens of a thread that certainly lie in one page.
    """

    out_dtype: DType
    paged: bool
    sequences: int
    tokens: int
    chunks: int
    sides: int
    run: int

    def chunks_per_sm(self, arch: Arch) -> int:
        return ceil_div(self.sequences * self.tokens * self.chunks * self.sides, arch.num_sms)


class QuantizeTactic(NamedTuple):
    """How the quantize kernel is cut: tokens of a thread, threads of a CTA."""

    tokens: int
    threads: int


class DequantizeTactic(NamedTuple):
    """How the dequantize kernel is cut: tokens of a thread, threads of a CTA."""

    tokens: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSpec(KernelSpec):
    """A thread quantizes the same block of ``tokens_per_thread`` tokens."""

    in_dtype: DType
    addressing: Addressing
    tokens_per_thread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizeSpec(KernelSpec):
    """A thread fills 16 bytes of ``tokens_per_thread`` tokens, ``tokens_per_lookup`` of them in one page.

    Not ``paged``: there is one page, of one sequence.
    """

    out_dtype: DType
    paged: bool
    tokens_per_thread: int
    tokens_per_lookup: int


def quantize_rejects(problem: QuantizeProblem, tactic: QuantizeTactic, _: Arch) -> str | None:
    """Why a tactic cannot run a problem: the place of whole pages' tokens is looked up once for each thread."""
    if problem.run % tactic.tokens:
        return f"{tactic.tokens} tokens of a thread may lie in two pages"
    return None


def dequantize_rejects(_: DequantizeProblem, __: DequantizeTactic, ___: Arch) -> None:
    """Every tactic can run every problem."""


def quantize_spec(problem: QuantizeProblem, tactic: QuantizeTactic) -> QuantizeSpec:
    """The kernel that a tactic makes for a problem."""
    return QuantizeSpec(in_dtype=problem.in_dtype, addressing=problem.addressing, tokens_per_thread=tactic.tokens)


def dequantize_spec(problem: DequantizeProblem, tactic: DequantizeTactic) -> DequantizeSpec:
    """The kernel that a tactic makes for a problem."""
    return DequantizeSpec(
        out_dtype=problem.out_dtype,
        paged=problem.paged,
        tokens_per_thread=tactic.tokens,
        tokens_per_lookup=math.gcd(problem.run, tactic.tokens),
    )


def quantize_geometry(problem: QuantizeProblem, tactic: QuantizeTactic, _: Arch) -> Geometry:
    """Grid: x over tokens, y over the blocks of one, z over sides."""
    across, strips, block = _cut(problem.tokens, problem.blocks, *tactic)
    return Geometry(grid=(across, strips, problem.sides), block=block)


def dequantize_geometry(problem: DequantizeProblem, tactic: DequantizeTactic, _: Arch) -> Geometry:
    """Grid: x over tokens, y over sequences, z over sides and the chunks of a token."""
    across, strips, block = _cut(problem.tokens, problem.chunks, *tactic)
    return Geometry(grid=(across, problem.sequences, strips * problem.sides), block=block)


def _cut(tokens: int, items: int, tokens_per_thread: int, threads: int) -> tuple[int, int, tuple[int, int, int]]:
    """CTAs over tokens, CTAs over the items of a token, and the shape of one: items by threads that share one."""
    strips = ceil_div(items, threads)
    wide = ceil_div(items, strips)
    high = max(1, threads // wide)
    return ceil_div(tokens, high * tokens_per_thread), strips, (wide, high, 1)
