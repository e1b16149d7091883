"""The kernels of the gated delta rule: what they can be specialised to, what they take, and their launch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import F32, I64, Geometry, KernelSpec, Param, Ptr

DTYPES = (DType.BF16, DType.F16)
STATE_DTYPES = (DType.F32, DType.BF16)
HEAD_DIMS = (128, 64)
MAX_TOKENS = (4, 16)
MAX_CHUNK = (8, 16)
CHUNK_ROWS = 16  # of a state, in a warp of the chunkwise kernel
AHEAD_GRAIN = 4  # heads that one CTA brings into L2
_ROWS_OF_WARP = 4  # times ilp_rows: eight lanes share a row
_MAX_GRID_Y = 65535
_CTA_RESERVE = 1024  # shared memory that the hardware keeps for itself in every CTA


class StateLayout(StrEnum):
    """The order of a head's state in memory: [V, K] or [K, V]."""

    VK = "vk"
    KV = "kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A CTA of ``warps`` warps takes ``tile_v`` rows of a state; a lane holds ``ilp_rows`` at a time.

    ``max_tokens`` bounds the tokens of a call; ``use_smem_v`` stages v in shared memory instead of in registers;
    ``store_steps`` is for calls that keep the state after every token; ``keep_state`` leaves the final state in L2,
    from where the next call reads it, and has everything else leave first; ``bulk_stores`` has the copy engine write
    the states, a warp's rows at a time; ``ahead`` heads are brought into L2 in one burst, before their CTAs load them.
    """

    dtype: DType
    state_dtype: DType
    state_layout: StateLayout
    head_dim: int
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
        for name, allowed in (
            ("head_dim", HEAD_DIMS),
            ("max_tokens", MAX_TOKENS),
            ("ilp_rows", (1, 2, 4, 8)),
            ("warps", (1, 2, 4, 8)),
            ("tile_v", tuple(rows for rows in (4, 8, 16, 32, 64, 128) if rows <= self.head_dim)),
        ):
            _require(self, name, allowed)
        pass_rows = _ROWS_OF_WARP * self.ilp_rows * self.warps
        if self.tile_v % pass_rows:
            raise ArgumentError("tile_v", self.tile_v, f"a multiple of 4 * ilp_rows * warps = {pass_rows}")
        if self.state_layout is StateLayout.KV and (self.state_dtype is not DType.F32 or self.ilp_rows % 4):
            raise ArgumentError("state_layout", "kv", "a float32 state and ilp_rows of 4 or 8")
        if self.state_layout is StateLayout.KV and self.bulk_stores:
            raise ArgumentError("bulk_stores", True, "False for [K, V], where a warp's rows are no piece of memory")
        _require_grain(self.ahead)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a CTA uses: k and q, outputs, gates and step offsets, staged v, states that leave."""
        token = 2 * 4 * self.head_dim + 2 * self.tile_v + (16 if self.store_steps else 8)
        token += 4 * self.tile_v if self.use_smem_v else 0
        warp_rows = _ROWS_OF_WARP * self.ilp_rows * self.head_dim * (4 if self.state_dtype is DType.F32 else 2)
        return round_up(self.max_tokens * token, 16) + (2 * self.warps * warp_rows if self.bulk_stores else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec(KernelSpec):
    """A warp takes 16 rows of a [V, K] state and up to ``max_tokens`` tokens at once; ``ahead`` is as in Spec."""

    dtype: DType
    state_dtype: DType
    head_dim: int
    max_tokens: int
    warps: int
    ahead: int

    def __post_init__(self) -> None:
        _require(self, "head_dim", HEAD_DIMS)
        _require(self, "max_tokens", MAX_CHUNK)
        _require(self, "warps", tuple(warps for warps in (1, 2, 4, 8) if warps * CHUNK_ROWS <= self.head_dim))
        _require_grain(self.ahead)

    @property
    def tile_v(self) -> int:
        """Rows of a state that a CTA takes."""
        return CHUNK_ROWS * self.warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a CTA uses: k and q, factors between tokens, gates."""
        tokens, padding = self.max_tokens, 16 if self.state_dtype is DType.F32 else 4
        floats_of_token = 2 * (self.head_dim + padding) + 2 * tokens + 2 * 2 + (tokens + 1) + 2
        return 4 * tokens * floats_of_token


def _require(spec: KernelSpec, name: str, allowed: tuple[int, ...]) -> None:
    if getattr(spec, name) not in allowed:
        raise ArgumentError(name, getattr(spec, name), f"one of {allowed}")


def _require_grain(ahead: int) -> None:
    if ahead < 0 or ahead % AHEAD_GRAIN:
        raise ArgumentError("ahead", ahead, f"a multiple of {AHEAD_GRAIN}")


def geometry(spec: Spec | ChunkSpec, *, batch: int, value_heads: int, arch: Arch, ctas_per_sm: int = 0) -> Geometry:
    """``head_dim / tile_v`` CTAs for each value head; requests along y and, past the limit of y, z.

    With at most ``ctas_per_sm``, what is being written at a time stays close together, which DRAM rewards.
    """
    grid_y = min(batch, _MAX_GRID_Y)
    grid = (value_heads * (spec.head_dim // spec.tile_v), grid_y, ceil_div(batch, grid_y))
    shared_bytes = max(spec.shared_bytes, share_of_sm(arch, ctas_per_sm))
    return Geometry(grid=grid, block=(32 * spec.warps, 1, 1), shared_bytes=shared_bytes)


def share_of_sm(arch: Arch, ctas_per_sm: int) -> int:
    """So much shared memory that no more CTAs than ``ctas_per_sm`` fit; 0 for no bound."""
    return (arch.shared_bytes + _CTA_RESERVE) // ctas_per_sm - _CTA_RESERVE if ctas_per_sm else 0


PARAMS: tuple[Param, ...] = (
    Ptr("q", "const In", "[batch, tokens, heads, K]"),
    Ptr("k", "const In", "[batch, tokens, heads, K]"),
    Ptr("v", "const In", "[batch, tokens, value_heads, V]"),
    Ptr("a", "const In", "[batch, tokens, value_heads]"),
    Ptr("b", "const In", "[batch, tokens, value_heads]"),
    Ptr("a_log", "const float", "[value_heads]"),
    Ptr("dt_bias", "const void", "[value_heads] of dt_bias_type"),
    Ptr("state", "State", "[pool, value_heads, V, K] in kStateLayout"),
    Ptr("slots", "const void", "[batch], integers of slot_bytes; negative: no state, output zero"),
    Ptr("write_slots", "const void", "[batch], integers of write_slot_bytes; negative: not written"),
    Ptr("steps", "State", "[batch, tokens, value_heads, V, K], or [pool, ...] with step_slots"),
    Ptr("step_slots", "const void", "[batch, tokens], integers of step_slot_bytes; negative: not written"),
    Ptr("out", "In", "[batch, tokens, value_heads, V]"),
    F32("scale", "of q"),
    I64("batch"),
    I64("tokens", "<= kMaxTokens"),
    I64("heads"),
    I64("value_heads", "a multiple of heads"),
    I64("q_batch_stride", "elements, as all strides"),
    I64("q_token_stride"),
    I64("k_batch_stride"),
    I64("k_token_stride"),
    I64("v_batch_stride"),
    I64("v_token_stride"),
    I64("a_batch_stride"),
    I64("a_token_stride"),
    I64("b_batch_stride"),
    I64("b_token_stride"),
    I64("state_stride"),
    I64("steps_batch_stride"),
    I64("steps_token_stride", "of a slot with step_slots"),
    I64("dt_bias_type", "0 float, 1 bf16, 2 f16"),
    I64("step_slot_bytes", "0: steps has its own strides"),
    I64("slot_bytes", "0, 4 or 8; 0: request n uses slot n"),
    I64("write_slot_bytes", "likewise"),
    I64("update_state", "0: write_slots is not used"),
    I64("l2norm", "0: q and k as they are"),
)
