"""A model of the time of a product on the sm_100 family, from which selection takes the fastest tactic.

Nothing in it is measured: no GPU of the family was available. The constants are assumptions of the right magnitude, the
same for every tactic, so that only the order of two results means anything. A call is waves of groups of tiles, one for
each cluster, and a tile takes as long as its products or its copies, whichever take longer:

- an instruction of 128 rows by N takes N / 2 clocks, whether it multiplies 64 or 96 columns;
- copies arrive at the rate of an SM's port or, if that is less, at bytes in flight divided by the latency;
- all SMs together read from L2 at most at its rate; what a cluster shares is read once and arrives at several SMs;
- the sums of parts of the columns go to one CTA through its port, after a latency;
- the whole call takes at least the time in which memory moves its operands and its output.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from jitfp4.arch import Arch
from jitfp4.families.gemm.kernels import blockscaled, blockscaled_k96
from jitfp4.families.gemm.kernels.blockscaled import TILE_ROWS, Cut, K64Tactic, groups, sides
from jitfp4.families.gemm.kernels.blockscaled_k96 import K96Tactic
from jitfp4.families.gemm.problem import Fp4Problem
from jitfp4.layouts import ceil_div

Tactic = K64Tactic | K96Tactic

_PORT_RATE = 64  # bytes per clock, to one SM
_L2_RATE = 6000  # bytes per clock, to all SMs
_MEMORY_RATE = 4200  # likewise
_LATENCY = 1000  # clocks of a copy
_SLICE_BYTES = 128
_KERNELS: dict[type, Any] = {kernel.tactic: kernel for kernel in (blockscaled.KERNEL, blockscaled_k96.KERNEL)}


class Estimate(NamedTuple):
    """The result of the model for a tactic: counts, bytes and clocks."""

    groups: int
    waves: int
    stages: int
    bytes_in_flight: int  # of an SM
    tile_bytes: float  # that arrive at an SM for a tile
    l2_bytes: float  # that an SM reads from L2 for a tile
    product_clocks: float  # of a tile
    copy_clocks: float  # of a tile
    clocks: float  # of the call


def estimate(problem: Fp4Problem, tactic: Tactic, arch: Arch) -> Estimate:
    """The model's figures for a tactic that can run the problem."""
    spec = _KERNELS[type(tactic)].specialise(problem, tactic)
    left, right = sides(problem, spec)
    number, at_once = groups(problem, spec), arch.clusters(spec.cluster)
    # Rows outside of the matrix are not read.
    left_rows, right_rows = min(left, TILE_ROWS), min(right, tactic.tile_n // tactic.ctas)
    columns = min(problem.k, ceil_div(ceil_div(problem.k, spec.step), tactic.split) * spec.step)
    code, scale = columns / 2, TILE_ROWS * columns / problem.format.block  # bytes of a row, and of 128 rows
    tile_bytes = (left_rows + right_rows) * code + (1 + spec.right_atoms) * scale
    l2_bytes = (left_rows * code + scale) / tactic.cluster_n
    l2_bytes += right_rows * code / tactic.cluster_m + spec.right_atoms * scale / spec.column
    in_flight = tactic.stages * (left_rows + right_rows) * _SLICE_BYTES
    products = ceil_div(columns, spec.products) * tactic.tile_n / 2
    from_l2 = min(number, at_once) * spec.cluster * l2_bytes / _L2_RATE
    copies = max(tile_bytes / min(_PORT_RATE, in_flight / _LATENCY), from_l2) + _LATENCY
    whole = (problem.m + problem.n) * problem.k * (1 / 2 + 1 / problem.format.block) + 2 * problem.m * problem.n
    # By the last tile, when nothing else runs.
    written = min(left, TILE_ROWS) * min(right, tactic.tile_n) * 2 / _PORT_RATE
    if tactic.split > 1:
        written += _LATENCY + (tactic.split - 1) * TILE_ROWS * tactic.tile_n * 4 / _PORT_RATE
    waves = ceil_div(number, at_once)
    clocks = max(waves * max(products, copies), whole / _MEMORY_RATE) + written
    return Estimate(number, waves, tactic.stages, in_flight, tile_bytes, l2_bytes, products, copies, clocks)


# Only a few tactics, so that all can be built ahead of time; a tuner tries others too. Smaller clusters come first.
_PAIRS = (
    *(Cut(256, 2), Cut(128, 2), Cut(256, 2, cluster_n=2), Cut(128, 2, cluster_n=2)),
    Cut(256, 2, cluster_m=2, cluster_n=2),
)
_SINGLE = (
    *(Cut(128, 1), Cut(64, 1)),
    *(Cut(tile_n, 1, swap_ab=True, split=split) for split in (1, 4) for tile_n in (64, 32, 16, 8)),
)
_tactics: tuple[Tactic, ...] = (*blockscaled_k96.KERNEL.tactics, *blockscaled.KERNEL.tactics)
_plain: dict[tuple[type, Cut], Tactic] = {
    (type(tactic), Cut.of(tactic)): tactic
    for tactic in reversed(_tactics)  # so that the first of equal keys is kept, which has no prefetch
}
# PTX lists products of 96 columns only for pairs of CTAs; CUTLASS uses them for single CTAs too. Some tactics do that,
# but none that selection returns.
SELECTABLE = (*(_plain[K96Tactic, cut] for cut in _PAIRS), *(_plain[K64Tactic, cut] for cut in _PAIRS + _SINGLE))


@functools.lru_cache(maxsize=4096)
def cheapest(problem: Fp4Problem, arch: Arch) -> Tactic | None:
    """The tactic of SELECTABLE that the model finds fastest for a problem; of equal ones, that with faster products."""

    def cost(tactic: Tactic) -> tuple[float, float]:
        figures = estimate(problem, tactic, arch)
        return figures.clocks, figures.product_clocks

    legal = (tactic for tactic in SELECTABLE if _KERNELS[type(tactic)].rejects(problem, tactic, arch) is None)
    return min(legal, key=cost, default=None)
