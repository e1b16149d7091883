"""Locks that make N processes build a kernel once. Nothing is correct because of them; they save work.

flock(2) on an open file: the kernel drops it when its holder dies, so no lock can be left behind. It also excludes the
threads of one process, because every holder opens the file anew. It is called directly: a round trip takes 3 us (59 us
through filelock), and filelock replaces a missing flock by a marker file, which a killed process leaves behind.

A lock file is never removed: a waiter that holds the removed inode and a newcomer would both believe they own the lock.
Recipes share a fixed number of files instead, so two unrelated recipes sometimes wait for each other.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import logging
import os
import stat
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


@contextmanager
def locked(root: int, path: str, what: str, timeout: float, done: Callable[[], bool] | None = None) -> Iterator[Lock]:
    """Hold the lock file ``path`` below the folder ``root``, waiting at most ``timeout`` seconds.

    While it waits it logs who holds the lock and what for; ``what`` is that text for others. The wait is over, without
    the lock, when ``done()`` says so: 63 waiters that need nothing but the result do not queue for the lock. Raises
    OSError when the lock file cannot be opened or locked; it never raises after the body has started.
    """
    with open_lock(root, path) as fd:
        outcome = _wait(fd, path, what, timeout, done)
        if outcome is not Lock.HELD:
            yield outcome
            return
        _sign(fd, what)
        try:
            yield Lock.HELD
        finally:
            _unlock(fd)


@contextmanager
def open_lock(root: int, path: str) -> Iterator[int]:
    """A lock file, open but not locked, created when missing. Raises OSError when it is anything but a regular file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=root)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        yield fd
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Take an exclusive flock now, or say that somebody else has it. Raises OSError when locks do not work here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return False
        raise
    return True


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


def _unlock(fd: int) -> None:
    """Explicit, because a child forked during the body still has the file open. An empty file takes no block."""
    with suppress(OSError):
        os.ftruncate(fd, 0)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
