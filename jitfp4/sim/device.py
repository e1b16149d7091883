"""The simulated device of a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jitfp4.arch import Arch

_active: ContextVar[Arch | None] = ContextVar("jitfp4_sim_arch", default=None)


def active_arch() -> Arch | None:
    """The architecture of the innermost ``device`` block, or None outside of one."""
    return _active.get()


@contextmanager
def device(arch: str | Arch) -> Iterator[Arch]:
    """Inside the block, public functions on CPU tensors compile their kernels for ``arch`` and simulate them."""
    chosen = Arch.of(arch) if isinstance(arch, str) else arch
    token = _active.set(chosen)
    try:
        yield chosen
    finally:
        _active.reset(token)
