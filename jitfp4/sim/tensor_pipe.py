"""The asynchronous tensor units: wgmma groups of each warpgroup, and the tcgen05 pipe with its tensor memory.

A matrix multiply takes effect as late as the program allows: wgmma when its warpgroup waits for the group, tcgen05 work, in
order of issue, when no thread can run and no copy is pending. Shared memory is read then, so that overwriting an operand
too early changes the result. Until then wgmma accumulators hold a NaN pattern, and reading tensor memory is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.memory import WRITTEN
from jitfp4.sim.ptx import Array
from jitfp4.sim.tcgen05 import Cta
from jitfp4.sim.tmem import COLUMNS, LANES, Allocations

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine

IN_FLIGHT_BITS = np.uint32(0x7FFFDEAD)
WARPGROUP = 128


@dataclass(slots=True)
class GroupedWork:
    """A wgmma of one warpgroup: ``group`` is the number of groups committed before it."""

    group: int
    pc: int
    perform: Callable[[], None]


class WarpGroups:
    """Pending wgmma of every warpgroup of the batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        per_cta = -(-machine.block_threads // WARPGROUP)
        self.number = machine.cta * per_cta + machine.tid // WARPGROUP
        count = machine.ctas * per_cta
        self.committed = np.zeros(count, np.int64)
        self.fenced = np.zeros(count, bool)
        self.queue: list[deque[GroupedWork]] = [deque() for _ in range(count)]

    def of(self, lanes: Lanes) -> list[tuple[int, Array]]:
        """Each whole warpgroup among ``lanes``: its number and its threads."""
        numbers = self.number[lanes.sel]
        out = [(int(n), lanes.ids[numbers == n]) for n in np.unique(numbers)]
        for _, ids in out:
            if len(ids) != WARPGROUP:
                raise self.machine.error(SimError, f"wgmma by {len(ids)} threads of a warpgroup", ids)
        return out

    def issue(self, number: int, ids: Array, perform: Callable[[], None]) -> None:
        if not self.fenced[number]:
            raise self.machine.error(SimError, "wgmma.mma_async before the first wgmma.fence", ids)
        self.queue[number].append(GroupedWork(int(self.committed[number]), self.machine.pc, perform))

    def wait(self, number: int, allowed: int) -> None:
        queue = self.queue[number]
        now = self.machine.pc
        while queue and queue[0].group < self.committed[number] - allowed:
            work = queue.popleft()
            self.machine.pc = work.pc
            work.perform()
        self.machine.pc = now


@dataclass(slots=True)
class PipeWork:
    """One queued tcgen05 operation and the thread that issued it."""

    thread: int
    pc: int
    perform: Callable[[], None]


class TensorPipe:
    """Tensor memory of every CTA and the queue of tcgen05.mma, .cp and .commit.

    ``pending`` counts, per CTA and column, queued writes; ``written`` marks cells that hold a value.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cells = np.full((machine.ctas, LANES, COLUMNS), IN_FLIGHT_BITS, np.uint32)
        self.written = np.zeros((machine.ctas, LANES, COLUMNS), bool)
        self.pending = np.zeros((machine.ctas, COLUMNS), np.int64)
        self.allocations = [Allocations() for _ in range(machine.ctas)]
        self.waiting: list[Lanes] = []  # allocations that found no room, with their program counters
        self.queue: deque[PipeWork] = deque()
        machine.engines.append(self)
        machine.on_exit.append(self.threads_left)

    def issue(self, thread: int, perform: Callable[[], None]) -> None:
        self.queue.append(PipeWork(thread, self.machine.pc, perform))

    def advance(self) -> bool:
        if not self.queue:
            return False
        work = self.queue.popleft()
        now, self.machine.pc = self.machine.pc, work.pc
        try:
            work.perform()
        except SimError as fault:
            if len(fault.args) == 1 and "PTX line" not in str(fault):
                raise self.machine.error(type(fault), str(fault), np.array([work.thread])) from fault
            raise
        self.machine.pc = now
        return True

    def ctas_of(self, thread: int, group: int) -> tuple[int, ...]:
        """CTA numbers that an instruction of ``cta_group`` size ``group`` works on: its own, or the even and the odd."""
        m = self.machine
        cta = int(m.cta[thread])
        if group == 1:
            return (cta,)
        if m.cluster_size % 2:
            raise m.error(SimError, "cta_group::2 in a cluster without pairs", np.array([thread]))
        even = cta - int(m.rank[thread]) % 2
        return (even, even + 1)

    def view(self, cta: int) -> Cta:
        m = self.machine
        stride = m.memory.shared_stride
        shared = m.memory.shared.data[cta * stride : (cta + 1) * stride]
        return Cta(shared=shared, tmem=self.cells[cta], allocations=self.allocations[cta])

    def expect_write(self, ctas: tuple[int, ...], first: int, count: int) -> None:
        self.pending[list(ctas), first : first + count] += 1

    def wrote(self, ctas: tuple[int, ...], first: int, count: int) -> None:
        self.pending[list(ctas), first : first + count] -= 1
        self.written[list(ctas), :, first : first + count] = True

    def check_read(self, cta: int, at: Array, ids: Array) -> None:
        """Cells that a load reads must be allocated, written, and not about to be written."""
        lanes, columns = at[0], at[1]
        self.allocations[cta].require(int(columns.min()), int(columns.max() - columns.min()) + 1)
        if self.pending[cta, columns].any():
            raise self.machine.error(SimMemoryError, "tensor memory is read before the queued work on it was waited for", ids)
        if not self.written[cta, lanes, columns].all():
            raise self.machine.error(SimMemoryError, "tensor memory that nothing wrote is read", ids)

    def check_shared(self, cta: int, addresses: Array, thread: int) -> None:
        """Shared bytes that an operand names must have been written when the instruction is issued."""
        m = self.machine
        if addresses.min() < 0 or addresses.max() >= m.memory.shared_end:
            raise m.error(SimMemoryError, "a matrix descriptor leaves shared memory", np.array([thread]))
        state = m.memory.state.data[cta * m.memory.shared_stride + addresses]
        if (state != WRITTEN).any():
            at = int(addresses.reshape(-1)[np.flatnonzero(state.reshape(-1) != WRITTEN)[0]])
            text = f"an operand in shared memory at {at:#x} was not written or is still being copied"
            raise m.error(SimMemoryError, text, np.array([thread]))

    def free(self, cta: int, address: int, columns: int) -> None:
        self.allocations[cta] = self.allocations[cta].dealloc(address, columns)
        self.written[cta, :, address : address + columns] = False
        waiting, self.waiting = self.waiting, []
        for lanes in waiting:
            self.machine.resume(lanes.ids, int(self.machine.waiting[lanes.ids[0]]))

    def threads_left(self, ids: Array) -> None:
        m = self.machine
        for cta in np.unique(m.cta[ids]):
            if m.live_in_cta[cta] == 0 and self.allocations[cta].blocks:
                raise m.error(SimError, "a CTA exits without tcgen05.dealloc of its tensor memory", ids)
