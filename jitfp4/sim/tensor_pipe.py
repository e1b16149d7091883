"""The tcgen05 pipe and its tensor memory.

Work takes effect as late as the program allows: in order of issue, when no thread can run and no copy is pending.
Shared memory is read then, so that overwriting an operand too early changes the result. Until then reading the tensor
memory that queued work will write is an error. Arrivals of commits in other CTAs come last, the latest first or,
with a seed, in any order: nothing orders the arrivals of two commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitfp4.errors import SimError, SimMemoryError
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.ptx import Array
from jitfp4.sim.tcgen05 import Cta
from jitfp4.sim.tmem import COLUMNS, LANES, Allocations

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine

POISON_BITS = np.uint32(0x7FFFDEAD)


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
        self.cells = np.full((machine.ctas, LANES, COLUMNS), POISON_BITS, np.uint32)
        self.written = np.zeros((machine.ctas, LANES, COLUMNS), bool)
        self.pending = np.zeros((machine.ctas, COLUMNS), np.int64)
        self.allocations = [Allocations() for _ in range(machine.ctas)]
        self.waiting: list[Lanes] = []  # allocations that found no room, with their program counters
        self.queue: deque[PipeWork] = deque()
        self.abroad: list[PipeWork] = []  # arrivals in other CTAs
        machine.engines.append(self)
        machine.on_exit.append(self.threads_left)

    def issue(self, thread: int, perform: Callable[[], None]) -> None:
        self.queue.append(PipeWork(thread, self.machine.pc, perform))

    def arrive_abroad(self, thread: int, arrive: Callable[[], None]) -> None:
        self.abroad.append(PipeWork(thread, self.machine.pc, arrive))

    def advance(self) -> bool:
        if not self.queue and not self.abroad:
            return False
        order = self.machine.launch.order
        latest = -1 if order is None or not self.abroad else int(order.integers(len(self.abroad)))
        work = self.queue.popleft() if self.queue else self.abroad.pop(latest)
        now, self.machine.pc = self.machine.pc, work.pc
        with self.blame(work.thread):
            work.perform()
        self.machine.pc = now
        return True

    @contextmanager
    def blame(self, thread: int) -> Iterator[None]:
        """Give errors of the pure models, which know no thread, the thread and the instruction."""
        try:
            yield
        except SimError as fault:
            if "PTX line" in str(fault):
                raise
            raise self.machine.error(type(fault), str(fault), np.array([thread])) from fault

    def ctas_of(self, thread: int, group: int) -> tuple[int, ...]:
        """CTA numbers that an instruction of ``cta_group::<group>`` works on: its own, or the even and the odd."""
        m = self.machine
        cta = int(m.cta[thread])
        if group == 1:
            return (cta,)
        if m.cluster_size % 2:
            raise m.error(SimError, "cta_group::2 in a cluster without pairs", np.array([thread]))
        even = cta - int(m.rank[thread]) % 2
        return (even, even + 1)

    def view(self, cta: int) -> Cta:
        shared = self.machine.memory.of_cta(cta)
        return Cta(shared=shared, tmem=self.cells[cta], allocations=self.allocations[cta])

    def will_hold(self, ctas: tuple[int, ...], first: int, count: int) -> bool:
        """Whether the columns have been written, or will be by queued work."""
        columns = slice(first, first + count)
        return bool((self.written[list(ctas), 0, columns] | (self.pending[list(ctas), columns] > 0)).all())

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
            text = "tensor memory is read before the queued work on it was waited for"
            raise self.machine.error(SimMemoryError, text, ids)
        if not self.written[cta, lanes, columns].all():
            raise self.machine.error(SimMemoryError, "tensor memory that nothing wrote is read", ids)

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
