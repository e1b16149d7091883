"""Problems, tactics and specs of the gated delta rule, and the geometry of its launches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import FLOATS
from jitfp4.errors import ArgumentError
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import Geometry, KernelSpec

STATE_DTYPES = {dtype: FLOATS[dtype] for dtype in (torch.float32, torch.bfloat16)}
HEAD_DIMS = (128, 64)
VALUE_DIMS = {128: (128, 256), 64: (64,)}  # by head_dim; those that differ from head_dim only for float32 states
MAX_TOKENS = (4, 16)
MAX_CHUNK = (8, 16)
CHUNK_ROWS = 16  # rows of a state that a warp of the chunkwise kernel takes
AHEAD_GRAIN = 4  # heads that one CTA prefetches into L2
_ROWS_OF_WARP = 4  # times ilp_rows: eight lanes share a row
_MAX_GRID_Y = 65535


class StateLayout(StrEnum):
    """The order of a head's state in memory: [V, K] or [K, V]."""

    VK = "vk"
    KV = "kv"


class Problem(NamedTuple):
    """The properties of a call that selection depends on.

    A head's state has ``value_dim`` rows (V) of ``head_dim`` columns (K). ``store_steps``: the state after every token
    is stored; ``step_slots``: in slots that the caller chose, which may be equal. ``general``: V differs from K, a or b
    is float32, or there are gaps between the heads of a slot.
    """

    dtype: DType
    state_dtype: DType
    state_layout: StateLayout
    head_dim: int
    value_dim: int
    tokens: int
    batch: int
    value_heads: int
    store_steps: bool
    step_slots: bool = False
    general: bool = False

    @property
    def heads(self) -> int:
        """Value heads in the whole batch."""
        return self.batch * self.value_heads


@dataclass(frozen=True, slots=True)
class WalkTactic:
    """Fields of WalkSpec, the kernel that takes tokens one by one, and the most CTAs that run on an SM; 0 for as many
    as fit.
    """

    tile_v: int
    ilp_rows: int
    warps: int
    use_smem_v: bool = False
    keep_state: bool = False
    ctas_per_sm: int = 0
    bulk_stores: bool = False
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class ChunkTactic:
    """Fields of ChunkSpec, the chunkwise kernel."""

    warps: int
    ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkSpec(KernelSpec):
    """A CTA of ``warps`` warps takes ``tile_v`` rows of a state; a lane holds ``ilp_rows`` at a time.

    ``general``: parameters of the kernel say the types of a and b and the gaps between heads of a slot. ``max_tokens``
    bounds the tokens of a call. ``use_smem_v``: v is staged in shared memory instead of registers. ``store_steps``: the
    state after every token is stored. ``keep_state``: the final state stays in L2 for the next call, and all other data
    is evicted first. ``bulk_stores``: the copy engine writes the states, a warp's rows at a time. ``ahead``: the states
    of so many heads are prefetched into L2 in one burst, before their CTAs load them; 0 for none.
    """

    dtype: DType
    state_dtype: DType
    state_layout: StateLayout
    general: bool
    head_dim: int
    value_dim: int
    max_tokens: int
    tile_v: int
    ilp_rows: int
    warps: int
    use_smem_v: bool
    store_steps: bool
    keep_state: bool
    bulk_stores: bool
    ahead: int

    def __post_init__(self) -> None:
        _require_dims(self)
        for name, allowed in (
            ("max_tokens", MAX_TOKENS),
            ("ilp_rows", (1, 2, 4, 8)),
            ("warps", (1, 2, 4, 8)),
            ("tile_v", tuple(rows for rows in (4, 8, 16, 32, 64, 128) if rows <= self.value_dim)),
        ):
            _require(self, name, allowed)
        pass_rows = _ROWS_OF_WARP * self.ilp_rows * self.warps
        if self.tile_v % pass_rows:
            raise ArgumentError("tile_v", self.tile_v, f"a multiple of 4 * ilp_rows * warps = {pass_rows}")
        if self.state_layout is StateLayout.KV and (self.state_dtype is not DType.F32 or self.ilp_rows % 4):
            raise ArgumentError("state_layout", "kv", "a float32 state and ilp_rows of 4 or 8")
        if self.state_layout is StateLayout.KV and self.bulk_stores:
            raise ArgumentError("bulk_stores", True, "False for [K, V], where a warp's rows are not contiguous")
        _require_grain(self.ahead)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: k and q, outputs, gates and step offsets, staged v, buffers of states."""
        token = 2 * 4 * self.head_dim + 2 * self.tile_v + (16 if self.store_steps else 8)
        token += 4 * self.tile_v if self.use_smem_v else 0
        warp_rows = _ROWS_OF_WARP * self.ilp_rows * self.head_dim * (4 if self.state_dtype is DType.F32 else 2)
        return round_up(self.max_tokens * token, 16) + (2 * self.warps * warp_rows if self.bulk_stores else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec(KernelSpec):
    """A warp takes 16 rows of a [V, K] state and up to ``max_tokens`` tokens at once; the rest is as in WalkSpec."""

    dtype: DType
    state_dtype: DType
    general: bool
    head_dim: int
    value_dim: int
    max_tokens: int
    warps: int
    ahead: int

    def __post_init__(self) -> None:
        _require_dims(self)
        _require(self, "max_tokens", MAX_CHUNK)
        _require(self, "warps", tuple(warps for warps in (1, 2, 4, 8) if warps * CHUNK_ROWS <= self.value_dim))
        _require_grain(self.ahead)

    @property
    def tile_v(self) -> int:
        """Rows of a state that a CTA owns."""
        return CHUNK_ROWS * self.warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: k and q, factors between tokens, gates."""
        tokens, padding = self.max_tokens, 16 if self.state_dtype is DType.F32 else 4
        floats_of_token = 2 * (self.head_dim + padding) + 2 * tokens + 2 * 2 + (tokens + 1) + 2
        return 4 * tokens * floats_of_token


