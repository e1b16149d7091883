"""The machine: registers and scheduling of one batch of CTAs.

Every array has one element per thread of the batch; a thread's number is ``cta * block_threads + tid``. An instruction
is executed by a set of threads at the same program counter (``Lanes``). Instructions that may suspend, branch or exit
end their basic block and hand their threads to the scheduler themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from jitfp4.arch import Arch
from jitfp4.errors import SimDeadlockError, SimError, SimLimitError, SimMemoryError
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.memory import WINDOWS, GlobalMemory, Memory
from jitfp4.sim.ptx import Array
from jitfp4.sim.scheduler import FAIR_TURN, RandomReady, Ready
from jitfp4.sim.tensormap import TENSOR_MAP_BYTES, TensorMap, tensor_map_in
from jitfp4.spec import Dim3, Geometry

if TYPE_CHECKING:
    from jitfp4.sim.history import History
    from jitfp4.sim.program import Program
    from jitfp4.sim.races import Races

WARP = 32


class Engine(Protocol):
    """Something that works beside the threads: pending copies, the tensor pipe."""

    def advance(self) -> bool:
        """Complete the oldest piece of work. False when there is none."""
        ...


class Unit(Protocol):
    """Machine state of one topic, such as barriers; made on first use."""

    def __init__(self, machine: Machine) -> None: ...


U = TypeVar("U", bound=Unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What all CTAs of a grid share."""

    geometry: Geometry
    cluster: Dim3
    arch: Arch
    tensor_maps: dict[int, TensorMap]
    history: History | None = None  # with it accesses are checked for races
    order: np.random.Generator | None = None  # with it warps and lanes of atomics run in random order
    clusters: Array | None = None  # the order in which clusters run; None is that of their numbers
    limit: float = np.inf  # of instructions that one batch may issue


def linear(dim: Dim3) -> int:
    return dim[0] * dim[1] * dim[2]


