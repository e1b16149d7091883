"""The kernel of the gated delta rule: what it can be specialised to, which one a problem gets, and its launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import NamedTuple

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div, round_up
from jitfp4.registry import Family, register
from jitfp4.spec import F32, I64, Geometry, KernelSpec, Ptr

DTYPES = (DType.BF16, DType.F16)
STATE_DTYPES = (DType.F32, DType.BF16)
HEAD_DIMS = (128, 64)
MAX_TOKENS = (4, 16)
_ROWS_OF_WARP = 4  # times ilp_rows: eight lanes share a row
_MAX_GRID_Y = 65535
_CTA_RESERVE = 1024  # shared memory that the hardware keeps for itself in every CTA
_NO_LIMIT = 1 << 62


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
    the states, a warp's rows at a time.
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

    def __post_init__(self) -> None:
        for name, allowed in (
            ("head_dim", HEAD_DIMS),
            ("max_tokens", MAX_TOKENS),
            ("ilp_rows", (1, 2, 4, 8)),
            ("warps", (1, 2, 4, 8)),
            ("tile_v", tuple(rows for rows in (4, 8, 16, 32, 64, 128) if rows <= self.head_dim)),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")
        pass_rows = _ROWS_OF_WARP * self.ilp_rows * self.warps
        if self.tile_v % pass_rows:
            raise ArgumentError("tile_v", self.tile_v, f"a multiple of 4 * ilp_rows * warps = {pass_rows}")
        if self.state_layout is StateLayout.KV and (self.state_dtype is not DType.F32 or self.ilp_rows % 4):
            raise ArgumentError("state_layout", "kv", "a float32 state and ilp_rows of 4 or 8")
        if self.state_layout is StateLayout.KV and self.bulk_stores:
            raise ArgumentError("bulk_stores", True, "False for [K, V], where a warp's rows are no piece of memory")

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a CTA uses: k and q, gates and step offsets, v where it is staged, states that leave."""
        token = 2 * 4 * self.head_dim + (16 if self.store_steps else 8) + (4 * self.tile_v if self.use_smem_v else 0)
        warp_rows = _ROWS_OF_WARP * self.ilp_rows * self.head_dim * (4 if self.state_dtype is DType.F32 else 2)
        return round_up(self.max_tokens * token, 16) + (2 * self.warps * warp_rows if self.bulk_stores else 0)