def _require(spec: KernelSpec, name: str, allowed: tuple[int, ...]) -> None:
    if getattr(spec, name) not in allowed:
        raise ArgumentError(name, getattr(spec, name), f"one of {allowed}")


def _require_dims(spec: WalkSpec | ChunkSpec) -> None:
    _require(spec, "head_dim", HEAD_DIMS)
    allowed = VALUE_DIMS[spec.head_dim]
    _require(spec, "value_dim", allowed if spec.general and spec.state_dtype is DType.F32 else allowed[:1])


def _require_grain(ahead: int) -> None:
    if ahead < 0 or ahead % AHEAD_GRAIN:
        raise ArgumentError("ahead", ahead, f"a multiple of {AHEAD_GRAIN}")


def walk_spec(problem: Problem, tactic: WalkTactic) -> WalkSpec:
    """Raises ArgumentError for a tactic that cannot be."""
    cut = asdict(tactic)
    del cut["ctas_per_sm"]
    return WalkSpec(
        dtype=problem.dtype,
        state_dtype=problem.state_dtype,
        state_layout=problem.state_layout,
        general=problem.general,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        max_tokens=_bound(problem, MAX_TOKENS[-1:] if problem.general else MAX_TOKENS),  # rare: fewer builds
        store_steps=problem.store_steps,
        **cut,
    )


def walk_rejects(problem: Problem, tactic: WalkTactic, arch: Arch) -> str | None:
    """Bulk stores and bursts need a copy engine. Bulk stores keep no order, but equal slots need one."""
    if not arch.has_tma and (tactic.bulk_stores or tactic.ahead):
        return "the GPU has no copy engine"
    if tactic.bulk_stores and problem.step_slots:
        return "bulk stores keep no order, and slots may coincide"
    try:
        spec = walk_spec(problem, tactic)
    except ArgumentError as error:
        return str(error)
    return _too_large(spec, arch)


def chunk_spec(problem: Problem, tactic: ChunkTactic) -> ChunkSpec:
    """Raises ArgumentError for a tactic that cannot be."""
    return ChunkSpec(
        dtype=problem.dtype,
        state_dtype=problem.state_dtype,
        general=problem.general,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        max_tokens=_bound(problem, MAX_CHUNK),
        warps=tactic.warps,
        ahead=tactic.ahead,
    )


def chunk_rejects(problem: Problem, tactic: ChunkTactic, arch: Arch) -> str | None:
    if problem.store_steps or problem.state_layout is not StateLayout.VK:
        return "it takes [V, K] states, and does not store the states of steps"
    if not arch.has_tma and tactic.ahead:
        return "the GPU has no copy engine"
    try:
        spec = chunk_spec(problem, tactic)
    except ArgumentError as error:
        return str(error)
    return _too_large(spec, arch)


def walk_geometry(problem: Problem, tactic: WalkTactic, arch: Arch) -> Geometry:
    return _geometry(problem, walk_spec(problem, tactic), share_of_sm(arch, tactic.ctas_per_sm))


def chunk_geometry(problem: Problem, tactic: ChunkTactic, _arch: Arch) -> Geometry:
    return _geometry(problem, chunk_spec(problem, tactic), 0)


def share_of_sm(arch: Arch, ctas_per_sm: int) -> int:
    """The shared memory of a CTA, in bytes, with which at most ``ctas_per_sm`` CTAs fit on an SM; 0 for no bound.

    With fewer CTAs, the addresses written at a time are closer together, which makes DRAM faster.
    """
    return arch.shared_of(ctas_per_sm) if ctas_per_sm else 0


def _geometry(problem: Problem, spec: WalkSpec | ChunkSpec, least_shared_bytes: int) -> Geometry:
    """``value_dim / tile_v`` CTAs for each value head along x; requests along y and, beyond the limit of y, z."""
    grid_y = min(problem.batch, _MAX_GRID_Y)
    grid = (problem.value_heads * (spec.value_dim // spec.tile_v), grid_y, ceil_div(problem.batch, grid_y))
    shared_bytes = max(spec.shared_bytes, least_shared_bytes)
    return Geometry(grid=grid, block=(32 * spec.warps, 1, 1), shared_bytes=shared_bytes)


def _bound(problem: Problem, bounds: tuple[int, ...]) -> int:
    return next(bound for bound in bounds if problem.tokens <= bound)


def _too_large(spec: WalkSpec | ChunkSpec, arch: Arch) -> str | None:
    """Why a CTA does not fit on an SM."""
    fits = spec.shared_bytes <= arch.shared_bytes
    return None if fits else f"it needs {spec.shared_bytes} bytes of shared memory"