class Machine:
    """One batch of CTAs: ``first`` is the position of its first CTA in cluster-major order, ``ctas`` their number."""

    def __init__(
        self, program: Program, launch: Launch, memory: GlobalMemory, params: Array, const: Array, first: int, ctas: int
    ) -> None:
        self.program, self.launch, self.ctas = program, launch, ctas
        self.block_threads = linear(launch.geometry.block)
        self.block_warps = -(-self.block_threads // WARP)
        self.cluster_size = linear(launch.cluster)
        self.total = ctas * self.block_threads
        self.ids = np.arange(self.total)
        self.cta = self.ids // self.block_threads
        self.tid = self.ids % self.block_threads
        self.lane = self.tid % WARP
        self.warp = self.cta * self.block_warps + self.tid // WARP
        self.first, self.rank = first, self.cta % self.cluster_size
        self.live = np.ones(self.total, bool)
        self.live_in_cta = np.full(ctas, self.block_threads)
        self.waiting = np.full(self.total, -1, np.int32)  # program counter at which a suspended thread waits
        self.pc = program.entry.start
        self.races: Races | None = None
        self.memory = Memory(self, memory, params, const)
        self.registers: list[Array] = [np.full(self.total, fill, dtype) for dtype, fill in program.registers]
        self.ready = Ready(self.total) if launch.order is None else RandomReady(self.warp, launch.order)
        self.engines: list[Engine] = []
        self.on_exit: list[Callable[[Array], None]] = []
        self.units: dict[type[Any], Any] = {}
        self.special: dict[str, Any] = {}  # values of special registers that do not change
        self.block_runs = np.zeros(len(program.blocks), np.int64)
        self.issued = 0  # instructions, each counted once for all threads that execute it together
        if launch.history is not None:
            from jitfp4.sim.races import Races

            self.races = Races(self, launch.history)

    def unit(self, kind: type[U]) -> U:
        """The batch's instance of ``kind``."""
        found = self.units.get(kind)
        if found is None:
            found = self.units[kind] = kind(self)
        return found

    def lanes(self, ids: Array) -> Lanes:
        return Lanes(ids, self.total)

    # Execution

    def run(self) -> None:
        """Run every thread to its exit, then complete all asynchronous work."""
        self.ready.push(self.program.entry.start, self.lanes(self.ids))
        try:
            self.turn_until_idle()
            while self.advance():
                self.turn_until_idle()
        except Exception as fault:
            if "PTX line" not in str(fault):
                fault.add_note(self.program.place(self.pc))
            raise
        if self.live.any():
            raise self.deadlock()

    def release(self) -> None:
        """Part from what refers back to the machine, so that its memory is free at once, not at a garbage collection."""
        self.units.clear()
        self.engines.clear()
        self.on_exit.clear()
        del self.memory, self.races

    def turn_until_idle(self) -> None:
        """Run basic blocks while some thread can run."""
        ready, blocks, block_at = self.ready, self.program.blocks, self.program.block_at
        while ready.groups:
            pc, lanes = ready.pop()
            number = block_at[pc]
            block = blocks[number]
            self.block_runs[number] += lanes.n
            self.issued += len(block.steps) + 1
            for at, step in block.steps:
                self.pc = at  # where an error happened
                step(self, lanes)
            if block.control is None:
                ready.push(block.end, lanes)
            else:
                self.pc = block.end - 1
                block.control(self, lanes, block.end)
            if ready.turn % FAIR_TURN == 0:
                self.advance()
                if self.issued > self.launch.limit:
                    raise self.error(SimLimitError, f"still runs after {self.issued} instructions", lanes.ids)

    def advance(self) -> bool:
        """Let one asynchronous engine complete one piece of work."""
        return any(engine.advance() for engine in self.engines)

    def split(self, lanes: Lanes, mask: Array) -> tuple[Lanes | None, Lanes | None]:
        """``lanes`` for which ``mask`` holds, and the others."""
        if mask.all():
            return lanes, None
        if not mask.any():
            return None, lanes
        return self.lanes(lanes.ids[mask]), self.lanes(lanes.ids[~mask])

    def suspend(self, lanes: Lanes) -> None:
        self.waiting[lanes.sel] = self.pc

    def resume(self, ids: Array, pc: int) -> None:
        """Make suspended threads runnable at ``pc``."""
        if len(ids):
            self.waiting[ids] = -1
            self.ready.push(pc, self.lanes(ids))

    def exit(self, lanes: Lanes) -> None:
        self.live[lanes.sel] = False
        self.live_in_cta -= np.bincount(self.cta[lanes.sel], minlength=self.ctas)
        for hook in self.on_exit:
            hook(lanes.ids)

    def tensor_map(self, space: str, address: int, lanes: Lanes) -> TensorMap:
        """The tensor map at an address: that of a kernel parameter, or of a copy of one in global memory."""
        at = address - WINDOWS["param"] if space == "generic" else address
        found = self.launch.tensor_maps.get(at)
        if found is None and self.memory.in_a_buffer(address):
            (part,) = self.memory.locate("global", lanes.ids[:1], np.array([address]), TENSOR_MAP_BYTES)
            offset = int(part.offset[0])
            found = self.launch.tensor_maps.get(tensor_map_in(part.region.data[offset:]))
            if found is not None and self.races is not None:
                self.races.reads_tensor_map(part, lanes.ids[:1], TENSOR_MAP_BYTES)
        if found is None:
            raise self.error(SimMemoryError, f"no tensor map at {space} address {address:#x}", lanes.ids)
        return found

    # Facts about threads

    @cached_property
    def cta_index(self) -> tuple[Array, Array, Array]:
        """Grid coordinates of each CTA of the batch; a cluster's CTAs are neighbours in the batch."""
        grid, cluster = self.launch.geometry.grid, self.launch.cluster
        cluster_grid = tuple(-(-g // c) for g, c in zip(grid, cluster, strict=True))
        number = np.arange(self.first, self.first + self.ctas)
        which, rank = number // self.cluster_size, number % self.cluster_size
        if self.launch.clusters is not None:
            which = self.launch.clusters[which]
        out = []
        for axis in range(3):
            out.append(which % cluster_grid[axis] * cluster[axis] + rank % cluster[axis])
            which, rank = which // cluster_grid[axis], rank // cluster[axis]
        return out[0], out[1], out[2]

    def describe(self, thread: int) -> str:
        block = self.launch.geometry.block
        tid = int(self.tid[thread])
        xyz = tid % block[0], tid // block[0] % block[1], tid // (block[0] * block[1])
        cta = tuple(int(axis[self.cta[thread]]) for axis in self.cta_index)
        return f"thread {xyz} of CTA {cta}"

    # Errors

    def error(self, kind: type[SimError], message: str, threads: Array, pc: int | None = None) -> SimError:
        """An exception that names the first thread at fault, the instruction, its PTX line and its CUDA line."""
        more = f" and {len(threads) - 1} more" if len(threads) > 1 else ""
        where = f"\n  {self.describe(int(threads[0]))}{more}" if len(threads) else ""
        return kind(f"{message}{where}\n  {self.program.place(self.pc if pc is None else pc)}")

    def deadlock(self) -> SimDeadlockError:
        lines = ["every live thread waits"]
        for pc in np.unique(self.waiting[self.live]):
            ids = np.flatnonzero(self.live & (self.waiting == pc))
            names = ", ".join(self.describe(int(i)) for i in ids[:3]) + (", ..." if len(ids) > 3 else "")
            lines.append(f"  {len(ids)} threads ({names}) at {self.program.place(int(pc))}")
        for unit in self.units.values():
            lines += [f"  {line}" for line in getattr(unit, "report", list)()]
        return SimDeadlockError("\n".join(lines))
