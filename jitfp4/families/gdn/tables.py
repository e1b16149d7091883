"""The tactics for calls of the gated delta rule, and the problems that reach every row.

512 float32 states of 64 KiB fit in an L2 cache of 50 MB. The speed of the same loads and stores without arithmetic is
in bench/results/h200/gdn_ceiling.csv.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.gdn.kernels.chunk import ChunkTactic
from jitfp4.families.gdn.kernels.delta_rule import WalkTactic
from jitfp4.families.gdn.problem import HEAD_DIMS, MAX_CHUNK, MAX_TOKENS, STATE_DTYPES, VALUE_DIMS, Problem, StateLayout
from jitfp4.formats import DType
from jitfp4.selection import Row, Table

Tactic = WalkTactic | ChunkTactic


def _rows(*rows: tuple[int, int | None, Tactic], measured: str | None = None, **when: Any) -> Iterator[Row[Tactic]]:
    """Rows of (most tokens, most value heads in the batch, tactic), which follow from ``measured``.

    Each tactic is followed by the same without bulk copies, and without prefetches, for problems and GPUs that cannot
    have them; a chunk's copies fit wherever there is a copy engine, which its prefetches need too.
    """
    for tokens, heads, tactic in rows:
        limits = {"tokens": tokens} | ({} if heads is None else {"heads": heads})
        if isinstance(tactic, WalkTactic):
            plain: Tactic = replace(tactic, bulk_stores=False)
        else:
            plain = replace(tactic, bulk=False, ahead=0)
        for one in dict.fromkeys((tactic, plain, replace(plain, ahead=0))):
            yield Row(one, when | limits, measured)


TABLE = Table(
    (
        *_rows((16, None, WalkTactic(64, 4, 4)), general=True),  # not searched
        *_rows(
            (16, 64, WalkTactic(32, 4, 2)),
            (16, 512, WalkTactic(64, 4, 4)),
            (16, None, WalkTactic(128, 8, 4)),
            (16, None, WalkTactic(64, 4, 4, ahead=96)),  # V of 64
            measured="h200/gdn_search_kv.csv",
            state_layout=StateLayout.KV,
        ),
        *_rows(  # not searched
            (16, 64, WalkTactic(32, 1, 8)),
            (16, 1024, WalkTactic(64, 4, 4, keep_state=True)),
            (16, None, WalkTactic(64, 4, 4)),
            head_dim=64,
        ),
        *_rows(
            (16, 64, WalkTactic(32, 1, 8)),
            (4, 256, WalkTactic(32, 1, 8, keep_state=True)),
            (4, 512, WalkTactic(64, 4, 4, keep_state=True)),
            (2, None, WalkTactic(16, 1, 4, ctas_per_sm=6, bulk_stores=True, ahead=48)),
            (4, None, WalkTactic(16, 1, 4, ctas_per_sm=6, bulk_stores=True, ahead=96)),
            (16, 256, WalkTactic(64, 2, 8, keep_state=True, bulk_stores=True)),
            (16, 512, WalkTactic(128, 8, 4, keep_state=True)),
            (16, 1024, WalkTactic(16, 1, 4, ctas_per_sm=6, bulk_stores=True, ahead=96)),
            (16, None, WalkTactic(16, 1, 4, ctas_per_sm=4, bulk_stores=True, ahead=96)),
            state_dtype=DType.F32,
            store_steps=True,
        ),
        *_rows(
            (1, 64, WalkTactic(32, 2, 4)),
            (4, 64, WalkTactic(32, 1, 8)),
            (2, 512, WalkTactic(64, 4, 4)),
            (2, 1024, WalkTactic(32, 2, 4, ahead=96)),
            (2, None, WalkTactic(32, 2, 4)),
            (4, 512, ChunkTactic(4)),
            (4, None, ChunkTactic(4, ahead=96, bulk=True)),
            (8, 64, ChunkTactic(4)),
            (8, 512, ChunkTactic(8)),
            (8, None, ChunkTactic(4, bulk=True)),
            (16, 128, ChunkTactic(8)),
            (16, None, ChunkTactic(8, bulk=True)),
            measured="h200/gdn_search_final.csv",
            state_dtype=DType.F32,
            store_steps=False,
        ),
        *_rows(
            (16, 64, WalkTactic(32, 1, 8)),
            (16, 512, WalkTactic(128, 4, 8, keep_state=True)),
            (16, None, WalkTactic(32, 2, 4, bulk_stores=True, ahead=48)),
            state_dtype=DType.BF16,
            store_steps=True,
        ),
        *_rows(
            (1, 64, WalkTactic(32, 2, 4)),
            (4, 64, WalkTactic(32, 1, 8)),
            (1, 1024, WalkTactic(64, 4, 4)),
            (1, None, WalkTactic(32, 4, 2)),
            (8, 512, ChunkTactic(8)),
            (4, None, ChunkTactic(4, bulk=True)),
            (8, None, ChunkTactic(4)),
            (16, 128, ChunkTactic(8)),
            (16, None, ChunkTactic(8, bulk=True)),
            measured="h200/gdn_search_final.csv",
            state_dtype=DType.BF16,
            store_steps=False,
        ),
    ),
    measured="h200/gdn_search.csv",
)


def problems(_arch: Arch) -> Iterator[Problem]:
    """Problems that reach each row of the table, in each dtype."""
    tokens = sorted({row.when["tokens"] for row in TABLE.rows} | set(MAX_TOKENS) | set(MAX_CHUNK))
    heads = sorted({row.when.get("heads", 4096) for row in TABLE.rows})
    steps = ((True, False), (True, True), (False, False))
    for dtype, state_dtype, head_dim, count, (store_steps, step_slots), size in product(
        HALVES.values(), STATE_DTYPES.values(), HEAD_DIMS, tokens, steps, heads
    ):
        problem = Problem(
            dtype=dtype,
            state_dtype=state_dtype,
            state_layout=StateLayout.VK,
            head_dim=head_dim,
            value_dim=head_dim,
            tokens=count,
            batch=size // 32 or 1,
            value_heads=min(size, 32),
            store_steps=store_steps,
            step_slots=step_slots,
        )
        forms = [problem, problem._replace(general=True)]
        if state_dtype is DType.F32:
            forms += [problem._replace(general=True, value_dim=value_dim) for value_dim in VALUE_DIMS[head_dim][1:]]
        yield from forms
        if state_dtype is DType.F32 and not store_steps:
            yield from (form._replace(state_layout=StateLayout.KV, tokens=1) for form in forms)
