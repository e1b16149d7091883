"""Kernels with one synchronising piece that the PTX ISA manual demands: right with it, undefined without.

Every case names the section that rules it. The tests run both twins in the simulator; ``bench/faults_on_gpu.py`` runs
them on a GPU, where hardware may well give the right result: the manual rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jitfp4.spec import Geometry


@dataclass(frozen=True, kw_only=True)
class Case:
    """``source`` contains PIECE, which is ``right`` or ``wrong``; of the latter the simulator says ``message``."""

    name: str
    section: str
    source: str
    right: str
    wrong: str = ""
    message: str
    args: Callable[[], list[Any]]
    grid: int = 1
    block: int = 64
    arch: str = "sm_90a"
    ends: bool = True  # on a GPU too, whatever is missing
    extra: dict[str, str] = field(default_factory=dict)

    def text(self, piece: str) -> str:
        source = self.source
        for name, value in self.extra.items():
            source = source.replace(name, value)
        return source.replace("PIECE", piece)

    @property
    def geometry(self) -> Geometry:
        return Geometry((self.grid, 1, 1), (self.block, 1, 1))


def ints(*sizes: int) -> Callable[[], list[Any]]:
    """One int32 array each: the first counts up, the others hold zeros."""
    return lambda: [np.arange(n, dtype=np.int32) if i == 0 else np.zeros(n, np.int32) for i, n in enumerate(sizes)]


FENCE_ASYNC = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
FENCE_GLOBAL = 'asm volatile("fence.proxy.async.global;" ::: "memory");'
STORE = (
    'asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256; cp.async.bulk.commit_group;"'
    ' ::"l"(y), "r"(address(cells)) : "memory");'
)
DRAINED = 'asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");'
READ = 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");'
INIT = (
    'asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&full)) : "memory");'
    'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");'
)
HEAD = 'extern "C" __global__ void kernel(const int* x, int* y) { const int t = threadIdx.x; '
CELLS = HEAD + "__shared__ __align__(128) int cells[64]; __shared__ __align__(8) uint64 full; "
_PROXIES = "Memory Consistency Model: Proxies; membar/fence: fence.proxy.async"

PROXIES = [
    Case(
        name="bulk store of what threads wrote",
        section=_PROXIES,
        source=CELLS + "cells[t] = x[t] + 1; PIECE __syncthreads(); if (t == 0) {" + STORE + DRAINED + "} }",
        right=FENCE_ASYNC,
        message="async proxy accesses shared memory that the generic proxy wrote",
        args=ints(64, 64),
    ),
    Case(
        name="bulk load over what threads wrote",
        section=_PROXIES,
        source=CELLS
        + "cells[t] = 7; if (t == 0) {"
        + INIT
        + "} PIECE __syncthreads(); if (t == 0) { expect(&full, 256); copy_in(cells, x, 256, &full); }"
        " wait(&full, 0); y[t] = cells[t]; }",
        right=FENCE_ASYNC,
        message="async proxy accesses shared memory that the generic proxy wrote",
        args=ints(64, 64),
    ),
    Case(
        name="bulk load of global memory that threads wrote",
        section=_PROXIES,
        source=CELLS
        + "y[t] = x[t] + 1; if (t == 0) {"
        + INIT
        + "} PIECE __syncthreads(); if (t == 0) { expect(&full, 256); copy_in(cells, y, 256, &full); }"
        " wait(&full, 0); y[64 + t] = cells[t]; }",
        right=FENCE_GLOBAL,
        message="async proxy accesses global memory that the generic proxy wrote",
        args=ints(64, 128),
    ),
    Case(
        name="bulk load read without its mbarrier",
        section="Data Movement: async operations, mbarrier-based completion mechanism",
        source=CELLS
        + "if (t == 0) {"
        + INIT
        + "} __syncthreads(); if (t == 0) { expect(&full, 256); copy_in(cells, x, 256, &full); }"
        " if (t < 32) wait(&full, 0); else { PIECE } y[t] = cells[t]; }",
        right="wait(&full, 0);",
        message="still writing|not waited for",
        args=ints(64, 64),
    ),
    Case(
        name="source of a bulk store overwritten before it was read",
        section="cp.async.bulk.wait_group: .read",
        source=CELLS
        + "cells[t] = x[t];"
        + FENCE_ASYNC
        + "__syncthreads(); if (t == 0) {"
        + STORE
        + "PIECE } __syncthreads(); cells[t] = 0; if (t == 0) {"
        + DRAINED
        + "} }",
        right=READ,
        message="unordered read by asynchronous work",
        args=ints(64, 64),
    ),
    Case(
        name="bulk store read back before its group was waited for",
        section="cp.async.bulk.wait_group",
        source=CELLS
        + "cells[t] = x[t] + 1;"
        + FENCE_ASYNC
        + "__syncthreads(); if (t == 0) {"
        + STORE
        + "PIECE } __syncthreads(); y[64 + t] = y[t]; if (t == 0) {"
        + DRAINED
        + "} }",
        right=DRAINED,
        wrong=READ,
        message="unordered write by asynchronous work",
        args=ints(64, 128),
    ),
    Case(
        name="mbarrier initialised without a fence for the async proxy",
        section="membar/fence: fence.mbarrier_init; CUDA Programming Guide, asynchronous bulk copies",
        source=CELLS
        + 'if (t == 0) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&full)) : "memory");'
        " PIECE }"
        " __syncthreads(); if (t == 0) { expect(&full, 256); copy_in(cells, x, 256, &full); }"
        " wait(&full, 0); y[t] = cells[t]; }",
        right='asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");',
        message="whose initialisation no fence",
        args=ints(64, 64),
    ),
    Case(
        name="mbarrier used without a barrier after its initialisation",
        section="Memory Consistency Model: Data races; mbarrier.init",
        source=CELLS + "if (t == 0) {" + INIT + "} PIECE if (t >= 32) arrive(&full); wait(&full, 0); y[t] = t; }",
        right="__syncthreads();",
        message="no mbarrier|unordered write",
        ends=False,
        args=ints(64, 64),
        extra={'full)) : "memory");\'': "full))", "b64 [%0], 1;": "b64 [%0], 32;"},
    ),
    Case(
        name="mbarrier that expects one arrival too few",
        section="mbarrier: Phase of the mbarrier object",
        source=CELLS
        + 'if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], PIECE;" ::"r"(address(&full)) : "memory");'
        " __syncthreads(); if (t < 128) { if (t % 2) cells[t / 2] = x[t / 2]; __syncwarp();"
        " if (t % 32 == 0) arrive(&full); }"
        " else { wait(&full, 0); y[t - 128] = cells[t - 128]; y[t - 96] = cells[t - 96]; } }",
        right="4",
        wrong="3",
        message="unordered write by another warp",
        args=ints(64, 64),
        block=160,
    ),
    Case(
        name="non-coherent load of memory that the kernel writes",
        section="ld.global.nc",
        source=HEAD + "y[t] = x[t] + 1; __syncthreads(); int v;"
        ' asm volatile("PIECE.s32 %0, [%1];" : "=r"(v) : "l"(y + (t ^ 32))); y[64 + t] = v; }',
        right="ld.global",
        wrong="ld.global.nc",
        message="ld.global.nc",
        args=ints(64, 128),
    ),
    Case(
        name="lanes that rely on the wait of one",
        section="Memory Consistency Model: Causality order; bar.warp.sync",
        source=CELLS
        + "if (t == 0) {"
        + INIT
        + "} __syncthreads(); if (t == 0) { expect(&full, 256); copy_in(cells, x, 256, &full); }"
        " if (t % 32 == 0) wait(&full, 0); PIECE y[t] = cells[t]; }",
        right="__syncwarp();",
        message="still writing|not waited for",
        args=ints(64, 64),
    ),
]

_CAUSALITY = "Memory Consistency Model: Release and acquire patterns, Causality order"
_LAST = (
    'extern "C" __global__ void kernel(const int* x, int* y, unsigned* count) {'
    "  __shared__ bool last; const int t = threadIdx.x; y[1 + blockIdx.x * 64 + t] = x[t] + blockIdx.x;"
    "  BEFORE __syncthreads();"
    "  if (t == 0) { RELEASE last = atomicAdd(count, 1u) == gridDim.x - 1; ACQUIRE }"
    "  __syncthreads();"
    "  if (last && t == 0) { int sum = 0; for (int i = 0; i < gridDim.x * 64; i++) sum += y[1 + i]; y[0] = sum; } }"
)
_FLAG = (
    'extern "C" __global__ void kernel(const int* x, int* y, int* flag) {'
    "  if (threadIdx.x) return;"
    "  if (blockIdx.x == 0) { y[0] = x[5]; WRITE }"
    "  else { int v = 0; while (!v) { READ } AFTER y[1] = y[0]; } }"
)
_RELEASE = 'asm volatile("st.release.gpu.s32 [%0], 1;" ::"l"(flag) : "memory");'
_RELAXED = 'asm volatile("st.relaxed.gpu.s32 [%0], 1;" ::"l"(flag) : "memory");'
_ACQUIRE = 'asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");'
_LOOK = 'asm volatile("ld.relaxed.gpu.s32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");'


def last(**extra: str) -> dict[str, str]:
    """The last CTA sums up what all wrote; fences unless said otherwise."""
    fence = "__threadfence();"
    return {"BEFORE": "", "RELEASE": fence, "ACQUIRE": fence} | extra


def flag(**extra: str) -> dict[str, str]:
    return {"WRITE": _RELEASE, "READ": _ACQUIRE, "AFTER": ""} | extra


GLOBAL = [
    Case(
        name="last CTA without the releasing fence",
        section=_CAUSALITY,
        source=_LAST,
        right="__threadfence();",
        message="unordered write by another CTA",
        args=ints(64, 257, 1),
        grid=4,
        extra=last(RELEASE="PIECE"),
    ),
    Case(
        name="last CTA without the acquiring fence",
        section=_CAUSALITY,
        source=_LAST,
        right="__threadfence();",
        message="unordered write by another CTA",
        args=ints(64, 257, 1),
        grid=4,
        extra=last(ACQUIRE="PIECE"),
    ),
    Case(
        name="last CTA with fences of CTA scope",
        section="Memory Consistency Model: Scope, Morally strong operations",
        source=_LAST,
        right="__threadfence();",
        wrong="__threadfence_block();",
        message="unordered write by another CTA",
        args=ints(64, 257, 1),
        grid=4,
        extra=last(RELEASE="PIECE"),
    ),
    Case(
        name="flag with a relaxed store",
        section=_CAUSALITY,
        source=_FLAG,
        right=_RELEASE,
        wrong=_RELAXED,
        message="unordered write by another CTA",
        args=ints(64, 2, 1),
        grid=2,
        block=32,
        extra=flag(WRITE="PIECE"),
    ),
    Case(
        name="flag with a relaxed load",
        section=_CAUSALITY,
        source=_FLAG,
        right=_ACQUIRE,
        wrong=_LOOK,
        message="unordered write by another CTA",
        args=ints(64, 2, 1),
        grid=2,
        block=32,
        extra=flag(READ="PIECE"),
    ),
    Case(
        name="relaxed flag without fences",
        section=_CAUSALITY,
        source=_FLAG,
        right="__threadfence();",
        message="unordered write by another CTA",
        args=ints(64, 2, 1),
        grid=2,
        block=32,
        extra=flag(WRITE="PIECE " + _RELAXED, READ=_LOOK, AFTER="PIECE"),
    ),
    Case(
        name="flag by a plain store",
        section="Memory Consistency Model: Data races",
        source=_FLAG,
        right=_RELEASE,
        wrong="__threadfence(); *flag = 1;",
        message="unordered (write|read) by another CTA",
        args=ints(64, 2, 1),
        grid=2,
        block=32,
        extra=flag(WRITE="PIECE"),
    ),
    Case(
        name="two CTAs write one cell",
        section="Memory Consistency Model: Data races",
        source=HEAD + "if (t == 0) PIECE; }",
        right="atomicAdd(y, x[blockIdx.x])",
        wrong="*y += x[blockIdx.x]",
        message="unordered (write|read) by another CTA",
        args=ints(64, 1),
        grid=4,
    ),
    Case(
        name="last CTA sets a counter back by a plain store",
        section="Memory Consistency Model: Data races, Morally strong operations",
        source=HEAD + "if (t == 0 && atomicAdd(y, 1) == gridDim.x - 1) PIECE; }",
        right="atomicExch(y, 0)",
        wrong="*y = 0",
        message="unordered write by another CTA",
        args=ints(64, 1),
        grid=4,
    ),
    Case(
        name="warps exchange through global memory",
        section="Memory Consistency Model: Data races; bar.sync",
        source=HEAD + "y[t] = x[t] + 1; PIECE y[64 + t] = y[63 - t]; }",
        right="__syncthreads();",
        wrong="__syncwarp();",
        message="unordered write by another warp",
        args=ints(64, 128),
    ),
    Case(
        name="lane 0 publishes for its warp",
        section=_CAUSALITY,
        source='extern "C" __global__ void kernel(const int* x, int* y, int* flag) { const int t = threadIdx.x;'
        "  if (blockIdx.x == 0) { y[t] = x[t]; PIECE if (t == 0) {" + _RELEASE + "} }"
        "  else { int v = 0; while (!v) {" + _ACQUIRE + "} __syncwarp(); y[32 + t] = y[t]; } }",
        right="__syncwarp();",
        message="unordered write by another CTA",
        args=ints(64, 64, 1),
        grid=2,
        block=32,
    ),
    Case(
        name="lanes that exchange registers, not memory",
        section="bar.warp.sync; shfl.sync (CUDA C++ Programming Guide: it implies no memory barrier)",
        source=HEAD + "__shared__ int cells[32]; cells[t] = x[t]; int v = __shfl_xor_sync(~0u, t, 1); PIECE"
        " y[t] = cells[31 - t] + v; }",
        right="__syncwarp();",
        message="another lane without a warp sync",
        args=ints(32, 32),
        block=32,
    ),
]
