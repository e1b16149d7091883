"""Locks that make N processes build a kernel once. They only save work: results are right without them.

The lock is flock(2) on an open descriptor, by filelock. The operating system releases it when the holder dies, so no
lock can be left behind. It also works between the threads of one process, because every holder opens the file anew. A
forked child closes its copies of the descriptors: otherwise it would keep the lock of a parent that has died.

A lock file is never removed: else a waiter with the removed file and a newcomer with a new one could both hold "the"
lock. Recipes share a fixed number of lock files instead, so two unrelated recipes sometimes wait for each other.
"""

from __future__ import annotations

import enum
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from jitfp4.cache.tree import close

LOCKS = "locks"
TROUBLE = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO, errno.EACCES, errno.EINVAL, errno.EBADF})
"""Errors with which flock fails on file systems that have no locks."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.01
_REPORT_SECONDS = (1.0, 10.0)  # before the first report of a wait, and between two reports
_HOLDER_BYTES = 256

_log = logging.getLogger("jitfp4.cache")


class Lock(enum.Enum):
    """The outcome of an attempt to take a lock."""

    HELD = enum.auto()
    NOT_NEEDED = enum.auto()
    TIMED_OUT = enum.auto()


def stripe(digest: str) -> str:
    """The lock file of a recipe. There are 4096; of 20 recipes built at once, two share one with a chance of 5 %."""
    return f"{LOCKS}/{digest[:3]}"


class Held:
    """An open file or folder that can be locked. ``fd`` is -1 once it is closed, and in a forked child."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close the descriptor. Errors of close(2) are ignored."""
        fd, self.fd = self.fd, -1
        close(fd)


_held: set[Held] = set()
_forking = threading.RLock()  # a fork waits while a file is being opened, so that the child knows all its copies


@contextmanager
def held(opened: Callable[[], int]) -> Iterator[Held]:
    """The descriptor that ``opened()`` returns; closed at the end, and in every child that is forked before."""
    with _forking:
        file = Held(opened())
        _held.add(file)
    try:
        yield file
    finally:
        with _forking:
            _held.discard(file)
            file.close()


def _close_in_child() -> None:
    for file in _held:
        file.close()
    _held.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)


@contextmanager
def locked(root: int, path: str, what: str, timeout: float, done: Callable[[], bool] | None = None) -> Iterator[Lock]:
    """Hold the lock file ``path`` below the folder ``root``, waiting at most ``timeout`` seconds.

    While it waits, it logs who holds the lock, and for what; ``what`` is what other waiters log about this holder. The
    wait ends without the lock as soon as ``done()`` is true: waiters that only need the result do not queue for the
    lock. Raises OSError when the lock file cannot be opened or locked, and never after the body has started.
    """
    with open_lock(root, path) as file:
        outcome = _wait(file.fd, path, what, timeout, done)
        if outcome is not Lock.HELD:
            yield outcome
            return
        _sign(file.fd, what)
        try:
            yield Lock.HELD
        finally:
            with suppress(OSError):
                os.ftruncate(file.fd, 0)  # an empty file takes no disk block
            unlock(file.fd)


@contextmanager
def open_lock(root: int, path: str) -> Iterator[Held]:
    """A lock file, opened but not locked, created when missing. Raises OSError when it is not a regular file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with held(lambda: os.open(path, flags, 0o600, dir_fd=root)) as file:
        mode = os.fstat(file.fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if stat.S_IMODE(mode) != 0o600:
            with suppress(OSError):  # the file of another user, or a file system without modes
                os.fchmod(file.fd, 0o600)  # whatever the umask: other processes must be able to open it
        yield file


def try_lock(fd: int) -> bool:
    """Take an exclusive flock, without waiting. False when another holds it. Raises OSError when locks do not work."""
    try:
        from filelock import lock_descriptor, unlock_descriptor  # 30 ms, which a process that only hits saves
    except ImportError as error:  # the process has no free descriptor to read the module with
        raise OSError(errno.ENOLCK, str(error)) from None
    if lock_descriptor(fd, blocking=False):
        return True
    unlock_descriptor(fd)  # filelock takes EACCES for a held lock; where flock is forbidden, this raises EACCES
    return False


def unlock(fd: int) -> None:
    """Release the lock. Does nothing in a forked child, which does not hold it."""
    from filelock import unlock_descriptor

    if fd >= 0:
        with suppress(OSError):
            unlock_descriptor(fd)


def _wait(fd: int, path: str, what: str, timeout: float, done: Callable[[], bool] | None) -> Lock:
    start = time.monotonic()
    pause, report = _FIRST_PAUSE, _REPORT_SECONDS[0]
    while not try_lock(fd):
        if done and done():
            return Lock.NOT_NEEDED
        waited = time.monotonic() - start
        if waited >= timeout:
            _log.warning("%s: waited %.1f s for %s (%s); going on alone", what, waited, _holder(fd), path)
            return Lock.TIMED_OUT
        if waited >= report:
            _log.warning("%s: waiting for %s (%s), %.0f s of %.0f s", what, _holder(fd), path, waited, timeout)
            report += _REPORT_SECONDS[1]
        time.sleep(min(pause, timeout - waited))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return Lock.HELD


def _sign(fd: int, what: str) -> None:
    """Write the holder into the lock file, for the log of waiters. On a full disk the holder goes unnamed."""
    with suppress(OSError):
        os.pwrite(fd, f"pid {os.getpid()} on {os.uname().nodename}, {what}".encode()[:_HOLDER_BYTES], 0)


def _holder(fd: int) -> str:
    with suppress(OSError):
        return os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace") or "a process that gave no name"
    return "a process that cannot be named"
