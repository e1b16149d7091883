"""The kernel of the norm family: what it can be, what a problem gets, and how it is launched."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

import torch

from jitfp4.arch import Arch
from jitfp4.engine import Launch
from jitfp4.formats import DType
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.registry import Family, register
from jitfp4.spec import F32, I64, Geometry, KernelSpec, Ptr

IN_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16}
MIN_HIDDEN, MAX_HIDDEN = 64, 65536

_UNIT = 16  # elements that a thread takes at once
_WARP = 32
_TURN = _UNIT * _WARP
_MANY_ROWS, _MANY_ELEMENTS = 20, 40000  # for each SM
_MAX_CTAS = 8  # of a cluster


class Scale(StrEnum):
    """Type of a block scale."""

    E4M3 = "e4m3"
    UE8M0 = "ue8m0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A kernel in which up to ``warps`` warps of a CTA share a row, or a cluster of such CTAs.

    A thread holds ``units`` units of 16 elements in registers or, when ``stream``, reads them twice. With one warp and
    one unit, rows may share the warp.
    """

    in_dtype: DType
    block: int
    scale: Scale
    add: bool
    units: int
    warps: int
    clustered: bool
    stream: bool

    @property
    def max_threads(self) -> int:
        """Of a CTA; rows of one warp get four warps to a CTA."""
        return _WARP * (4 if self.warps == 1 else self.warps)

    @property
    def min_ctas(self) -> int:
        """CTAs that an SM must have registers for: 64, 80, 128 of a thread keep 1, 2, 4 units out of local memory."""
        return {1: 1024, 2: 768}.get(self.units, 512) // self.max_threads

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a thread: two inputs and a packed weight, or one input and a float32 weight."""
        return 6 * _UNIT * self.units

    @property
    def common_bytes(self) -> int:
        """Shared memory of a CTA besides: two sets of partial sums of 32 lanes, and 256 multipliers."""
        return 4 * (2 * (self.warps + (_MAX_CTAS if self.clustered else 1)) * _WARP + 256)

    def shared_bytes(self, threads: int) -> int:
        return self.common_bytes + (0 if self.stream else threads * self.slot_bytes)

    def capacity(self, arch: Arch) -> int:
        """Elements of the longest row that this kernel can take on ``arch``."""
        if self.shared_bytes(self.max_threads) > arch.shared_bytes or (self.clustered and not arch.has_tma):
            return 0
        return _TURN * self.units * self.warps * (_MAX_CTAS if self.clustered else 1)


def geometry(spec: Spec, *, m: int, h: int, padded: bool, arch: Arch) -> tuple[Geometry, int]:
    """A persistent grid, no larger than the rows need, and how many threads of a CTA share a row.

    ``padded`` counts the padding rows of the 128x4 layout, which must be written too.
    """
    rows = SfLayout.layout_128x4.shape(m, 1)[0] if padded else m
    turns, ctas = ceil_div(h, _TURN * spec.units), 1
    if spec.clustered:
        row_threads, ctas = spec.max_threads, ceil_div(turns, spec.warps)
    elif spec.warps > 1 or spec.units > 1:
        row_threads = turns * _WARP
    else:  # 8: whole tiles of 4 scales, also in blocks of 32
        row_threads = max(8, 1 << (ceil_div(h, _UNIT) - 1).bit_length())
    threads = row_threads if spec.warps > 1 else spec.max_threads
    shared_bytes = spec.shared_bytes(threads)
    by_registers = spec.min_ctas * spec.max_threads // threads
    by_memory = (arch.shared_bytes + 1024) // (shared_bytes + 1024)  # the system takes 1 KiB of each CTA
    resident = arch.num_sms * max(1, min(by_registers, by_memory)) // ctas * ctas
    needed = ceil_div(rows * row_threads, threads) * ctas
    grid = (min(needed, resident), 1, 1)
    return Geometry(grid, block=(threads, 1, 1), cluster=(ctas, 1, 1), shared_bytes=shared_bytes), row_threads


# (units, warps, clustered): what one launch can be, apart from streaming.
Shapes = tuple[tuple[int, int, bool], ...]
_SHORT: Shapes = ((1, 1, False),)
_ONE: Shapes = ((1, 8, False),)
_TWO: Shapes = ((2, 8, False),)
_FOUR: Shapes = ((4, 1, False), (4, 4, False), (4, 8, False), (4, 16, False), (4, 16, True), (4, 4, True))
SHAPES = (*_SHORT, *_ONE, *_TWO, *_FOUR)


def select(*, in_dtype: DType, block: int, scale: Scale, add: bool, m: int, h: int, arch: Arch) -> Spec:
    """The kernel for m rows of h elements; streaming where no other holds a row.

    Four units a thread cost the fewest instructions, which bound a plain norm; with fewer, more threads share a row and
    are done sooner, which few rows gain by, and any number where two inputs are read. Thresholds:
    bench/results/h200/norm.csv, columns units1_us to units4_us.
    """
    if h <= _TURN:
        shapes = _SHORT
    elif add:
        shapes = (*_ONE, *_TWO, *_FOUR) if m >= _MANY_ROWS * arch.num_sms else (*_TWO, *_FOUR)
    else:
        shapes = _FOUR if m * h >= _MANY_ELEMENTS * arch.num_sms else (*_TWO, *_FOUR)
    for units, warps, clustered in shapes:
        spec = Spec(
            in_dtype=in_dtype,
            block=block,
            scale=scale,
            add=add,
            units=units,
            warps=warps,
            clustered=clustered,
            stream=False,
        )
        if h <= spec.capacity(arch):
            return spec
    return replace(spec, units=8, warps=16, clustered=False, stream=True)


def specs(arch: Arch) -> Iterator[Spec]:
    """What select() returns for any problem."""
    formats = ((16, Scale.E4M3), (32, Scale.E4M3), (32, Scale.UE8M0))
    hidden = range(_TURN, MAX_HIDDEN + 1, _TURN)
    for in_dtype, (block, scale), add in product(IN_DTYPES.values(), formats, (False, True)):
        yield from dict.fromkeys(
            select(in_dtype=in_dtype, block=block, scale=scale, add=add, m=m, h=h, arch=arch)
            for h, m in product(hidden, (1, _MANY_ELEMENTS * arch.num_sms))
        )


RMSNORM = register(
    Family(
        name="norm/rmsnorm_fp4quant",
        spec=Spec,
        params=(
            Ptr("x", "const In", "[m, h]"),
            Ptr("residual", "In", "[m, h], updated in place; null without an addition"),
            Ptr("weight", "const In", "[h]"),
            Ptr("global_scale", "const float", "[1], encode; null means 1"),
            Ptr("q", "uint8", "[m, h/2], low nibble first"),
            Ptr("sf_128x4", "uint8", "scales in the 128x4 layout, or null"),
            Ptr("sf_linear", "uint8", "[m, h/kBlock], or null"),
            Ptr("y", "In", "[m, h], what is quantized, or null"),
            I64("m"),
            I64("h"),
            I64("row_threads"),
            F32("eps"),
        ),
        specs=specs,
    )
)


@functools.lru_cache(maxsize=4096)
def plan(
    dtype: torch.dtype, block: int, scale: str, add: bool, padded: bool, m: int, h: int, arch: Arch
) -> tuple[Launch, int]:
    """The launch for a problem, and its argument row_threads."""
    spec = select(in_dtype=IN_DTYPES[dtype], block=block, scale=Scale(scale), add=add, m=m, h=h, arch=arch)
    launch_geometry, row_threads = geometry(spec, m=m, h=h, padded=padded, arch=arch)
    return Launch(RMSNORM, spec, launch_geometry), row_threads
