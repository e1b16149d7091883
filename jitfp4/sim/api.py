"""Run a kernel's PTX on CPU arrays."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError, SimParseError
from jitfp4.sim.arguments import pack
from jitfp4.sim.chain import Chain
from jitfp4.sim.device import active_device
from jitfp4.sim.history import History
from jitfp4.sim.machine import Launch, Machine, linear
from jitfp4.sim.memory import GlobalMemory
from jitfp4.sim.parser import parse
from jitfp4.sim.program import Program
from jitfp4.sim.ptx import Array
from jitfp4.spec import Dim3, Geometry

BATCH_THREADS = 8192
"""Threads simulated together unless the caller says otherwise: a 32-bit register array then takes 32 KiB of cache."""


@dataclass(slots=True)
class Stats:
    """What a run cost. ``instructions`` counts thread-instructions, ``opcodes`` the same by opcode, ``executed`` by
    position in the module's code; ``issued`` counts an instruction once for all threads that execute it together.
    """

    instructions: int = 0
    issued: int = 0
    seconds: float = 0.0
    opcodes: Counter[str] = field(default_factory=Counter)
    executed: Counter[int] = field(default_factory=Counter)


@lru_cache(maxsize=16)  # a large kernel takes 16 MB
def load(ptx: str, entry: str | None = None) -> Program:
    """Parse and decode a module. Raises SimParseError, whatever the text is."""
    try:
        return Program(parse(ptx), entry)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise SimParseError(f"no PTX that can be read: {type(error).__name__}: {str(error)[:200]}") from error


def run(
    ptx: str | Program,
    args: Sequence[Any],
    geometry: Geometry,
    arch: str | Arch,
    *,
    entry: str | None = None,
    races: bool = False,
    batch: int = BATCH_THREADS,
    seed: int | None = None,
    chain: Chain | None = None,
    limit: int | None = None,
) -> Stats:
    """Execute ``entry`` of a PTX module over a grid.

    Args:
        ptx: a module as NVRTC writes it, or a program that was loaded from one.
        args: one per kernel parameter. NumPy arrays and torch CPU tensors (views too) are pointers, mutated in place
            and bounds-checked at the view's extent; integers, bools and NumPy scalars take the parameter's width;
            floats become float32 or, for an 8-byte parameter, float64; TensorMap, TileMap and ``bytes`` are passed by
            value; None is a null pointer.
        geometry: grid in CTAs, block, cluster, dynamic shared bytes. A cluster size compiled into the kernel wins
            over 1.
        races: also look for data races, missing fences and registers in flight (SimRaceError); two to three times
            slower.
        batch: threads simulated together, at least one cluster.
        seed: run CTAs, warps and the lanes of atomics in an order drawn from it; None is one fixed order.
        chain: the launches that this one may overlap (only with ``races``). ``seed`` and ``chain`` default to those of
            the innermost ``sim.device``.
        limit: about how many instructions each batch may issue, so that a program that never ends is an error
            (SimLimitError); None is no limit. ``Stats.issued`` tells what a run needed.
    Raises:
        SimError: a fault of the program, or something that is not modelled.
    """
    began = time.perf_counter()
    program = load(ptx, entry) if isinstance(ptx, str) else ptx
    arch = Arch.of(arch) if isinstance(arch, str) else arch
    _check_limits(program, geometry, arch)
    memory = GlobalMemory()
    params, maps = pack(program.entry.params, args, memory)
    const = program.initialise(memory)
    cluster = _cluster(program, geometry)
    device = active_device()
    seed = seed if seed is not None or device is None else device.seed
    chain = chain if chain is not None or device is None else device.chain
    history = _history(races, chain, [r.data for r in memory.slots.values()] + [t.base for t in maps.values()])
    order = None if seed is None else np.random.default_rng(seed)
    total, size = linear(geometry.grid), linear(cluster)
    clusters = None if order is None else order.permutation(total // size)
    launch = Launch(
        geometry=geometry,
        cluster=cluster,
        arch=arch,
        tensor_maps=maps,
        history=history,
        order=order,
        clusters=clusters,
        limit=np.inf if limit is None else limit,
    )
    stats = Stats()
    ctas = max(batch // (linear(geometry.block) * size), 1) * size
    with np.errstate(all="ignore"):
        for first in range(0, total, ctas):
            machine = Machine(program, launch, memory, params, const, first, min(ctas, total - first))
            machine.run()
            if history is not None and machine.races is not None:
                history.finish_batch(machine.races.clocks)
            stats.executed += program.executed(machine.block_runs)
            stats.issued += machine.issued
            machine.release()
    for pc, count in stats.executed.items():
        stats.opcodes[program.opcode(pc)] += count
    stats.instructions = stats.opcodes.total()
    stats.seconds = time.perf_counter() - began
    return stats


def _history(races: bool, chain: Chain | None, arrays: list[Array]) -> History | None:
    """What earlier launches did to the memory of this one."""
    if not races:
        return None
    if chain is not None:
        return chain.begin(arrays)
    history = History()
    history.cover(arrays)
    return history


def _cluster(program: Program, geometry: Geometry) -> Dim3:
    cluster = program.entry.block_directive("reqnctapercluster") or geometry.cluster
    if geometry.cluster != (1, 1, 1) and geometry.cluster != cluster:
        raise ArgumentError("geometry.cluster", geometry.cluster, f"{cluster}, which the kernel was compiled for")
    if any(g % c for g, c in zip(geometry.grid, cluster, strict=True)):
        raise ArgumentError("geometry.grid", geometry.grid, f"multiples of the cluster {cluster}")
    return cluster


def _check_limits(program: Program, geometry: Geometry, arch: Arch) -> None:
    """What the driver would refuse to launch."""
    if program.module.target != arch.name:
        raise ArgumentError("arch", arch.name, f"{program.module.target}, which the PTX targets")
    required, limit = (program.entry.block_directive(name) for name in ("reqntid", "maxntid"))
    if required not in (None, geometry.block):
        raise ArgumentError("geometry.block", geometry.block, f"{required}, which the kernel was compiled for")
    most = min(1024, linear(limit)) if limit else 1024
    if not 0 < linear(geometry.block) <= most:
        raise ArgumentError("geometry.block", geometry.block, f"1 to {most} threads")
    if not linear(geometry.grid):
        raise ArgumentError("geometry.grid", geometry.grid, "positive sizes")
    used = program.shared_static + geometry.shared_bytes
    if used > arch.shared_bytes:
        raise ArgumentError("geometry.shared_bytes", used, f"at most {arch.shared_bytes} static and dynamic bytes")
