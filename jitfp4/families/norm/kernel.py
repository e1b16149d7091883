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
_FEW, _MANY = 8192, 76000  # elements for each SM
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
        """CTAs that an SM must have registers for: 64, 80, 96 or 128 of a thread keep its units out of local memory."""
        threads = {1: 1024, 2: 768, 3: 512 if self.add else 640}.get(self.units, 512)
        return threads // self.max_threads

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a thread for its inputs."""
        return 2 * _UNIT * self.units * (2 if self.add else 1)

    @property
    def weight_bytes(self) -> int:
        """Shared memory of a thread for its weights: as they come, beside two inputs, or float32."""
        return (2 if self.add else 4) * _UNIT * self.units

    @property
    def common_bytes(self) -> int:
        """Shared memory of a CTA besides: two sets of partial sums of 32 lanes, and 256 multipliers."""
        return 4 * (2 * (self.warps + (_MAX_CTAS if self.clustered else 1)) * _WARP + 256)

    def shared_bytes(self, threads: int) -> int:
        weights = self.weight_bytes * (threads if self.warps > 1 else _WARP)
        return self.common_bytes + (0 if self.stream else weights + self.slot_bytes * threads)

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


# (units, warps, clustered): what one launch can be, apart from streaming. The first that holds a row is taken.
# Measured: bench/results/h200/norm_shapes.csv
Shapes = tuple[tuple[int, int, bool], ...]
_LONG: Shapes = ((4, 16, False), (4, 16, True))
_FEW_ROWS: Shapes = ((2, 8, False), (2, 16, False), (2, 16, True))
_PLAIN: Shapes = ((1, 1, False), (2, 1, False), (3, 1, False), (2, 8, False), (4, 4, False), (4, 8, False), *_LONG)
_ADD: Shapes = ((1, 1, False), (1, 8, False), (2, 8, False), (2, 16, False), *_LONG)
_ADD_MANY: Shapes = ((1, 1, False), (2, 1, False), (3, 1, False), *_ADD[2:])
SHAPES: Shapes = tuple(dict.fromkeys((*_PLAIN, *_ADD, *_FEW_ROWS)))
_BEST_UP_TO = {(2, 8): 6144}  # of what a shape holds


def select(*, in_dtype: DType, block: int, scale: Scale, add: bool, m: int, h: int, arch: Arch) -> Spec:
    """The kernel for m rows of h elements; streaming where no other holds a row.

    Few rows are spread over many threads, which are done sooner. A plain norm is bound by instructions, of which more
    units in a thread cost fewer; with an addition, memory is the bound, and warps that wait are what helps.
    """
    few = m * h <= _FEW * arch.num_sms or 2 * m <= arch.num_sms
    if h <= _TURN:
        shapes = _PLAIN[:1]
    elif few:
        shapes = _FEW_ROWS
    elif add:
        shapes = _ADD if m * h <= _MANY * arch.num_sms else _ADD_MANY
    else:
        shapes = _PLAIN
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
        if h <= spec.capacity(arch) and (few or h <= _BEST_UP_TO.get((units, warps), h)):
            return spec
    return replace(spec, units=8, warps=16, clustered=False, stream=True)


def specs(arch: Arch) -> Iterator[Spec]:
    """What select() returns for any problem."""
    formats = ((16, Scale.E4M3), (32, Scale.E4M3), (32, Scale.UE8M0))
    hidden = range(_TURN, MAX_HIDDEN + 1, _TURN)
    loads = (0, _MANY // 2, 2 * _MANY)  # elements for each SM
    for in_dtype, (block, scale), add in product(IN_DTYPES.values(), formats, (False, True)):
        yield from dict.fromkeys(
            select(in_dtype=in_dtype, block=block, scale=scale, add=add, m=load * arch.num_sms // h, h=h, arch=arch)
            for h, load in product(hidden, loads)
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
