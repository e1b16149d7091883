"""Work in processes that are forked where its data lies, so many at a time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable

Work = Callable[[], None]


class Forks:
    """At most ``count`` processes work. What one of them forks shares the same count."""

    def __init__(self, count: int) -> None:
        self._free = multiprocessing.get_context("fork").Semaphore(count)
        self._children: list[int] = []

    def begin(self, work: Work) -> None:
        """Waits until one is free, and starts ``work`` in it."""
        self._free.acquire()
        self._fork(work)

    def begin_or_do(self, work: Work) -> None:
        """Starts ``work`` in a process if one is free, and does it here if not."""
        if self._free.acquire(block=False):
            self._fork(work)
        else:
            work()

    def join(self) -> None:
        """Waits for what was started here. Raises RuntimeError if some of it failed; its traceback was printed."""
        failed = [pid for pid in self._children if os.waitpid(pid, 0)[1]]
        self._children = []
        if failed:
            raise RuntimeError(f"{len(failed)} processes failed")

    def _fork(self, work: Work) -> None:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            self._children.append(pid)
            return
        status = 1
        try:
            self._children = []
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            self._free.release()
            sys.stdout.flush()
            os._exit(status)
