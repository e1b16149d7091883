"""The same of wgmma and tcgen05: kernels of test_matrix.py with one piece missing or weaker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.sim.faulty import FENCE_ASYNC, Case
from tests.sim.matrix_kernels import COMMIT, FENCE, FREE, TCGEN05, WAIT, WGMMA


def integers(seed: int, rows: int) -> np.ndarray:
    """bf16 of small integers, ``[rows, 16]``: every product and sum is exact."""
    values = np.random.default_rng(seed).integers(-4, 5, (rows, 16)).astype(np.float32)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def wgmma_args() -> list[Any]:
    a, b = integers(2, 64), integers(3, 16)
    return [a, b, np.zeros((64, 16), np.float32), np.int32(1)]


def tcgen05_args() -> list[Any]:
    a, b = integers(4, 128), integers(5, 16)
    return [a, b, np.zeros((128, 16), np.float32)]


def _with_piece(source: str, old: str, new: str = "PIECE") -> str:
    assert old in source
    return source.replace(old, new, 1)


def wgmma(old: str = "", new: str = "PIECE", **pieces: str) -> dict[str, Any]:
    parts = {"FENCE;": FENCE + ";", "WAIT;": WAIT + ";", "EARLY;": ""} | {f"{k};": v for k, v in pieces.items()}
    source = WGMMA.replace(FENCE_ASYNC, "ASYNC;")
    for name, text in parts.items():
        source = source.replace(name, text)
    source = source.replace("ASYNC;", "PIECE" if old == FENCE_ASYNC else FENCE_ASYNC)
    if old and old != FENCE_ASYNC:
        source = _with_piece(source, old, new)
    return {"source": source, "args": wgmma_args, "block": 128}


_BEFORE = "tcgen05.fence::before_thread_sync;"
_AFTER = 'asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");'
_WAIT_LD = 'asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");'


def tcgen05(change: Callable[[str], str]) -> dict[str, Any]:
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | 16 >> 3 << 17 | (128 >> 4) << 24
    source = change(TCGEN05)
    for name, text in {
        "COMMIT": COMMIT,
        "WAIT;": "wait(&done, 0);",
        "FREE": FREE,
        "GROUP": "1",
        "IDESC": f"{idesc}u",
        "BROWS": "16",
        "SYNC": "__syncthreads()",
        "CLUSTER": "",
        "RANK": "0",
    }.items():
        source = source.replace(name, text)
    return {"source": source, "args": tcgen05_args, "block": 128, "arch": "sm_100a"}


_ST = """
  for (int i = 0; i < 1; i++)
    asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(column + 20 + (warp << 21)), "r"(t));
  PIECE
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(again) : "r"(column + 20 + (warp << 21)));
"""

MATRIX = [
    Case(
        name="wgmma of operands that threads wrote",
        section="Asynchronous warpgroup level matrix instructions: Async proxy",
        right=FENCE_ASYNC,
        message="async proxy accesses shared memory that the generic proxy wrote",
        **wgmma(FENCE_ASYNC),
    ),
    Case(
        name="accumulators read before the wait",
        section="wgmma.mma_async; wgmma.wait_group",
        right=WAIT + ";",
        message="accessed before wgmma.wait_group",
        **wgmma(WAIT=" PIECE"),
    ),
    Case(
        name="accumulators of a group that was not committed",
        section="wgmma.commit_group",
        right="wgmma.commit_group.sync.aligned;",
        message="accessed before wgmma.wait_group",
        **wgmma("wgmma.commit_group.sync.aligned;"),
    ),
    Case(
        name="operand overwritten before the wait",
        section="wgmma.mma_async: Async proxy; wgmma.wait_group",
        right=WAIT + ";",
        message="unordered read by asynchronous work",
        **wgmma(EARLY="PIECE __syncthreads(); if (t < 32) sb[t] = make_uint4(0, 0, 0, 0);"),
    ),
    Case(
        name="accumulators scaled before the next wgmma",
        section="wgmma.fence",
        right=FENCE + ";",
        message="accessed after the last wgmma.fence",
        **wgmma(
            "for (int i = 0; i <= again; i++)\n",
            "for (int i = 0; i <= again; i++) {\n for (int j = 0; j < 8; j++) c[j] *= x; PIN PIECE",
        ),
        extra={
            '"r"(i));': f'"r"(1)); asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); {WAIT}; }}',
            "float c[8];": "float c[8], x = again;",
            "PIN": 'for (int j = 0; j < 8; j++) asm volatile("" : "+f"(c[j])::"memory");',
        },
    ),
    Case(
        name="tcgen05.mma of operands that threads wrote",
        section="tcgen05 memory consistency model: Async proxy",
        right="fence.proxy.async.shared::cta;",
        message="async proxy accesses shared memory that the generic proxy wrote",
        **tcgen05(lambda s: _with_piece(s, "fence.proxy.async.shared::cta;")),
    ),
    Case(
        name="accumulators read without the fence after the wait",
        section="tcgen05.fence; tcgen05 memory consistency model: Canonical synchronization patterns",
        right=_AFTER,
        message="tcgen05 read follows an unordered write",
        **tcgen05(
            lambda s: _AFTER.join([*s.split(_AFTER)[:-1], ""]).removesuffix(_AFTER) + "PIECE" + s.split(_AFTER)[-1]
        ),
    ),
    Case(
        name="registers of tcgen05.ld read before its wait",
        section="tcgen05.wait; tcgen05.ld",
        right=_WAIT_LD,
        message="accessed before tcgen05.wait::ld",
        **tcgen05(lambda s: _with_piece(s, _WAIT_LD)),
    ),
    Case(
        name="tensor memory stored and loaded without a wait",
        section="tcgen05.wait::st",
        right='asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");',
        message="tcgen05 read follows an unordered write",
        **tcgen05(
            lambda s: _with_piece(s, "  uint32 r[16];", "  uint32 r[16], again;" + _ST).replace(
                "__uint_as_float(r[i])", "__uint_as_float(r[i]) + (again - t)"
            )
        ),
    ),
    Case(
        name="tensor memory freed while others load",
        section="tcgen05.dealloc; tcgen05.wait::ld",
        right="__syncthreads();",
        message="tcgen05.dealloc follows an unordered read",
        **tcgen05(lambda s: _with_piece(s, "  SYNC;\n  FREE;", "  PIECE\n  FREE;")),
    ),
    Case(
        name="tensor memory stored by one warp and read by mma without the fence before",
        section="tcgen05.fence::before_thread_sync",
        right=_BEFORE,
        message="tcgen05 write follows an unordered write",
        **tcgen05(
            lambda s: _with_piece(
                _with_piece(s, "  if (warp == 1 && RANK == 0", "  RESET if (warp == 1 && RANK == 0"),
                "RESET",
                'asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};"'
                ' ::"r"(column + (warp << 21)), "r"(t));'
                'asm volatile("tcgen05.wait::st.sync.aligned; PIECE" ::: "memory"); __syncthreads();' + _AFTER,
            )
        ),
    ),
]
