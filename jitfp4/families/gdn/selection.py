"""Which kernel of the gated delta rule a problem gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from jitfp4.arch import Arch
from jitfp4.engine import Launch
from jitfp4.families.gdn.kernel import (
    DTYPES,
    HEAD_DIMS,
    MAX_CHUNK,
    MAX_TOKENS,
    PARAMS,
    STATE_DTYPES,
    ChunkSpec,
    Spec,
    StateLayout,
    geometry,
)
from jitfp4.formats import DType
from jitfp4.registry import Family, register
from jitfp4.spec import KernelSpec

_NO_LIMIT = 1 << 62


class Shape(NamedTuple):
    """How the recurrent kernel is cut: fields of its Spec, and the most CTAs that an SM takes, 0 for as many as fit."""

    tile_v: int
    ilp_rows: int
    warps: int
    use_smem_v: bool = False
    keep_state: bool = False
    ctas_per_sm: int = 0
    bulk_stores: bool = False
    ahead: int = 0


class ChunkShape(NamedTuple):
    """How the chunkwise kernel is cut: fields of its ChunkSpec. It takes [V, K] states whose steps are not kept."""

    warps: int
    ahead: int = 0


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
    shape: Shape | ChunkShape


# 512 float32 states of 64 KiB stay in an L2 of 50 MB. Measured: bench/results/h200/gdn_search.csv; gdn_ceiling.csv
# beside it says what loads and stores without arithmetic reach.
_WITH_STEPS = (
    Row(16, 64, Shape(32, 1, 8)),
    Row(4, 256, Shape(32, 1, 8, keep_state=True)),
    Row(4, 512, Shape(64, 4, 4, keep_state=True)),
    Row(2, _NO_LIMIT, Shape(16, 1, 4, ctas_per_sm=6, bulk_stores=True, ahead=48)),
    Row(4, _NO_LIMIT, Shape(16, 1, 4, ctas_per_sm=6, bulk_stores=True, ahead=96)),
    Row(16, 256, Shape(64, 2, 8, keep_state=True, bulk_stores=True)),
    Row(16, 512, Shape(128, 8, 4, keep_state=True)),
    Row(16, 1024, Shape(16, 1, 4, ctas_per_sm=6, bulk_stores=True, ahead=96)),
    Row(16, _NO_LIMIT, Shape(16, 1, 4, ctas_per_sm=4, bulk_stores=True, ahead=96)),
)
_WITHOUT_STEPS = (
    Row(4, 64, Shape(32, 1, 8)),
    Row(2, 256, Shape(64, 4, 4)),
    Row(2, 512, Shape(64, 2, 8)),
    Row(2, 1024, Shape(32, 2, 4, ahead=32)),
    Row(2, _NO_LIMIT, Shape(16, 2, 2)),
    Row(16, 64, ChunkShape(4)),
    Row(16, 512, ChunkShape(8)),
    Row(4, 1024, Shape(32, 2, 4, ahead=32)),
    Row(4, _NO_LIMIT, Shape(64, 4, 4, ahead=96)),
    Row(16, _NO_LIMIT, ChunkShape(4, ahead=96)),
)
_BF16_WITH_STEPS = (
    Row(16, 64, Shape(32, 1, 8)),
    Row(16, 512, Shape(128, 4, 8, keep_state=True)),
    Row(16, _NO_LIMIT, Shape(32, 2, 4, bulk_stores=True, ahead=48)),
)
_BF16_WITHOUT_STEPS = (
    Row(4, 64, Shape(32, 1, 8)),
    Row(16, 64, ChunkShape(4)),
    Row(2, _NO_LIMIT, Shape(32, 4, 2)),
    Row(16, _NO_LIMIT, ChunkShape(8)),
)
_SMALL_HEADS = (  # of dimension 64; not searched
    Row(16, 64, Shape(32, 1, 8)),
    Row(16, 1024, Shape(64, 4, 4, keep_state=True)),
    Row(16, _NO_LIMIT, Shape(64, 4, 4)),
)
_K_MAJOR = (
    Row(16, 64, Shape(32, 4, 2)),
    Row(16, 512, Shape(64, 4, 4)),
    Row(16, _NO_LIMIT, Shape(64, 4, 4, ahead=96)),
)
_TABLES = (_WITH_STEPS, _WITHOUT_STEPS, _BF16_WITH_STEPS, _BF16_WITHOUT_STEPS, _SMALL_HEADS, _K_MAJOR)


def _table(problem: Problem) -> tuple[Row, ...]:
    if problem.state_layout is StateLayout.KV:
        return _K_MAJOR
    if problem.head_dim != HEAD_DIMS[0]:
        return _SMALL_HEADS
    if problem.state_dtype is DType.F32:
        return _WITH_STEPS if problem.store_steps else _WITHOUT_STEPS
    return _BF16_WITH_STEPS if problem.store_steps else _BF16_WITHOUT_STEPS


def shape_of(problem: Problem, arch: Arch) -> Shape | ChunkShape:
    """How the kernel for a problem is cut. Bulk stores need a copy engine and, as they keep no order, unlike places."""
    rows = (row for row in _table(problem) if problem.tokens <= row.tokens and problem.heads <= row.heads)
    shape = next(rows).shape
    if isinstance(shape, Shape):
        shape = shape._replace(bulk_stores=shape.bulk_stores and arch.has_tma and not problem.step_slots)
    return shape if arch.has_tma else shape._replace(ahead=0)


def select(problem: Problem, arch: Arch) -> Spec | ChunkSpec:
    """The kernel for a problem. Pure: reads no device, no clock and no environment."""
    return specialise(problem, shape_of(problem, arch))


def specialise(problem: Problem, shape: Shape | ChunkShape) -> Spec | ChunkSpec:
    """The kernel for a problem in a given shape."""
    bounds = MAX_TOKENS if isinstance(shape, Shape) else MAX_CHUNK
    max_tokens = next(bound for bound in bounds if problem.tokens <= bound)
    if isinstance(shape, ChunkShape):
        return ChunkSpec(
            dtype=problem.dtype,
            state_dtype=problem.state_dtype,
            head_dim=problem.head_dim,
            max_tokens=max_tokens,
            warps=shape.warps,
            ahead=shape.ahead,
        )
    return Spec(
        dtype=problem.dtype,
        state_dtype=problem.state_dtype,
        state_layout=problem.state_layout,
        head_dim=problem.head_dim,
        max_tokens=max_tokens,
        tile_v=shape.tile_v,
        ilp_rows=shape.ilp_rows,
        warps=shape.warps,
        use_smem_v=shape.use_smem_v,
        store_steps=problem.store_steps,
        keep_state=shape.keep_state,
        bulk_stores=shape.bulk_stores,
        ahead=shape.ahead,
    )


def plan(problem: Problem, shape: Shape | ChunkShape, arch: Arch, *, batch: int, value_heads: int) -> Launch:
    """The launch of the kernel for a problem in a given shape."""
    spec = specialise(problem, shape)
    ctas_per_sm = shape.ctas_per_sm if isinstance(shape, Shape) else 0
    cut = geometry(spec, batch=batch, value_heads=value_heads, arch=arch, ctas_per_sm=ctas_per_sm)
    return Launch(DELTA_RULE if isinstance(spec, Spec) else CHUNK, spec, cut)


def specs(arch: Arch) -> Iterator[Spec | ChunkSpec]:
    """What select() returns for any problem."""
    yield from dict.fromkeys(select(problem, arch) for problem in _problems())


def _problems() -> Iterator[Problem]:
    """Some that fall into each row of each table, in each dtype."""
    rows = [row for table in _TABLES for row in table]
    tokens = sorted({row.tokens for row in rows} | set(MAX_TOKENS) | set(MAX_CHUNK))
    heads = sorted({row.heads for row in rows})
    steps = ((True, False), (True, True), (False, False))
    for dtype, state_dtype, head_dim, count, (store_steps, step_slots), size in product(
        DTYPES, STATE_DTYPES, HEAD_DIMS, tokens, steps, heads
    ):
        problem = Problem(
            dtype=dtype,
            state_dtype=state_dtype,
            state_layout=StateLayout.VK,
            head_dim=head_dim,
            tokens=count,
            heads=size,
            store_steps=store_steps,
            step_slots=step_slots,
        )
        yield problem
        if state_dtype is DType.F32 and not store_steps:
            yield replace(problem, state_layout=StateLayout.KV, tokens=1)


def _specs_of(kind: type[KernelSpec]) -> Callable[[Arch], Iterator[KernelSpec]]:
    return lambda arch: (spec for spec in specs(arch) if isinstance(spec, kind))


DELTA_RULE = register(Family(name="gdn/delta_rule", spec=Spec, params=PARAMS, specs=_specs_of(Spec)))
CHUNK = register(Family(name="gdn/chunk", spec=ChunkSpec, params=PARAMS, specs=_specs_of(ChunkSpec)))
