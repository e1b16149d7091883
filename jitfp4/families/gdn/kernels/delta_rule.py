"""The kernel that takes tokens one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.launches import PARAMS, bind, bound, grid, refused, require, require_dims, require_grain
from jitfp4.families.gdn.problem import MAX_TOKENS, Problem, StateLayout
from jitfp4.formats import DType
from jitfp4.kernel import Kernel
from jitfp4.layouts import round_up
from jitfp4.spec import Geometry, KernelSpec, fields_of

_ROWS_OF_WARP = 4  # times ilp_rows: eight lanes share a row


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


# tile_v, ilp_rows, warps
_CUTS = (
    (8, 1, 2),
    (16, 1, 4),
    (16, 2, 2),
    (32, 1, 8),
    (32, 2, 4),
    (32, 4, 2),
    (64, 2, 8),
    (64, 4, 4),
    (128, 4, 8),
    (128, 8, 4),
)
_CTAS_PER_SM = {2: (0, 8, 12), 4: (0, 3, 4, 5, 6), 8: (0, 2, 3)}  # by warps
_AHEAD = (0, 32, 48, 96)


def _tactics() -> Iterator[WalkTactic]:
    """Tactics for small batches, whose states fit in L2, for large ones, which memory bounds, and for stored steps."""
    for cut in _CUTS:
        for bulk_stores, keep_state in product((False, True), (False, True)):
            yield WalkTactic(*cut, bulk_stores=bulk_stores, keep_state=keep_state)
        for ahead, use_smem_v in product(_AHEAD, (False, True)):
            yield WalkTactic(*cut, ahead=ahead, use_smem_v=use_smem_v)
        for ctas_per_sm, ahead in product(_CTAS_PER_SM[cut[2]], _AHEAD):
            yield WalkTactic(*cut, ctas_per_sm=ctas_per_sm, bulk_stores=True, ahead=ahead)
    for ctas_per_sm, ahead in product((4, 6), (0, 48, 96)):  # where bulk stores cannot be
        yield WalkTactic(16, 1, 4, ctas_per_sm=ctas_per_sm, ahead=ahead)


TACTICS = tuple(dict.fromkeys(_tactics()))


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkSpec(KernelSpec):
    """A CTA of ``warps`` warps takes ``tile_v`` rows of a state; a lane holds ``ilp_rows`` at a time.

    ``general``: parameters of the kernel say the types of a and b and the gaps between heads of a slot. ``max_tokens``
    bounds the tokens of a call; with 1, rows of bf16 states stay in registers as they are in memory. ``use_smem_v``: v
    is staged in shared memory instead of registers. ``store_steps``: the state after every token is stored.
    ``keep_state``: the final state stays in L2 for the next call, and all other data is evicted first. ``bulk_stores``:
    the copy engine writes the states, a warp's rows at a time. ``ahead``: the states of so many heads are prefetched
    into L2 in one burst, before their CTAs load them; 0 for none.
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
        require_dims(self)
        for name, allowed in (
            ("max_tokens", MAX_TOKENS),
            ("ilp_rows", (1, 2, 4, 8)),
            ("warps", (1, 2, 4, 8)),
            ("tile_v", tuple(rows for rows in (4, 8, 16, 32, 64, 128) if rows <= self.value_dim)),
        ):
            require(self, name, allowed)
        pass_rows = _ROWS_OF_WARP * self.ilp_rows * self.warps
        if self.tile_v % pass_rows:
            raise ArgumentError("tile_v", self.tile_v, f"a multiple of 4 * ilp_rows * warps = {pass_rows}")
        if self.state_layout is StateLayout.KV and (self.state_dtype is not DType.F32 or self.ilp_rows % 4):
            raise ArgumentError("state_layout", "kv", "a float32 state and ilp_rows of 4 or 8")
        if self.state_layout is StateLayout.KV and self.bulk_stores:
            raise ArgumentError("bulk_stores", True, "False for [K, V], where a warp's rows are not contiguous")
        if self.max_tokens == 1 and not _packs(self):
            raise ArgumentError("max_tokens", 1, "a bf16 state without steps, in the usual form")
        require_grain(self.ahead)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: k and q, outputs, gates and step offsets, staged v, buffers of states."""
        token = 2 * 4 * self.head_dim + 2 * self.tile_v + (16 if self.store_steps else 8)
        token += 4 * self.tile_v if self.use_smem_v else 0
        warp_rows = _ROWS_OF_WARP * self.ilp_rows * self.head_dim * (4 if self.state_dtype is DType.F32 else 2)
        return round_up(self.max_tokens * token, 16) + (2 * self.warps * warp_rows if self.bulk_stores else 0)


def specialise(problem: Problem, tactic: WalkTactic) -> WalkSpec:
    """Raises ArgumentError for a tactic that cannot be."""
    cut: dict[str, Any] = fields_of(tactic)
    del cut["ctas_per_sm"]
    return WalkSpec(
        dtype=problem.dtype,
        state_dtype=problem.state_dtype,
        state_layout=problem.state_layout,
        general=problem.general,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        max_tokens=bound(problem, _bounds(problem)),
        store_steps=problem.store_steps,
        **cut,
    )


def _bounds(problem: Problem) -> tuple[int, ...]:
    """What may bound the tokens of a call: few values where a build is rare, and 1 where its kernel is another one."""
    if problem.general:
        return MAX_TOKENS[-1:]
    return MAX_TOKENS if _packs(problem) else MAX_TOKENS[1:]


def _packs(of: Problem | WalkSpec) -> bool:
    """Whether a build for one token may hold rows as they are in memory."""
    return of.state_dtype is DType.BF16 and not of.store_steps and not of.general


def rejects(problem: Problem, tactic: WalkTactic, arch: Arch) -> str | None:
    """Bulk stores and bursts need a copy engine. Bulk stores keep no order, but equal slots need one."""
    if not arch.has_tma and (tactic.bulk_stores or tactic.ahead):
        return "the GPU has no copy engine"
    if tactic.bulk_stores and problem.step_slots:
        return "bulk stores keep no order, and slots may coincide"
    return refused(specialise, problem, tactic, arch)


def geometry(problem: Problem, tactic: WalkTactic, arch: Arch) -> Geometry:
    return grid(problem, specialise(problem, tactic), share_of_sm(arch, tactic.ctas_per_sm))


def share_of_sm(arch: Arch, ctas_per_sm: int) -> int:
    """The shared memory of a CTA, in bytes, with which at most ``ctas_per_sm`` CTAs fit on an SM; 0 for no bound.

    With fewer CTAs, the addresses written at a time are closer together, which makes DRAM faster.
    """
    return arch.shared_of(ctas_per_sm) if ctas_per_sm else 0


KERNEL = Kernel(
    name="gdn/delta_rule",
    spec=WalkSpec,
    params=PARAMS,
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind,
)
