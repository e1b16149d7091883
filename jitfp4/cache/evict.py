"""Keeping the user's root within its limits: the least recently used entries are removed first.

Sizes are those of disk blocks. A *pass* is one walk over the root that removes what exceeds the limits.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

from jitfp4.cache.layer import INDEXES, Layer, entry_path
from jitfp4.cache.lock import LOCKS, open_lock, try_lock, unlock
from jitfp4.cache.publish import BAD, discard, evict, sweep
from jitfp4.cache.survey import Use, survey
from jitfp4.cache.tree import disk_bytes, names, open_below
from jitfp4.errors import CacheUntrustedError

PRUNE_LOCK = f"{LOCKS}/prune"
"""The lock of the one process that evicts. The file's time of modification is when the last pass began."""

_PASS_SECONDS = 60.0
_KEPT_INDEXES = 16
_ROOM = 7 / 8  # an automatic pass that evicts goes down to this share of a limit, so that the next entries fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a pass leaves: disk bytes, entries, seconds since the last use. None is no limit."""

    max_bytes: float | None = None
    max_entries: float | None = None
    max_age: float | None = None

    def exceeded(self, total: int, count: int) -> bool:
        """Whether ``total`` disk bytes or ``count`` entries are too many."""
        return (self.max_bytes is not None and total > self.max_bytes) or (
            self.max_entries is not None and count > self.max_entries
        )


def choose(uses: list[Use], limits: Limits, *, other_bytes: int) -> list[Use]:
    """The entries to remove, least recently used first. ``other_bytes`` is the disk use of everything else."""
    total, count = other_bytes + sum(use.disk_bytes for use in uses), len(uses)
    oldest_allowed = time.time() - limits.max_age if limits.max_age is not None else float("-inf")
    chosen = []
    for use in uses:
        if use.last_used >= oldest_allowed and not limits.exceeded(total, count):
            break
        chosen.append(use)
        total, count = total - use.disk_bytes, count - 1
    return chosen


def enforce(root: int, layer: Layer, limits: Limits, *, dry_run: bool = False, room: float = 1.0) -> list[Use]:
    """One pass: sweep; when a limit is exceeded, empty ``bad/`` and evict. Returns the evicted entries.

    With ``dry_run`` it removes nothing and returns the entries that it would evict.

    Args:
        root: descriptor of the trusted folder of ``layer``, the user's root.
        room: when a limit is exceeded, evict down to this share of it.
    """
    if not dry_run:
        sweep(root)
        _drop_indexes(root, layer.pin)
    uses = survey(layer).uses
    total = disk_bytes(".", at=root)[0]
    if limits.exceeded(total, len(uses)):
        total -= disk_bytes(BAD, at=root)[0]
        if not dry_run:
            discard(root, root, BAD)
        limits = Limits(
            max_bytes=None if limits.max_bytes is None else limits.max_bytes * room,
            max_entries=None if limits.max_entries is None else limits.max_entries * room,
            max_age=limits.max_age,
        )
    chosen = choose(uses, limits, other_bytes=total - sum(use.disk_bytes for use in uses))
    return [use for use in chosen if dry_run or evict(root, entry_path(use.digest, use.toolchain))]


def enforce_now_and_then(root: int, layer: Layer, limits: Limits, *, at_once: bool) -> int:
    """An automatic pass, unless one is running or has just been made. Returns the number of evicted entries.

    ``at_once``: also when the last pass was just made.
    """
    with open_lock(root, PRUNE_LOCK) as file:
        status = os.fstat(file.fd)
        recent = status.st_size > 0 and abs(time.time() - status.st_mtime) < _PASS_SECONDS
        if (recent and not at_once) or not try_lock(file.fd):
            return 0
        try:
            with suppress(OSError):  # a full disk must not stop the pass that makes room
                os.pwrite(file.fd, b"the last pass began when this file was modified\n", 0)
            return len(enforce(root, layer, limits, room=_ROOM))
        finally:
            unlock(file.fd)


def _drop_indexes(root: int, pin: str | None) -> None:
    """Remove indexes of imported bundles, but for the newest ones and the pinned one."""
    with suppress(OSError, CacheUntrustedError), open_below(root, INDEXES) as folder:
        age = {name: os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns for name in names(folder)}
        for name in sorted(age, key=lambda name: age[name])[:-_KEPT_INDEXES]:
            if name != f"{pin}.json":
                discard(root, folder, name)
