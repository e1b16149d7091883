"""The simulated device of a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from jitfp4.arch import Arch


class Simulated(NamedTuple):
    """A simulated GPU, and whether its runs look for shared-memory races."""

    arch: Arch
    races: bool


_active: ContextVar[Simulated | None] = ContextVar("jitfp4_sim_device", default=None)


def active_device() -> Simulated | None:
    """That of the innermost ``device`` block, or None outside of one."""
    return _active.get()


@contextmanager
def device(arch: str | Arch, *, races: bool = False) -> Iterator[Arch]:
    """Inside the block, public functions on CPU tensors compile their kernels for ``arch`` and simulate them.

    Args:
        arch: the architecture or its name, ``sm_90a`` for example.
        races: also look for shared-memory races (SimRaceError); several times slower.
    Raises:
        UnsupportedArchError: for a name that is none.
    """
    chosen = Arch.of(arch) if isinstance(arch, str) else arch
    token = _active.set(Simulated(chosen, races))
    try:
        yield chosen
    finally:
        _active.reset(token)
