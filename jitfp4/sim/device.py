"""The simulated device of a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from jitfp4.arch import Arch

if TYPE_CHECKING:
    from jitfp4.sim.chain import Chain


class Simulated(NamedTuple):
    """A simulated GPU, whether its runs look for races, in which order they run, and which launches overlap."""

    arch: Arch
    races: bool
    seed: int | None = None
    chain: Chain | None = None


_active: ContextVar[Simulated | None] = ContextVar("jitfp4_sim_device", default=None)


def active_device() -> Simulated | None:
    """That of the innermost ``device`` block, or None outside of one."""
    return _active.get()


@contextmanager
def device(
    arch: str | Arch, *, races: bool = False, seed: int | None = None, chain: Chain | None = None
) -> Iterator[Arch]:
    """Inside the block, public functions on CPU tensors compile their kernels for ``arch`` and simulate them.

    Args:
        arch: the architecture or its name, ``sm_90a`` for example.
        races, seed, chain: as of ``sim.run``.
    Raises:
        UnsupportedArchError: for a name that is none.
    """
    chosen = Arch.of(arch) if isinstance(arch, str) else arch
    token = _active.set(Simulated(chosen, races, seed, chain))
    try:
        yield chosen
    finally:
        _active.reset(token)
