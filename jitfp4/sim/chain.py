"""Launches that overlap, as programmatic dependent launches do.

A dependent grid may begin when every CTA of the grid before it has executed ``griddepcontrol.launch_dependents`` or has
ended, and only ``griddepcontrol.wait`` promises that the grid before is complete and its memory visible (PTX ISA,
"griddepcontrol"). The simulator runs one grid after the other, and holds each to what it may rely on: before the wait
an access to memory that an earlier grid wrote, or a write to what it read, is a race.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitfp4.sim.arguments import array_of
from jitfp4.sim.history import History
from jitfp4.sim.ptx import Array


class Chain:
    """The launches of one stream, for ``run(..., chain=)`` and ``sim.device(..., chain=)``.

    Args:
        constant: arrays and tensors, weights for example, that no launch of the chain writes: they may be read before
            the wait.
        after_unknown: the first launch follows a grid that reads and writes every argument that is not constant.
    """

    def __init__(self, *, constant: Sequence[Any] = (), after_unknown: bool = False) -> None:
        self.constant = [array_of("constant", one) for one in constant]
        self.after_unknown = after_unknown
        self.history: History | None = None

    def begin(self, arrays: list[Array]) -> History:
        """The history that the next launch continues; it uses the byte arrays ``arrays``."""
        if self.history is None:
            self.history = History()
            self.history.cover(arrays)
            for data in arrays if self.after_unknown else ():
                self.history.touched_before(data)
        else:
            self.history.next_grid()
            self.history.cover(arrays)
        for data in self.constant:
            self.history.forget(data)
        return self.history
