"""Locks that make N processes build a kernel once. Nothing is correct because of them; they save work.

filelock's native lock on an open descriptor: flock(2), which the kernel drops when its holder dies, so no lock can be
left behind. It also excludes the threads of one process, because every holder opens the file anew. A forked child gives
up its copies of the descriptors: else it would keep a lock whose holder has died, and nobody could tell.

A lock file is never removed: a waiter that holds the removed inode and a newcomer would both believe they own the lock.
Recipes share a fixed number of files instead, so two unrelated recipes sometimes wait for each other.
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

LOCKS = "locks"
TROUBLE = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO, errno.EACCES, errno.EINVAL, errno.EBADF})
"""What flock or a file system says when it does not do locks."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.01
_REPORT_SECONDS = (1.0, 10.0)  # after the first wait, then between two reports
_HOLDER_BYTES = 256

_log = logging.getLogger("jitfp4.cache")


class Lock(enum.Enum):
    """What became of an attempt to take a lock."""

    HELD = enum.auto()
    NOT_NEEDED = enum.auto()
    TIMED_OUT = enum.auto()


def stripe(digest: str) -> str:
    """Lock file of a recipe: 4096 of them, 20 recipes built at once share one with a chance of 5 %."""
    return f"{LOCKS}/{digest[:3]}"


class Held:
    """An open file or folder that a lock may be on. ``fd`` is -1 after it was closed, and in a forked child."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Once; errors of a close are of no use to anybody."""
        fd, self.fd = self.fd, -1
        with suppress(OSError):
            os.close(fd)


_held: set[Held] = set()
_forking = threading.RLock()  # a fork waits for a file that is just being opened, so that no child has an unknown copy


@contextmanager
def held(opened: Callable[[], int]) -> Iterator[Held]:
    """The descriptor that ``opened()`` returns, closed at the end, and in any child that is forked meanwhile."""
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

    While it waits it logs who holds the lock and what for; ``what`` is that text for others. The wait is over, without
    the lock, when ``done()`` says so: 63 waiters that need nothing but the result do not queue for the lock. Raises
    OSError when the lock file cannot be opened or locked; it never raises after the body has started.
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
                os.ftruncate(file.fd, 0)  # an empty file takes no block
            unlock(file.fd)


@contextmanager
def open_lock(root: int, path: str) -> Iterator[Held]:
    """A lock file, open but not locked, created when missing. Raises OSError when it is anything but a regular file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with held(lambda: os.open(path, flags, 0o600, dir_fd=root)) as file:
        mode = os.fstat(file.fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if stat.S_IMODE(mode) != 0o600:
            with suppress(OSError):  # another's, or a file system without modes
                os.fchmod(file.fd, 0o600)  # whatever the umask: the next one opens it too
        yield file


def try_lock(fd: int) -> bool:
    """Take an exclusive flock now, or say that somebody else has it. Raises OSError when locks do not work here."""
    try:
        from filelock import lock_descriptor, unlock_descriptor  # 30 ms that a process that only hits does not pay
    except ImportError as error:  # no descriptor is left to read the module
        raise OSError(errno.ENOLCK, str(error)) from None
    if lock_descriptor(fd, blocking=False):
        return True
    unlock_descriptor(fd)  # filelock takes EACCES for contention; where flock is forbidden this raises it, else nothing
    return False


def unlock(fd: int) -> None:
    """Let the next one in. Nothing happens in a child that was forked, which has no part in the lock."""
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
    """Leave a name for those who wait. A full disk must not cost the lock."""
    with suppress(OSError):
        os.pwrite(fd, f"pid {os.getpid()} on {os.uname().nodename}, {what}".encode()[:_HOLDER_BYTES], 0)


def _holder(fd: int) -> str:
    with suppress(OSError):
        return os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace") or "a process that gave no name"
    return "a process that cannot be named"
