"""The chunkwise kernel: a warp takes all tokens of a call at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from jitfp4.arch import Arch
from jitfp4.families.gdn.launches import PARAMS, bind, bound, grid, refused, require, require_dims, require_grain
from jitfp4.families.gdn.problem import CHUNK_ROWS, MAX_CHUNK, Problem, StateLayout
from jitfp4.formats import DType
from jitfp4.kernel import Kernel
from jitfp4.layouts import round_up
from jitfp4.spec import Geometry, KernelSpec


@dataclass(frozen=True, slots=True)
class ChunkTactic:
    """Fields of ChunkSpec, the chunkwise kernel."""

    warps: int
    ahead: int = 0
    bulk: bool = False


TACTICS = tuple(
    ChunkTactic(warps, ahead, bulk) for warps, ahead, bulk in product((2, 4, 8), (0, 32, 48, 96), (False, True))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec(KernelSpec):
    """A warp takes 16 rows of a [V, K] state and up to ``max_tokens`` tokens at once.

    ``bulk``: the copy engine moves the states, a warp's rows at a time. The rest is as in WalkSpec.
    """

    dtype: DType
    state_dtype: DType
    general: bool
    head_dim: int
    value_dim: int
    max_tokens: int
    warps: int
    ahead: int
    bulk: bool

    def __post_init__(self) -> None:
        require_dims(self)
        require(self, "max_tokens", MAX_CHUNK)
        require(self, "warps", tuple(warps for warps in (1, 2, 4, 8) if warps * CHUNK_ROWS <= self.value_dim))
        require_grain(self.ahead)

    @property
    def tile_v(self) -> int:
        """Rows of a state that a CTA owns."""
        return CHUNK_ROWS * self.warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: rows and their barriers, k and q, factors between tokens, gates."""
        of_token = 2 * 2 * self.head_dim + 4 * (2 * self.max_tokens + 2 * 2 + (self.max_tokens + 1) + 2)
        rows = self.tile_v * self.head_dim * (4 if self.state_dtype is DType.F32 else 2) + 8 * self.warps
        return (round_up(rows, 16) if self.bulk else 0) + round_up(self.max_tokens * of_token, 16)


def specialise(problem: Problem, tactic: ChunkTactic) -> ChunkSpec:
    """Raises ArgumentError for a tactic that cannot be."""
    return ChunkSpec(
        dtype=problem.dtype,
        state_dtype=problem.state_dtype,
        general=problem.general,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        max_tokens=bound(problem, MAX_CHUNK),
        warps=tactic.warps,
        ahead=tactic.ahead,
        bulk=tactic.bulk,
    )


def rejects(problem: Problem, tactic: ChunkTactic, arch: Arch) -> str | None:
    if problem.store_steps or problem.state_layout is not StateLayout.VK:
        return "it takes [V, K] states, and does not store the states of steps"
    if not arch.has_tma and (tactic.ahead or tactic.bulk):
        return "the GPU has no copy engine"
    return refused(specialise, problem, tactic, arch)


def geometry(problem: Problem, tactic: ChunkTactic, _arch: Arch) -> Geometry:
    return grid(problem, specialise(problem, tactic), 0)


KERNEL = Kernel(
    name="gdn/chunk",
    spec=ChunkSpec,
    params=PARAMS,
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind,
)