class Shape(NamedTuple):
    """How a kernel is cut: fields of its Spec, and the most CTAs that an SM takes at a time, 0 for as many as fit."""

    tile_v: int
    ilp_rows: int
    warps: int
    use_smem_v: bool = False
    keep_state: bool = False
    ctas_per_sm: int = 0
    bulk_stores: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What selection depends on.

    ``heads`` counts value heads over the whole batch. ``step_slots``: the states that are kept go to slots that the
    caller chose, which may be one and the same.
    """

    dtype: DType
    state_dtype: DType
    state_layout: StateLayout
    head_dim: int
    tokens: int
    heads: int
    store_steps: bool
    step_slots: bool = False


class Row(NamedTuple):
    """A line of a table: up to so many tokens, and value heads in the whole batch."""

    tokens: int
    heads: int
    shape: Shape


# 512 float32 states of 64 KiB stay in an L2 of 50 MB. Measured: bench/results/h200/gdn_search.csv; gdn_ceiling.csv
# beside it says what loads and stores without arithmetic reach.
_WITH_STEPS = (
    Row(16, 128, Shape(32, 1, 8)),
    Row(16, 256, Shape(32, 1, 8, keep_state=True)),
    Row(16, 512, Shape(128, 8, 4, keep_state=True)),
    Row(4, _NO_LIMIT, Shape(8, 1, 2, bulk_stores=True)),
    Row(16, _NO_LIMIT, Shape(64, 2, 8, ctas_per_sm=1)),
)
_WITHOUT_STEPS = (
    Row(2, 64, Shape(16, 1, 4)),
    Row(2, 512, Shape(32, 2, 4)),
    Row(2, _NO_LIMIT, Shape(16, 1, 4)),
    Row(16, 64, Shape(32, 1, 8)),
    Row(4, 512, Shape(64, 4, 4)),
    Row(4, _NO_LIMIT, Shape(32, 2, 4)),
    Row(16, _NO_LIMIT, Shape(128, 4, 8)),
)
_OTHERS = (  # bf16 states and head dimension 64
    Row(16, 64, Shape(32, 1, 8)),
    Row(16, 1024, Shape(64, 4, 4, keep_state=True)),
    Row(16, _NO_LIMIT, Shape(64, 4, 4)),
)
_K_MAJOR = (Row(16, 64, Shape(32, 4, 2)), Row(16, _NO_LIMIT, Shape(64, 4, 4)))


def shape_of(problem: Problem, arch: Arch) -> Shape:
    """How the kernel for a problem is cut. Bulk stores need a copy engine and, as they keep no order, unlike places."""
    rows: tuple[Row, ...] = _WITH_STEPS if problem.store_steps else _WITHOUT_STEPS
    if problem.state_layout is StateLayout.KV:
        rows = _K_MAJOR
    elif problem.state_dtype is not DType.F32 or problem.head_dim != HEAD_DIMS[0]:
        rows = _OTHERS
    shape = next(row.shape for row in rows if problem.tokens <= row.tokens and problem.heads <= row.heads)
    return shape._replace(bulk_stores=shape.bulk_stores and arch.has_tma and not problem.step_slots)


def select(problem: Problem, arch: Arch) -> Spec:
    """The kernel for a problem. Pure: reads no device, no clock and no environment."""
    return specialise(problem, shape_of(problem, arch))


def specialise(problem: Problem, shape: Shape) -> Spec:
    """The kernel for a problem in a given shape."""
    return Spec(
        dtype=problem.dtype,
        state_dtype=problem.state_dtype,
        state_layout=problem.state_layout,
        head_dim=problem.head_dim,
        max_tokens=next(bound for bound in MAX_TOKENS if problem.tokens <= bound),
        tile_v=shape.tile_v,
        ilp_rows=shape.ilp_rows,
        warps=shape.warps,
        use_smem_v=shape.use_smem_v,
        store_steps=problem.store_steps,
        keep_state=shape.keep_state,
        bulk_stores=shape.bulk_stores,
    )


def specs(arch: Arch) -> Iterator[Spec]:
    """What select() can return."""
    rows = (*_WITH_STEPS, *_WITHOUT_STEPS, *_OTHERS, *_K_MAJOR)
    counts, sizes = sorted({row.tokens for row in rows}), sorted({row.heads for row in rows})
    found: dict[Spec, None] = {}
    for dtype, state_dtype, head_dim, tokens, (store_steps, step_slots), heads in product(
        DTYPES, STATE_DTYPES, HEAD_DIMS, counts, ((True, False), (True, True), (False, False)), sizes
    ):
        problem = Problem(
            dtype=dtype,
            state_dtype=state_dtype,
            state_layout=StateLayout.VK,
            head_dim=head_dim,
            tokens=tokens,
            heads=heads,
            store_steps=store_steps,
            step_slots=step_slots,
        )
        found[select(problem, arch)] = None
        if state_dtype is DType.F32 and not store_steps:
            found[select(replace(problem, state_layout=StateLayout.KV, tokens=1), arch)] = None
    yield from found


def geometry(spec: Spec, *, batch: int, value_heads: int, arch: Arch, ctas_per_sm: int = 0) -> Geometry:
    """``head_dim / tile_v`` CTAs for each value head; requests along y and, past the limit of y, z.

    ``ctas_per_sm`` asks for so much shared memory that no more CTAs fit: what is being written at a time stays close
    together, which DRAM rewards.
    """
    grid_y = min(batch, _MAX_GRID_Y)
    grid = (value_heads * (spec.head_dim // spec.tile_v), grid_y, ceil_div(batch, grid_y))
    share = (arch.shared_bytes + _CTA_RESERVE) // ctas_per_sm - _CTA_RESERVE if ctas_per_sm else 0
    return Geometry(grid=grid, block=(32 * spec.warps, 1, 1), shared_bytes=max(share, spec.shared_bytes))


DELTA_RULE = register(
    Family(
        name="gdn/delta_rule",
        spec=Spec,
        params=(
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
        ),
        specs=specs,
    )
)
